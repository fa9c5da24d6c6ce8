"""Rates of the link by chunk size and of the lossless decoder, measured once and cached."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch

from offload_rt.engine import profile
from offload_rt.offload.copy_device import CopyDevice
from offload_rt.offload.disk import DiskTier
from offload_rt.offload.memory import pinned_block
from offload_rt.offload.mirrors import NO_MIRRORS, Mirrors
from offload_rt.ops import cpu, lossless
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.layout import host_block
from offload_rt.weights.lossless import SidecarLayer

_remembered = partial(profile.remembered, "link.json", 1)
# Encoded bytes of a decoder measurement: more than caches hold, about 20 ms.
_SAMPLE_NBYTES = 64 << 20
# Chunk sizes of copies to a GPU, bytes of a measured copy, and its repetitions after a first.
_CHUNKS = (32 << 20, 64 << 20, 128 << 20)
_COPY_NBYTES = 256 << 20
_ROUNDS = 5


@dataclass(frozen=True)
class LinkRates:
    """GB/s of the link, and of the decoder (decoded bytes) on all cores or the GPU."""

    link_gbps: float
    decode_gbps: float


def measured_rates(
    checkpoint: Checkpoint,
    sidecar: Sequence[SidecarLayer],
    device: torch.device,
    mirrors: Mirrors = NO_MIRRORS,
) -> LinkRates:
    """Return this machine's rates for layers to a device: of its disk, or a GPU's faster link."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    paths = checkpoint.layers[0].tensors[0].path, *mirrors.folders
    disk = " and ".join(str(path.stat().st_dev) for path in paths if path.exists())
    decoder = (*profile.processor(), cpu.library() is not None)
    return LinkRates(
        _remembered(f"link {card or disk}", lambda: _link_gbps(checkpoint, device, mirrors)),
        _remembered(f"decoder {card or decoder}", lambda: decode_gbps(sidecar[0], device)),
    )


def copy_chunk(device: torch.device) -> int:
    """Return the bytes per chunk of copies to a GPU, measured once per GPU model and cached.

    Returns the smallest size with at least 99.5 % of the highest rate: a copy of another stream
    waits for the current chunk.
    """

    def measure() -> float:
        rates = chunk_rates(device)
        torch.cuda.empty_cache()
        least = 0.995 * max(rates.values())
        return next(size / (1 << 20) for size, rate in rates.items() if rate >= least)

    return int(_remembered(f"MiB per chunk {torch.cuda.get_device_name(device)}", measure)) << 20


def chunk_rates(device: torch.device, nbytes: int = _COPY_NBYTES) -> dict[int, float]:
    """Measure GB/s of pinned copies by chunk size, interleaved; the last size is one whole copy."""
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    copies = {size: CopyDevice(device, size) for size in (*_CHUNKS, nbytes)}
    seconds = {size: list[float]() for size in copies}
    with pinned_block(nbytes, device) as source:
        for size, link in [*copies.items()] * (1 + _ROUNDS):
            start, end = link.copy([(target, source)], link.event())
            link.wait(end)
            seconds[size].append(link.seconds_between(start, end) or 0.0)
    return {size: nbytes / median(times[1:]) / 1e9 for size, times in seconds.items()}


def _link_gbps(checkpoint: Checkpoint, device: torch.device, mirrors: Mirrors) -> float:
    if device.type == "cuda":
        return profile.upload_gbps(device)
    settings = profile.read_settings(checkpoint.layers)
    with closing(DiskTier(checkpoint.layers, settings, mirrors=mirrors)) as tier:
        return profile.link_gbps(tier, checkpoint.spec.n_layers)


def decode_gbps(layer: SidecarLayer, device: torch.device) -> float:
    """Measure the decoding of a layer's first chunks, in GB/s of decoded bytes. Raises OSError."""
    encoded = layer.encoded
    n = max(int(np.searchsorted(np.cumsum(encoded.chunks["nbytes"]), _SAMPLE_NBYTES)), 1)
    chunks = encoded.chunks[:n].tolist()
    # start of the last chunk, and its bytes
    block = host_block(sum(chunks[-1][i] for i in (0, 3)))
    encoded.write_table(block)
    content = block.numpy()
    payload = content[encoded.table_nbytes :]
    payload[:] = np.fromfile(layer.payload.path, np.uint8, len(payload), offset=layer.payload.start)
    nbytes = int(encoded.chunks[n]["target"]) if n < len(encoded.chunks) else encoded.layout.nbytes
    if device.type == "cuda":
        on_card = block.to(device)
        out = torch.empty(nbytes, dtype=torch.uint8, device=device)
        seconds = profile.timed(device, lambda: lossless.decode_block(on_card, n, out))
        return nbytes / median(seconds) / 1e9
    decoded = host_block(nbytes).numpy()

    def decode(source: int, target: int, n_weights: int, size: int, kind: int) -> bool:
        return lossless.decode(content[source : source + size], kind, n_weights, decoded[target:])

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        columns = tuple(zip(*chunks, strict=True))
        seconds = profile.timed(device, lambda: list(pool.map(decode, *columns)))
    return nbytes / median(seconds) / 1e9
