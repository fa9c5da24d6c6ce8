"""The drafters that have a model: trees of a shape chosen for the machine, or grown where the draft is confident."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from offload_rt.executor.sequence import Sequence
from offload_rt.speculate.dynamic_builder import DynamicTreeBuilder
from offload_rt.speculate.ngrams import Match, MatchRates, append_ngram, find_matches
from offload_rt.speculate.pair_stats import DraftParts, root_only
from offload_rt.speculate.static_builder import StaticTreeBuilder, shape_of
from offload_rt.tree.choose import (
    N_RANKS,
    Acceptance,
    Calibration,
    Choice,
    ExpectedTokensBias,
    best_prefix,
    choose,
    sizes_up_to,
)
from offload_rt.tree.search import TreeTable, search
from offload_rt.tree.topology import DraftTree, Topology, Verdict

# A copied continuation is appended onto a tree where its tokens are at least so likely, up to so many of them.
_NGRAM_RATE, _NGRAM_LENGTH = 0.5, 8


@dataclass
class _Table:
    """The best trees for an acceptance, and at how many observations they are to be searched anew."""

    trees: TreeTable
    stale_at: int


TreeBuilder = StaticTreeBuilder | DynamicTreeBuilder


@dataclass(frozen=True)
class _Proposal:
    """A tree on its way, and what is needed to learn from what becomes of it."""

    kind: str
    builder: TreeBuilder
    expected: float
    match: Match | None
    n_shape: int


class TreeDrafter:
    """Proposes trees by a draft model.

    at_zero, above  the kind of tree at temperature 0 and above: "dynamic", or a child distribution for trees of a chosen shape
    """

    def __init__(self, parts: DraftParts, at_zero: str, above: str) -> None:
        self._model, self._cost, self.limits = parts.model, parts.cost, parts.limits
        self.pair_stats = parts.pair_stats
        self._kinds = (at_zero, above)
        self._tables: dict[str, _Table] = {}
        self._rates = MatchRates()
        self._proposals: dict[int, _Proposal] = {}
        self._fixed: Topology | None = None

    def propose(self, sequences: Several[Sequence], n_nodes: int) -> list[DraftTree]:
        """One tree for each sequence, of at most `n_nodes` nodes."""
        started = time.perf_counter()
        self._proposals = {}
        for sequence in sequences:
            proposal = self._start_tree(sequence, n_nodes, len(sequences))
            if proposal is not None:
                self._proposals[id(sequence)] = proposal
        n_passes = self._model.grow([proposal.builder for proposal in self._proposals.values()])
        draft_s = time.perf_counter() - started
        size = partial(self._size, len(sequences), draft_s)
        trees = [self._corrected(one, self._finish_tree(one, n_nodes, size(one))) for one in sequences]
        self._cost.drafted(n_passes, time.perf_counter() - started)
        return trees

    def learn(self, sequence: Sequence, tree: DraftTree, verdict: Verdict) -> None:
        """Keep count of what was accepted."""
        proposal = self._proposals.get(id(sequence))
        if proposal is None:
            return
        nodes = [0, *verdict.path]
        after = [*tree.tokens[list(verdict.path)].tolist(), verdict.bonus]
        self._bias(sequence).observe(proposal.expected, len(after))
        if proposal.match is not None:
            self._rates.observe(proposal.match, after)
        if isinstance(proposal.builder, DynamicTreeBuilder):
            self._learn_grown(proposal, [node for node in nodes if node < proposal.n_shape], after)
        else:
            self._learn_static(proposal, sequence, tree.topology, nodes)

    def fix_shape(self, topology: Topology | None) -> None:
        """Use this shape instead of choosing one, as a comparison of shapes does; None to choose again."""
        self._fixed = topology

    def acceptance_at(self, temperature: float) -> Acceptance:
        """What is known of the acceptance of its trees of a chosen shape; for a drafter of grown ones, of grown ones."""
        return self.pair_stats.acceptance.setdefault(self._key(temperature), Acceptance())

    def _bias(self, sequence: Sequence) -> ExpectedTokensBias:
        return self.pair_stats.bias.setdefault(self._key(sequence.sampling.temperature), ExpectedTokensBias())

    def _corrected(self, sequence: Sequence, tree: DraftTree) -> DraftTree:
        """The tree with what its expectation is worth; one token for each level is the most that can come of it."""
        most = 1.0 + int(tree.topology.depths.max())
        return replace(tree, expected=min(self._bias(sequence).corrected(tree.expected), most))

    def _key(self, temperature: float) -> str:
        return f"{self._kinds[temperature > 0]} {temperature:.1f}"

    def _start_tree(self, sequence: Sequence, n_nodes: int, n_sequences: int) -> _Proposal | None:
        kind = self._kinds[sequence.sampling.temperature > 0]
        n_levels = min(self.limits.n_levels, sequence.n_left)
        if n_nodes == 1 or n_levels == 1:
            return None
        state = self._model.start(sequence, n_nodes, n_sequences == 1)
        match = self._worthy_match(sequence, min(n_levels - 1, n_nodes - 2))
        n_nodes -= len(match.tokens) if match else 0
        temperature = sequence.sampling.temperature
        if kind == "dynamic":
            worth = self._cost.level_s / self._seconds_of_a_token(sequence)
            calibration = self._calibration(f"{temperature:.1f}")
            builder = DynamicTreeBuilder(state, n_nodes, n_levels, temperature, calibration, worth)
            return _Proposal(kind, builder, 1.0, match, n_nodes)
        choice, topology = self._choose(sequence, (n_nodes, n_levels, n_sequences))
        if len(topology) == 1:
            return None
        copied = match.tokens if match else ()
        builder = StaticTreeBuilder(state, shape_of(topology), kind, temperature, copied)
        return _Proposal(kind, builder, choice.tokens, match, len(topology))

    def _finish_tree(self, sequence: Sequence, n_nodes: int, size: Callable[[np.ndarray], int]) -> DraftTree:
        proposal = self._proposals.get(id(sequence))
        if proposal is None:
            return root_only(sequence)
        if isinstance(proposal.builder, StaticTreeBuilder):
            return proposal.builder.tree(proposal.expected)
        tree = proposal.builder.tree(size)
        self._proposals[id(sequence)] = replace(proposal, expected=tree.expected, n_shape=len(tree.topology))
        return append_ngram(tree, proposal.match.tokens, n_nodes) if proposal.match else tree

    def _calibration(self, key: str) -> Calibration:
        return self.pair_stats.calibration.setdefault(key, Calibration())

    def _size(self, n_sequences: int, draft_s: float, sequence: Sequence) -> Callable[[np.ndarray], int]:
        """How many nodes of some chances, descending, are worth taking in a tree of this sequence, drafted in `draft_s`."""

        def size(chances: np.ndarray) -> int:
            if self.limits.fixed_size:
                return len(chances)
            rows = n_sequences * np.arange(1, len(chances) + 2)
            return best_prefix(chances, self._cost.seconds(rows, len(sequence.tokens), draft_s))

        return size

    def _choose(self, sequence: Sequence, most: tuple[int, int, int]) -> tuple[Choice, Topology]:
        n_nodes, n_levels, n_sequences = most
        if self._fixed is not None:
            return Choice(len(self._fixed), int(self._fixed.depths.max()) + 1, 1.0, 0.0), self._fixed
        trees = self._trees(sequence.sampling.temperature)
        sizes = np.array([n_nodes]) if self.limits.fixed_size else sizes_up_to(n_nodes)
        draft_s = self._cost.level_s * np.arange(n_levels)  # the last level needs no pass of the draft
        seconds = self._cost.seconds(n_sequences * sizes[:, None], len(sequence.tokens), draft_s)
        expected = trees.values[:, : n_levels + 1]
        least_levels = n_levels if self.limits.fixed_depth else 1 + self.limits.fixed_size
        choice = choose(expected, sizes, seconds, least_levels)
        return choice, trees.topology(choice.n_nodes, choice.n_levels)

    def _trees(self, temperature: float) -> TreeTable:
        """The best trees for what is known of acceptance, searched anew after 4, 8, 16 ... observations."""
        key, acceptance = self._key(temperature), self.acceptance_at(temperature)
        table = self._tables.get(key)
        if table is None or acceptance.n_seen >= table.stale_at:
            # One token may be struck out of a draw, and no child can be drawn where no other is left.
            n_ranks = min(N_RANKS, self.limits.n_nodes, self._model.vocab_size - 1)
            trees = search(acceptance.by_rank()[:n_ranks], self.limits.n_nodes, self.limits.n_levels)
            table = _Table(trees, max(2 * acceptance.n_seen, 4))
            self._tables[key] = table
        return table.trees

    def _seconds_of_a_token(self, sequence: Sequence) -> float:
        """Seconds of a pass of one token: what another token accepted would save."""
        return float(self._cost.seconds(np.array([1]), len(sequence.tokens))[0])

    def _worthy_match(self, sequence: Sequence, n_next: int) -> Match | None:
        matches = find_matches(sequence.tokens, min(_NGRAM_LENGTH, n_next))
        worthy = [match for match in matches[:1] if match.tokens and self._rates.rate(match.n_equal) >= _NGRAM_RATE]
        return worthy[0] if worthy else None

    def _learn_grown(self, proposal: _Proposal, nodes: list[int], after: list[int]) -> None:
        temperature = proposal.builder.temperature
        calibration, acceptance = self._calibration(f"{temperature:.1f}"), self.acceptance_at(temperature)
        for row, token in zip(proposal.builder.rows_of(nodes), after, strict=False):
            if row in proposal.builder.seen:
                tokens, probabilities = proposal.builder.seen[row]
                hits = np.flatnonzero(tokens == token)
                hit = int(hits[0]) if len(hits) else None
                calibration.observe(probabilities, hit)
                acceptance.observe(len(tokens), hit)

    def _learn_static(self, proposal: _Proposal, sequence: Sequence, topology: Topology, nodes: list[int]) -> None:
        acceptance = self.acceptance_at(sequence.sampling.temperature)
        for node, taken in zip(nodes, (*nodes, None)[1:], strict=True):
            if node >= proposal.n_shape or (taken is not None and taken >= proposal.n_shape):
                break  # along a n-gram continuation, which tells nothing of the draft
            n_children = sum(child < proposal.n_shape for child in topology.children[node])
            acceptance.observe(n_children, None if taken is None else int(topology.ranks[taken]))
