"""`offload-rt convert`: write a checkpoint's weights as they cross the link, once, for later runs.

Each layer is a file of its own, written whole or not at all: after an interrupt the same command goes on where it was. It
also reads what is there, and writes a damaged layer anew.
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
    link_format: str = setting("lossless", "how the weights are encoded: bit for bit", choices=("lossless",))
    sidecar: str | None = setting(None, "directory to write to; default: lossless, in that of the model")
    revision: str | None = setting(None, "branch, tag or commit on the hub")
    offline: bool = setting(False, "use only what the hub cache already holds")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    text = "Encode the weights of a model without loss, for later runs."
    parser = Parser("offload-rt convert", text, ConvertSettings)
    return exit_code(lambda: _convert(parser.parse_args(arguments)))


def _convert(flags: Namespace) -> None:
    settings = from_flags(ConvertSettings, flags)
    # Not at the top: a wrong flag is told before the seconds that torch takes to load.
    from rich.console import Console

    from offload_rt.cli.format import quiet_libraries
    from offload_rt.engine.link import sidecar_of
    from offload_rt.offload.sidecar import write_sidecar
    from offload_rt.system.progress import loading_bar
    from offload_rt.weights.checkpoint import locate, open_checkpoint

    quiet_libraries()
    checkpoint = open_checkpoint(locate(settings.model, settings.revision, settings.offline))
    if checkpoint.format.name != "dense":
        have, change = checkpoint.format.name, "run it as it is"
        raise SettingsError("quantised weights do not shrink", have=have, change=change)
    directory = sidecar_of(checkpoint, settings.sidecar)
    with loading_bar(Console(stderr=True), "encoded") as bar:
        raw, encoded = write_sidecar(checkpoint, directory, bar)
    print(f"{directory}: {encoded / 1e9:.2f} GB for {raw / 1e9:.2f} GB of layers, {encoded / raw:.1%}")
