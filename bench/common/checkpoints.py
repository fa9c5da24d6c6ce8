"""Demonstration models in any size and format, statistics of model pairs, resident layers."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from bench.common.measure import ROOT
from bench.common.processes import run_python

if TYPE_CHECKING:  # imports in seconds
    from offload_rt import LLM
    from offload_rt.offload.memory import MemoryTier

TARGET = str(ROOT / "models/demo-target")
DRAFT = str(ROOT / "models/demo-draft")
EAGLE3 = str(ROOT / "models/demo-eagle3")
BLOCK = str(ROOT / "models/demo-block")
# As the Makefile prepares it: the file, the same weights in bfloat16, and its draft head.
REAL_FILE = ROOT / "demo-cache/SmolLM2-135M-Instruct.Q4_1.gguf"
REAL = ROOT / "demo-cache/SmolLM2-135M-Instruct"
REAL_HEAD = ROOT / "models/smollm2-eagle3"


def expanded_model(
    size: str,
    source: Path = Path(TARGET),
    n_positions: int | None = None,
    keep_width: bool = False,
) -> Path:
    """Return the source model expanded to a size, written at first use.

    n_positions  longest context; default: of the source
    keep_width   widen the MLP only, so that draft heads of the source fit
    """
    name = f"{'expanded' if source == Path(TARGET) else source.name}-{size}"
    flags = ["--source", str(source), "--size", size]
    if n_positions is not None:
        name += f"-{n_positions}"
        flags += ["--max-position-embeddings", str(n_positions)]
    flags += ["--keep-width"] * keep_width
    out = ROOT / "demo-cache" / name
    run_python("scripts/expand.py", *flags, "--out", str(out))
    return out


def quantized_model(model: Path, format: str, folder: Path) -> tuple[Path, Path]:
    """Write a checkpoint in a format of `scripts/quantize.py`, and the same weights as floats."""
    out = folder / f"{model.name}-{format}"
    plain = folder / f"{model.name}-plain"
    flags = ("--exact", str(plain), "--format", format, "--group-size", "128")
    run_python("scripts/quantize.py", str(model), str(out), *flags)
    return out, plain


def gguf_model(model: Path, type: str, folder: Path) -> Path:
    """Write a checkpoint as a GGUF file with matrices of this type, unless up to date."""
    out = folder / f"{model.name}-{type}.gguf"
    if not out.exists() or out.stat().st_mtime < (model / "config.json").stat().st_mtime:
        partial = out.with_suffix(f".{os.getpid()}.partial")
        flags = ("--format", "gguf", "--type", type)
        run_python("scripts/quantize.py", str(model), str(partial), *flags)
        partial.rename(out)
    return out


def mixture_file(kind: str, type: str) -> Path:
    """Return a GGUF file of scripts/write_mixture.py, written at first use."""
    out = ROOT / "demo-cache" / f"{kind}-{type}.gguf"
    if not out.exists():
        out.parent.mkdir(exist_ok=True)
        partial = out.with_suffix(f".{os.getpid()}.partial")
        run_python("scripts/write_mixture.py", str(partial), "--kind", kind, "--type", type)
        partial.rename(out)
    return out


def resident_layers(llm: "LLM") -> "MemoryTier":
    """Return the layers of a resident model as a tier."""
    from offload_rt.offload.memory import MemoryTier
    from offload_rt.weights.layout import PackedLayer

    tier = MemoryTier()
    for view in llm.engine.runner.streamer.sweep():
        tier.put(view.i, PackedLayer(view.data, view.layout))
    return tier


def drop_from_page_cache(checkpoint: Path) -> None:
    """Evict the weights of a directory or a GGUF file from the page cache."""
    for path in [checkpoint] if checkpoint.is_file() else checkpoint.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


@contextmanager
def no_pair_stats() -> Iterator[None]:
    """Use an empty cache folder, without statistics of earlier runs."""
    with tempfile.TemporaryDirectory() as empty, mock.patch.dict(os.environ, XDG_CACHE_HOME=empty):
        yield
