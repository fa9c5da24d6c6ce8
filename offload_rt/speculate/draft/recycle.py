"""Token recycling: trees of earlier target predictions. Needs no draft model.

Token Recycling (Luo et al. 2024, arXiv 2408.08696) with three changes. Predictions are stored with
their probabilities under the last tokens before them, of several lengths. Trees grow best-first by
the product of acceptance probabilities, calibrated by the length. Prompt lookup adds its
continuations.
"""

import heapq
import time
from array import array
from bisect import bisect
from collections import OrderedDict, abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from offload_rt.cost.tree_size import (
    Calibration,
    ExpectedTokensBias,
    best_prefix,
    best_prefixes,
)
from offload_rt.executor.sequence import Sequence
from offload_rt.sampling import TopTokens
from offload_rt.speculate.ngrams import MatchRates, NgramMatch, copied_paths, find_matches
from offload_rt.speculate.pair_stats import PairStats
from offload_rt.speculate.protocols import Drafter, DrafterType, DraftParts
from offload_rt.tree.topology import DraftTree, Topology, Verdict

_SIZES = (512, 256, 128, 64, 32, 16, 8, 4, 1)
# Maximum tokens per table key, and maximum keys of all sequences, about 300 bytes each.
_LONGEST = 3
# Prior ratio of acceptance to stored probability, by the tokens of the key.
_PRIOR = (0.0, 0.35, 0.6, 0.8)
_MOST_KEYS = 1 << 17
# Initial size of a growing tree. The size doubles while more than half of its nodes are verified.
_N_FIRST = 16

_Context = tuple[int, ...]


class Prediction(NamedTuple):
    """Predicted tokens with their probabilities, stored under a key of `n_key` tokens."""

    n_key: int
    tokens: "array[int]"
    probs: "array[float]"


class PredictionTable:
    """Latest top target predictions, indexed by the preceding tokens."""

    def __init__(self, capacity: int = _MOST_KEYS) -> None:
        self._capacity = capacity
        self._after: OrderedDict[_Context, tuple[array[int], array[float]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._after)

    def __contains__(self, context: _Context) -> bool:
        return context in self._after

    def keep(self, context: _Context, tokens: list[int], probs: list[float]) -> None:
        """Store a prediction under all suffixes of a context; evict the least recently stored."""
        prediction = array("q", tokens), array("f", probs)
        for k in range(len(context)):
            self._after[context[k:]] = prediction
            self._after.move_to_end(context[k:])
        while len(self._after) > self._capacity:
            self._after.popitem(last=False)

    def find(self, context: _Context) -> Prediction | None:
        """Return the prediction after the longest stored suffix of a context."""
        for k in range(len(context)):
            if prediction := self._after.get(context[k:]):
                return Prediction(len(context) - k, *prediction)
        return None


class KeyCalibration:
    """Acceptance of stored predictions, by the tokens of their key and their probability."""

    def __init__(self, stats: PairStats, temperature: float) -> None:
        self._calibrations = [
            stats.at(f"recycled {n}", temperature).calibration for n in range(_LONGEST + 1)
        ]
        self._edges = Calibration.EDGES.tolist()
        self.refresh()

    def refresh(self) -> None:
        """Use the observations so far for later estimates."""
        self._ratios = [
            calibration.ratios(prior).tolist()
            for calibration, prior in zip(self._calibrations, _PRIOR, strict=True)
        ]

    def chances(self, prediction: Prediction) -> Iterator[tuple[int, float]]:
        """Return the predicted tokens with their acceptance probabilities."""
        ratios = self._ratios[prediction.n_key]
        for token, p in zip(prediction.tokens, prediction.probs, strict=True):
            yield token, min(p * ratios[bisect(self._edges, p)], 1.0)

    def observe(self, prediction: Prediction, token: int) -> None:
        """Record the actual token after a key."""
        hit = prediction.tokens.index(token) if token in prediction.tokens else None
        self._calibrations[prediction.n_key].observe(np.array(prediction.probs), hit)


class PredictedTree:
    """Best-first tree: the root and the most probable nodes, in descending order.

    copied  copied paths below the root, with their probabilities
    """

    def __init__(
        self,
        table: PredictionTable,
        calibration: KeyCalibration,
        sequence: Sequence,
        copied: dict[tuple[int, ...], float],
        n_levels: int,
    ) -> None:
        tokens = sequence.tokens
        self._table = table
        self._calibration = calibration
        self._n_allowed = sequence.n_allowed
        self._copied = copied
        self._n_levels = n_levels
        self.parents = [-1]
        self.tokens = [tokens[-1]]
        self.chances = [1.0]
        self.contexts = [tuple(tokens[-_LONGEST:])]
        # Prediction below each node, in the order of the nodes.
        self._predictions: list[Prediction | None] = []
        self._paths: list[tuple[int, ...]] = [()]
        self._below: dict[tuple[int, ...], list[int]] = {}
        for path in copied:
            self._below.setdefault(path[:-1], []).append(path[-1])
        # Heap of (negative probability, parent, token), most probable candidate first.
        self._best: list[tuple[float, int, int]] = []
        self._open(0)

    def grow(self, n_nodes: int) -> None:
        """Add nodes up to `n_nodes`, or until no candidate is left."""
        while self._best and len(self.parents) < n_nodes:
            chance, parent, token = heapq.heappop(self._best)
            path = (*self._paths[parent], token)
            if self._n_allowed(path) < len(path):
                continue
            self.parents.append(parent)
            self.tokens.append(token)
            self.chances.append(-chance)
            self.contexts.append((*self.contexts[parent], token)[-_LONGEST:])
            self._paths.append(path)
            self._open(len(self.parents) - 1)

    def _open(self, node: int) -> None:
        """Push the children of a node onto the candidate heap."""
        path = self._paths[node]
        chance = self.chances[node]
        prediction = self._table.find(self.contexts[node])
        self._predictions.append(prediction)
        if len(path) + 1 >= self._n_levels:
            return
        below = self._calibration.chances(prediction) if prediction else ()
        chances = {token: chance * p for token, p in below}
        for token in self._below.get(path, ()):
            copied = chance * self._copied[*path, token] / self._copied.get(path, 1.0)
            chances[token] = max(chances.get(token, 0.0), copied)
        for token, p in chances.items():
            heapq.heappush(self._best, (-p, node, token))

    def learn(self, nodes: abc.Sequence[int], after: abc.Sequence[int]) -> None:
        """Compare the predictions below accepted nodes with the actual tokens."""
        for node, token in zip(nodes, after, strict=True):
            if (prediction := self._predictions[node]) is not None:
                self._calibration.observe(prediction, token)


@dataclass
class _Proposal:
    """A tree under construction, its best match, and its expected tokens before bias correction."""

    tree: PredictedTree
    match: NgramMatch | None
    expected: float = 1.0


class Recycling(Drafter):
    """Propose best-first trees from a prediction table shared by all sequences."""

    n_predicted = 8
    reads_prompt = True

    def __init__(self, parts: DraftParts) -> None:
        self.limits = parts.limits
        self._cost = parts.cost
        self._stats = parts.pair_stats
        self._table = PredictionTable()
        self._rates = MatchRates()
        self._calibrations: dict[float, KeyCalibration] = {}
        self._proposals: dict[Sequence, _Proposal] = {}

    def propose(self, sequences: abc.Sequence[Sequence], n_nodes: int) -> list[DraftTree]:
        """Propose a tree per sequence; select the most probable nodes across all sequences."""
        started = time.perf_counter()
        proposals = [self._grown(sequence, n_nodes, len(sequences)) for sequence in sequences]
        chances = [np.array(proposal.tree.chances[1:]) for proposal in proposals]
        sizes = [len(candidates) for candidates in chances]
        if not self.limits.fixed_size:
            context = max(len(sequence.tokens) for sequence in sequences)
            draft_s = time.perf_counter() - started
            sizes = best_prefixes(
                chances, lambda n_rows: self._cost.seconds(n_rows, context, draft_s)
            )
        sized = zip(sequences, proposals, sizes, strict=True)
        return [self._finish(sequence, proposal, n_below) for sequence, proposal, n_below in sized]

    def read(self, sequence: Sequence, predicted: TopTokens) -> None:
        """Store the target's predictions at the prompt's last tokens."""
        tokens = sequence.tokens
        n = len(predicted.tokens)
        ends = range(len(tokens) - n, len(tokens))
        self._keep([tuple(tokens[max(end - _LONGEST, 0) : end]) for end in ends], predicted)

    def learn(
        self, sequence: Sequence, tree: DraftTree, verdict: Verdict, predicted: TopTokens | None
    ) -> None:
        """Store the target's predictions at every node, those on the accepted path last.

        Later entries overwrite earlier ones, and the sequence continues along the accepted path.
        """
        proposal = self._proposals[sequence]
        nodes = [0, *verdict.path]
        after = [*tree.tokens[nodes[1:]].tolist(), verdict.bonus]
        if proposal.match is not None:
            self._rates.observe(proposal.match, after)
        proposal.tree.learn(nodes, after)
        self._bias(sequence).observe(proposal.expected, len(after))
        if predicted is not None:
            contexts = proposal.tree.contexts
            self._keep(contexts[: len(predicted.tokens)], predicted)
            on_path = TopTokens(predicted.tokens[nodes], predicted.probs[nodes])
            self._keep([contexts[node] for node in nodes], on_path)

    def end(self, sequence: Sequence) -> None:
        """Forget the tree of a sequence. The table is kept: other texts share its n-grams."""
        self._proposals.pop(sequence, None)

    def _keep(self, contexts: abc.Sequence[_Context], predicted: TopTokens) -> None:
        rows = zip(contexts, predicted.tokens.tolist(), predicted.probs.tolist(), strict=True)
        for context, tokens, probs in rows:
            self._table.keep(context, tokens, probs)

    def _calibration(self, temperature: float) -> KeyCalibration:
        if temperature not in self._calibrations:
            self._calibrations[temperature] = KeyCalibration(self._stats, temperature)
        return self._calibrations[temperature]

    def _bias(self, sequence: Sequence) -> ExpectedTokensBias:
        return self._stats.at("recycled", sequence.temperature).bias

    def _grown(self, sequence: Sequence, n_nodes: int, n_sequences: int) -> _Proposal:
        """Grow a tree while the time per token decreases, assuming equal trees per sequence."""
        n_levels = min(self.limits.n_levels, sequence.n_left)
        started = time.perf_counter()
        matches = find_matches(sequence, n_levels - 1) if n_nodes > 1 else []
        calibration = self._calibration(sequence.temperature)
        calibration.refresh()
        copied = copied_paths(matches, self._rates)
        tree = PredictedTree(self._table, calibration, sequence, copied, n_levels)
        size = n_nodes if self.limits.fixed_size else min(_N_FIRST, n_nodes)
        while True:
            tree.grow(size)
            n = len(tree.parents)
            if n < size or size == n_nodes:
                break
            rows = n_sequences * np.arange(1, n + 1)
            draft_s = time.perf_counter() - started
            pass_s = self._cost.seconds(rows, len(sequence.tokens), draft_s)
            if 1 + best_prefix(np.array(tree.chances[1:]), pass_s) <= size // 2:
                break
            size = min(2 * size, n_nodes)
        return _Proposal(tree, matches[0] if matches else None)

    def _finish(self, sequence: Sequence, proposal: _Proposal, n_below: int) -> DraftTree:
        """Cut a tree to the root and its `n_below` best nodes."""
        tree = proposal.tree
        n = 1 + n_below
        topology = Topology(np.array(tree.parents[:n]))
        proposal.expected = sum(tree.chances[:n])
        self._proposals[sequence] = proposal
        # A pass yields at most a token per level.
        expected = min(self._bias(sequence).corrected(proposal.expected), topology.n_levels)
        return DraftTree(topology, torch.tensor(tree.tokens[:n]), expected=expected)


DRAFTER = DrafterType(Recycling, gives_draft_probs=False, best_rule="match", default_sizes=_SIZES)
