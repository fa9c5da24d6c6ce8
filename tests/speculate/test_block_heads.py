"""Block drafters in their published layouts, against a plain float64 reference."""

from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.heads import (
    KEPT,
    few_tokens,
    layer_config,
    layer_shapes,
    mlp,
    record_states,
    rms,
    rotated,
    write_random,
)
from support.texts import VOCABULARY, assert_distribution, run_together, small_model
from support.tiny import drafter_of, generate, open_llm, prompt_of, runner_of, say
from torch import Tensor
from transformers import PreTrainedModel

from offload_rt import SamplingParams
from offload_rt.cost.estimator import CostEstimator
from offload_rt.cost.tree_size import DraftLimits
from offload_rt.errors import SettingsError, UnsupportedModelError
from offload_rt.executor.sequence import Sequence as TokenSequence
from offload_rt.speculate.block_model import BlockModel
from offload_rt.speculate.select import load_rule
from offload_rt.tree.topology import Topology

pytestmark = pytest.mark.numeric

N_LAYERS = 2
BLOCK = 4
MASK = 5
RANK = 3
TAPS = 2
GROUP = 4
TOP = 3
DFLASH = {
    "architectures": ["DFlashDraftModel"],
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
}
SPECULATORS = {
    "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash",
    "speculators_config": {}, "speculators_version": "0.9.0", "aux_hidden_state_layer_ids": [1, 3],
    "block_size": BLOCK, "mask_token_id": MASK,
}  # fmt: skip
DFLASH2 = {
    "conv_kernel_size": TAPS,
    "conv_group_size": GROUP,
    "selector_rank": RANK,
    "selector_top_k": TOP,
}
MARKOV = {
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
# SpecForge nests the keys of DSpark, DeepSpec keeps all keys at the top.
SPECFORGE = {
    "architectures": ["DSparkDraftModel"],
    "block_size": BLOCK,
    "dflash_config": DFLASH["dflash_config"] | {"projector_type": "dspark"},
    "dspark_config": MARKOV,
}
DEEPSPEC = {
    "architectures": ["Qwen3DSparkModel"], "block_size": BLOCK, "num_anchors": 512,
    **DFLASH["dflash_config"], **MARKOV,
}  # fmt: skip
SCALES = {"input_embedding_scale": 0.5, "output_multiplier": 2.0, "final_logit_softcapping": 3.0}
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
    "use_sliding_window": True,
}


def write_block(folder: Path, model: PreTrainedModel, config: dict[str, Any], **layers: Any):
    """A target and a block drafter of random weights; returns settings, config and weights."""
    inner = layer_config(model, "qwen3", N_LAYERS, **layers)
    if "speculators_model_type" in config:
        raw = config | {"transformer_layer_config": inner}
    else:
        raw = inner | config
    d = inner["hidden_size"]
    vocab = inner["vocab_size"]
    n_tokens = config.get("draft_vocab_size", vocab)
    keys = flat(config)
    shapes = {"fc.weight": (d, 2 * d), "hidden_norm.weight": (d,), "norm.weight": (d,)}
    for i in range(N_LAYERS):
        parts = layer_shapes(d, d) | {"self_attn.q_norm": (8,), "self_attn.k_norm": (8,)}
        if "conv_kernel_size" in keys:
            for name in ("attention_conv", "mlp_conv"):
                parts[f"{name}.kernel_projection"] = (2 * TAPS * d // GROUP, d)
                shapes[f"layers.{i}.{name}.base_kernel"] = (2, TAPS, d)
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in parts.items()}
    if n_tokens != vocab:
        shapes["lm_head.weight"] = (n_tokens, d)
    if "conv_kernel_size" in keys:
        selector = "candidate_selector"
        shapes[f"{selector}.hidden_projection.weight"] = (RANK, d)
        shapes[f"{selector}.predecessor_codebook"] = (vocab, RANK)
        shapes[f"{selector}.successor_codebook"] = (vocab, RANK)
    if "markov_rank" in keys:
        shapes["markov_head.markov_w1.weight"] = (vocab, RANK)
        shapes["markov_head.markov_w2.weight"] = (n_tokens, RANK)
        shapes["confidence_head.proj.weight"] = (1, d + RANK)
    if keys.get("markov_head_type") == "gated":
        shapes["markov_head.gate_proj.weight"] = (RANK, d + RANK)
        shapes["markov_head.gate_proj.bias"] = (RANK,)
    settings, weights = write_random(folder, model, raw, shapes, n_tokens)
    return settings | {"drafter": "block"}, raw, weights


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """The config with its nested keys at the top."""
    return config | config.get("dflash_config", {}) | config.get("dspark_config", {})


def convolve(x: Tensor, base: Tensor, dynamic: Tensor) -> Tensor:
    """Sum of rows t - k times (base[k] + dynamic[t, k, group]) for t, k >= 0.

    base  (taps, d)
    dynamic  (rows, taps, groups)
    """
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for k in range(min(t + 1, TAPS)):
            out[t] += (base[k] + dynamic[t, k].repeat_interleave(GROUP)) * x[t - k]
    return out


def reference(raw, weights, model, states, tokens, path):
    """Logits (predictions, vocabulary) of a block, recomputed from all hidden states.

    states  (n, 2, hidden_size) of all tokens but the last
    path    tokens assumed to follow the last
    """
    keys = flat(raw)
    has_convolutions = "conv_kernel_size" in keys
    w = {name: weight.double() for name, weight in weights.items() if name != "d2t"}
    embedding = model.get_input_embeddings().weight.detach().double()
    is_nested = "speculators_model_type" in raw
    layers = raw["transformer_layer_config"] if is_nested else raw
    context = rms(states.double().flatten(1) @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = embedding[[tokens[-1], *path, *[keys["mask_token_id"]] * (BLOCK - 1 - len(path))]]
    x = x * keys.get("input_embedding_scale", 1)
    n = len(context)
    for i in range(N_LAYERS):
        p = f"layers.{i}."
        h = rms(x, w[f"{p}input_layernorm.weight"])
        if has_convolutions:
            base = w[f"{p}attention_conv.base_kernel"]
            dynamic = h @ w[f"{p}attention_conv.kernel_projection.weight"].T
            dynamic = dynamic.view(BLOCK, 2, TAPS, -1)
            h = convolve(h, base[0], dynamic[:, 0])
        both = torch.cat((context, h))
        q = (h @ w[f"{p}self_attn.q_proj.weight"].T).view(BLOCK, 2, 8)
        k = (both @ w[f"{p}self_attn.k_proj.weight"].T).view(-1, 1, 8)
        v = both @ w[f"{p}self_attn.v_proj.weight"].T
        q = rotated(rms(q, w[f"{p}self_attn.q_norm.weight"]), n)
        k = rotated(rms(k, w[f"{p}self_attn.k_norm.weight"]))
        is_windowed = layers.get("layer_types", [""] * N_LAYERS)[i] == "sliding_attention"
        is_causal = is_windowed
        if raw.get("sliding_window_non_causal"):
            is_causal = False
        if "causal" in keys:
            is_causal = keys["causal"]
        if keys.get("causal_head"):
            is_causal = True
        if keys.get("speculators_model_type") == "dflash2":
            is_causal = False
        out = torch.zeros(BLOCK, 2, 8, dtype=torch.float64)
        for row in range(BLOCK):
            seen = [
                key
                for key in range(n + BLOCK)
                if not (is_causal and key > n + row)
                and not (is_windowed and is_nested and key < n - 4)
                and not (is_windowed and not is_nested and abs(n + row - key) >= 4)
            ]
            for head in range(2):
                scores = k[seen, 0] @ q[row, head] / 8**0.5
                out[row, head] = torch.softmax(scores, 0) @ v[seen]
        out = out.flatten(1) @ w[f"{p}self_attn.o_proj.weight"].T
        if has_convolutions:
            out = convolve(out, base[1], dynamic[:, 1])
        x = x + out
        h = rms(x, w[f"{p}post_attention_layernorm.weight"])
        if has_convolutions:
            base = w[f"{p}mlp_conv.base_kernel"]
            dynamic = h @ w[f"{p}mlp_conv.kernel_projection.weight"].T
            dynamic = dynamic.view(BLOCK, 2, TAPS, -1)
            h = convolve(h, base[0], dynamic[:, 0])
        out = mlp(w, p, h)
        if has_convolutions:
            out = convolve(out, base[1], dynamic[:, 1])
        x = x + out
    hidden = rms(x, w["norm.weight"])
    is_dspark = "markov_rank" in keys
    if not raw.get("sample_from_anchor", is_dspark):
        hidden = hidden[1:]
    if "lm_head.weight" in w:
        logits = hidden @ w["lm_head.weight"].T
    else:
        logits = hidden @ model.lm_head.weight.detach().double().T
    logits = logits * keys.get("output_multiplier", 1)
    if "final_logit_softcapping" in keys:
        logits = keys["final_logit_softcapping"] * (logits / keys["final_logit_softcapping"]).tanh()
    before = previous_tokens(len(hidden))
    if is_dspark:
        previous = w["markov_head.markov_w1.weight"][before]
        if keys["markov_head_type"] == "gated":
            gate = torch.cat((hidden, previous), 1) @ w["markov_head.gate_proj.weight"].T
            previous = previous * (gate + w["markov_head.gate_proj.bias"]).sigmoid()
        logits = logits + previous @ w["markov_head.markov_w2.weight"].T
    if has_convolutions:
        selector = "candidate_selector."
        context = hidden @ w[f"{selector}hidden_projection.weight"].T
        context = context * w[f"{selector}predecessor_codebook"][before]
        last = logits.sort(descending=True).values[:, TOP - 1, None]
        scores = logits + context @ w[f"{selector}successor_codebook"].T
        return scores.masked_fill(logits < last, -torch.inf)
    if "d2t" not in weights:
        return logits
    whole = torch.full((len(logits), len(embedding)), -torch.inf, dtype=torch.float64)
    return whole.index_copy(1, torch.tensor(KEPT), logits)


def previous_tokens(n: int) -> Tensor:
    """Tokens before the predictions of a comparison."""
    return torch.arange(n) + 1


CASES = {
    "DFlash": (DFLASH, {}),
    "DFlash, windows": (DFLASH, WINDOWS),
    "JetSpec": (DFLASH | {"dflash_config": DFLASH["dflash_config"] | {"causal_head": True}}, {}),
    "speculators' DFlash": (SPECULATORS | {"draft_vocab_size": len(KEPT)}, WINDOWS),
    "speculators' DFlash, not causal": (SPECULATORS | {"sliding_window_non_causal": True}, WINDOWS),
    "DFlash, scales": (DFLASH | {"dflash_config": DFLASH["dflash_config"] | SCALES}, {}),
    "DSpark": (SPECULATORS | {"speculators_model_type": "dspark"} | MARKOV, {}),
    "DSpark without the anchor": (SPECULATORS | {"speculators_model_type": "dspark",
        "sample_from_anchor": False} | MARKOV | {"draft_vocab_size": len(KEPT),
        "markov_head_type": "gated"}, {}),
    "SpecForge's DSpark": (SPECFORGE, {}),
    "DeepSpec's DSpark": (DEEPSPEC, {}),
    "DFlash2": (DFLASH | {"architectures": ["DFlash2DraftModel"],
        "dflash_config": DFLASH["dflash_config"] | DFLASH2 | {"causal": False}}, WINDOWS),
    "speculators' DFlash2": (SPECULATORS | {"speculators_model_type": "dflash2"} | DFLASH2,
        WINDOWS),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits_of_consecutive_blocks_equal_the_reference(tmp_path, monkeypatch, case):
    model = few_tokens()
    settings, raw, weights = write_block(tmp_path, model, CASES[case][0], **CASES[case][1])
    states = record_states(monkeypatch, BlockModel)
    blocks = []
    compute = BlockModel._blocks

    def computed(self, state, paths):
        out = compute(self, state, paths)
        places = {
            (int(state._tree.parents[row]), state.tokens[row]): row
            for row in range(1, len(state.tokens))
        }
        for row, path in enumerate(paths, state.new_rows.start):
            assert reduce(lambda node, token: places[node, token], path, 0) == row
        hidden = out[0]
        logits = self._spec.logits(self.runner.non_layer, hidden, previous_tokens(len(hidden)))
        blocks.append((list(state.sequence.tokens), states[0].clone(), paths[0], logits))
        return out

    monkeypatch.setattr(BlockModel, "_blocks", computed)
    monkeypatch.setattr(CostEstimator, "level", lambda *_: 0.0)
    prompt = prompt_of(0, 9, model.config.vocab_size)
    with open_llm(dtype="float64", tree_size=16, **settings) as llm:
        text = say(llm, prompt, 16)
    assert text == generate(model.double(), prompt, 16)
    assert len({len(tokens) for tokens, *_ in blocks}) > 4
    assert {len(path) for _, _, path, _ in blocks} >= {0, 1, 2}
    for tokens, seen, path, logits in blocks:
        assert len(seen) == len(tokens) - 1
        expected = reference(raw, weights, model, seen, tokens, path)
        torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize(("changes", "layers", "error", "message"), [
    ({"dflash_config": {"selector_rank": 4}}, {}, UnsupportedModelError, "'selector_rank'"),
    (DEEPSPEC | {"markov_head_type": "rnn"}, {}, UnsupportedModelError, "'rnn'"),
    ({"projector_type": "domino"}, {}, UnsupportedModelError, "'domino'"),
    ({"something": 1}, {}, UnsupportedModelError, "'something'"),
    ({"dflash_config": {"mask_token_id": 99, "target_layer_ids": [0, 2]}}, {},
        UnsupportedModelError, "mask_token is 99"),
    ({}, {"vocab_size": 9}, SettingsError, "vocabulary differs"),
    ({}, {"num_target_layers": 9}, SettingsError, "number of layers differs"),
    ({"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 7]}}, {}, SettingsError,
        "hidden states differs"),
])  # fmt: skip
def test_other_configs_are_rejected_by_name(tmp_path, changes, layers, error, message):
    settings, _, _ = write_block(tmp_path, few_tokens(), DFLASH | changes, **layers)
    with pytest.raises(error, match=message):
        open_llm(**settings)


@pytest.mark.slow
def test_joint_distribution_of_sampled_trees(tmp_path, monkeypatch):
    """Siblings are drawn without replacement, grandchildren from the block with their path."""
    model = small_model(VOCABULARY, n_layers=5, sureness=0.5)
    config = DFLASH | {"dflash_config": DFLASH["dflash_config"] | {"mask_token_id": 3}}
    settings, raw, weights = write_block(tmp_path, model, config)
    shape = Topology(np.array([-1, 0, 0, 1, 2]))
    # The target's most probable tokens, so that all sequences have equal texts.
    sampling = [
        SamplingParams(max_new_tokens=4, temperature=0.8, top_k=1, seed=i) for i in range(500)
    ]
    sequences = [TokenSequence([1, 3, 2, 0, 1], params, 64) for params in sampling]
    trees: list[Tensor] = []
    with open_llm(max_model_len=64, **settings) as llm:
        limits = DraftLimits(5, 4)
        drafter = drafter_of(llm, "block", "traversal", limits, level_s=0.0, shape=shape)
        propose = drafter.propose
        states = record_states(monkeypatch, BlockModel)

        def proposed(batch, n_nodes):
            made = propose(batch, n_nodes)
            trees.extend(tree.tokens for tree in made if len(tree.topology) == len(shape))
            return made

        monkeypatch.setattr(drafter, "propose", proposed)
        run_together(runner_of(llm), drafter, load_rule("traversal"), sequences, 5, 2)
    assert len(trees) == len(sequences)
    text = sequences[0].tokens[: 5 + 1]
    probs = [
        torch.softmax(reference(raw, weights, model, states[0][:5], text, path) / 0.8, -1).numpy()
        for path in ([], *([token] for token in range(VOCABULARY)))
    ]
    root = probs[0][0]
    siblings = root[:, None] * root / (1 - root[:, None]) * (1 - np.eye(VOCABULARY))
    below = np.stack([block[1] for block in probs[1:]])
    tokens = torch.stack(trees).tolist()
    assert_distribution(
        [(a, b, c) for _, a, b, c, _ in tokens], siblings[..., None] * below[:, None]
    )
    assert_distribution([(a, b, d) for _, a, b, _, d in tokens], siblings[..., None] * below)
