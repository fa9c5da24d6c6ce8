"""`offload-rt convert`: write encoded weights, shards of ranks, or an unquantised checkpoint.

Of encoded weights and shards, each layer is a file, written atomically. After an interrupt the same
command continues. It also verifies existing files and rewrites damaged layers.
"""

import sys
from argparse import Namespace
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path

from rich.console import Console

from offload_rt.cli.flags import Parser, from_flags
from offload_rt.cli.process import command
from offload_rt.config import flag_of, setting
from offload_rt.errors import SettingsError
from offload_rt.system.progress import loading_bar


@dataclass(frozen=True)
class ConvertSettings:
    """Content and location of the written files."""

    model: str = setting(MISSING, "directory of a checkpoint, GGUF file, or hub id")
    dequantize: str | None = setting(
        None,
        "new directory for an unquantised safetensors checkpoint of a GGUF file or of quantised"
        " weights, with config, tokenizer and chat template",
    )
    dtype: str = setting(
        "auto",
        "dtype of the weights of --dequantize; auto: the dtype of a run",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    link_format: str = setting(
        "auto",
        "lossless: encoded bit for bit; raw: unchanged shards, with --ranks; auto: raw for"
        " quantised weights",
        choices=("auto", "lossless", "raw"),
    )
    sidecar: str | None = setting(None, "output directory; default: in the model's directory")
    ranks: int | None = setting(None, "write a shard per rank for torchrun runs of this size")
    exact_parallel: bool = setting(False, "shards for runs with --exact-parallel")
    stripe: str | None = setting(
        None,
        "folders on further disks, separated by commas, for a part of each layer; the first becomes"
        " the checkpoint of later runs",
    )
    revision: str | None = setting(None, "branch, tag or commit on the hub")
    offline: bool = setting(False, "use only files in the hub cache")


new_parser = partial(
    Parser,
    "offload-rt convert",
    "Write losslessly encoded weights for later runs, or dequantise a checkpoint.",
    ConvertSettings,
    examples=(
        "offload-rt convert DIR",
        "offload-rt convert model-Q4_K_M.gguf --dequantize DIR",
        "offload-rt convert DIR --ranks 2",
        "offload-rt convert DIR --stripe /mnt/second/DIR",
    ),
)


@command(new_parser)
def main(flags: Namespace) -> None:
    """Run the command."""
    settings = from_flags(ConvertSettings, flags)
    given = {
        item.name for item in fields(settings) if getattr(settings, item.name) != item.default
    } - {"model", "revision", "offline"}
    if "dtype" in given and "dequantize" not in given:
        raise SettingsError("--dtype is a setting of --dequantize", change="omit it")
    for mode, allowed in (("dequantize", {"dtype"}), ("stripe", set[str]())):
        if mode in given and (others := given - allowed - {mode}):
            problem = f"--{mode} excludes {', '.join(sorted(map(flag_of, others)))}"
            raise SettingsError(problem, change="omit either")
    # Imported late: report wrong flags and paths before loading torch, which takes seconds.
    from offload_rt.weights.checkpoint import open_checkpoint
    from offload_rt.weights.locate import locate

    path = locate(settings.model, settings.revision, settings.offline)
    from offload_rt.engine.link import sidecar_of
    from offload_rt.offload.sidecar import write_sidecar
    from offload_rt.parallel.sharded_weights import shard_checkpoint

    if settings.dequantize is not None:
        return _dequantize(path, settings.dequantize, settings.dtype)
    if settings.stripe is not None:
        return _stripe(path, settings.stripe)
    checkpoint = open_checkpoint(path)
    n = settings.ranks
    name = checkpoint.format.name
    kind = settings.link_format
    if kind == "auto":
        kind = "lossless" if name == "dense" or n is None else "raw"
    if kind == "lossless" and name != "dense":
        change = "skip this step, or use --ranks"
        raise SettingsError("quantised weights do not shrink", have=name, change=change)
    if n is None and (kind == "raw" or settings.exact_parallel):
        problem = "--link-format raw and --exact-parallel apply to shards"
        raise SettingsError(problem, change="add --ranks")
    if n is not None and n < 2:
        raise SettingsError(f"--ranks {n}", need="at least 2", change="omit it for a single rank")
    exact = settings.exact_parallel
    parts = [shard_checkpoint(checkpoint, i, n, exact) for i in range(n)] if n else [checkpoint]
    verb = "encoded" if kind == "lossless" else "written"
    for part in parts:
        directory = sidecar_of(part, settings.sidecar, kind)
        with loading_bar(Console(stderr=True), verb, next_phase=None) as bar:
            raw, encoded = write_sidecar(part, directory, bar, kind == "raw")
        sizes = f"{encoded / 1e9:.2f} GB for {raw / 1e9:.2f} GB of layers"
        print(f"{directory}: {sizes}, {encoded / raw:.1%}")


def _dequantize(source: Path, folder: str, dtype_name: str) -> None:
    from offload_rt.dtypes import DTYPES
    from offload_rt.offload.dense_checkpoint import write_dense
    from offload_rt.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(source)
    dtype = checkpoint.dtype if dtype_name == "auto" else DTYPES[dtype_name]
    directory = Path(folder).expanduser().resolve()
    with loading_bar(Console(stderr=True), "written", next_phase=None) as bar:
        nbytes = write_dense(checkpoint, directory, dtype, bar)
    print(f"{directory}: {nbytes / 1e9:.2f} GB in {dtype.value}")


def _stripe(source: Path, names: str) -> None:
    if source.is_file():
        need = "safetensors files"
        raise SettingsError("--stripe", need=need, have=source.name, change="use --mirror")
    from offload_rt.system.disk_rate import measure_disk_gbps
    from offload_rt.weights.stripe import stripe

    folders = [Path(name.strip()).expanduser() for name in names.split(",")]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.stat().st_dev == source.stat().st_dev:
            print(f"{folder} is on the disk of {source}: nothing is faster", file=sys.stderr)
    rates = [measure_disk_gbps(folder) for folder in (source, *folders)]
    gbps = [rate if rate and all(rates) else 1.0 for rate in rates]
    with loading_bar(Console(stderr=True), "copied", next_phase=None) as bar:
        sizes = stripe(source, folders, gbps, bar)
    for folder, nbytes, rate in zip((source, *folders), sizes, rates, strict=True):
        measured = "" if rate is None else f", read at {rate:.2f} GB/s"
        print(f"{folder}: {nbytes / 1e9:.2f} GB{measured}")
    print(f"run with {folders[0]}; keep {source}")
