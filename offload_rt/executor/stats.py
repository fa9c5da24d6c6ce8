"""What the passes of one sequence cost, and what became of its trees."""

from dataclasses import dataclass, field

from offload_rt.tree.choose import N_RANKS
from offload_rt.tree.topology import DraftTree, Topology, Verdict


@dataclass(frozen=True)
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
    """Sums over the passes of a sequence, in seconds and bytes of whole passes, which it may have shared with others.

    n_nodes, n_levels              of all trees
    predicted_s, predicted_tokens  of the passes that computed no prompt, as predicted before each
    measured_s, measured_tokens    of the same passes
    topology                       the last of the largest trees
    tried, taken                   per rank among siblings: at nodes that were reached, children there were, and accepted ones
    """

    n_passes: int = 0
    n_nodes: int = 0
    n_levels: int = 0
    started: float = 0.0
    ended: float = 0.0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    waited_s: float = 0.0
    link_nbytes: int = 0
    link_busy_s: float = 0.0
    predicted_s: float = 0.0
    predicted_tokens: float = 0.0
    measured_s: float = 0.0
    measured_tokens: int = 0
    n_measured: int = 0
    topology: Topology = field(default_factory=lambda: Topology.chain(1))
    tried: list[int] = field(default_factory=lambda: [0] * N_RANKS)
    taken: list[int] = field(default_factory=lambda: [0] * N_RANKS)

    def add_tree(self, tree: DraftTree, verdict: Verdict) -> None:
        """Count what was accepted of a tree."""
        topology = tree.topology
        self.n_nodes += len(topology)
        self.n_levels += topology.n_levels
        self.topology = max(topology, self.topology, key=len)
        for node, taken in zip((0, *verdict.path), (*verdict.path, None), strict=True):
            for rank in range(min(len(topology.children[node]), N_RANKS)):
                self.tried[rank] += 1
            if taken is not None and topology.ranks[taken] < N_RANKS:
                self.taken[topology.ranks[taken]] += 1

    def add_pass(self, times: PassTimes, tree: DraftTree, n_tokens: int) -> None:
        """Count a pass that gave the sequence so many tokens; its first one is its prefill."""
        if self.n_passes == 0:
            self.started, self.prefill_s = times.started, times.computed - times.started
        self.n_passes += 1
        self.ended = times.ended
        self.draft_s += times.drafted - times.started
        self.verify_s += times.ended - times.computed
        self.waited_s += times.waited_s
        self.link_nbytes += times.link_nbytes
        self.link_busy_s += times.link_busy_s
        if times.predicted_s is not None:
            self.n_measured += 1
            self.predicted_s += times.predicted_s
            self.predicted_tokens += tree.expected
            self.measured_s += times.ended - times.started
            self.measured_tokens += n_tokens
