"""Pass times and acceptance statistics of a sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from offload_rt.cost.tree_size import N_RANKS
from offload_rt.tree.topology import DraftTree, Topology, Verdict


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Times of a pass by `time.perf_counter`, link traffic, and the predicted time.

    waited_s     seconds the device waited for layers
    predicted_s  predicted seconds of drafting, pass and verification; None for prompt passes
    """

    started: float
    drafted: float
    computed: float
    ended: float
    link_nbytes: int
    link_busy_s: float
    waited_s: float
    predicted_s: float | None
    n_rows: int


@dataclass
class SequenceStats:
    """Statistics of a sequence; its passes may be shared with further sequences.

    passes             (times, expected tokens, actual tokens) per pass; the first is the prefill
    n_nodes, n_levels  sums over all trees
    topology           largest tree, the latest among equals
    last               last tree, and its accepted nodes without the root
    tried, taken       per sibling rank: existing and accepted children of reached nodes
    """

    passes: list[tuple[PassTimes, float, int]] = field(default_factory=list)
    n_nodes: int = 0
    n_levels: int = 0
    topology: Topology = field(default_factory=lambda: Topology.chain(1))
    last: tuple[Topology, Sequence[int]] = field(default_factory=lambda: (Topology.chain(1), ()))
    tried: list[int] = field(default_factory=lambda: [0] * N_RANKS)
    taken: list[int] = field(default_factory=lambda: [0] * N_RANKS)

    def add_tree(self, tree: DraftTree, verdict: Verdict) -> None:
        """Record the verdict on a tree."""
        topology = tree.topology
        self.last = topology, verdict.path
        self.n_nodes += len(topology)
        self.n_levels += topology.n_levels
        self.topology = max(topology, self.topology, key=len)
        for node in (0, *verdict.path):
            for rank in range(min(len(topology.children[node]), N_RANKS)):
                self.tried[rank] += 1
            if node and topology.ranks[node] < N_RANKS:
                self.taken[topology.ranks[node]] += 1
