"""Unquantised safetensors copies of quantised checkpoints and GGUF files."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload_rt.dtypes import DType
from offload_rt.errors import SettingsError, UnsupportedModelError
from offload_rt.models.layers import TensorShape
from offload_rt.offload.disk import DiskTier
from offload_rt.offload.tier import read_parallel
from offload_rt.text.detokenize import load_tokenizer
from offload_rt.weights.checkpoint import Checkpoint, open_checkpoint, without_quantization
from offload_rt.weights.files import SINGLE, check_room, companions
from offload_rt.weights.header import FLOATS, TensorRecord, header_of
from offload_rt.weights.layout import BlockRecord, host_block

_NAMES = {dtype: name for name, dtype in FLOATS.items()}
# Rows of a matrix that are dequantised at a time.
_N_ROWS = 4096


# Stored block, prefix of its tensors' names, and the tensors that the model reads from it.
_Block = tuple[BlockRecord, str, Sequence[TensorShape]]


def write_dense(
    checkpoint: Checkpoint, directory: Path, dtype: DType, progress: Callable[[int, int], None]
) -> int:
    """Dequantise all blocks, one at a time, into a new directory; return the bytes of the weights.

    The directory is complete or absent. Tensors without use in a pass are left out.
    progress  receives (written bytes, bytes to write)
    Raises SettingsError if the directory has contents, UnsupportedModelError for gpt-oss in MXFP4,
    CapacityError if the disk is too full, LinkError if reading fails, OSError if writing fails.
    """
    if checkpoint.format.name == "mxfp4":
        problem = "--dequantize writes no model with all experts in one tensor"
        change = "use Mxfp4Config(dequantize=True) of transformers"
        raise UnsupportedModelError(problem, change=change)
    if directory.exists() and any(directory.iterdir()):
        raise SettingsError(f"{directory} has contents", change="name a new directory")
    partial = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        nbytes = _write_weights(checkpoint, partial / SINGLE, dtype, progress)
        _write_companions(checkpoint, partial, dtype)
        open_checkpoint(partial)
        partial.replace(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return nbytes


def _write_weights(
    checkpoint: Checkpoint, path: Path, dtype: DType, progress: Callable[[int, int], None]
) -> int:
    blocks = _blocks(checkpoint)
    records = [
        TensorRecord(name, _NAMES[dtype], shape, path, 0, math.prod(shape) * dtype.itemsize, name)
        for _, prefix, tensors in blocks
        for name, shape in ((prefix + name, shape) for name, shape in tensors)
    ]
    total = sum(record.nbytes for record in records)
    check_room(path.parent, total)
    done = 0
    with path.open("wb") as file:
        file.write(header_of(records))
        for values in _values(checkpoint, blocks, dtype):
            done += file.write(values.contiguous().view(torch.uint8).numpy().data)
            progress(done, total)
        os.fsync(file.fileno())
    return total


def _blocks(checkpoint: Checkpoint) -> list[_Block]:
    spec = checkpoint.spec
    layers = [
        (layer, spec.layer_prefix(i), spec.layer_tensors(i))
        for i, layer in enumerate(checkpoint.layers)
    ]
    images = checkpoint.image_blocks()
    parts = spec.images.parts if images and spec.images is not None else []
    tower = [(block, "", part) for block, part in zip(images, parts, strict=True)]
    return [*layers, (checkpoint.non_layer, "", spec.non_layer_tensors()), *tower]


def _values(checkpoint: Checkpoint, blocks: Sequence[_Block], dtype: DType) -> Iterator[Tensor]:
    """Yield the values of all tensors in `dtype`, in order; of large matrices some rows each."""
    with closing(DiskTier([stored for stored, _, _ in blocks], packed=True)) as files:
        for i, (_, _, tensors) in enumerate(blocks):
            layout = files.layout(i)
            content = host_block(layout.nbytes)
            read_parallel(files.reads(i, content), files.n_parallel)
            view = checkpoint.format.view(layout, content, dtype.torch)
            for name, shape in tensors:
                module = name.removesuffix(".weight")
                if module == name or len(shape) != 2:
                    yield view.tensor(name)
                    continue
                for first in range(0, shape[0], _N_ROWS):
                    yield view.rows(torch.arange(first, min(first + _N_ROWS, shape[0])), module)


def _write_companions(checkpoint: Checkpoint, directory: Path, dtype: DType) -> None:
    config = without_quantization(checkpoint.config) | {"dtype": dtype.value}
    config.pop("torch_dtype", None)
    if checkpoint.path.is_dir():
        for path in companions(checkpoint.path):
            if not path.match("quant*_config.json"):
                shutil.copyfile(path, directory / path.name)
    else:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        special = {"eos_token_id": config["eos_token_id"] or None}
        tokenizer = load_tokenizer(checkpoint.path)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
            special |= {key: getattr(tokenizer, key) for key in ("bos_token_id", "pad_token_id")}
        _write_json(directory / "generation_config.json", special)
        config |= special
        config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
    _write_json(directory / "config.json", config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
