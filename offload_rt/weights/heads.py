"""Checkpoints of draft heads, which predict from a target's hidden states."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path

from offload_rt.dtypes import DType
from offload_rt.errors import CheckpointError
from offload_rt.models.block_head import BlockHead
from offload_rt.models.eagle3 import Eagle3
from offload_rt.models.head_configs import mtp_of, parse_head
from offload_rt.models.heads import MEDUSA_PREFIXES, MTP_LAYOUTS, Medusa, target_mismatch
from offload_rt.models.native import NativeDecoder
from offload_rt.weights.checkpoint import Checkpoint, assemble, without_quantization
from offload_rt.weights.files import read_config, tensors_of
from offload_rt.weights.formats import StoredTensor, format_of
from offload_rt.weights.gguf import SUFFIX
from offload_rt.weights.header import TensorRecord
from offload_rt.weights.source import OTHER_CONFIG, Source


def open_head(directory: Path, target: Checkpoint) -> Checkpoint | None:
    """Open the checkpoint of a head; return None for a complete model.

    Raises UnsupportedModelError, CheckpointError, and SettingsError for a head of another model.
    """
    if directory.suffix == SUFFIX:  # such files contain complete models
        return None
    config = read_config(directory)
    head = parse_head(without_quantization(config), target.spec)
    if head is None:
        return None
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    names = [next(iter(c.get("architectures") or ()), "") for c in (verifier, target.config)]
    # Models with and without other modalities differ in the rest of the name.
    kinds = {name.partition("For")[0] for name in names}
    if len(kinds) == 2 and all(kinds):
        raise target_mismatch("target", *names)
    stored = tensors_of(directory)
    if isinstance(head, Medusa):
        head = _with_stored_heads(head, stored)
    elif isinstance(head, Eagle3 | BlockHead) and head.n_tokens != head.vocab_size:
        import torch

        offsets = Source(stored).read(StoredTensor("d2t", (head.n_tokens,), DType.INT64))
        tokens = offsets + torch.arange(head.n_tokens)
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < head.vocab_size:
            problem = "tensor 'd2t' leads out of the vocabulary"
            need = f"tokens below {head.vocab_size}"
            raise CheckpointError(problem, need=need, change=OTHER_CONFIG)
        head = replace(head, token_ids=tokens)
    weight_format = format_of(config.get("quantization_config"))
    return assemble(directory, config, head, weight_format, stored)


def find_mtp(directory: Path, target: Checkpoint) -> Checkpoint | None:
    """Open the multi-token prediction layer in a checkpoint of the target; None without one."""
    if not directory.is_dir():  # no GGUF file has one
        return None
    spec = target.spec
    stored = tensors_of(directory)
    norms = {
        f"{layout.for_target(spec.n_layers).hidden_norm}.weight": layout for layout in MTP_LAYOUTS
    }
    layout = next((norms[name] for name in norms if name in stored), None)
    if layout is None or not spec.supports_mtp:
        return None
    config = read_config(directory)
    weight_format = format_of(config.get("quantization_config"))
    if isinstance(spec, NativeDecoder):
        return assemble(directory, config, mtp_of(spec, layout), weight_format, stored)
    from offload_rt.models.traced_mtp import traced_mtp  # takes a second

    return assemble(directory, config, traced_mtp(spec, layout), weight_format, stored)


def _with_stored_heads(spec: Medusa, stored: Mapping[str, TensorRecord]) -> Medusa:
    """Use all heads of the file: some published configs state fewer."""
    for prefix in MEDUSA_PREFIXES:
        names = (f"{prefix}{i}.{spec.n_blocks}.weight" for i in count())
        heads = [stored[name] for name in takewhile(stored.__contains__, names)]
        if heads:
            have = list(heads[0].shape)
            need = [spec.vocab_size, spec.hidden_size]
            if have != need:
                raise target_mismatch("matrix", str(have), str(need))
            has_bias = f"{prefix}0.0.linear.bias" in stored
            return replace(spec, prefix=prefix, has_bias=has_bias, n_layers=len(heads))
    problem = "no Medusa heads among the weights"
    raise CheckpointError(problem, need="0.1.weight or the like", change=OTHER_CONFIG)
