"""Layers of random bytes, in memory and in files."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from offload_rt.weights.header import TensorRecord, read_header
from offload_rt.weights.layout import BlockRecord
from support.checkpoints import write_file

Layers = list[dict[str, Tensor]]
NAMES = ("norm", "wide", "bias", "deep")
SHAPES = ((48,), (96, 48), (3,), (48, 96))


def some_layers(n: int = 4, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Layers:
    """Layers of random bytes, so that all pages differ."""
    draw = partial(torch.randint, 256, generator=torch.Generator().manual_seed(seed))
    return [
        {
            name: draw((*shape[:-1], shape[-1] * dtype.itemsize)).byte().view(dtype)
            for name, shape in zip(NAMES, SHAPES, strict=True)
        }
        for _ in range(n)
    ]


def on_disk(
    directory: Path, layers: Layers, n_files: int = 1, shuffle: int = 0, odd: int = 0
) -> list[BlockRecord]:
    """Write layers to files with shuffled tensors and return the block records.

    odd  the data of a file starts at an offset of so much modulo 8
    """
    where = [(i, name) for i, layer in enumerate(layers) for name in layer]
    random.Random(shuffle).shuffle(where)
    records: dict[str, TensorRecord] = {}
    for n in range(n_files):
        path = directory / f"part-{n}.safetensors"
        write_file(path, {f"{i}.{name}": layers[i][name] for i, name in where[n::n_files]}, odd)
        records |= read_header(path)
    return [
        BlockRecord(tuple(replace(records[f"{i}.{name}"], key=name) for name in NAMES))
        for i in range(len(layers))
    ]
