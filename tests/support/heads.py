"""Draft heads of random weights in their published layouts, and a tree of fixed nodes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig, PreTrainedModel

from bench.models.tiny import config_of, random_model
from offload_rt import LLM, SamplingParams
from offload_rt.cost.tree_size import DraftLimits
from offload_rt.executor.sequence import Sequence as TokenSequence
from offload_rt.models.head_configs import parse_head
from offload_rt.speculate.select import load_rule
from offload_rt.speculate.tree_state import TreeState
from offload_rt.weights.checkpoint import open_checkpoint
from support.texts import SMALL, run_together
from support.tiny import CASES, SPREAD, drafter_of, engine_of, prompt_of, runner_of

VOCAB = 8
N_HEADS = 3
# Tokens that the vocabulary of an EAGLE-3 head stands for: token i of it is i + d2t[i].
KEPT = [0, 2, 3, 5, 6]
MTP = {
    "nextn": ("model.layers.{n}.", "{layer}enorm", "{layer}hnorm", "{layer}eh_proj",
        "{layer}shared_head.norm"),
    "mimo": ("model.mtp_layers.0.", "{layer}token_layernorm", "{layer}hidden_layernorm",
        "{layer}input_proj", "{layer}final_layernorm"),
    "qwen": ("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc",
        "mtp.norm"),
}  # fmt: skip
Weights = dict[str, Tensor]


def mtp_names(kind: str, model: PreTrainedModel) -> list[str]:
    """Prefix of the layer, norms of embedding and hidden state, projection, last norm."""
    layer = MTP[kind][0].format(n=model.config.num_hidden_layers)
    return [name.format(n=model.config.num_hidden_layers, layer=layer) for name in MTP[kind]]


def shapes_of(kind: str, model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """The published names and shapes of a head's tensors."""
    d = model.config.hidden_size
    vocab = model.config.vocab_size
    if kind == "medusa":
        linear = {"0.linear.weight": (d, d), "0.linear.bias": (d,), "1.weight": (vocab, d)}
        return {f"{i}.{name}": shape for name, shape in linear.items() for i in range(N_HEADS)}
    first = "model.layers.0."
    layer = {
        name.removeprefix(first): tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if first in name
    }
    if kind == "eagle":
        wide = {f"self_attn.{name}_proj.weight" for name in "qkv"}
        shapes = {
            f"midlayer.{name}": (shape[0], 2 * d) if name in wide else shape
            for name, shape in layer.items()
            if "_norm" not in name
        }
        own = {"fc.weight": (d, 3 * d), "norm.weight": (d,), "lm_head.weight": (len(KEPT), d)}
        return shapes | {"midlayer.hidden_norm.weight": (d,)} | own
    prefix, *norms, project, last = mtp_names(kind, model)
    shapes = {f"{prefix}{name}": shape for name, shape in layer.items()}
    shapes |= {f"{project}.weight": (d, 2 * d)}
    return shapes | {f"{name}.weight": (d,) for name in (*norms, last)}


def random_weights(
    kind: str, model: PreTrainedModel, seed: int = 5, more: dict[str, tuple[int, ...]] | None = None
) -> Weights:
    """Random weights of a head, with shapes of further tensors."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in (shapes_of(kind, model) | (more or {})).items():
        middle = float(len(shape) == 1 and not name.endswith("bias"))
        weights[name] = SPREAD * torch.randn(shape, generator=generator) + middle
    if kind == "eagle":
        kept = torch.tensor(KEPT)
        chosen = torch.isin(torch.arange(model.config.vocab_size), kept)
        weights |= {"d2t": kept - torch.arange(len(kept)), "t2d": chosen}
    return weights


def write_head(
    folder: Path, kind: str, model: PreTrainedModel, weights: Weights, **changes: Any
) -> dict[str, Any]:
    """A target below a folder, with the head; returns the settings that choose both."""
    target = folder / "target"
    head = folder / "head"
    model.save_pretrained(target)
    if kind in MTP:
        file = target / "model.safetensors"
        save_file({**load_file(file), **weights}, file)
        config = json.loads((target / "config.json").read_text())
        config |= {"num_nextn_predict_layers": 1} | changes
        (target / "config.json").write_text(json.dumps(config))
        return {"directory": target, "drafter": "mtp"}
    head.mkdir()
    if kind == "medusa":
        config = {"medusa_num_heads": 2, "medusa_num_layers": 1}
        config |= {"base_model_name_or_path": "somewhere"}
    else:
        names = (
            "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
            "num_key_value_heads", "head_dim",
        )  # fmt: skip
        sizes = {name: getattr(model.config, name) for name in names}
        config = LlamaConfig(**sizes, num_hidden_layers=1).to_dict()
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(KEPT)}
        # published ones are for much shorter texts than their target's
        config |= {"max_position_embeddings": 8}
    file = "medusa_lm_head.safetensors" if kind == "medusa" else "model.safetensors"
    save_file(weights, head / file)
    if changes.get("speculators_model_type"):
        config = nested_config(config)
    (head / "config.json").write_text(json.dumps(config | changes))
    return {"directory": target, "drafter": kind, "draft_model": str(head)}


def nested_config(config: dict[str, Any]) -> dict[str, Any]:
    """The layout of speculators: the config of the layer is a part of the head's config."""
    n_tokens = config["draft_vocab_size"]
    own = ("architectures", "draft_vocab_size")
    return {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": n_tokens,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "somewhere"},
        },
        "transformer_layer_config": {key: x for key, x in config.items() if key not in own},
        "target_hidden_size": None,
        "tie_word_embeddings": False,
    }


def random_head(folder: Path, kind: str, model: PreTrainedModel, **changes: Any) -> dict[str, Any]:
    return write_head(folder, kind, model, random_weights(kind, model), **changes)


def few_tokens(name: str = "llama") -> PreTrainedModel:
    """A target of so few tokens that a random head is right now and then."""
    return CASES[name].build(3, **SMALL, vocab_size=VOCAB, num_hidden_layers=5)


def small_target(kind: str, folder: Path) -> PreTrainedModel:
    """Write a random model of transformers with 8 tokens."""
    config = config_of(kind)
    config.get_text_config().vocab_size = VOCAB
    config.get_text_config().tie_word_embeddings = kind == "gemma2"
    model = random_model(config)
    model.save_pretrained(folder)
    return model


@dataclass
class Probe:
    """A builder of a tree that is fixed, which keeps the logits of its rows.

    rounds  (parents, tokens) of the rows added after each pass
    """

    state: TreeState
    rounds: list[tuple[list[int], list[int]]]
    reduce: None = None
    logits: list[Tensor] = field(default_factory=list)

    def select(self, out: Tensor) -> Tensor:
        return out

    def extend(self, selected: Tensor) -> None:
        self.logits.extend(selected.clone())
        if self.rounds:
            self.state.add(*self.rounds.pop(0))


PATHS = [[], [4], [6], [4, 1], [6, 1], [4, 7]]


def probe(llm: LLM, name: str, n_steps: int) -> Iterator[tuple[list[int], list[int], Tensor]]:
    """Yield tokens of sequences, PATHS, and a drafter's logits behind each path.

    The sequences have seen trees with accepted and rejected nodes, `n_steps` between joining.
    """
    drafter = drafter_of(llm, name, "match", DraftLimits(24, 5, fixed_size=True))
    engine = engine_of(llm, drafter, n_nodes=72)
    several = [TokenSequence(prompt_of(n, n, VOCAB), SamplingParams(60), 128) for n in (9, 1, 30)]
    for sequence in several:
        engine.add(sequence)
        for _ in range(n_steps):
            engine.step()
    n_accepted = sum(sequence.n_new - sequence.stats.n_passes for sequence in several)
    assert n_accepted > 2, "hardly anything was accepted"
    states = [drafter._model.start(sequence, 24, is_alone=False) for sequence in several]
    probes = [Probe(state, [([0, 0], [4, 6]), ([1, 2, 1], [1, 1, 7])]) for state in states]
    assert drafter._model.grow(probes) == 3
    for sequence, grown in zip(several, probes, strict=True):
        for path, logits in zip(PATHS, grown.logits, strict=True):
            yield sequence.tokens, path, logits


def assert_plain_texts(llm: LLM, name: str, rule: str) -> None:
    """Assert that sampled texts with a drafter equal those of plain decoding, in fewer passes."""
    several = [SamplingParams(16, temperature=0.5 + 0.1 * seed, seed=seed) for seed in range(9)]
    texts = []
    trees = DraftLimits(24, 5, fixed_size=True)
    for drafter, limits in (("none", DraftLimits(1, 1)), (name, trees)):
        batch = [TokenSequence([1, 2, 0, 3], params, 128) for params in several]
        parts = runner_of(llm), drafter_of(llm, drafter, rule, limits), load_rule(rule)
        texts.append(run_together(*parts, batch, limits.n_nodes))
    assert texts[0] == texts[1]
    assert sum(sequence.stats.n_passes for sequence in batch) < 9 * 14, "nothing was accepted"


HEADS = ("eagle", "medusa", "qwen")
_DFLASH = {"mask_token_id": 5, "target_layer_ids": [0, 2]}
_DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 3, "selector_top_k": 3}
# Without d2t: the vocabulary is the target's. The embedding is the head's only in P-EAGLE.
PUBLISHED: dict[str, dict[str, Any]] = {
    "eagle": {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
    "peagle": {"architectures": ["PEagleDraftModel"], "model_type": "llama", "pard_token": 5},
    "block": {"architectures": ["DFlashDraftModel"], "block_size": 4, "dflash_config": _DFLASH},
    "dflash2": {"architectures": ["DFlash2DraftModel"], "block_size": 4,
        "dflash_config": _DFLASH | _DFLASH2},
}  # fmt: skip


def write_published(folder: Path, target: Path, kind: str) -> dict[str, Any]:
    """Write a head of random weights for a target; return the settings that choose both."""
    spec = open_checkpoint(target).spec
    sizes = {"vocab_size": spec.vocab_size, "hidden_size": spec.hidden_size}
    raw = PUBLISHED[kind] | _LAYERS | sizes | {"num_hidden_layers": 1 if kind == "eagle" else 2}
    head = parse_head(raw, spec)
    assert head is not None
    tensors = dict(head.non_layer_tensors())
    for i in range(head.n_layers):
        tensors |= {f"{head.layer_prefix(i)}{name}": size for name, size in head.layer_tensors(i)}
    _save(folder, raw, _random(tensors, 0.3))
    return {"directory": target, "draft_model": str(folder)}


def _random(shapes: dict[str, tuple[int, ...]], spread: float) -> Weights:
    draw = torch.Generator().manual_seed(4)
    return {
        name: spread * torch.randn(shape, generator=draw) + float(len(shape) == 1)
        for name, shape in shapes.items()
    }


def _save(folder: Path, config: dict[str, Any], weights: Weights) -> None:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def layer_config(
    model: PreTrainedModel, model_type: str, n_layers: int, **changes: Any
) -> dict[str, Any]:
    """The config of a head's layers, used by the float64 references."""
    sizes = {"vocab_size": model.config.vocab_size, "hidden_size": model.config.hidden_size}
    return _LAYERS | sizes | {"model_type": model_type, "num_hidden_layers": n_layers} | changes


_LAYERS = {
    "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip


def layer_shapes(d: int, width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer of layer_config whose projections q, k and v read width values."""
    return {
        "input_layernorm": (d,), "post_attention_layernorm": (d,), "self_attn.q_proj": (16, width),
        "self_attn.k_proj": (8, width), "self_attn.v_proj": (8, width), "self_attn.o_proj": (d, 16),
        "mlp.gate_proj": (24, d), "mlp.up_proj": (24, d), "mlp.down_proj": (d, 24),
    }  # fmt: skip


def write_random(
    folder: Path,
    model: PreTrainedModel,
    raw: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    n_tokens: int,
) -> tuple[dict[str, Any], Weights]:
    """Write a target and a head of random weights; return settings and weights.

    n_tokens  size of the head's vocabulary; KEPT are its tokens if it has as many
    """
    weights = _random(shapes, 0.4)
    if n_tokens == len(KEPT):
        weights["d2t"] = torch.tensor(KEPT) - torch.arange(n_tokens)
    model.save_pretrained(folder / "target")
    _save(folder / "head", raw, weights)
    return {"directory": folder / "target", "draft_model": str(folder / "head")}, weights


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm with the epsilon of layer_config."""
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def rotated(x: Tensor, first: int = 0) -> Tensor:
    """Rotary embedding of x (n, heads, 8) at the positions from `first`, in float64."""
    frequencies = 1 / 10000.0 ** (torch.arange(0, 8, 2).float() / 8)
    angles = torch.arange(first, first + len(x))[:, None, None].float() * frequencies
    cos, sin = angles.cos().double(), angles.sin().double()
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def mlp(weights: Weights, prefix: str, h: Tensor) -> Tensor:
    gate, up, down = (
        weights[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down")
    )
    return (silu(h @ gate) * (h @ up)) @ down


def record_states(monkeypatch: pytest.MonkeyPatch, drafter: type[Any]) -> list[Tensor]:
    """Record the hidden states a drafter observes; return the list that will hold them.

    The list has a single tensor (n, ...): the states of all tokens but the last.
    """
    states: list[Tensor] = []
    observe = drafter.observe

    def observed(self: Any, sequence: Any, first: int, parts: Any) -> None:
        known = torch.cat(states)[:first] if states else torch.empty(0)
        states[:] = [torch.cat((known, *parts)) if first else torch.cat(list(parts))]
        observe(self, sequence, first, parts)

    monkeypatch.setattr(drafter, "observe", observed)
    return states
