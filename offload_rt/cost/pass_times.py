"""Seconds of a pass, from measured rates of the machine and the bytes that the pass reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

# Exponent of the norm by which link and compute add up to a pass; infinite would be the longer of
# the two. Measured on two cores and a disk: a pass of 150 rows whose compute and link took 1.05 s
# each took 1.13 s, one of 0.94 and 1.03 took 1.09.
_ROUNDING = 8.0
# Parts of a pass through the stages of a pipeline at most, and how much longer than the best fewer
# of them may take: each costs a hand-over, which nobody measures.
_MOST_PARTS = 16
_WORTH_PARTS = 1.05


@dataclass(frozen=True)
class MachineProfile:
    """Bandwidths of one machine and, once calibrated, what its passes cost.

    source       what was measured or simulated, in words
    measured     False for a simulated machine
    link_gbps    GB/s at which streamed layers arrive: tier name -> rate, as pairs
    memory_gbps  GB/s at which the device reads weights while computing one token
    fixed_s      seconds a pass takes besides its layers: embedding, head, sampling
    compute      seconds of computing a whole pass of this model, by rows and context; None until
                 measured
    """

    source: str
    measured: bool
    link_gbps: tuple[tuple[str, float], ...]
    memory_gbps: float
    fixed_s: float = 0.0
    compute: "ComputeTimes | None" = None

    def link(self, tier: str) -> float:
        """GB/s at which a tier delivers."""
        return dict(self.link_gbps)[tier]


@dataclass(frozen=True)
class ComputeTimes:
    """Measured seconds of computing all layers and the head.

    widths    rows of a pass, ascending
    contexts  tokens in the cache, ascending
    seconds   per context, per width
    """

    widths: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def at(self, n_rows: np.ndarray, context: int, n_sequences: int = 1) -> np.ndarray:
        """Seconds at any number of rows and context, linear between the measured ones and beyond
        the largest.

        n_sequences  that the rows belong to, each with a context of its own
        """
        least = min(context, self.contexts[0])
        attention = self._at(n_rows / n_sequences, context) - self._at(n_rows / n_sequences, least)
        return np.asarray(self._at(n_rows, least) + n_sequences * attention)

    def n_parts(self, n_rows: int, n_stages: int) -> int:
        """In how many parts so many rows are soonest through stages that take as long as each
        other, one behind the other.
        """
        parts = np.arange(1, min(n_rows, _MOST_PARTS) + 1)
        seconds = self._in_parts(n_rows, parts, n_stages)
        return int(parts[seconds < _WORTH_PARTS * seconds.min()][0])

    def of_stages(self, n: int) -> "ComputeTimes":
        """What passes take whose parts follow each other through n stages; see `n_parts`."""

        def seconds(width: int, context: int) -> float:
            return float(self._in_parts(width, np.array([self.n_parts(width, n)]), n, context)[0])

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
        table = np.array(self.seconds)
        by_width = [_line(np.array([context]), self.contexts, column)[0] for column in table.T]
        # Beyond the measured widths a noisy line may fall below zero. No pass is faster than the
        # fastest measured pass.
        return np.asarray(np.maximum(_line(n_rows, self.widths, by_width), min(by_width)))


@dataclass(frozen=True)
class StreamedRows:
    """Rows of keys and values that come over a link in each pass, as its context is long.

    tier        where they are
    n_resident  the first rows, of all sequences together, which are not among them
    nbytes      of a row of one layer
    windows     per layer how many positions back it sees; None: all of them
    chunk_rows  rows of a pass that read them together
    """

    tier: str
    n_resident: int
    nbytes: int
    windows: tuple[int | None, ...]
    chunk_rows: int

    def of_layer(self, i: int, context: int, n_rows: int = 1, n_sequences: int = 1) -> int:
        """Bytes that come for layer i in a pass of so many rows of some sequences, after `context`
        others of each.
        """
        first = max(self.n_resident, n_sequences * (context - (self.windows[i] or context)))
        return max(n_sequences * context - first, 0) * self.nbytes * -(-n_rows // self.chunk_rows)

    def of_pass(self, context: int, n_rows: int = 1, n_sequences: int = 1) -> int:
        """Bytes that come for all layers."""
        return sum(self.of_layer(i, context, n_rows, n_sequences) for i in range(len(self.windows)))


@dataclass(frozen=True)
class HostTimes:
    """Seconds in which the host computes an expert where it lies, by rows, ascending."""

    widths: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, n_rows: np.ndarray) -> np.ndarray:
        """Of any number of rows, as `ComputeTimes.at`."""
        return _line(n_rows, self.widths, self.seconds)


@dataclass(frozen=True)
class TouchedExperts:
    """Experts of mixtures that come over a link as the rows of a pass need them.

    tier        where they are
    n_layers    that have experts
    n_experts   of each of them, of which a row takes `n_used`
    nbytes      of one expert
    n_resident  of a layer on the device, on average
    host        computes some of the others while the link brings the rest; None: all come
    bias        by which passes of some numbers of rows bring more than that; None: nothing is known
    """

    tier: str
    n_layers: int
    n_experts: int
    n_used: int
    nbytes: int
    n_resident: float = 0.0
    host: HostTimes | None = None
    bias: Callable[[np.ndarray], np.ndarray] | None = None

    def of_pass(self, n_rows: np.ndarray, gbps: float = 0.0) -> np.ndarray:
        """Bytes that come in a pass of so many rows, if each took any experts as often as others
        but for the bias.

        gbps  of the link: the host and it end together, but one of them has the last expert to
              itself; 0: all come
        """
        touched = 1 - (1 - self.n_used / self.n_experts) ** n_rows
        n_missing = touched * (self.n_experts - self.n_resident)
        n_missing = n_missing if self.bias is None else n_missing * self.bias(n_rows)
        if self.host is not None and gbps:
            share = self.host.at(n_rows * self.n_used / (touched * self.n_experts)) / (
                self.nbytes / gbps / 1e9
            )
            n_missing = np.maximum(
                n_missing * share / (1 + share), np.minimum(n_missing, 1) * np.minimum(share, 1)
            )
        return np.asarray(n_missing * self.n_layers * self.nbytes)


@dataclass(frozen=True)
class PassBytes:
    """Bytes one pass over the weights moves.

    streamed  bytes of weights that cross each link: tier name -> bytes, as pairs
    computed  bytes of weights the device reads while computing, resident ones included
    ahead     bytes of the next pass that the slots take in while nothing is computed
    rows      keys and values that cross a link as well; None: all are on the device
    experts   that cross a link as well, where only those come that a pass needs; None: they are in
              `streamed` exchanged bytes from other ranks for each row, where they cross the link of
              the host as well
    disk_experts  experts that are brought to the host before, with as many resident as are there
    """

    streamed: tuple[tuple[str, int], ...]
    computed: int
    ahead: int = 0
    rows: StreamedRows | None = None
    experts: TouchedExperts | None = None
    exchanged: int = 0
    disk_experts: TouchedExperts | None = None

    def at(self, context: int, n_rows: int = 1, n_sequences: int = 1) -> dict[str, int]:
        """Bytes that cross each link, by the tier's name, without zeros; see
        `StreamedRows.of_layer`.
        """
        moved = dict(self.streamed)
        if self.rows is not None:
            moved[self.rows.tier] = moved.get(self.rows.tier, 0) + self.rows.of_pass(
                context, n_rows, n_sequences
            )
        for one in filter(None, (self.experts, self.disk_experts)):
            moved[one.tier] = moved.get(one.tier, 0) + int(one.of_pass(np.array(n_rows)))
        moved["host"] = moved.get("host", 0) + n_rows * self.exchanged
        return {tier: nbytes for tier, nbytes in moved.items() if nbytes}


def pass_time(
    profile: MachineProfile,
    moved: PassBytes,
    n_rows: int = 1,
    context: int = 0,
    between_s: float = 0.0,
) -> float:
    """Seconds of one pass; see `pass_times`."""
    return float(pass_times(profile, moved, np.array([n_rows]), context, between_s)[0])


def pass_times(
    profile: MachineProfile, moved: PassBytes, n_rows: np.ndarray, context: int,
    between_s: np.ndarray | float = 0.0,
    n_sequences: int = 1,
) -> np.ndarray:  # fmt: skip
    """Seconds from the start of a pass to that of the next: the slower of link and compute, and
    what neither hides.

    n_rows     of each pass
    between_s  seconds of drafting between two passes, of the shape of `n_rows` or one that
               broadcasts with it: the device is
               busy, and the link goes on until the slots are full
    n_sequences  that share the rows, after `context` tokens each

    Links are stages that overlap: the slowest one counts. Where link and compute are about equal,
    now one waits and now the other: see `_ROUNDING`.
    """
    alike = replace(moved, experts=None, exchanged=0, disk_experts=None)
    once = moved.at(context, 0)
    of_chunk = alike.at(context, n_sequences=n_sequences)
    tiers = moved.at(context, n_sequences=n_sequences)
    links = [
        (tier, once.get(tier, 0), of_chunk.get(tier, 0), profile.link(tier) * 1e9) for tier in tiers
    ]
    _, rate = max(((nbytes / rate, rate) for _, _, nbytes, rate in links), default=(0.0, 1.0))
    n_chunks = (
        np.ceil(n_rows / moved.rows.chunk_rows) if moved.rows is not None else np.ones(n_rows.shape)
    )
    link = np.zeros(n_rows.shape)
    for tier, weights, nbytes, its_rate in links:
        touched = (
            one
            for one in (moved.experts, moved.disk_experts)
            if one is not None and one.tier == tier
        )
        by_rows = sum(one.of_pass(n_rows, its_rate / 1e9) for one in touched)
        by_rows = by_rows + n_rows * moved.exchanged * (tier == "host")
        link = np.maximum(link, (weights + (nbytes - weights) * n_chunks + by_rows) / its_rate)
    if profile.compute is None:
        compute = np.full(n_rows.shape, moved.computed / (profile.memory_gbps * 1e9))
    else:
        compute = profile.compute.at(n_rows, context, n_sequences)
    between = between_s + profile.fixed_s
    idle = np.maximum(between - moved.ahead / rate, 0.0) if links else 0.0
    device = compute + between - idle
    slower = np.maximum(device, link)
    if not slower.all():
        return np.asarray(slower + idle)
    shares = (device / slower) ** _ROUNDING + (link / slower) ** _ROUNDING
    return np.asarray(slower * shares ** (1 / _ROUNDING) + idle)


def _line(x: np.ndarray, xs: Sequence[float], ys: Sequence[float]) -> np.ndarray:
    """Through the points (xs, ys): straight between them and on beyond the last, level before the
    first.
    """
    if len(xs) > 1:
        far = 1e3 * xs[-1]
        xs, ys = [*xs, far], [*ys, ys[-1] + (ys[-1] - ys[-2]) * (far - xs[-1]) / (xs[-1] - xs[-2])]
    return np.asarray(np.interp(x, xs, ys))
