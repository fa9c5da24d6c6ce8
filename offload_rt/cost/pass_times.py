"""Pass times, from measured machine rates and the bytes of a pass."""

import math
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

# Exponent p of the p-norm that combines link and compute time; infinity would be the maximum.
# Measured on two cores and a disk: passes of 150 rows with 1.05 s of compute and of link took
# 1.13 s, with 0.94 s and 1.03 s they took 1.09 s.
_OVERLAP_NORM = 8.0
# Maximum parts of a pass in a pipeline. Each part costs a hand-over, which is not measured, so the
# smallest number of parts within this factor of the best is selected.
_MAX_PARTS = 16
_NEARLY = 1.05
# GB/s of weights that a GPU writes in decoding encoded or quantised weights (assumed). GPU memory
# is several times as fast.
DECODE_GBPS = 300.0


def transfer_s(nbytes: float, gbps: float) -> float:
    """Return the seconds to move or read `nbytes` bytes at `gbps` GB/s."""
    return nbytes / gbps / 1e9


@dataclass(frozen=True)
class MachineProfile:
    """Bandwidths of a machine, and compute times of a model if measured.

    link_gbps    (tier, GB/s) of streamed layers, as pairs
    memory_gbps  GB/s of weights read by the device in computing a token
    fixed_s      seconds of a pass besides layers: embedding, head, sampling
    compute      compute times of whole passes by rows and context; None until measured
    """

    link_gbps: tuple[tuple[str, float], ...]
    memory_gbps: float
    fixed_s: float = 0.0
    compute: "ComputeTimes | None" = None

    def link(self, tier: str) -> float:
        """Return the link rate of a tier, in GB/s."""
        return dict(self.link_gbps)[tier]


@dataclass(frozen=True)
class ComputeTimes:
    """Measured compute times of all layers and the head, or of an expert.

    widths    rows of a pass, ascending
    contexts  tokens in the cache, ascending
    seconds   (contexts, widths)
    """

    widths: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    @cached_property
    def _table(self) -> np.ndarray:
        return np.array(self.seconds)

    def at(self, n_rows: np.ndarray, context: int = 0, n_sequences: int = 1) -> np.ndarray:
        """Interpolate linearly, also beyond the largest measurements; `context` is per sequence."""
        least = min(context, self.contexts[0])
        if least == context:
            return self._at(n_rows, context)
        attention = self._at(n_rows / n_sequences, context) - self._at(n_rows / n_sequences, least)
        return np.asarray(self._at(n_rows, least) + n_sequences * attention)

    def n_parts(self, n_rows: int, n_stages: int) -> int:
        """Return the number of parts of a pass with the least time in equally slow stages."""
        parts = np.arange(1, min(n_rows, _MAX_PARTS) + 1)
        seconds = self._in_parts(n_rows, parts, n_stages)
        return int(parts[seconds < _NEARLY * seconds.min()][0])

    def pipelined(self, n_stages: int) -> "ComputeTimes":
        """Return the times in a pipeline of `n_stages` stages, in `n_parts` parts per pass."""

        def seconds(width: int, context: int) -> float:
            parts = np.array([self.n_parts(width, n_stages)])
            return float(self._in_parts(width, parts, n_stages, context)[0])

        rows = tuple(
            tuple(seconds(width, context) for width in self.widths) for context in self.contexts
        )
        return replace(self, seconds=rows)

    def _in_parts(
        self, n_rows: int, parts: np.ndarray, n_stages: int, context: int = 0
    ) -> np.ndarray:
        seconds = self._at(n_rows / parts, max(context, self.contexts[0]))
        return np.asarray(seconds * (1 + (parts - 1) / n_stages))

    def _at(self, n_rows: np.ndarray, context: int) -> np.ndarray:
        by_width = _interpolate_rows(context, self.contexts, self._table)
        # Extrapolation of noisy times may fall below zero. No pass is faster than the fastest
        # measured pass.
        return np.asarray(np.maximum(_interpolate(n_rows, self.widths, by_width), min(by_width)))


@dataclass(frozen=True)
class StreamedRows:
    """Off-device KV rows, copied over a link in each pass.

    n_resident  rows on the device: the first rows of all sequences together
    nbytes      bytes of a row of a layer
    windows     attention window per layer, in positions; None for all positions
    chunk_rows  rows of a pass that share a copy
    """

    tier: str
    n_resident: int
    nbytes: int
    windows: tuple[int | None, ...]
    chunk_rows: int

    def pass_nbytes(self, context: int, n_rows: int = 1, n_sequences: int = 1) -> int:
        """Return the bytes copied in a pass of `n_rows` rows of all sequences.

        context  tokens per sequence
        """
        starts = (n_sequences * (context - (window or context)) for window in self.windows)
        stop = n_sequences * context
        n_copied = sum(max(stop - max(self.n_resident, start), 0) for start in starts)
        return n_copied * self.nbytes * -(-n_rows // self.chunk_rows)


@dataclass(frozen=True)
class TouchedExperts:
    """Experts copied over a link on demand.

    n_used      experts per row and layer
    n_resident  mean number of experts per layer on the device
    host        host compute times, to compute some missing experts during copies; None to copy all
    bias        learned correction factor by row count; None for 1
    n_on_host   mean number of experts per layer in host memory, besides `n_resident`; the host
                computes no others
    """

    tier: str
    n_layers: int
    n_experts: int
    n_used: int
    nbytes: int
    n_resident: float = 0.0
    host: ComputeTimes | None = None
    bias: Callable[[np.ndarray], np.ndarray] | None = None
    n_on_host: float = math.inf

    def pass_nbytes(self, n_rows: np.ndarray, gbps: float = 0.0) -> np.ndarray:
        """Return the bytes copied in passes, for equally likely experts and the learned bias.

        gbps  link rate to split missing experts between link and host, which end together, except
              that one of them computes the last expert alone; 0 to copy all
        """
        touched = 1 - (1 - self.n_used / self.n_experts) ** n_rows
        n_missing = touched * (self.n_experts - self.n_resident)
        n_missing = n_missing if self.bias is None else n_missing * self.bias(n_rows)
        if self.host is not None and gbps:
            rows_per_expert = n_rows * self.n_used / (touched * self.n_experts)
            share = self.host.at(rows_per_expert) / transfer_s(self.nbytes, gbps)
            last = np.minimum(n_missing, 1) * np.minimum(share, 1)
            n_copied = np.maximum(n_missing * share / (1 + share), last)
            on_host = min(self.n_on_host / max(self.n_experts - self.n_resident, 1), 1.0)
            n_missing = np.maximum(n_copied, n_missing * (1 - on_host))
        return np.asarray(n_missing * self.n_layers * self.nbytes)


@dataclass(frozen=True)
class PassBytes:
    """Bytes moved in a pass.

    streamed   (tier, bytes) of weights over each link, as pairs; without experts on demand
    computed   bytes of weights read in computing, including resident weights
    ahead      bytes of the next pass that fit into the slots while the device is busy elsewhere
    rows       off-device KV rows; None if all rows are on the device
    experts    experts copied on demand; None if whole layers are streamed
    exchanged  bytes received from other ranks per row, over the host link
    disk_experts  experts copied from disk to the host on demand; `n_resident` counts both memories
    """

    streamed: tuple[tuple[str, int], ...]
    computed: int
    ahead: int = 0
    rows: StreamedRows | None = None
    experts: TouchedExperts | None = None
    exchanged: int = 0
    disk_experts: TouchedExperts | None = None

    @cached_property
    def is_resident(self) -> bool:
        """Whether a pass moves nothing over a link."""
        on_demand = self.rows or self.experts or self.disk_experts or self.exchanged
        return not on_demand and not any(nbytes for _, nbytes in self.streamed)

    def at(self, context: int, n_rows: int = 1, n_sequences: int = 1) -> dict[str, int]:
        """Return the bytes over each link, by tier, without zeros; see `StreamedRows`."""
        moved = Counter(dict(self.streamed))
        if self.rows is not None:
            moved[self.rows.tier] += self.rows.pass_nbytes(context, n_rows, n_sequences)
        for experts in filter(None, (self.experts, self.disk_experts)):
            moved[experts.tier] += int(experts.pass_nbytes(np.array(n_rows)))
        moved["host"] += n_rows * self.exchanged
        return {tier: nbytes for tier, nbytes in moved.items() if nbytes}


def pass_time(
    profile: MachineProfile, moved: PassBytes, n_rows: int = 1, between_s: float = 0.0
) -> float:
    """Return the seconds of a pass without a context; see `pass_times`."""
    return float(pass_times(profile, moved, np.array([n_rows]), 0, between_s)[0])


def pass_times(
    profile: MachineProfile, moved: PassBytes, n_rows: np.ndarray, context: int,
    between_s: np.ndarray | float = 0.0,
    n_sequences: int = 1,
) -> np.ndarray:  # fmt: skip
    """Return the seconds of passes: the slower of link and compute, plus the exposed time.

    n_rows       rows of each pass
    context      tokens per sequence
    between_s    seconds of drafting between passes; must broadcast with `n_rows`. The device is
                 busy; the link continues until the slots are full
    n_sequences  sequences that share the rows

    Links overlap: the slowest link counts. Link and compute of similar length overlap
    incompletely; see `_OVERLAP_NORM`.
    """
    link, gbps = _link_times(profile, moved, n_rows, context, n_sequences)
    if profile.compute is None:
        compute = np.full(n_rows.shape, moved.computed / (profile.memory_gbps * 1e9))
    else:
        compute = profile.compute.at(n_rows, context, n_sequences)
    between = between_s + profile.fixed_s
    idle = np.maximum(between - moved.ahead / (gbps * 1e9), 0.0) if gbps else 0.0
    device = compute + between - idle
    slower = np.maximum(device, link)
    if not slower.all():
        return np.asarray(slower + idle)
    shares = (device / slower) ** _OVERLAP_NORM + (link / slower) ** _OVERLAP_NORM
    return np.asarray(slower * shares ** (1 / _OVERLAP_NORM) + idle)


def lossless_gain(moved: PassBytes, link_gbps: float, memory_gbps: float, share: float) -> float:
    """Predict the time of a one-row pass of a GPU with raw layers, relative to encoded layers.

    link_gbps    GB/s of the host link; a disk counts as equally fast, which underestimates the gain
    memory_gbps  GB/s of the GPU's memory
    share        encoded bytes relative to raw bytes
    """
    links = ("disk", link_gbps), ("host", link_gbps)
    raw_nbytes = sum(nbytes for _, nbytes in moved.streamed)
    streamed = ((tier, int(share * nbytes)) for tier, nbytes in moved.streamed)
    encoded = replace(moved, streamed=tuple(streamed))
    raw_s = pass_time(MachineProfile(links, memory_gbps), moved)
    computed_s = transfer_s(moved.computed, memory_gbps) + transfer_s(raw_nbytes, DECODE_GBPS)
    decoding = MachineProfile(links, moved.computed / computed_s / 1e9)
    return raw_s / pass_time(decoding, encoded)


def _link_times(
    profile: MachineProfile, moved: PassBytes, n_rows: np.ndarray, context: int, n_sequences: int
) -> tuple[np.ndarray, float]:
    """Return the seconds of the slowest link per row count, and the busiest link's GB/s or 0."""
    if moved.is_resident:
        return np.zeros(n_rows.shape), 0.0
    by_chunk = replace(moved, experts=None, exchanged=0, disk_experts=None)
    of_pass = moved.at(context, 0)
    of_chunk = by_chunk.at(context, n_sequences=n_sequences)
    n_chunks = np.ceil(n_rows / moved.rows.chunk_rows) if moved.rows else np.ones(n_rows.shape)
    times = np.zeros(n_rows.shape)
    busiest = (-1.0, 0.0)
    for tier in moved.at(context, n_sequences=n_sequences):
        gbps = profile.link(tier)
        weights = of_pass.get(tier, 0)
        nbytes = of_chunk.get(tier, 0)
        busiest = max(busiest, (transfer_s(nbytes, gbps), gbps))
        by_rows = n_rows * moved.exchanged * (tier == "host")
        for experts in filter(None, (moved.experts, moved.disk_experts)):
            if experts.tier == tier:
                by_rows = by_rows + experts.pass_nbytes(n_rows, gbps)
        total = weights + (nbytes - weights) * n_chunks + by_rows
        times = np.maximum(times, total / (gbps * 1e9))
    return times, busiest[1]


def _interpolate_rows(x: float, xs: Sequence[float], rows: np.ndarray) -> np.ndarray:
    if len(xs) == 1:
        return np.asarray(rows[0])
    i = min(max(bisect(xs, x) - 1, 0), len(xs) - 2)
    weight = max((x - xs[i]) / (xs[i + 1] - xs[i]), 0.0)
    return np.asarray(rows[i] + weight * (rows[i + 1] - rows[i]))


def _interpolate(
    x: np.ndarray, xs: Sequence[float], ys: Sequence[float] | np.ndarray
) -> np.ndarray:
    """Interpolate linearly; extrapolate beyond the last point, and stay level before the first."""
    if len(xs) > 1:
        far = 1e3 * xs[-1]
        xs, ys = [*xs, far], [*ys, ys[-1] + (ys[-1] - ys[-2]) * (far - xs[-1]) / (xs[-1] - xs[-2])]
    return np.asarray(np.interp(x, xs, ys))
