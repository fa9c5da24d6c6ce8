"""What the passes of one sequence cost, and what became of its trees."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from offload_rt.tree.choose import N_RANKS
from offload_rt.tree.topology import DraftTree, Topology, Verdict


@dataclass(frozen=True, slots=True)
class PassTimes:
    """One pass: moments on the clock of `time.perf_counter`, what crossed the link, and what was predicted.

    link_busy_s   seconds in which the link moved bytes
    waited_s      seconds in which the device had no layer to compute
    predicted_s   of drafting, the pass and verification; None where the pass computed a prompt
    """

    started: float
    drafted: float
    computed: float
    ended: float
    link_nbytes: int
    link_busy_s: float
    waited_s: float
    predicted_s: float | None


@dataclass
class SequenceStats:
    """What became of a sequence's trees, and what its passes took, which it may have shared with others.

    passes             each with the tokens that were expected of it and those that it gave; the first is the prefill
    n_nodes, n_levels  of all trees
    topology           the last of the largest trees
    last               the last tree, and the nodes of it that were accepted, without the root
    tried, taken       per rank among siblings: at nodes that were reached, children there were, and accepted ones
    """

    passes: list[tuple[PassTimes, float, int]] = field(default_factory=list)
    n_nodes: int = 0
    n_levels: int = 0
    topology: Topology = field(default_factory=lambda: Topology.chain(1))
    last: tuple[Topology, Sequence[int]] = field(default_factory=lambda: (Topology.chain(1), ()))
    tried: list[int] = field(default_factory=lambda: [0] * N_RANKS)
    taken: list[int] = field(default_factory=lambda: [0] * N_RANKS)

    @property
    def n_passes(self) -> int:
        """Passes so far."""
        return len(self.passes)

    def add_tree(self, tree: DraftTree, verdict: Verdict) -> None:
        """Count what was accepted of a tree."""
        topology = tree.topology
        self.last = topology, verdict.path
        self.n_nodes += len(topology)
        self.n_levels += topology.n_levels
        self.topology = max(topology, self.topology, key=len)
        for node, taken in zip((0, *verdict.path), (*verdict.path, None), strict=True):
            for rank in range(min(len(topology.children[node]), N_RANKS)):
                self.tried[rank] += 1
            if taken is not None and topology.ranks[taken] < N_RANKS:
                self.taken[topology.ranks[taken]] += 1
