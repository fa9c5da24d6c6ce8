"""Draft heads of random weights in their published layouts, and a tree of fixed nodes."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from bench.models.tiny import config_of, random_model
from offload_rt import LLM, SamplingParams
from offload_rt.cost.tree_size import DraftLimits
from offload_rt.executor.sequence import Sequence as TokenSequence
from offload_rt.models.architecture import Architecture
from offload_rt.models.head_configs import mtp_of, parse_head
from offload_rt.models.heads import MTP_LAYOUTS, Head, Medusa
from offload_rt.models.native import NativeDecoder
from offload_rt.speculate.tree_state import TreeState
from offload_rt.weights.checkpoint import open_checkpoint
from support.texts import SMALL, run_together
from support.tiny import CASES, drafter_of, engine_of, prompt_of

VOCAB = 8
N_HEADS = 3
MASK = 5
# Tokens that a reduced vocabulary stands for: token i of it is i + d2t[i].
KEPT = [0, 2, 3, 5, 6]
# Layouts of multi-token prediction layers: prefix of the layer, norms of embedding and hidden
# state, projection, last norm.
MTP = {
    "nextn": ("model.layers.{n}.", "{layer}enorm", "{layer}hnorm", "{layer}eh_proj",
        "{layer}shared_head.norm"),
    "mimo": ("model.mtp_layers.0.", "{layer}token_layernorm", "{layer}hidden_layernorm",
        "{layer}input_proj", "{layer}final_layernorm"),
    "qwen": ("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc",
        "mtp.norm"),
}  # fmt: skip
HEADS = ("eagle", "medusa", "qwen")
_DFLASH = {"mask_token_id": MASK, "target_layer_ids": [0, 2]}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 3, "selector_top_k": 3}
# Published heads for any target. The embedding is the head's only in P-EAGLE.
PUBLISHED: dict[str, dict[str, Any]] = {
    "eagle": {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "num_hidden_layers": 1, "draft_vocab_size": len(KEPT)},
    "peagle": {"architectures": ["PEagleDraftModel"], "model_type": "llama", "pard_token": MASK},
    "block": {"architectures": ["DFlashDraftModel"], "block_size": 4, "dflash_config": _DFLASH},
    "dflash2": {"architectures": ["DFlash2DraftModel"], "block_size": 4,
        "dflash_config": _DFLASH | DFLASH2},
}  # fmt: skip
_MEDUSA = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "somewhere"}
_CONFIGS = PUBLISHED | {"medusa": _MEDUSA}
_LAYERS = {
    "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "num_hidden_layers": 2, "rms_norm_eps": 1e-6,
    # Published heads are for much shorter texts than their target.
    "max_position_embeddings": 8,
}  # fmt: skip
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Written:
    """A head in files.

    settings  that choose target and head
    raw       config.json of the head
    weights   tensors that the head uses
    """

    settings: dict[str, Any]
    raw: dict[str, Any]
    weights: Weights


def write_head(
    folder: Path, target: Path, kind: str, layers: Mapping[str, Any] | None = None, **changes: Any
) -> Written:
    """Write a head of random weights for a target, within the target's file for kinds of MTP.

    layers   changes of the layers' config, which speculators nest
    changes  of the config of the head; speculators' config replaces the published one
    """
    spec = open_checkpoint(target).spec
    is_nested = "speculators_model_type" in changes
    sizes = {"vocab_size": spec.vocab_size, "hidden_size": spec.hidden_size}
    own = changes if is_nested else _CONFIGS.get(kind, {}) | changes
    model_type = "qwen3" if kind in ("block", "dflash2") else "llama"
    of_layers = _LAYERS | sizes | {"model_type": model_type} | (layers or {})
    raw = own | {"transformer_layer_config": of_layers} if is_nested else of_layers | own
    weights = _random_weights(_head_of(kind, raw, spec), is_nested)
    if kind in MTP:
        file = target / "model.safetensors"
        save_file(load_file(file) | weights, file)
        edit_config(target, num_nextn_predict_layers=1)
        return Written({"directory": target}, raw, weights)
    folder.mkdir()
    # Copies of tables, the map of the vocabulary, and a head for training are ignored.
    unused = {name: torch.zeros(1) for name in ("embed_tokens.weight", "t2d", "confidence_head")}
    file = "medusa_lm_head.safetensors" if kind == "medusa" else "model.safetensors"
    save_file(unused | weights, folder / file)
    (folder / "config.json").write_text(json.dumps(raw))
    return Written({"directory": target, "draft_model": str(folder)}, raw, weights)


def _head_of(kind: str, raw: dict[str, Any], target: Architecture) -> Head:
    if kind in MTP:
        assert isinstance(target, NativeDecoder)
        return mtp_of(target, MTP_LAYOUTS[[*MTP].index(kind)])
    head = parse_head(raw, target)
    assert head is not None
    return replace(head, n_layers=N_HEADS) if isinstance(head, Medusa) else head


def _random_weights(head: Head, is_nested: bool) -> Weights:
    """Return weights by published names; speculators number the first layer."""
    draw = torch.Generator().manual_seed(5)
    shapes = dict(head.non_layer_tensors())
    for i in range(head.n_layers):
        prefix = head.layer_prefix(i).replace("midlayer", "layers.0" if is_nested else "midlayer")
        shapes |= {f"{prefix}{name}": shape for name, shape in head.layer_tensors(i)}
    weights = {
        name: 0.3 * torch.randn(shape, generator=draw)
        + float(len(shape) == 1 and not name.endswith("bias"))
        for name, shape in shapes.items()
    }
    n_tokens = getattr(head, "n_tokens", 0)
    if n_tokens == len(KEPT):
        weights["d2t"] = torch.tensor(KEPT) - torch.arange(n_tokens)
    return weights


def edit_config(folder: Path, name: str = "config.json", **changes: Any) -> None:
    """Change keys of a config."""
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def random_head(
    folder: Path, kind: str, model: PreTrainedModel, layers: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Written:  # fmt: skip
    """Write a target and a head, as `write_head`."""
    model.save_pretrained(folder / "target")
    written = write_head(folder / "head", folder / "target", kind, layers, **changes)
    drafter = "mtp" if kind in MTP else kind.replace("dflash2", "block")
    written.settings["drafter"] = drafter
    return written


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

    rounds      (parents, tokens) of the rows added after each pass
    recomputes  of the last round, see `TreeState`
    """

    state: TreeState
    rounds: list[tuple[list[int], list[int]]]
    recomputes: bool = True
    reduce: None = None
    logits: list[Tensor] = field(default_factory=list)

    def select(self, out: Tensor) -> Tensor:
        return out

    def extend(self, selected: Tensor) -> None:
        self.logits.extend(selected.clone())
        if self.rounds:
            self.state.add(*self.rounds.pop(0))
            self.state.recomputes = self.recomputes or bool(self.rounds)


PATHS = [[], [4], [6], [4, 1], [6, 1], [4, 7]]


def probe(
    llm: LLM, name: str, n_steps: int, recomputes: bool = True
) -> Iterator[tuple[list[int], list[int], Tensor]]:
    """Yield tokens of sequences, PATHS, and a drafter's logits behind each path.

    The sequences have seen trees with accepted and rejected nodes, `n_steps` between joining.
    recomputes  block drafters: nodes of the last round have blocks of their own
    """
    drafter = drafter_of(llm, name, "match", DraftLimits(24, 5, fixed_size=True))
    engine = engine_of(llm, drafter, n_nodes=72)
    several = [TokenSequence(prompt_of(n, n, VOCAB), SamplingParams(60), 128) for n in (9, 1, 30)]
    for sequence in several:
        engine.add(sequence)
        for _ in range(n_steps):
            engine.step()
    n_accepted = sum(sequence.n_new - len(sequence.stats.passes) for sequence in several)
    assert n_accepted > 2, "hardly anything was accepted"
    states = [drafter._model.start(sequence, 24, is_alone=False) for sequence in several]
    rounds = ([0, 0], [4, 6]), ([1, 2, 1], [1, 1, 7])
    probes = [Probe(state, [*rounds], recomputes) for state in states]
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
        built = drafter_of(llm, drafter, rule, limits)
        texts.append(run_together(llm, built, rule, batch, limits.n_nodes))
    assert texts[0] == texts[1]
    assert sum(len(sequence.stats.passes) for sequence in batch) < 9 * 14, "nothing was accepted"
