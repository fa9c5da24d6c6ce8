"""`offload-rt convert`: write encoded weights, or the shard of each rank, for later runs.

Each layer is a file, written atomically. After an interrupt the same command continues.
It also verifies existing files and rewrites damaged layers.
"""

import sys
from argparse import Namespace
from dataclasses import MISSING, dataclass
from pathlib import Path

from offload_rt.cli.flags import Parser, from_flags
from offload_rt.cli.process import exit_code
from offload_rt.config import setting
from offload_rt.errors import SettingsError


@dataclass(frozen=True)
class ConvertSettings:
    """Content and location of the sidecar."""

    model: str = setting(MISSING, "directory of a checkpoint, or a hub id")
    link_format: str = setting(
        "auto",
        "lossless: encoded bit for bit; raw: unchanged shards, with --ranks; auto: raw for"
        " quantised weights",
        choices=("auto", "lossless", "raw"),
    )
    sidecar: str | None = setting(None, "output directory; default: in the model's directory")
    ranks: int | None = setting(
        None, "write a shard per rank for torchrun runs of this size", parse=int
    )
    exact_parallel: bool = setting(False, "shards for runs with --exact-parallel")
    stripe: str | None = setting(
        None,
        "folders on further disks, separated by commas, for a part of each layer; the first becomes"
        " the checkpoint of later runs",
    )
    revision: str | None = setting(None, "branch, tag or commit on the hub")
    offline: bool = setting(False, "use only files in the hub cache")


def new_parser() -> Parser:
    """Return the parser of the command."""
    return Parser(
        "offload-rt convert",
        "Write losslessly encoded weights for later runs.",
        ConvertSettings,
        examples=(
            "offload-rt convert DIR",
            "offload-rt convert DIR --ranks 2",
            "offload-rt convert DIR --stripe /mnt/second/DIR",
        ),
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = new_parser()
    return exit_code(lambda: _convert(parser.parse_args(arguments)))


def _convert(flags: Namespace) -> None:
    settings = from_flags(ConvertSettings, flags)
    # Imported late: report wrong flags and paths before loading torch, which takes seconds.
    from offload_rt.weights.checkpoint import open_checkpoint
    from offload_rt.weights.locate import locate

    path = locate(settings.model, settings.revision, settings.offline)
    from rich.console import Console

    from offload_rt.cli.format import quiet_libraries
    from offload_rt.engine.link import sidecar_of
    from offload_rt.offload.sidecar import write_sidecar
    from offload_rt.parallel.sharded_weights import shard_checkpoint
    from offload_rt.system.progress import loading_bar

    quiet_libraries()
    if settings.stripe is not None:
        return _stripe(path, settings)
    checkpoint = open_checkpoint(path)
    n = settings.ranks
    name = checkpoint.format.name
    kind = settings.link_format
    if kind == "auto":
        kind = "lossless" if name == "dense" or n is None else "raw"
    if kind == "lossless" and name != "dense":
        raise SettingsError(
            "quantised weights do not shrink", have=name, change="skip this step, or use --ranks"
        )
    if n is None and (kind == "raw" or settings.exact_parallel):
        raise SettingsError(
            "--link-format raw and --exact-parallel apply to shards", change="add --ranks"
        )
    if n is not None and n < 2:
        raise SettingsError(f"--ranks {n}", need="at least 2", change="omit it for a single rank")
    for part in (
        [checkpoint]
        if n is None
        else (shard_checkpoint(checkpoint, i, n, settings.exact_parallel) for i in range(n))
    ):
        directory = sidecar_of(part, settings.sidecar, kind)
        verb = "encoded" if kind == "lossless" else "written"
        with loading_bar(Console(stderr=True), verb, next_phase=None) as bar:
            raw, encoded = write_sidecar(part, directory, bar, kind == "raw")
        print(
            f"{directory}: {encoded / 1e9:.2f} GB for {raw / 1e9:.2f} GB of layers,"
            f" {encoded / raw:.1%}"
        )


def _stripe(source: Path, settings: ConvertSettings) -> None:
    """Divide a checkpoint between its disk and those of further folders."""
    assert settings.stripe is not None
    if settings.ranks is not None or settings.sidecar or settings.link_format != "auto":
        raise SettingsError(
            "--stripe divides the files of the checkpoint", change="omit the other settings"
        )
    if source.is_file():
        raise SettingsError(
            "--stripe", need="safetensors files", have=source.name, change="use --mirror"
        )
    from rich.console import Console

    from offload_rt.system.disk_rate import measure_disk_gbps
    from offload_rt.system.progress import loading_bar
    from offload_rt.weights.stripe import stripe

    folders = [Path(name.strip()).expanduser() for name in settings.stripe.split(",")]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.stat().st_dev == source.stat().st_dev:
            print(f"{folder} is on the disk of {source}: nothing is faster", file=sys.stderr)
    rates = [measure_disk_gbps(folder) for folder in (source, *folders)]
    gbps = [rate or 1.0 for rate in rates] if all(rates) else [1.0] * len(rates)
    with loading_bar(Console(stderr=True), "copied", next_phase=None) as bar:
        sizes = stripe(source, folders, gbps, bar)
    for folder, nbytes, rate in zip((source, *folders), sizes, rates, strict=True):
        measured = "" if rate is None else f", read at {rate:.2f} GB/s"
        print(f"{folder}: {nbytes / 1e9:.2f} GB{measured}")
    print(f"run with {folders[0]}; keep {source}")
