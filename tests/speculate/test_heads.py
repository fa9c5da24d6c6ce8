"""Draft heads on the target's hidden states: logits, texts, and selection by checkpoint."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import heads
from support.fake_gpu import fake_gpu
from support.heads import (
    N_HEADS,
    VOCAB,
    Probe,
    Weights,
    assert_plain_texts,
    few_tokens,
    mtp_names,
    probe,
    random_head,
    random_weights,
    rms,
    write_head,
)
from support.texts import small_model
from support.tiny import (
    CASES,
    assert_continued,
    drafter_of,
    engine_of,
    generate,
    keep_steady,
    open_llm,
    open_unloaded,
    prompt_of,
)
from torch import Tensor
from transformers import PreTrainedModel

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
from offload_rt.speculate import head_model
from offload_rt.speculate.select import load_rule

pytestmark = pytest.mark.numeric


def decoder_layer(w: Weights, prefix: str, model: PreTrainedModel, x: Tensor, h: Tensor) -> Tensor:
    """Attention of h and an MLP, added to x (n, d); rotary embeddings by the row."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{prefix}{name}.weight"], w.get(f"{prefix}{name}.bias"))

    dim = model.config.head_dim
    q, k, v = (
        linear(f"self_attn.{name}_proj", h).view(len(h), -1, dim).transpose(0, 1) for name in "qkv"
    )
    if f"{prefix}self_attn.q_norm.weight" in w:
        q, k = (
            rms(vectors, w[f"{prefix}self_attn.{name}_norm.weight"])
            for vectors, name in ((q, "q"), (k, "k"))
        )
    frequencies = 1 / 10000.0 ** (torch.arange(0, dim, 2).float() / dim)
    angles = torch.arange(len(h))[:, None].float() * frequencies
    turns = torch.complex(angles.cos().to(h.dtype), angles.sin().to(h.dtype))

    def turned(x: Tensor) -> Tensor:
        pairs = torch.complex(*x.chunk(2, -1)) * turns
        return torch.cat((pairs.real, pairs.imag), -1)

    out = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
    x = x + linear("self_attn.o_proj", out.transpose(0, 1).flatten(1))
    h = rms(x, w[f"{prefix}post_attention_layernorm.weight"])
    return x + linear(
        "mlp.down_proj", F.silu(linear("mlp.gate_proj", h)) * linear("mlp.up_proj", h)
    )


def make_double(model: PreTrainedModel) -> None:
    """Compute in float64, including the norms, which transformers computes in float32."""
    for module in model.double().modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(rms, weight=module.weight)  # type: ignore[method-assign]


@torch.no_grad()
def states_of(model: PreTrainedModel, tokens: Sequence[int]) -> list[Tensor]:
    """(n, d) behind 0, 1, ... all layers, the last norm not applied; and with it."""
    last: list[Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, given: last.append(given[0][0]))
    states = model(
        torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True
    ).hidden_states
    handle.remove()
    return [*(state[0] for state in states[:-1]), last[0], states[-1][0]]


@torch.no_grad()
def expected_logits(
    kind: str,
    w: Weights,
    model: PreTrainedModel,
    tokens: list[int],
    path: list[int],
    config: dict[str, Any] | None = None,
) -> Tensor:
    """Logits after the last token and after each token of a path: (1 + len(path), vocabulary).

    config  changes of an EAGLE-3 head's config
    """
    config = config or {}
    is_nested = "speculators_model_type" in config
    prefix = "layers.0." if is_nested else "midlayer."
    states = states_of(model, tokens[:-1])
    embedding = model.model.embed_tokens.weight
    head = model.lm_head.weight
    if kind == "medusa":
        x = states[-1][-1:]
        blocks = [
            x + F.silu(F.linear(x, w[f"{i}.0.linear.weight"], w[f"{i}.0.linear.bias"]))
            for i in range(N_HEADS)
        ]
        return torch.cat([F.linear(block, w[f"{i}.1.weight"]) for i, block in enumerate(blocks)])[
            : 1 + len(path)
        ]
    if kind == "eagle":
        n = model.config.num_hidden_layers
        taps = [states[i] for i in (2, n // 2, n - 3)]
        if config.get("fc_norm"):
            taps = [rms(tap, w[f"fc_norm.{i}.weight"]) for i, tap in enumerate(taps)]
        fused = torch.cat(taps, 1)
        if config.get("norm_before_fc"):
            fused = rms(fused, w["input_norm.weight"])
        hidden = F.linear(fused, w["fc.weight"])
        if config.get("embed_requires_grad"):
            embedding = w["embed_tokens.weight"]
    else:
        prefix, of_embedding, of_hidden, project, last = mtp_names(kind, model)
        hidden = states[-2] if kind == "mimo" else states[-1]
    inputs = tokens[1:]
    logits = []
    for token in [*path, None]:
        embedded = embedding[torch.tensor(inputs)]
        if kind == "eagle":
            normed = rms(hidden, w[f"{prefix}hidden_norm.weight"])
            both = torch.cat((rms(embedded, w[f"{prefix}input_layernorm.weight"]), normed), 1)
            residual = normed if config.get("norm_before_residual") else hidden
            given = decoder_layer(w, prefix, model, residual, both)
            output = rms(given, w["norm.weight"])
            if is_nested and config.get("norm_output"):
                given = output
            elif not is_nested and not config.get("norm_output", True):
                output = given
            some = F.linear(output, w["lm_head.weight"])[-1]
            logits.append(
                some.new_full((len(embedding),), -torch.inf).index_copy(
                    0, torch.tensor(heads.KEPT), some
                )
            )
        else:
            parts = (
                rms(embedded, w[f"{of_embedding}.weight"]),
                rms(hidden, w[f"{of_hidden}.weight"]),
            )
            x = F.linear(
                torch.cat(parts[::-1] if kind == "mimo" else parts, 1), w[f"{project}.weight"]
            )
            out = decoder_layer(w, prefix, model, x, rms(x, w[f"{prefix}input_layernorm.weight"]))
            given = rms(out, w[f"{last}.weight"])
            logits.append(F.linear(given, head)[-1])
        hidden = torch.cat((hidden, given[-1:]))
        inputs = [*inputs, token]
    return torch.stack(logits)


SPECULATORS = {"speculators_model_type": "eagle3"}


def eagle_weights(model: PreTrainedModel, config: dict[str, Any]) -> Weights:
    """Random weights of an EAGLE-3 head with the tensors and names that its config requires."""
    d = model.config.hidden_size
    more: dict[str, tuple[int, ...]] = {}
    if config.get("fc_norm"):
        more |= {f"fc_norm.{i}.weight": (d,) for i in range(3)}
    if config.get("norm_before_fc"):
        more["input_norm.weight"] = (3 * d,)
    # Most files contain a copy of the target's embedding, which is used only if it was trained.
    more["embed_tokens.weight"] = (model.config.vocab_size, d)
    weights = random_weights("eagle", model, more=more)
    if "speculators_model_type" not in config:
        return weights
    return {name.replace("midlayer.", "layers.0."): weight for name, weight in weights.items()}


@pytest.mark.parametrize(("kind", "name", "changes"), [
    ("eagle", "llama", {}),
    # AngelSlim keeps keys of Qwen's windows, which Llama layers do not have.
    ("eagle", "qwen3", {"norm_before_residual": True, "max_window_layers": 28,
        "sliding_window": None, "use_sliding_window": False}),
    # EAGLE-3.1 in the layout of SpecForge
    ("eagle", "llama", {"fc_norm": True, "norm_output": False}),
    ("eagle", "llama", SPECULATORS),
    ("eagle", "llama", {**SPECULATORS, "norm_before_fc": True, "norm_before_residual": True}),
    ("eagle", "llama", {**SPECULATORS, "fc_norm": True, "norm_output": True}),
    ("eagle", "llama", {**SPECULATORS, "embed_requires_grad": True}),
    ("medusa", "llama", {}),
    ("nextn", "llama", {}), ("nextn", "qwen3", {}), ("mimo", "qwen2-window", {}),
    ("qwen", "mistral-full", {}),
])  # fmt: skip
def test_head_logits_equal_the_definition(tmp_path, monkeypatch, kind, name, changes):
    """After chunked prompts and after trees with accepted and rejected nodes."""
    monkeypatch.setattr(head_model, "CHUNK_ROWS", 4)
    model = few_tokens(name)
    model.config.head_dim = getattr(model.config, "head_dim", None) or 8
    weights = eagle_weights(model, changes) if kind == "eagle" else random_weights(kind, model)
    settings = write_head(tmp_path, kind, model, weights, **changes)
    make_double(model)
    weights = {name: weight.double() for name, weight in weights.items()}
    with open_llm(dtype="float64", **settings) as llm:
        probed = list(probe(llm, settings["drafter"], 2))
    for tokens, path, logits in probed:
        wanted = expected_logits(kind, weights, model, tokens, path, changes)[-1]
        torch.testing.assert_close(logits, wanted, atol=1e-9, rtol=0)


@pytest.mark.parametrize("n", [3, 14, 21])
@pytest.mark.parametrize("kind", ["eagle", "qwen"])
def test_head_continues_in_the_cache_of_a_shared_prefix(tmp_path, kind, n):
    """From within, behind, or past the rows of the head."""
    model = few_tokens()
    weights = random_weights(kind, model)
    settings = write_head(tmp_path, kind, model, weights)
    with open_llm(**settings) as llm:
        drafter = drafter_of(llm, settings["drafter"], "match", DraftLimits(24, 5, fixed_size=True))
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
            wanted = expected_logits(kind, weights, model, new.tokens, [])[-1]
            torch.testing.assert_close(probe.logits[0], wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "place"), [
    ("eagle", "resident"), ("eagle", "mixed"), ("medusa", "disk"), ("nextn", "mixed"),
    ("mimo", "disk"), ("qwen", "resident"),
])  # fmt: skip
def test_greedy_tokens_equal_transformers(tmp_path, kind, place):
    model = few_tokens()
    settings = random_head(tmp_path, kind, model)
    prompts = [prompt_of(seed, n, VOCAB) for seed, n in enumerate((9, 1, 30))]
    with open_llm(**settings, place=place) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=24))
        alone = llm.generate(prompts[2], SamplingParams(max_new_tokens=24))[0]
        llm.engine.reset_prefix_cache()
        assert not llm.engine.drafter._model._inputs and not llm.engine.draft._caches, (
            "ended sequences are released"
        )
    assert_continued(outputs, model, prompts, 24)
    assert alone.token_ids == outputs[2].token_ids
    assert all(output.stats.nodes_per_tree > 1 for output in outputs)


def test_earlier_predictions_complete_the_trees_of_a_useless_head(tmp_path, monkeypatch):
    """The second run of a text finds the target's predictions of the first run."""
    keep_steady(monkeypatch)
    model = CASES["llama"].build(0)
    settings = random_head(tmp_path, "eagle", model)
    prompt = prompt_of(0, 20)
    with open_llm(**settings, place="resident", tree_size=24) as llm:
        first, second = (llm.generate(prompt, SamplingParams(max_new_tokens=32))[0] for _ in "12")
    assert first.token_ids == second.token_ids
    assert second.stats.tokens_per_pass > 1.5 * first.stats.tokens_per_pass


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_perfect_medusa_heads_draft_in_every_pass(tmp_path, temperature):
    """A target that counts, token after token: no layer adds anything to orthogonal embeddings."""
    model = CASES["llama"].build(0, vocab_size=64, num_hidden_layers=3)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    eye = torch.eye(64)
    model.model.embed_tokens.weight.data = eye.clone()
    model.model.norm.weight.data.fill_(1.0)
    model.lm_head.weight.data = 2 * eye.roll(1, 0)
    weights = {name: 0 * weight for name, weight in random_weights("medusa", model).items()}
    weights |= {f"{i}.1.weight": 2 * eye.roll(i + 2, 0) for i in range(N_HEADS)}
    with open_llm(**write_head(tmp_path, "medusa", model, weights)) as llm:
        limits = DraftLimits(8, 5, fixed_size=True)
        drafter = drafter_of(llm, "medusa", "coupled", limits)
        engine = engine_of(llm, drafter, load_rule("coupled"))
        params = SamplingParams(20, temperature=temperature, seed=0)
        engine.add(TokenSequence([3, 4, 5], params, 128))
        lengths = [len(event.token_ids) for _ in range(4) for event in engine.step()]
    # The first pass has no hidden states; earlier predictions may add levels below the heads.
    assert lengths[:2] == [1, 4] and min(lengths[1:]) == 4


@pytest.mark.parametrize(("kind", "rule"), [("eagle", "match"), ("medusa", "coupled")])
def test_sampled_texts_equal_plain_decoding(tmp_path, kind, rule):
    """Both rules draw the tokens of plain decoding, whatever the head proposes."""
    settings = random_head(tmp_path, kind, few_tokens())
    with open_llm(**settings) as llm:
        assert_plain_texts(llm, settings["drafter"], rule)


def test_oom_keeps_the_texts(tmp_path, monkeypatch):
    """Hidden states that were handed over twice, or not yet, are ignored."""
    model = few_tokens()
    n_failed = 0
    settings = random_head(tmp_path, "eagle", model)
    with open_llm(**settings) as llm:
        model_type = type(llm.engine.drafter._model)
        for name in ("observe", "_begin", "_forward"):
            plain: Callable[..., Any] = getattr(model_type, name)
            calls = iter(range(1000))

            def failing(*asked: Any, plain: Callable[..., Any] = plain, calls: Any = calls) -> Any:
                nonlocal n_failed
                drafted = plain(*asked)
                if next(calls) in (1, 4):
                    n_failed += 1
                    raise torch.OutOfMemoryError
                return drafted

            with monkeypatch.context() as patch:
                patch.setattr(model_type, name, failing)
                prompts = [prompt_of(0, 9, VOCAB), prompt_of(1, 20, VOCAB)]
                outputs = llm.generate(prompts, SamplingParams(max_new_tokens=20))
            assert_continued(outputs, model, prompts, 20)
            assert all(output.stats.nodes_per_tree > 1.5 for output in outputs), "it drafts no more"
    assert n_failed == 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_heads_draft_on_cuda(tmp_path, monkeypatch, kind):
    model = few_tokens()
    settings = random_head(tmp_path, kind, model)
    directory = str(settings.pop("directory"))
    prompts = [prompt_of(0, 9, VOCAB), prompt_of(1, 20, VOCAB)]
    with (
        fake_gpu(monkeypatch),
        LLM(directory, device="cuda", max_model_len=64, tree_size=16, **settings) as llm,
    ):
        alone = llm.generate(prompts[0], SamplingParams(max_new_tokens=6))[0]
        several = [
            SamplingParams(max_new_tokens=6),
            SamplingParams(max_new_tokens=6, temperature=0.8, seed=1),
        ]
        outputs = llm.generate(prompts, several)
    wanted = generate(model, prompts[0], 6)
    assert alone.token_ids == outputs[0].token_ids == wanted
    assert len(outputs[1].token_ids) == 6
    assert min(output.stats.nodes_per_tree for output in (alone, *outputs)) > 1


def opened(directory: Path, **settings: Any) -> LLM:
    return open_unloaded(directory, device="cpu", max_model_len=64, **settings)


def test_heads_select_their_drafter_and_reserve_memory(tmp_path):
    model = few_tokens()
    for kind in ("eagle", "medusa", "nextn"):
        settings = random_head(tmp_path / kind, kind, model)
        name = settings.pop("drafter")
        with opened(**settings) as llm, opened(settings["directory"], drafter="recycle") as without:
            drafting = llm.spec.draft.drafting
            reserved = llm.plan.reserved
            assert (drafting.name, drafting.rule) == (name, load_rule("coupled"))
            assert without.spec.draft.drafting.draft is None
            nbytes = sum(
                tensor.nbytes
                for tensor in random_weights(kind, model).values()
                if tensor.is_floating_point()
            )
            assert drafting.draft is not None and drafting.draft.nbytes == nbytes < reserved.draft
            assert drafting.draft.identity != llm.spec.target.checkpoint.identity
            n_taps = 3 if kind == "eagle" else 1
            n_rows = 64 + llm.spec.memory.limits.n_nodes
            scratch = reserved.scratch - without.plan.reserved.scratch
            assert scratch >= n_rows * (n_taps + 1) * 16 * 4


def test_mtp_layers_are_ignored_by_other_drafters(tmp_path):
    model = few_tokens()
    with_mtp = random_head(tmp_path / "with", "nextn", model)["directory"]
    model.save_pretrained(tmp_path / "without")
    with opened(with_mtp, drafter="none") as llm:
        assert llm.spec.target.checkpoint.spec.n_layers == 5
    with (
        opened(with_mtp, tree_size=2) as llm,
        opened(with_mtp, drafter="recycle", tree_size=2) as plain,
    ):
        assert (llm.spec.draft.drafting.name, plain.spec.draft.drafting.name) == ("mtp", "recycle")
        too_little = {
            "device_memory": plain.plan.reserved.total + 2 * max(plain.plan.layer_nbytes),
            "tree_size": 2,
        }
    with opened(with_mtp, **too_little) as llm:
        assert llm.spec.draft.drafting.name == "recycle"
    with pytest.raises(CapacityError):
        opened(with_mtp, drafter="mtp", **too_little)
    with opened(tmp_path / "without", drafter="mtp", draft_model=str(with_mtp)) as llm:
        assert llm.spec.draft.drafting.name == "mtp" and llm.spec.draft.drafting.draft is not None
    config = json.loads((with_mtp / "config.json").read_text())
    (with_mtp / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
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
    ("eagle", {**SPECULATORS, "speculators_config": {"verifier": {"architectures":
        ["Qwen3ForCausalLM"]}}}, {}, SettingsError, ["target", "Qwen3For", "LlamaFor"]),
    ("eagle", {**SPECULATORS, "surprise": 1}, {}, UnsupportedModelError, ["surprise"]),
    ("eagle", {"speculators_model_type": "mlp"}, {}, UnsupportedModelError, ["mlp"]),
    ("eagle", {"fc_norm": True, "norm_before_fc": True}, {}, UnsupportedModelError,
        ["most one"]),
    ("eagle", {"draft_vocab_size": 4}, {}, CheckpointError, ["d2t"]),
    ("eagle", {}, {"drafter": "adaptive_tree"}, SettingsError,
        ['drafter="adaptive_tree"', 'drafter="eagle"']),
    ("eagle", {}, {"rule": "sequoia"}, SettingsError, ['rule="sequoia"', "eagle"]),
    ("medusa", {}, {"drafter": "eagle"}, SettingsError,
        ['drafter="eagle"', 'drafter="medusa"']),
    ("medusa", {"medusa_num_layers": "many"}, {}, UnsupportedModelError,
        ["medusa_num_layers", "many"]),
    ("nextn", {}, {"drafter": "eagle"}, SettingsError, ['drafter="eagle"', "draft_model"]),
])  # fmt: skip
def test_unfit_heads_are_refused(tmp_path, kind, changes, settings, error, words):
    chosen = random_head(tmp_path, kind, few_tokens(), **changes)
    chosen.pop("drafter")
    with pytest.raises(OffloadError) as caught:
        opened(**chosen, **settings)
    assert type(caught.value) is error
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value), str(
        caught.value
    )


def test_head_of_another_model_is_refused(tmp_path):
    settings = random_head(tmp_path, "medusa", few_tokens())
    small_model(4, n_layers=3).save_pretrained(tmp_path / "other")
    with pytest.raises(SettingsError, match=r"4, 16.*8, 16"):
        opened(tmp_path / "other", draft_model=settings["draft_model"])
    whole = {"draft_model": str(tmp_path / "target")}
    for name, more in (("mtp", {}), ("mtp", whole), ("eagle", whole)):
        with pytest.raises(SettingsError, match=f'drafter="{name}".*heads'):
            opened(tmp_path / "target", drafter=name, **more)
    weights = random_weights("eagle", few_tokens())
    weights["d2t"][0] = 8
    with pytest.raises(CheckpointError, match="d2t"):
        opened(**write_head(tmp_path / "bad", "eagle", few_tokens(), weights))
