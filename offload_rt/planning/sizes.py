"""Sizes of models from local files or configs, and in other weight formats."""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path

from offload_rt.config import EngineConfig
from offload_rt.cost.roofline import layer_weights
from offload_rt.dtypes import DTYPES, DType
from offload_rt.engine.memory_plan import Sizes
from offload_rt.errors import CheckpointError, SettingsError, UnsupportedModelError
from offload_rt.models.families import spec_of
from offload_rt.models.heads import head_of
from offload_rt.offload.placement import ExpertSizes, LinkSizes
from offload_rt.packing import REFERENCE_NBYTES
from offload_rt.planning.known_models import KNOWN
from offload_rt.speculate.select import check_pair
from offload_rt.weights import gguf, int4
from offload_rt.weights.checkpoint import Checkpoint, open_checkpoint, open_headers
from offload_rt.weights.formats import format_of
from offload_rt.weights.layout import packed_layout
from offload_rt.weights.locate import find_config, locate

# Part of their bytes that layers of 16-bit weights take encoded without loss (docs/formats.md: 0.70
# of two models).
LOSSLESS_SHARE = 0.70
# As DeepSeek and Qwen publish float8, and llm-compressor makes W4A16.
_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
_INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
}  # fmt: skip


def find_models(config: EngineConfig) -> tuple[Sizes, Sizes | None]:
    """The target and what computes drafts for it, a model or heads; None where nothing does.

    Raises as reading configs and headers does, and where the two do not belong together.
    """
    target = _sizes_of(config.model, config.revision, config)
    if config.draft_model is None:
        head = (
            head_of(None, target.spec)
            if target.spec.supports_mtp and config.drafter == "auto"
            else None
        )
        return target, None if head is None else Sizes.of_spec(head, target.dtype)
    raw = KNOWN.get(config.draft_model.lower()) or find_config(
        config.draft_model, None, config.offline
    )
    head = head_of(raw, target.spec) if target.spec.supports_heads else None
    if head is not None:
        return target, Sizes.of_spec(head, target.dtype)
    draft = _sizes_of(config.draft_model, None, replace(config, dtype="auto"))
    check_pair(target.spec, draft.spec, (None, None))
    return target, draft


def _sizes_of(name: str, revision: str | None, config: EngineConfig) -> Sizes:
    """Of the headers of its files where they lie here, else of its config."""
    raw = dict(KNOWN.get(name.lower(), {}))
    checkpoint = None if raw else find_checkpoint(name, revision)
    if checkpoint is None and not raw:
        if "/" not in name and not Path(name).exists():
            need = (
                "a config.json, its directory, a GGUF file, a hub id like org/name, or a shape that"
                " is built in"
            )
            raise CheckpointError(
                f"no model called {name}",
                need=need,
                have=", ".join(KNOWN),
                change="give one of these",
            )
        raw = find_config(name, revision, config.offline)
        if "quantization_config" in raw and not Path(name).exists():
            checkpoint = open_headers(name, revision, config.offline)
    if checkpoint is not None:
        named = checkpoint.spec.dtype_name or checkpoint.dtype
        dtype = DTYPES[named if config.dtype == "auto" else config.dtype]
        layers = tuple(layer.layout.nbytes for layer in checkpoint.layers)
        sizes = replace(Sizes.of_checkpoint(checkpoint, dtype), layer_nbytes=layers, dtype=dtype)
        return replace(sizes, divided=partial(_divided, sizes, checkpoint))
    stored = raw.pop("quantization_config", None)
    spec = spec_of(raw)
    dtype = DTYPES[spec.dtype_name or "float16" if config.dtype == "auto" else config.dtype]
    sizes = Sizes.of_spec(spec, dtype, format_of(stored))
    if stored is not None and stored.get("quant_method") == "mxfp4":
        return _mxfp4(sizes)
    if stored is not None and is_plain(sizes):
        problem = f"{name}: which of its weights are quantised is said by their headers"
        raise UnsupportedModelError(
            problem, change="download it, or plan for its unquantised original"
        )
    return sizes


def _divided(sizes: Sizes, checkpoint: Checkpoint) -> Sizes | None:
    """Return the sizes with experts as separate blocks; None for indivisible files."""
    divided = checkpoint.by_expert()
    mixture = sizes.spec.mixture
    if divided is None or mixture is None:
        return None
    rest, experts = divided
    nbytes = max(expert.layout.nbytes for expert in experts)
    layers = tuple(layer.layout.nbytes for layer in rest.layers)
    return replace(sizes, layer_nbytes=layers, experts=ExpertSizes(mixture, nbytes))


def _mxfp4(sizes: Sizes) -> Sizes:
    """The same as gpt-oss is published: of its experts 32 numbers are 16 bytes and a scale. Only
    headers have their names.
    """
    layers = [
        [one.shape for one in sizes.spec.layer_tensors(i) if len(one.shape) == 3]
        for i in range(sizes.spec.n_layers)
    ]
    saved = [
        sum(map(math.prod, shapes)) * (32 * sizes.dtype.itemsize - 17) // 32 for shapes in layers
    ]
    largest = (
        max((math.prod(shape[1:]) for shapes in layers for shape in shapes), default=0)
        * sizes.dtype.itemsize
    )
    layer_nbytes = tuple(n - less for n, less in zip(sizes.layer_nbytes, saved, strict=True))
    return replace(sizes, layer_nbytes=layer_nbytes, view_nbytes=largest + REFERENCE_NBYTES)


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
    # vectors in other dtypes, and padding
    return abs(sum(sizes.layer_nbytes) - decoded) <= 0.1 * decoded


def _check_plain(sizes: Sizes, flag: str) -> None:
    if not is_plain(sizes):
        raise SettingsError(flag, need="unquantised weights", change="leave it out")


def decoded_nbytes(sizes: Sizes, layers: Iterable[bool] = repeat(True)) -> int:
    """Bytes of the numbers in layers, in those of which it is true, in the dtype of the
    computation.
    """
    chosen = zip(range(sizes.spec.n_layers), layers, strict=False)
    return (
        sum(layer_weights(sizes.spec, i) for i, is_chosen in chosen if is_chosen)
        * sizes.dtype.itemsize
    )


def lossless(sizes: Sizes, on_card: bool) -> Sizes:
    """The same whose streamed layers are encoded on their way. Raises SettingsError for weights
    that are quantised.
    """
    _check_plain(sizes, "--link-format lossless")
    encoded = tuple(int(LOSSLESS_SHARE * n) for n in sizes.layer_nbytes)
    decoded = max(sizes.layer_nbytes)
    link = LinkSizes(encoded, max(encoded), decoded) if on_card else LinkSizes(encoded, decoded, 0)
    return replace(sizes, link=link)


def copies(sizes: Sizes, on_card: bool) -> Sizes:
    """The copies of layers by which a target drafts itself. Raises SettingsError for weights that
    are quantised.
    """
    _check_plain(sizes, "--drafter self")
    spec = sizes.spec
    layers = {spec.layer_tensors(i) for i in range(spec.n_layers)}
    layouts = [
        packed_layout((name, shape, sizes.dtype) for name, shape in layer) for layer in layers
    ]
    stand_in = max(int4.copy_layout(layout, on_card).nbytes for layout in layouts)
    return Sizes(spec, (0,) * spec.n_layers, 0, int4.DTYPE, stand_in=stand_in)


def formats(sizes: Sizes, on_card: bool) -> dict[str, Sizes]:
    """Return the sizes of a 16-bit model in several formats, by name."""
    name = {DType.BFLOAT16: "bf16", DType.FLOAT16: "fp16"}[sizes.dtype]
    plain = replace(sizes, link=None)
    quantised = {"fp8, blocks 128x128": _FP8, "int4, groups of 128": _INT4}
    others = {
        one: Sizes.of_spec(sizes.spec, sizes.dtype, format_of(config))
        for one, config in quantised.items()
    }
    # Quantised are layers alone, and of embedding and head a rank may have a part.
    others = {
        key: replace(one, non_layer_nbytes=sizes.non_layer_nbytes) for key, one in others.items()
    }
    return {name: plain, "lossless": lossless(plain, on_card), **others}
