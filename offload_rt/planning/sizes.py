"""Sizes of models from local files or configs, and in other weight formats."""

import math
from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from itertools import chain, compress, repeat
from pathlib import Path
from typing import Any

from offload_rt.config import EngineConfig
from offload_rt.cost.roofline import layer_weights
from offload_rt.dtypes import DTYPES, DType
from offload_rt.engine.model_sizes import Sizes
from offload_rt.errors import CheckpointError, SettingsError, UnsupportedModelError
from offload_rt.models.families import parse_architecture
from offload_rt.models.head_configs import parse_head
from offload_rt.offload.placement import ExpertSizes, LinkSizes
from offload_rt.packing import LOSSLESS_SHARE
from offload_rt.planning.known_models import KNOWN, known_name
from offload_rt.speculate.select import check_pair
from offload_rt.weights import gguf
from offload_rt.weights.checkpoint import Checkpoint, open_checkpoint, open_headers
from offload_rt.weights.formats import format_of, mxfp4
from offload_rt.weights.locate import find_config, locate

# float8 as published by DeepSeek and Qwen, and W4A16 as written by llm-compressor.
_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
_INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
}  # fmt: skip


def find_models(config: EngineConfig) -> tuple[Sizes, Sizes | None]:
    """Return the sizes of the target and of its draft model or draft heads; None without a draft.

    Raises CheckpointError for missing files, UnsupportedModelError for unsupported configs, and
    SettingsError for a draft that does not match the target.
    """
    target = sizes_of(config.model, config.revision, config)
    raw = None
    if config.draft_model is not None:
        raw = _config_of(config.draft_model, None, config.offline)
    elif not target.spec.supports_mtp or config.drafter != "auto":
        return target, None
    head = parse_head(raw, target.spec)
    if head is not None:
        return target, Sizes.of_spec(head, target.dtype)
    if config.draft_model is None:
        return target, None
    draft = sizes_of(config.draft_model, None, replace(config, dtype="auto"))
    check_pair(target.spec, draft.spec, (None, None))
    return target, draft


def sizes_of(name: str, revision: str | None, config: EngineConfig) -> Sizes:
    """Return the sizes of a model from local file headers, else from its config."""
    checkpoint = None if name.lower() in KNOWN else find_checkpoint(name, revision)
    raw: dict[str, Any] = {}
    if checkpoint is None:
        raw = _config_of(name, revision, config.offline)
        if "quantization_config" in raw and known_name(name) is None and not Path(name).exists():
            checkpoint = open_headers(name, revision, config.offline)
    if checkpoint is not None:
        stored_dtype = checkpoint.spec.dtype_name or checkpoint.dtype
        dtype = DTYPES[stored_dtype if config.dtype == "auto" else config.dtype]
        layers = tuple(layer.layout.nbytes for layer in checkpoint.layers)
        sizes = replace(Sizes.of_checkpoint(checkpoint, dtype), layer_nbytes=layers, dtype=dtype)
        return replace(sizes, divided=partial(_divided, sizes, checkpoint))
    stored = raw.pop("quantization_config", None)
    spec = parse_architecture(raw)
    dtype = DTYPES[spec.dtype_name or "float16" if config.dtype == "auto" else config.dtype]
    sizes = Sizes.of_spec(spec, dtype, format_of(stored))
    if stored is not None and stored.get("quant_method") == "mxfp4":
        return _mxfp4(sizes)
    if stored is not None and is_plain(sizes):
        problem = f"{name}: the config does not list the quantised weights"
        change = "download the model, or plan for the unquantised original"
        raise UnsupportedModelError(problem, change=change)
    return sizes


def _config_of(name: str, revision: str | None, offline: bool) -> dict[str, Any]:
    """Return a model's config; built in for a publisher's hub id that the hub cache lacks."""
    known = known_name(name)
    if known is None and "/" not in name and not Path(name).exists():
        places = "a config.json, its directory, a GGUF file, a hub id like org/name"
        close = ", ".join(get_close_matches(name.lower(), KNOWN))
        change = f"did you mean {close}?" if close else "`offload-rt plan --list` prints all"
        need = f"{places}, or a built-in shape"
        raise CheckpointError(f"no model called {name}", need=need, change=change)
    if known is None or revision is not None:
        return find_config(name, revision, offline)
    try:
        if name.lower() != known:
            return find_config(name, None, offline=True)
    except CheckpointError:
        pass
    return dict(KNOWN[known])


def _divided(sizes: Sizes, checkpoint: Checkpoint) -> Sizes | None:
    divided = checkpoint.by_expert()
    mixture = sizes.spec.mixture
    if divided is None or mixture is None:
        return None
    rest, experts = divided
    nbytes = max(expert.layout.nbytes for expert in experts)
    layers = tuple(layer.layout.nbytes for layer in rest.layers)
    return replace(sizes, layer_nbytes=layers, experts=ExpertSizes(mixture, nbytes))


def _mxfp4(sizes: Sizes) -> Sizes:
    """Return the sizes with MXFP4 experts, of three dimensions, as published for gpt-oss."""
    layers = [
        [tensor.shape for tensor in sizes.spec.layer_tensors(i) if len(tensor.shape) == 3]
        for i in range(sizes.spec.n_layers)
    ]
    layer_nbytes = tuple(
        nbytes - sum(map(math.prod, shapes)) * (32 * sizes.dtype.itemsize - 17) // 32
        for nbytes, shapes in zip(sizes.layer_nbytes, layers, strict=True)
    )
    # The architecture has inputs first.
    shapes = {(n_out, n_in) for _, n_in, n_out in chain(*layers)}
    experts = [mxfp4.matrix_of("expert", shape) for shape in sorted(shapes)]
    on_card, on_host = (
        max(expert.scratch_nbytes(sizes.dtype, has_card) for expert in experts)
        for has_card in (True, False)
    )
    return replace(
        sizes, layer_nbytes=layer_nbytes, view_nbytes=on_card, host_view_nbytes=on_host,
        matrix=max(experts, key=lambda expert: math.prod(expert.shape)),
    )  # fmt: skip


def find_checkpoint(name: str, revision: str | None) -> Checkpoint | None:
    """Return the local checkpoint; None without local weights."""
    try:
        path = locate(name, revision, offline=True)
    except CheckpointError:
        return None
    has_weights = path.suffix == gguf.SUFFIX or any(path.glob("*.safetensors"))
    return open_checkpoint(path) if has_weights else None


def is_plain(sizes: Sizes) -> bool:
    """Return whether layers are stored unquantised."""
    decoded = decoded_nbytes(sizes)
    # The tolerance covers vectors in other dtypes, and padding.
    return abs(sum(sizes.layer_nbytes) - decoded) <= 0.1 * decoded


def _check_plain(sizes: Sizes, flag: str) -> None:
    if not is_plain(sizes):
        raise SettingsError(flag, need="unquantised weights", change=f"omit {flag}")


def decoded_nbytes(sizes: Sizes, layers: Iterable[bool] = repeat(True)) -> int:
    """Return the bytes of the selected layers in the dtype of the computation."""
    chosen = compress(range(sizes.spec.n_layers), layers)
    return sum(layer_weights(sizes.spec, i) for i in chosen) * sizes.dtype.itemsize


def lossless(sizes: Sizes, on_card: bool) -> Sizes:
    """Return the sizes with losslessly encoded layers; raises SettingsError if quantised."""
    _check_plain(sizes, "--link-format=lossless")
    encoded = tuple(int(LOSSLESS_SHARE * n) for n in sizes.layer_nbytes)
    decoded = max(sizes.layer_nbytes)
    link = LinkSizes(encoded, max(encoded), decoded) if on_card else LinkSizes(encoded, decoded, 0)
    return replace(sizes, link=link)


def copies(sizes: Sizes) -> Sizes:
    """Return the sizes of a target's 4-bit layer copies; raises SettingsError if quantised."""
    _check_plain(sizes, "--drafter=self")
    spec = sizes.spec
    layers = {spec.layer_tensors(i) for i in range(spec.n_layers)}
    plain = ([(name, shape, sizes.dtype) for name, shape in layer] for layer in layers)
    return Sizes.of_copies(spec, plain)


def formats(sizes: Sizes, on_card: bool) -> dict[str, Sizes]:
    """Return the sizes of a 16-bit model in several formats, by name."""
    name = {DType.BFLOAT16: "bf16", DType.FLOAT16: "fp16"}[sizes.dtype]
    plain = replace(sizes, link=None)
    quantised = {"fp8, blocks 128x128": _FP8, "int4, groups of 128": _INT4}
    by_format = {name: plain, "lossless": lossless(plain, on_card)}
    for key, config in quantised.items():
        # Only layers are quantised. Embedding and head may be a rank's shard.
        layers = Sizes.of_spec(sizes.spec, sizes.dtype, format_of(config))
        by_format[key] = replace(layers, non_layer_nbytes=sizes.non_layer_nbytes)
    return by_format
