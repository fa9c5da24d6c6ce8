"""Opening the checkpoints of heads that draft for a model by its hidden states."""

from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch

from offload_rt.errors import CheckpointError
from offload_rt.models.heads import MEDUSA_PREFIXES, MTP_LAYOUTS, Medusa, eagle_of, medusa_of, mtp_of, of_another_target
from offload_rt.models.native import NativeDecoder
from offload_rt.weights.checkpoint import Checkpoint, assemble, read_json, tensors_of
from offload_rt.weights.formats import StoredTensor, format_of
from offload_rt.weights.header import TensorRecord
from offload_rt.weights.source import OTHER_CONFIG, Source


def open_head(directory: Path, kind: str, target: Checkpoint) -> Checkpoint:
    """The checkpoint of a head of a kind, see `head_kind`.

    Raises UnsupportedModelError for a config that is not understood, SettingsError for a head of another model,
    CheckpointError for everything else.
    """
    raw, spec = read_json(directory / "config.json"), target.spec
    weight_format, found = format_of(raw.pop("quantization_config", None)), tensors_of(directory)
    assert isinstance(spec, NativeDecoder), "all families are"
    if kind == "medusa":
        return assemble(directory, _medusa(raw, spec, found), weight_format, found)
    eagle = eagle_of(raw, spec)
    if eagle.n_tokens != eagle.vocab_size:
        tokens = Source(found).read(StoredTensor("d2t", (eagle.n_tokens,), torch.int64)) + torch.arange(eagle.n_tokens)
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < eagle.vocab_size:
            need = f"tokens below {eagle.vocab_size}"
            raise CheckpointError("tensor 'd2t' leads out of the vocabulary", need=need, change=OTHER_CONFIG)
        eagle = replace(eagle, token_ids=tokens)
    return assemble(directory, eagle, weight_format, found)


def find_mtp(directory: Path, target: Checkpoint) -> Checkpoint | None:
    """The layer for multi-token prediction in a checkpoint of the target; None where there is none."""
    assert isinstance(target.spec, NativeDecoder), "all families are"
    if not directory.is_dir():  # no GGUF file has one
        return None
    found = tensors_of(directory)
    for layout in MTP_LAYOUTS:
        spec = mtp_of(target.spec, layout)
        if f"{spec.layout.hidden_norm}.weight" in found:
            weight_format = format_of(read_json(directory / "config.json").get("quantization_config"))
            return assemble(directory, spec, weight_format, found)
    return None


def _medusa(raw: dict[str, Any], target: NativeDecoder, found: dict[str, TensorRecord]) -> Medusa:
    """As many heads as the file has: configs are known to state fewer."""
    spec = medusa_of(raw, target)
    for prefix in MEDUSA_PREFIXES:
        names = (f"{prefix}{i}.{spec.n_blocks}.weight" for i in count())
        heads = [found[name] for name in takewhile(found.__contains__, names)]
        if heads:
            have, need = heads[0].shape, (target.vocab_size, target.hidden_size)
            if have != need:
                raise of_another_target("matrix", str(list(have)), str(list(need)))
            has_bias = f"{prefix}0.0.linear.bias" in found
            return replace(spec, prefix=prefix, has_bias=has_bias, n_layers=len(heads))
    raise CheckpointError("no Medusa heads among the weights", need="0.1.weight or the like", change=OTHER_CONFIG)
