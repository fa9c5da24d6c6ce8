"""`offload-rt convert`: write a checkpoint's weights, or the part of each rank, as they cross the
link, once, for later runs.

Each layer is a file of its own, written whole or not at all: after an interrupt the same command
goes on where it was. It also reads what is there, and writes a damaged layer anew.
"""

from argparse import Namespace
from dataclasses import MISSING, dataclass

from offload_rt.cli.flags import Parser, from_flags
from offload_rt.cli.process import exit_code
from offload_rt.config import setting
from offload_rt.errors import SettingsError


@dataclass(frozen=True)
class ConvertSettings:
    """What to write, and where."""

    model: str = setting(MISSING, "directory of a checkpoint, or a hub id")
    link_format: str = setting(
        "auto", "encoded, bit for bit, or for ranks also raw, as they are; auto: raw where they "
                "are quantised",
        choices=("auto", "lossless", "raw"),
    )  # fmt: skip
    sidecar: str | None = setting(None, "directory to write to; default: in that of the model")
    ranks: int | None = setting(
        None, "write the part of each rank for runs of so many by torchrun", parse=int
    )
    exact_parallel: bool = setting(False, "parts for runs with --exact-parallel")
    revision: str | None = setting(None, "branch, tag or commit on the hub")
    offline: bool = setting(False, "use only what the hub cache already holds")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    parser = Parser(
        "offload-rt convert",
        "Write the weights of a model without loss, for later runs.",
        ConvertSettings,
    )
    return exit_code(lambda: _convert(parser.parse_args(arguments)))


def _convert(flags: Namespace) -> None:
    settings = from_flags(ConvertSettings, flags)
    # Not at the top: a wrong flag or path is told before the seconds that torch takes to load.
    from offload_rt.weights.checkpoint import locate, open_checkpoint

    path = locate(settings.model, settings.revision, settings.offline)
    from rich.console import Console

    from offload_rt.cli.format import quiet_libraries
    from offload_rt.engine.link import sidecar_of
    from offload_rt.offload.sidecar import write_sidecar
    from offload_rt.parallel.sharded_weights import part_of
    from offload_rt.system.progress import loading_bar

    quiet_libraries()
    checkpoint = open_checkpoint(path)
    n = settings.ranks
    name = checkpoint.format.name
    kind = settings.link_format
    if kind == "auto":
        kind = "lossless" if name == "dense" or n is None else "raw"
    if kind == "lossless" and name != "dense":
        raise SettingsError(
            "quantised weights do not shrink", have=name, change="run it as it is, or with --ranks"
        )
    if n is None and (kind == "raw" or settings.exact_parallel):
        raise SettingsError(
            "--link-format raw and --exact-parallel are for parts of ranks", change="give --ranks"
        )
    if n is not None and n < 2:
        raise SettingsError(f"--ranks {n}", need="two ranks or more", change="leave it out for one")
    for part in (
        [checkpoint]
        if n is None
        else (part_of(checkpoint, i, n, settings.exact_parallel) for i in range(n))
    ):
        directory = sidecar_of(part, settings.sidecar, kind)
        with loading_bar(
            Console(stderr=True), "encoded" if kind == "lossless" else "written"
        ) as bar:
            raw, encoded = write_sidecar(part, directory, bar, kind == "raw")
        print(
            f"{directory}: {encoded / 1e9:.2f} GB for {raw / 1e9:.2f} GB of layers,"
            f" {encoded / raw:.1%}"
        )
