"""Transfer format of streamed layers: raw, or losslessly encoded."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from offload_rt.config import EngineConfig
from offload_rt.cost.pass_times import transfer_s
from offload_rt.engine.link_rates import measured_rates
from offload_rt.errors import CheckpointError, DeviceError, SettingsError
from offload_rt.models.architecture import Architecture
from offload_rt.offload.mirrors import Mirrors
from offload_rt.offload.placement import LinkSizes
from offload_rt.offload.sidecar import open_sidecar
from offload_rt.ops import extension
from offload_rt.parallel.tensor_parallel import TensorParallelModel
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.layout import PAGE, BlockRecord, align_up
from offload_rt.weights.lossless import SidecarLayer, estimate

# Maximum buffer bytes of all threads that read encoded layers, and the number of these threads.
_BUFFERS = 9 << 20
_N_THREADS = 8


@dataclass(frozen=True)
class LinkFormat:
    """Transfer format of the streamed layers.

    sidecar  encoded layers; None without a sidecar
    layers   a rank's shards in contiguous raw files; None without such files
    encodes  layers are encoded during loading into host memory
    sizes    sizes of the encoded layers; None for raw layers
    """

    sidecar: tuple[SidecarLayer, ...] | None = None
    layers: tuple[BlockRecord, ...] | None = None
    encodes: bool = False
    sizes: LinkSizes | None = None
    notice: str = ""

    @property
    def is_converted(self) -> bool:
        """Whether layers are read from files of `offload-rt convert`."""
        return bool(self.sidecar or self.layers)


def sidecar_of(checkpoint: Checkpoint, directory: str | None, kind: str = "lossless") -> Path:
    """Return the sidecar's directory, beside the checkpoint unless `directory` is set."""
    beside = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.with_suffix("")
    base = beside if directory is None else Path(directory).expanduser()
    spec = checkpoint.spec
    if isinstance(spec, TensorParallelModel):
        return base / f"{kind}-{spec.size}{'-exact' if spec.is_exact else ''}" / f"rank-{spec.rank}"
    return base / kind if directory is None else base


def choose_link(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> LinkFormat:
    """Choose the transfer format by the setting and the existing sidecars.

    `auto` uses a sidecar if it is faster by measured rates. Only `lossless` encodes during loading:
    that costs about a second of all cores per 4 GB in each run. The plan then relies on a sample of
    the weights. Quantised weights are transferred raw. Each shard of a rank has a separate sidecar,
    encoded or raw.
    Raises an OffloadError if the requested format is impossible.
    """
    is_asked = config.link_format == "lossless"
    is_auto = config.link_format == "auto"
    if config.pipeline > 1 and is_asked:
        problem = "--link-format=lossless with --pipeline"
        raise SettingsError(problem, change="leave one of them out")
    is_divided = isinstance(checkpoint.spec, TensorParallelModel)
    directory = sidecar_of(checkpoint, config.sidecar)
    is_raw = is_divided and not is_asked and not (is_auto and directory.is_dir())
    if config.pipeline > 1 or (config.link_format == "raw" and not is_raw):
        return LinkFormat()
    if is_raw:
        directory = sidecar_of(checkpoint, config.sidecar, "raw")
    others = _other_sidecars(directory) if is_divided and not directory.is_dir() else ""
    if not (is_asked or directory.is_dir() or (is_auto and (config.sidecar or others))):
        return LinkFormat()
    try:
        if is_raw:
            layers = zip(_opened(checkpoint, directory, others), checkpoint.layers, strict=True)
            return LinkFormat(layers=tuple(sidecar.raw_block(layer) for sidecar, layer in layers))
        link = _encoded(config, checkpoint, directory, device, others)
        return _faster(link, config, checkpoint, device) if is_auto and link.sidecar else link
    except (CheckpointError, DeviceError, SettingsError) as problem:
        if is_asked or not (directory.is_dir() or others):
            raise
        return LinkFormat(notice=f"weights are transferred raw: {problem.for_command_line}")


def _faster(
    link: LinkFormat, config: EngineConfig, checkpoint: Checkpoint, device: torch.device
) -> LinkFormat:
    """Choose the sidecar or the raw weights by measured rates, with the reason as notice.

    Decoding counts in full: the same processor or GPU computes the passes.
    """
    assert link.sidecar is not None and link.sizes is not None, "the link reads a sidecar"
    mirrors = Mirrors.from_setting(config.mirror, checkpoint.layers)
    rates = measured_rates(checkpoint, link.sidecar, device, mirrors)
    nbytes = sum(layer.encoded.layout.nbytes for layer in link.sidecar)
    raw_s = transfer_s(10**9, rates.link_gbps)
    link_s = sum(link.sizes.layer_nbytes) / nbytes * raw_s
    decode_s = transfer_s(10**9, rates.decode_gbps)
    figures = (
        f"1 GB of weights needs {link_s:.2f} s on a link of {rates.link_gbps:.2f} GB/s and"
        f" {decode_s:.2f} s to decode; raw weights need {raw_s:.2f} s"
    )
    if link_s + decode_s < raw_s:
        return replace(link, notice=f"weights are read encoded: {figures}")
    return as_they_are(config, checkpoint, device, figures)


def as_they_are(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, reason: str
) -> LinkFormat:
    """Return the link of raw weights despite a sidecar, with the reason in its notice."""
    raw = choose_link(replace(config, link_format="raw"), checkpoint, device)
    return replace(raw, notice=f"weights are read raw, not from the sidecar: {reason}")


def _encoded(
    config: EngineConfig, checkpoint: Checkpoint, directory: Path, device: torch.device, others: str
) -> LinkFormat:
    on_card = device.type == "cuda"
    if (name := checkpoint.format.name) != "dense":
        raise SettingsError(
            "--link-format=lossless", need="unquantised weights", have=name, change="leave it out"
        )
    if on_card and not extension.serves(torch.empty(0, device=device)):
        problem = f"no kernel decodes lossless weights: {extension.missing()}"
        raise DeviceError(problem, change="use --link-format=raw")
    is_asked = config.link_format == "lossless"
    if is_asked and on_card and not (config.sidecar or directory.is_dir()):
        encoded = tuple(map(estimate, checkpoint.layers))
        return LinkFormat(encodes=True, sizes=_sizes(checkpoint, encoded, on_card))
    sidecar = _opened(checkpoint, directory, others)
    layers = [layer.encoded for layer in sidecar]
    nbytes = tuple(layer.nbytes if on_card else layer.payload_nbytes for layer in layers)
    return LinkFormat(sidecar, sizes=_sizes(checkpoint, nbytes, on_card))


def _opened(checkpoint: Checkpoint, directory: Path, others: str) -> tuple[SidecarLayer, ...]:
    if not directory.is_dir():
        change = f"run `{convert_command(checkpoint.spec)}` first, or use --link-format=raw"
        raise CheckpointError(f"no sidecar in {directory}", have=others, change=change)
    return open_sidecar(checkpoint, directory)


def convert_command(spec: Architecture) -> str:
    """Return the command that converts a model, or all shards of a rank's model."""
    if not isinstance(spec, TensorParallelModel):
        return "offload-rt convert"
    return f"offload-rt convert --ranks {spec.size}{' --exact-parallel' if spec.is_exact else ''}"


def _other_sidecars(directory: Path) -> str:
    names = (path.name for path in directory.parent.parent.glob("*"))
    return ", ".join(sorted(name for name in names if name.startswith(("lossless", "raw-"))))


def _sizes(checkpoint: Checkpoint, encoded: tuple[int, ...], on_card: bool) -> LinkSizes:
    decoded = max(align_up(layer.layout.nbytes, PAGE) for layer in checkpoint.layers)
    if on_card:
        return LinkSizes(encoded, max(encoded), decoded)
    buffers = min(_BUFFERS, _N_THREADS * align_up(max(encoded) + PAGE, PAGE))
    return LinkSizes(encoded, decoded, buffers)
