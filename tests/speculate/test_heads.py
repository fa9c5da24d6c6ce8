"""Draft heads on the target's hidden states: logits, texts, and selection by checkpoint."""

import itertools

import pytest
import torch
from safetensors.torch import save_file
from support.fake_gpu import fake_gpu
from support.gguf_files import build
from support.head_reference import Reference, make_double
from support.heads import (
    DFLASH2,
    KEPT,
    MASK,
    PUBLISHED,
    VOCAB,
    Probe,
    edit_config,
    few_tokens,
    probe,
    random_head,
    small_target,
    write_head,
)
from support.texts import small_model
from support.tiny import (
    CASES,
    assert_continued,
    drafter_of,
    engine_of,
    open_llm,
    open_unloaded,
    prompt_of,
)

from offload_rt import LLM, SamplingParams
from offload_rt.cost.tree_size import DraftLimits
from offload_rt.errors import (
    CapacityError,
    CheckpointError,
    OffloadError,
    SettingsError,
    UnsupportedModelError,
)
from offload_rt.executor.sequence import Sequence as TokenSequence
from offload_rt.models.heads import HeadWeights
from offload_rt.models.native import EMBED, HEAD
from offload_rt.models.transformers import TransformersModel
from offload_rt.speculate import head_model
from offload_rt.speculate.head_model import HeadModel
from offload_rt.speculate.select import load_rule

pytestmark = pytest.mark.numeric

# In the layout of speculators
EAGLE = {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3",
    "draft_vocab_size": len(KEPT), "speculators_version": "0.9.0", "target_hidden_size": None,
    "tie_word_embeddings": False, "speculators_config": {"algorithm": "eagle3",
    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
    "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "somewhere"}}}  # fmt: skip
PEAGLE = {"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle",
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]},
    "eagle_aux_hidden_state_layer_ids": [1, 3, 4], "mask_token_id": 7,
    "norm_before_residual": True, "draft_vocab_size": len(KEPT)}  # fmt: skip
DFLASH = {"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash",
    "speculators_config": {}, "speculators_version": "0.9.0", "aux_hidden_state_layer_ids": [1, 3],
    "block_size": 4, "mask_token_id": MASK}  # fmt: skip
NESTED = PUBLISHED["block"]["dflash_config"]
MARKOV = {"markov_rank": 3, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True}  # fmt: skip
# SpecForge nests the keys of DSpark, DeepSpec keeps all keys at the top.
SPECFORGE = {"architectures": ["DSparkDraftModel"], "dspark_config": MARKOV,
    "dflash_config": NESTED | {"projector_type": "dspark"}}  # fmt: skip
DEEPSPEC = {"architectures": ["Qwen3DSparkModel"], "dflash_config": {}, "num_anchors": 512,
    **NESTED, **MARKOV}  # fmt: skip
DSPARK = DFLASH | {"speculators_model_type": "dspark"} | MARKOV
SCALES = {"input_embedding_scale": 0.5, "output_multiplier": 2.0, "final_logit_softcapping": 3.0}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4,
    "use_sliding_window": True}  # fmt: skip
# Kind, target, changes of the head's config, and of its layers' config.
HEAD_CASES = {
    "EAGLE-3": ("eagle", "llama", {}, {}),
    # AngelSlim keeps keys of Qwen's windows, which Llama layers do not have.
    "AngelSlim": ("eagle", "qwen3", {"norm_before_residual": True, "max_window_layers": 28,
        "sliding_window": None, "use_sliding_window": False}, {}),
    "EAGLE-3.1, SpecForge": ("eagle", "llama", {"fc_norm": True, "norm_output": False}, {}),
    "speculators": ("eagle", "llama", EAGLE, {"num_hidden_layers": 1}),
    "speculators, norms": ("eagle", "llama", EAGLE | {"norm_before_fc": True,
        "norm_before_residual": True}, {}),
    "speculators, EAGLE-3.1": ("eagle", "llama", EAGLE | {"fc_norm": True, "norm_output": True},
        {}),
    "speculators, embedding": ("eagle", "llama", EAGLE | {"embed_requires_grad": True}, {}),
    "P-EAGLE": ("peagle", "llama", PEAGLE | {"norm_before_fc": True}, {"num_hidden_layers": 3}),
    "P-EAGLE.1": ("peagle", "llama", PEAGLE | {"fc_norm": True}, {}),
    "P-EAGLE, vLLM": ("peagle", "llama", {"architectures": ["LlamaForCausalLMEagle3"],
        "pard_token": None, "ptd_token_id": 7}, {}),
    "P-EAGLE, SpecForge": ("peagle", "llama", {}, {}),
    "Medusa": ("medusa", "llama", {}, {}),
    "nextn": ("nextn", "llama", {}, {}), "nextn, Qwen3": ("nextn", "qwen3", {}, {}),
    "MiMo": ("mimo", "qwen2-window", {}, {}), "Qwen3-Next": ("qwen", "mistral-full", {}, {}),
    "DFlash": ("block", "llama", {}, {}),
    "DFlash, windows": ("block", "llama", {}, WINDOWS),
    "JetSpec": ("block", "llama", {"dflash_config": NESTED | {"causal_head": True}}, {}),
    "speculators' DFlash": ("block", "llama", DFLASH | {"draft_vocab_size": len(KEPT)}, WINDOWS),
    "speculators' DFlash, not causal": ("block", "llama", DFLASH | {"sliding_window_non_causal":
        True}, WINDOWS),
    "DFlash, scales": ("block", "llama", {"dflash_config": NESTED | SCALES}, {}),
    "DSpark": ("block", "llama", DSPARK, {}),
    "DSpark without the anchor": ("block", "llama", DSPARK | {"sample_from_anchor": False,
        "draft_vocab_size": len(KEPT), "markov_head_type": "gated"}, {}),
    "SpecForge's DSpark": ("block", "llama", SPECFORGE, {}),
    "DeepSpec's DSpark": ("block", "llama", DEEPSPEC, {}),
    "DFlash2": ("dflash2", "llama", {"dflash_config": NESTED | DFLASH2 | {"causal": False}},
        WINDOWS),
    "speculators' DFlash2": ("dflash2", "llama", DFLASH | {"speculators_model_type": "dflash2"} |
        DFLASH2, WINDOWS),
}  # fmt: skip


@pytest.mark.parametrize("case", [*HEAD_CASES, "DFlash, blocks of parents"])
def test_head_logits_equal_the_definition(tmp_path, monkeypatch, case):
    """After chunked prompts and after trees with accepted and rejected nodes."""
    monkeypatch.setattr(head_model, "CHUNK_ROWS", 4)
    is_inherited = case not in HEAD_CASES
    kind, name, changes, layers = HEAD_CASES["DFlash" if is_inherited else case]
    model = few_tokens(name)
    written = random_head(tmp_path, kind, model, layers, **changes)
    make_double(model)
    reference = Reference(kind, written, model)
    drafter = written.settings["drafter"]
    with open_llm(dtype="float64", **written.settings) as llm:
        probed = list(probe(llm, drafter, 2, recomputes=not is_inherited))
    for tokens, path, logits in probed:
        wanted = reference.logits(tokens, path, path[:1] if is_inherited else None)
        torch.testing.assert_close(logits, wanted, atol=1e-9, rtol=0)


@pytest.mark.parametrize("n", [3, 14, 21])
@pytest.mark.parametrize("kind", ["eagle", "peagle", "qwen", "block"])
def test_head_continues_in_the_cache_of_a_shared_prefix(tmp_path, kind, n):
    """From within, behind, or past the rows of the head."""
    model = few_tokens()
    written = random_head(tmp_path, kind, model)
    reference = Reference(kind, written, model)
    with open_llm(**written.settings) as llm:
        limits = DraftLimits(24, 5, fixed_size=True)
        drafter = drafter_of(llm, written.settings["drafter"], "match", limits)
        engine = engine_of(llm, drafter, n_nodes=24)
        old = TokenSequence(prompt_of(1, 12, VOCAB), SamplingParams(12), 128)
        engine.add(old)
        while engine.step():
            pass
        other = [(token + 1) % VOCAB for token in old.tokens[n : n + 2]]
        new = TokenSequence([*old.tokens[:n], *other, 5], SamplingParams(60), 128)
        engine.add(new)
        assert not drafter._model.can_draft(new), "the target has not computed it"
        for _ in range(2):
            engine.step()
            probe = Probe(drafter._model.start(new, 24, is_alone=True), [])
            drafter._model.grow([probe])
            wanted = reference.logits(new.tokens, [])
            torch.testing.assert_close(probe.logits[0], wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "place"), [
    ("eagle", "resident"), ("eagle", "mixed"), ("medusa", "disk"), ("nextn", "mixed"),
    ("mimo", "disk"), ("qwen", "resident"), ("peagle", "mixed"), ("block", "disk"),
    ("dflash2", "resident"),
])  # fmt: skip
def test_greedy_tokens_equal_transformers(tmp_path, steady, kind, place):
    """Published heads for a quantised target."""
    if kind in PUBLISHED:
        path = tmp_path / "target.gguf"
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 5}
        model = build(path, CASES["llama"].build(3, **sizes, vocab_size=32), "Q8_0")
        settings = write_head(tmp_path / "head", path, kind).settings
    else:
        model = few_tokens()
        settings = random_head(tmp_path, kind, model).settings
    prompts = [prompt_of(seed, n, VOCAB) for seed, n in enumerate((9, 1, 30))]
    with open_llm(**settings, place=place, dtype="float32") as llm:
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=24))
        outputs += llm.generate(prompts[2], SamplingParams(max_new_tokens=24))
        llm.engine.reset_prefix_cache()
        assert not llm.engine.drafter._model._inputs, "ended sequences are released"
        assert not llm.engine.draft._caches
    assert_continued(outputs, model, [*prompts, prompts[2]], 24)
    assert all(output.stats.nodes_per_tree > 1 for output in outputs)


def test_oom_keeps_the_texts(tmp_path, monkeypatch):
    """Hidden states that were handed over twice, or not yet, are ignored."""
    model = few_tokens()
    settings = random_head(tmp_path, "eagle", model).settings
    prompts = [prompt_of(0, 9, VOCAB), prompt_of(1, 20, VOCAB)]
    with open_llm(**settings) as llm:
        drafting = llm.engine.drafter._model
        for name in ("observe", "_begin", "_forward"):
            plain = getattr(drafting, name)
            calls = itertools.count()

            def failing(*asked, plain=plain, calls=calls):
                drafted = plain(*asked)
                if next(calls) in (1, 4):
                    raise torch.OutOfMemoryError
                return drafted

            with monkeypatch.context() as patch:
                patch.setattr(drafting, name, failing)
                outputs = llm.generate(prompts, SamplingParams(max_new_tokens=20))
            assert_continued(outputs, model, prompts, 20)
            assert next(calls) > 5
            assert all(output.stats.nodes_per_tree > 1.5 for output in outputs), "it drafts no more"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_heads_draft_on_cuda(tmp_path, monkeypatch, kind):
    model = few_tokens()
    settings = random_head(tmp_path, kind, model).settings | {"device": "cuda", "tree_size": 16}
    directory = str(settings.pop("directory"))
    prompts = [prompt_of(0, 9, VOCAB), prompt_of(1, 20, VOCAB)]
    with fake_gpu(monkeypatch), LLM(directory, max_model_len=64, **settings) as llm:
        outputs = llm.generate(prompts[0], SamplingParams(6))
        outputs += llm.generate(prompts, [SamplingParams(6), SamplingParams(6, 0.8, seed=1)])
    assert_continued(outputs[:2], model, [prompts[0]] * 2, 6)
    assert len(outputs[2].token_ids) == 6
    assert min(output.stats.nodes_per_tree for output in outputs) > 1


def opened(directory, **settings):
    return open_unloaded(directory, device="cpu", max_model_len=64, **settings)


def test_heads_select_their_drafter_and_reserve_memory(tmp_path):
    for kind in ("eagle", "medusa", "nextn"):
        written = random_head(tmp_path / kind, kind, few_tokens())
        settings = written.settings
        name = settings.pop("drafter")
        with opened(**settings) as llm, opened(settings["directory"], drafter="recycle") as without:
            drafting = llm.spec.draft.drafting
            reserved = llm.plan.reserved
            assert (drafting.name, drafting.rule) == (name, load_rule("coupled"))
            assert without.spec.draft.drafting.draft is None
            weights = written.weights.values()
            nbytes = sum(weight.nbytes for weight in weights if weight.is_floating_point())
            assert drafting.draft is not None and drafting.draft.nbytes == nbytes < reserved.draft
            n_taps = 3 if kind == "eagle" else 1
            n_rows = 64 + llm.spec.memory.limits.n_nodes
            scratch = reserved.scratch - without.plan.reserved.scratch
            assert scratch >= n_rows * (n_taps + 1) * 16 * 4


def test_mtp_layers_are_ignored_by_other_drafters(tmp_path):
    model = few_tokens()
    with_mtp = random_head(tmp_path / "with", "nextn", model).settings["directory"]
    model.save_pretrained(tmp_path / "without")
    with opened(with_mtp, drafter="none") as llm:
        assert llm.spec.target.checkpoint.spec.n_layers == 5
    with opened(with_mtp, tree_size=2) as llm:
        assert llm.spec.draft.drafting.name == "mtp"
    with opened(with_mtp, drafter="recycle", tree_size=2) as plain:
        assert plain.spec.draft.drafting.name == "recycle"
        nbytes = plain.plan.reserved.total + 2 * max(plain.plan.layer_nbytes)
    too_little = {"device_memory": nbytes, "tree_size": 2}
    with opened(with_mtp, **too_little) as llm:
        assert llm.spec.draft.drafting.name == "recycle"
    with pytest.raises(CapacityError):
        opened(with_mtp, drafter="mtp", **too_little)
    with opened(tmp_path / "without", drafter="mtp", draft_model=str(with_mtp)) as llm:
        assert llm.spec.draft.drafting.name == "mtp" and llm.spec.draft.drafting.draft is not None
    edit_config(with_mtp, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"layers\.5"):
        opened(with_mtp)


@pytest.mark.parametrize(("kind", "changes", "settings", "error", "words"), [
    ("eagle", {"hidden_size": 32, "head_dim": 16}, {}, SettingsError, ["hidden size", "16",
        "32"]),
    ("eagle", {"target_hidden_size": 32}, {}, SettingsError, ["hidden size", "16", "32"]),
    ("eagle", {"vocab_size": 9}, {}, SettingsError, ["vocabulary", "8", "9"]),
    ("eagle", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 40]}}, {},
        SettingsError, ["41", "5"]),
    ("eagle", {"num_hidden_layers": 2}, {}, CheckpointError, ["layers.1."]),
    ("eagle", {"eagle_config": {"odd": 1}}, {}, UnsupportedModelError, ["odd"]),
    ("eagle", {"eagle_config": {"use_aux_hidden_state": False}}, {}, UnsupportedModelError,
        ["use_aux_hidden_state"]),
    ("eagle", {"surprise": 1}, {}, UnsupportedModelError, ["surprise"]),
    ("speculators", {"speculators_config": {"verifier": {"architectures":
        ["Qwen3ForCausalLM"]}}}, {}, SettingsError, ["target", "Qwen3For", "LlamaFor"]),
    ("speculators", {"surprise": 1}, {}, UnsupportedModelError, ["surprise"]),
    ("speculators", {"speculators_model_type": "mlp"}, {}, UnsupportedModelError, ["mlp"]),
    ("eagle", {"fc_norm": True, "norm_before_fc": True}, {}, UnsupportedModelError,
        ["most one"]),
    ("eagle", {"draft_vocab_size": 4}, {}, CheckpointError, ["d2t"]),
    ("eagle", {}, {"drafter": "adaptive_tree"}, SettingsError,
        ['drafter="adaptive_tree"', 'drafter="eagle"']),
    ("eagle", {}, {"rule": "sequoia"}, SettingsError, ['rule="sequoia"', "eagle"]),
    ("medusa", {"medusa_num_layers": "many"}, {}, UnsupportedModelError,
        ["medusa_num_layers", "many"]),
    ("nextn", {}, {"drafter": "eagle"}, SettingsError, ['drafter="eagle"', "draft_model"]),
    ("peagle", {"pard_token": None}, {}, UnsupportedModelError, ["mask_token_id is None"]),
    ("block", {"dflash_config": {"selector_rank": 4}}, {}, UnsupportedModelError,
        ["'selector_rank'"]),
    ("block", DEEPSPEC | {"markov_head_type": "rnn"}, {}, UnsupportedModelError, ["'rnn'"]),
    ("block", {"projector_type": "domino"}, {}, UnsupportedModelError, ["'domino'"]),
    ("block", {"dflash_config": NESTED | {"mask_token_id": 99}}, {}, UnsupportedModelError,
        ["mask_token is 99"]),
    ("block", {"vocab_size": 9}, {}, SettingsError, ["vocabulary differs"]),
    ("block", {"num_target_layers": 9}, {}, SettingsError, ["number of layers differs"]),
    ("block", {"dflash_config": NESTED | {"target_layer_ids": [0, 7]}}, {}, SettingsError,
        ["hidden states differs"]),
])  # fmt: skip
def test_unfit_heads_are_refused(tmp_path, kind, changes, settings, error, words):
    chosen = {"speculators": ("eagle", EAGLE)}.get(kind, (kind, {}))
    written = random_head(tmp_path, chosen[0], few_tokens(), **chosen[1])
    if "draft_model" in written.settings:
        edit_config(tmp_path / "head", **changes)
    written.settings.pop("drafter")
    with pytest.raises(OffloadError) as caught:
        opened(**written.settings, **settings)
    message = str(caught.value)
    assert type(caught.value) is error
    assert all(word in message for word in words) and "\n" not in message, message


def test_head_of_another_model_is_refused(tmp_path):
    settings = random_head(tmp_path, "medusa", few_tokens()).settings
    small_model(4, n_layers=3).save_pretrained(tmp_path / "other")
    with pytest.raises(SettingsError, match=r"4, 16.*8, 16"):
        opened(tmp_path / "other", draft_model=settings["draft_model"])
    whole = {"draft_model": str(tmp_path / "target")}
    for name, more in (("mtp", {}), ("mtp", whole), ("eagle", whole)):
        with pytest.raises(SettingsError, match=f'drafter="{name}".*heads'):
            opened(tmp_path / "target", drafter=name, **more)
    written = random_head(tmp_path / "bad", "eagle", few_tokens())
    written.weights["d2t"][0] = 8
    save_file(written.weights, tmp_path / "bad" / "head" / "model.safetensors")
    with pytest.raises(CheckpointError, match="d2t"):
        opened(**written.settings)


@pytest.mark.parametrize(("kind", "head", "place"), [
    ("gpt_oss", "eagle", "disk"),
    # Embeddings are scaled in the model, not in the head. Output and embedding are tied.
    ("gemma2", "dflash2", "disk"),
    ("qwen3_5_text", "block", "resident"),
])  # fmt: skip
def test_heads_draft_for_models_of_transformers(tmp_path, monkeypatch, steady, kind, head, place):
    model = small_target(kind, tmp_path / "target")
    settings = write_head(tmp_path / "head", tmp_path / "target", head).settings
    states = {}
    observe = HeadModel.observe

    def observed(self, sequence, first, parts):
        states.update(enumerate(torch.cat(list(parts)), first))
        observe(self, sequence, first, parts)

    prompts = [prompt_of(seed, n, 8) for seed, n in enumerate((9, 1, 20))]
    with open_llm(place=place, **settings) as llm:
        assert isinstance(llm.spec.target.checkpoint.spec, TransformersModel)
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=16))
        llm.engine.reset_prefix_cache()
        with monkeypatch.context() as patch:
            patch.setattr(HeadModel, "observe", observed)
            outputs += llm.generate(prompts[0], SamplingParams(max_new_tokens=16))
        text = prompts[0] + outputs[0].token_ids
        outputs += llm.generate(text[:-7], SamplingParams(max_new_tokens=7))
        weights = llm.engine.draft.non_layer
        taps = llm.engine.draft.spec.taps
        assert isinstance(weights, HeadWeights)
        embedding = model.get_input_embeddings().weight
        assert torch.equal(weights.rows(torch.arange(8), EMBED), embedding)
        x = torch.randn(3, embedding.shape[1])
        product = x @ model.get_output_embeddings().weight.T
        shared = weights.target.linear(x, weights.shared[HEAD])
        torch.testing.assert_close(shared, product, atol=1e-4, rtol=1e-4)
    assert_continued(outputs[:-1], model, [*prompts, prompts[0]], 16)
    assert outputs[-1].token_ids == text[-7:]
    assert all(output.stats.nodes_per_tree > 1 for output in outputs)
    tokens = torch.tensor([text])
    with torch.no_grad():
        known = model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    for row, seen in states.items():
        expected = torch.stack([known[tap][0, row] for tap in taps if tap < len(known) - 1])
        torch.testing.assert_close(seen[: len(expected)], expected, atol=1e-3, rtol=1e-3)
    assert len(states) >= len(prompts[0]) + 11


def test_medusa_heads_and_copies_of_layers_need_a_native_target(tmp_path):
    small_target("gpt_oss", tmp_path / "target")
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text('{"medusa_num_heads": 2}')
    for settings, what in (
        ({"draft_model": str(tmp_path / "head")}, "Medusa heads cannot draft for a model of"),
        ({"drafter": "self"}, "a model of type gpt_oss cannot draft for itself"),
    ):
        with pytest.raises(UnsupportedModelError, match=what):
            open_llm(tmp_path / "target", **settings)
