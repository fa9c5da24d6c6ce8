"""How streamed layers cross the link: as they are, or encoded without loss."""

from dataclasses import dataclass
from pathlib import Path

import torch

from offload_rt.config import EngineConfig
from offload_rt.errors import CheckpointError, DeviceError, SettingsError
from offload_rt.models.tensor_parallel import TensorParallelModel
from offload_rt.offload.placement import LinkSizes
from offload_rt.offload.sidecar import open_sidecar
from offload_rt.ops import extension
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.layout import PAGE, align_up
from offload_rt.weights.lossless import SidecarLayer, decoded_layout, estimate

# Threads that read encoded layers have so many bytes of buffers at most, and there are so many of them.
_BUFFERS, _N_THREADS = 9 << 20, 8


@dataclass(frozen=True)
class Link:
    """The way of the streamed layers.

    sidecar  the encoded layers; None: there are none
    encodes  layers are encoded while they are loaded into memory of the host
    sizes    None: those of the layers as they are
    notice   what the user should know; empty if nothing
    """

    sidecar: tuple[SidecarLayer, ...] | None = None
    encodes: bool = False
    sizes: LinkSizes | None = None
    notice: str = ""


def sidecar_of(checkpoint: Checkpoint, directory: str | None) -> Path:
    """The directory of the sidecar of a checkpoint; None: beside it."""
    return checkpoint.path / "lossless" if directory is None else Path(directory).expanduser()


def choose_link(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> Link:
    """By the setting and by what there is.

    `auto` uses a sidecar and nothing else: with one, loading reads fewer bytes too. Encoding at load takes about a second
    of all cores for every 4 GB, in each run, and the plan then rests on a sample of the weights; so it is done where it is
    asked for. Quantised weights cross the link as they are. Weights divided among ranks have no sidecar: they are encoded at
    load.
    Raises an OffloadError where what was asked for cannot be had.
    """
    is_asked = config.link_format == "lossless"
    directory, on_card = sidecar_of(checkpoint, config.sidecar), device.type == "cuda"
    if is_asked and config.pipeline > 1:
        raise SettingsError("--link-format lossless with --pipeline", change="leave one of them out")
    if config.pipeline > 1 or config.link_format == "raw" or not (is_asked or config.sidecar or directory.is_dir()):
        return Link()
    is_divided = isinstance(checkpoint.spec, TensorParallelModel)
    if checkpoint.format.name != "dense" or (is_divided and not (is_asked and on_card)):
        problem = "--link-format lossless is for weights that are not quantised, with several ranks on cards where it is given"
        have = "several ranks" if is_divided else checkpoint.format.name
        return _without(is_asked, SettingsError(problem, have=have, change="leave it out"))
    if on_card and not extension.serves(torch.empty(0, device=device)):
        problem = f"no kernel decodes lossless weights: {extension.missing()}"
        return _without(is_asked, DeviceError(problem, change="use --link-format raw"))
    if is_asked and on_card and (is_divided or not (config.sidecar or directory.is_dir())):
        encoded = tuple(estimate(layer) for layer in checkpoint.layers)
        return Link(encodes=True, sizes=_sizes(checkpoint, encoded, on_card))
    if not directory.is_dir():
        raise CheckpointError(
            f"no lossless sidecar in {directory}", change="run offload-rt convert first, or use --link-format raw"
        )
    try:
        sidecar = open_sidecar(checkpoint, directory)
    except CheckpointError as error:
        return _without(is_asked, error)
    nbytes = (one.encoded.nbytes if on_card else one.encoded.payload_nbytes for one in sidecar)
    return Link(sidecar, sizes=_sizes(checkpoint, tuple(nbytes), on_card))


def _without(is_asked: bool, problem: CheckpointError | DeviceError | SettingsError) -> Link:
    """The link without encoding, and why. Raises the problem where encoding was asked for."""
    if is_asked:
        raise problem
    return Link(notice=f"weights cross the link as they are: {problem}")


def _sizes(checkpoint: Checkpoint, encoded: tuple[int, ...], on_card: bool) -> LinkSizes:
    """A card's slots hold encoded layers, and a buffer the decoded one; slots of a CPU hold layers that were decoded."""
    decoded = max(align_up(decoded_layout(layer).nbytes, PAGE) for layer in checkpoint.layers)
    if on_card:
        return LinkSizes(encoded, max(encoded), decoded)
    buffers = min(_BUFFERS, _N_THREADS * align_up(max(encoded) + PAGE, PAGE))
    return LinkSizes(encoded, decoded, buffers)
