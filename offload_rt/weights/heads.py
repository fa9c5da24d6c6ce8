"""Opening the checkpoints of heads that draft for a model by its hidden states."""

from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path

from offload_rt.dtypes import DType
from offload_rt.errors import CheckpointError
from offload_rt.models.heads import (
    MEDUSA_PREFIXES,
    MTP_LAYOUTS,
    Eagle3,
    Medusa,
    head_of,
    mtp_of,
    of_another_target,
)
from offload_rt.models.native import NativeDecoder
from offload_rt.weights.checkpoint import Checkpoint, assemble, read_config, read_json, tensors_of
from offload_rt.weights.formats import StoredTensor, format_of
from offload_rt.weights.header import TensorRecord
from offload_rt.weights.source import OTHER_CONFIG, Source


def open_head(directory: Path, target: Checkpoint) -> Checkpoint | None:
    """The checkpoint of a head; None where it is of a whole model.

    Raises UnsupportedModelError for a config that is not understood, SettingsError for a head of
    another model, CheckpointError for everything else.
    """
    raw = read_config(directory)
    quantization = raw.pop("quantization_config", None)
    head = head_of(raw, target.spec)
    if head is None:
        return None
    found = tensors_of(directory)
    if isinstance(head, Medusa):
        head = _as_stored(head, found)
    elif isinstance(head, Eagle3) and head.n_tokens != head.vocab_size:
        import torch

        tokens = Source(found).read(
            StoredTensor("d2t", (head.n_tokens,), DType.INT64)
        ) + torch.arange(head.n_tokens)
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < head.vocab_size:
            need = f"tokens below {head.vocab_size}"
            raise CheckpointError(
                "tensor 'd2t' leads out of the vocabulary", need=need, change=OTHER_CONFIG
            )
        head = replace(head, token_ids=tokens)
    return assemble(directory, head, format_of(quantization), found)


def find_mtp(directory: Path, target: Checkpoint) -> Checkpoint | None:
    """The layer for multi-token prediction in a checkpoint of the target; None where there is
    none.
    """
    if not directory.is_dir():  # no GGUF file has one
        return None
    spec = target.spec
    found = tensors_of(directory)
    layout = next(
        (one for one in MTP_LAYOUTS if f"{one.of(spec.n_layers).hidden_norm}.weight" in found), None
    )
    if layout is None or not spec.supports_mtp:
        return None
    weight_format = format_of(read_json(directory / "config.json").get("quantization_config"))
    if isinstance(spec, NativeDecoder):
        return assemble(directory, mtp_of(spec, layout), weight_format, found)
    # takes a second, for the models that need it
    from offload_rt.models.traced_mtp import traced_mtp

    return assemble(directory, traced_mtp(spec, layout), weight_format, found)


def _as_stored(spec: Medusa, found: dict[str, TensorRecord]) -> Medusa:
    """As many heads as the file has: configs are known to state fewer."""
    for prefix in MEDUSA_PREFIXES:
        names = (f"{prefix}{i}.{spec.n_blocks}.weight" for i in count())
        heads = [found[name] for name in takewhile(found.__contains__, names)]
        if heads:
            have = heads[0].shape
            need = (spec.vocab_size, spec.hidden_size)
            if have != need:
                raise of_another_target("matrix", str(list(have)), str(list(need)))
            has_bias = f"{prefix}0.0.linear.bias" in found
            return replace(spec, prefix=prefix, has_bias=has_bias, n_layers=len(heads))
    raise CheckpointError(
        "no Medusa heads among the weights", need="0.1.weight or the like", change=OTHER_CONFIG
    )
