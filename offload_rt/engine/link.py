"""How streamed layers cross the link: as they are, or encoded without loss."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from offload_rt.config import EngineConfig
from offload_rt.cost.pass_times import transfer_s
from offload_rt.engine.link_rates import measured_rates
from offload_rt.errors import CheckpointError, DeviceError, SettingsError
from offload_rt.offload.placement import LinkSizes
from offload_rt.offload.sidecar import open_sidecar
from offload_rt.ops import extension
from offload_rt.parallel.tensor_parallel import TensorParallelModel
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.layout import PAGE, BlockRecord, align_up
from offload_rt.weights.lossless import SidecarLayer, estimate

# Threads that read encoded layers have so many bytes of buffers at most, and there are so many of
# them.
_BUFFERS = 9 << 20
_N_THREADS = 8


@dataclass(frozen=True)
class LinkFormat:
    """The way of the streamed layers.

    sidecar  the encoded layers; None: there are none
    layers   where a rank's parts lie one behind the other as they are; None: there are no such
             files
    encodes  layers are encoded while they are loaded into memory of the host
    sizes    None: those of the layers as they are
    notice   what the user should know; empty if nothing
    """

    sidecar: tuple[SidecarLayer, ...] | None = None
    layers: tuple[BlockRecord, ...] | None = None
    encodes: bool = False
    sizes: LinkSizes | None = None
    notice: str = ""


def sidecar_of(checkpoint: Checkpoint, directory: str | None, kind: str = "lossless") -> Path:
    """The directory of the sidecar of a checkpoint or of a rank's part; None: beside it."""
    beside = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.with_suffix("")
    base = beside if directory is None else Path(directory).expanduser()
    spec = checkpoint.spec
    if isinstance(spec, TensorParallelModel):
        return base / f"{kind}-{spec.size}{'-exact' if spec.is_exact else ''}" / f"rank-{spec.rank}"
    return base / kind if directory is None else base


def choose_link(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> LinkFormat:
    """By the setting and by what there is.

    `auto` uses a sidecar where that is faster by measured rates. Encoding at load takes about a
    second of all cores for every 4 GB, in each run, and the plan then rests on a sample of the
    weights; so it is done where it is asked for. Quantised weights cross the link as they are. Of
    weights divided among ranks each part has a sidecar of its own, encoded or as it is.
    Raises an OffloadError where what was asked for cannot be had.
    """
    is_asked = config.link_format == "lossless"
    is_auto = config.link_format == "auto"
    if config.pipeline > 1 and is_asked:
        raise SettingsError(
            "--link-format lossless with --pipeline", change="leave one of them out"
        )
    is_divided = isinstance(checkpoint.spec, TensorParallelModel)
    directory = sidecar_of(checkpoint, config.sidecar)
    is_raw = is_divided and not is_asked and not (is_auto and directory.is_dir())
    if config.pipeline > 1 or (config.link_format == "raw" and not is_raw):
        return LinkFormat()
    if is_raw:
        directory = sidecar_of(checkpoint, config.sidecar, "raw")
    others = _others(directory) if is_divided and not directory.is_dir() else ""
    if not (is_asked or directory.is_dir() or (is_auto and (config.sidecar or others))):
        return LinkFormat()
    try:
        if is_raw:
            layers = zip(_opened(checkpoint, directory, others), checkpoint.layers, strict=True)
            return LinkFormat(layers=tuple(sidecar.raw_block(layer) for sidecar, layer in layers))
        found = _encoded(config, checkpoint, directory, device, others)
        return _faster(found, config, checkpoint, device) if is_auto and found.sidecar else found
    except (CheckpointError, DeviceError, SettingsError) as problem:
        if is_asked or not (directory.is_dir() or others):
            raise
        return LinkFormat(notice=f"weights cross the link as they are: {problem}")


def _faster(
    found: LinkFormat, config: EngineConfig, checkpoint: Checkpoint, device: torch.device
) -> LinkFormat:
    """Choose between the sidecar and the raw weights by measured rates, and give the reason in the
    notice.

    Decoding counts in full: the same processor or card computes the passes.
    """
    assert found.sidecar is not None and found.sizes is not None, "the link reads a sidecar"
    rates = measured_rates(checkpoint, found.sidecar, device)
    nbytes = sum(one.encoded.layout.nbytes for one in found.sidecar)
    raw_s = transfer_s(10**9, rates.link_gbps)
    share = sum(found.sizes.layer_nbytes) / nbytes
    link_s = share * raw_s
    decode_s = transfer_s(10**9, rates.decode_gbps)
    figures = (
        f"1 GB of weights takes {link_s:.2f} s on a link of {rates.link_gbps:.2f} GB/s and"
        f" {decode_s:.2f} s to decode, as it is {raw_s:.2f} s"
    )
    if link_s + decode_s < raw_s:
        return replace(found, notice=f"weights are read encoded: {figures}")
    return as_they_are(config, checkpoint, device, figures)


def as_they_are(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, reason: str
) -> LinkFormat:
    """Link of raw weights in spite of a sidecar; its notice gives the reason."""
    raw = choose_link(replace(config, link_format="raw"), checkpoint, device)
    return replace(raw, notice=f"weights are read as they are, not from the sidecar: {reason}")


def _encoded(
    config: EngineConfig, checkpoint: Checkpoint, directory: Path, device: torch.device, others: str
) -> LinkFormat:
    is_asked = config.link_format == "lossless"
    on_card = device.type == "cuda"
    if checkpoint.format.name != "dense":
        problem = "--link-format lossless is for weights that are not quantised"
        raise SettingsError(problem, have=checkpoint.format.name, change="leave it out")
    if on_card and not extension.serves(torch.empty(0, device=device)):
        problem = f"no kernel decodes lossless weights: {extension.missing()}"
        raise DeviceError(problem, change="use --link-format raw")
    if is_asked and on_card and not (config.sidecar or directory.is_dir()):
        encoded = tuple(estimate(layer) for layer in checkpoint.layers)
        return LinkFormat(encodes=True, sizes=_sizes(checkpoint, encoded, on_card))
    sidecar = _opened(checkpoint, directory, others)
    nbytes = (one.encoded.nbytes if on_card else one.encoded.payload_nbytes for one in sidecar)
    return LinkFormat(sidecar, sizes=_sizes(checkpoint, tuple(nbytes), on_card))


def _opened(checkpoint: Checkpoint, directory: Path, others: str) -> tuple[SidecarLayer, ...]:
    if not directory.is_dir():
        flags = (
            convert_flags(s.size, s.is_exact)
            if isinstance(s := checkpoint.spec, TensorParallelModel)
            else ""
        )
        change = f"run offload-rt convert{flags} first, or use --link-format raw"
        raise CheckpointError(f"no sidecar in {directory}", have=others, change=change)
    return open_sidecar(checkpoint, directory)


def convert_flags(size: int, is_exact: bool) -> str:
    """Of `offload-rt convert` for so many ranks; is_exact: for runs with --exact-parallel."""
    return f" --ranks {size}{' --exact-parallel' if is_exact else ''}"


def _others(directory: Path) -> str:
    """The sidecars beside that of a rank: of other numbers of ranks, or cut in another way."""
    names = (one.name for one in directory.parent.parent.glob("*"))
    return ", ".join(sorted(name for name in names if name.startswith(("lossless", "raw-"))))


def _sizes(checkpoint: Checkpoint, encoded: tuple[int, ...], on_card: bool) -> LinkSizes:
    """A card's slots hold encoded layers, and a buffer the decoded one; slots of a CPU hold layers
    that were decoded.
    """
    decoded = max(align_up(layer.layout.nbytes, PAGE) for layer in checkpoint.layers)
    if on_card:
        return LinkSizes(encoded, max(encoded), decoded)
    buffers = min(_BUFFERS, _N_THREADS * align_up(max(encoded) + PAGE, PAGE))
    return LinkSizes(encoded, decoded, buffers)
