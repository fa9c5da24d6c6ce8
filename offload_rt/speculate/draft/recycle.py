"""Recycled distributions: trees of what the target predicted at the rows it computed. Needs no draft model.

Token Recycling (Luo et al. 2024, arXiv 2408.08696) with three changes: a prediction is kept, with its probabilities, under the
last three, two and one tokens before it; the tree grows best-first by their products; prompt lookup adds its continuations.
"""

import heapq
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass

import numpy as np
import torch

from offload_rt.executor.sequence import Sequence
from offload_rt.sampling import TopTokens
from offload_rt.speculate.ngrams import Match, MatchRates, copied_paths, find_matches
from offload_rt.speculate.protocols import Drafter, DrafterType, DraftParts
from offload_rt.tree.choose import ExpectedTokensBias, best_prefix, best_prefixes
from offload_rt.tree.topology import DraftTree, Topology, Verdict

_SIZES = (512, 256, 128, 64, 32, 16, 8, 4, 1)
# Tokens that a prediction is kept under, the most; and keys of all sequences together, some 300 bytes each.
_LONGEST, _MOST_KEYS = 3, 1 << 17
# Nodes that a tree grows to at first. It grows to twice as many as long as more than half of them are verified.
_N_FIRST = 16

_Context = tuple[int, ...]


class PredictionTable:
    """The target's most probable tokens by the last tokens before them, the newest prediction of each."""

    def __init__(self, n_most: int = _MOST_KEYS) -> None:
        self._n_most = n_most
        self._after: OrderedDict[_Context, tuple[array[int], array[float]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._after)

    def __contains__(self, context: _Context) -> bool:
        return context in self._after

    def keep(self, context: _Context, tokens: list[int], probs: list[float]) -> None:
        """Keep a prediction under all ends of a context; keys that were not seen for longest give way."""
        found = array("q", tokens), array("f", probs)
        for k in range(len(context)):
            self._after[context[k:]] = found
            self._after.move_to_end(context[k:])
        while len(self._after) > self._n_most:
            self._after.popitem(last=False)

    def find(self, context: _Context) -> Iterator[tuple[int, float]]:
        """Tokens and probabilities after the longest end of a context that has a prediction."""
        for k in range(len(context)):
            if found := self._after.get(context[k:]):
                return zip(*found, strict=True)
        return iter(())


class PredictedTree:
    """The root and the nodes with the highest chances, in their order.

    tokens  of the sequence
    copied  paths of tokens below the root that something else proposes, with their chances
    """

    def __init__(
        self, table: PredictionTable, tokens: list[int], copied: dict[tuple[int, ...], float], n_levels: int
    ) -> None:
        self._table, self._copied, self._n_levels = table, copied, n_levels
        self.parents, self.tokens, self.chances = [-1], [tokens[-1]], [1.0]
        self.contexts = [tuple(tokens[-_LONGEST:])]
        self._paths: list[tuple[int, ...]] = [()]
        self._below: dict[tuple[int, ...], list[int]] = {}
        for path in copied:
            self._below.setdefault(path[:-1], []).append(path[-1])
        # The most probable candidate first: minus its chance, parent, token.
        self._best: list[tuple[float, int, int]] = []
        self._open(0)

    def grow(self, n_nodes: int) -> None:
        """Add nodes until there are so many, or no candidates."""
        while self._best and len(self.parents) < n_nodes:
            chance, parent, token = heapq.heappop(self._best)
            self.parents.append(parent)
            self.tokens.append(token)
            self.chances.append(-chance)
            self.contexts.append((*self.contexts[parent], token)[-_LONGEST:])
            self._paths.append((*self._paths[parent], token))
            self._open(len(self.parents) - 1)

    def _open(self, node: int) -> None:
        """Let the children of a node compete."""
        path, chance = self._paths[node], self.chances[node]
        if len(path) + 1 >= self._n_levels:
            return
        chances = {token: chance * p for token, p in self._table.find(self.contexts[node])}
        for token in self._below.get(path, ()):
            copied = chance * self._copied[*path, token] / self._copied.get(path, 1.0)
            chances[token] = max(chances.get(token, 0.0), copied)
        for token, p in chances.items():
            heapq.heappush(self._best, (-p, node, token))


@dataclass
class _Proposal:
    """A tree under way, the best match of it, and the tokens it promises before correction."""

    tree: PredictedTree
    match: Match | None
    expected: float = 1.0


class Recycling(Drafter):
    """Trees as large as it pays, by one table for all sequences."""

    n_predicted = 8
    reads_prompt = True

    def __init__(self, parts: DraftParts) -> None:
        self.limits, self._cost, self._stats = parts.limits, parts.cost, parts.pair_stats
        self._table, self._rates = PredictionTable(), MatchRates()
        self._proposals: dict[Sequence, _Proposal] = {}

    def propose(self, sequences: Several[Sequence], n_nodes: int) -> list[DraftTree]:
        """One tree for each sequence, of the nodes that are worth most among those of all."""
        started = time.perf_counter()
        grown = [self._grown(sequence, n_nodes, len(sequences)) for sequence in sequences]
        chances = [np.array(one.tree.chances[1:]) for one in grown]
        sizes = [len(one) for one in chances]
        if not self.limits.fixed_size:
            context, draft_s = max(len(one.tokens) for one in sequences), time.perf_counter() - started
            sizes = best_prefixes(chances, lambda n_rows: self._cost.seconds(n_rows, context, draft_s))
        return [self._finish(*one) for one in zip(sequences, grown, sizes, strict=True)]

    def read(self, sequence: Sequence, predicted: TopTokens) -> None:
        """Keep what the target predicts in a prompt."""
        tokens, n = sequence.tokens, len(predicted.tokens)
        ends = range(len(tokens) - n, len(tokens))
        self._keep([tuple(tokens[max(end - _LONGEST, 0) : end]) for end in ends], predicted)

    def learn(self, sequence: Sequence, tree: DraftTree, verdict: Verdict, predicted: TopTokens | None) -> None:
        """Keep what the target predicts at every node, on the accepted path last: there it was asked for."""
        proposal, nodes = self._proposals[sequence], [0, *verdict.path]
        after = [*tree.tokens[nodes[1:]].tolist(), verdict.bonus]
        if proposal.match is not None:
            self._rates.observe(proposal.match, after)
        self._bias(sequence).observe(proposal.expected, len(after))
        if predicted is not None:
            contexts = proposal.tree.contexts
            self._keep(contexts[: len(predicted.tokens)], predicted)
            on_path = TopTokens(predicted.tokens[nodes], predicted.probs[nodes])
            self._keep([contexts[node] for node in nodes], on_path)

    def end(self, sequence: Sequence) -> None:
        """Forget its tree; predictions stay, for other texts have the same words."""
        self._proposals.pop(sequence, None)

    def _keep(self, contexts: Several[_Context], predicted: TopTokens) -> None:
        for context, *found in zip(contexts, predicted.tokens.tolist(), predicted.probs.tolist(), strict=True):
            self._table.keep(context, *found)

    def _bias(self, sequence: Sequence) -> ExpectedTokensBias:
        return self._stats.at("recycled", sequence.temperature).bias

    def _grown(self, sequence: Sequence, n_nodes: int, n_sequences: int) -> _Proposal:
        """A tree that has grown for as long as it pays, if the others of the pass are alike."""
        n_levels, started = min(self.limits.n_levels, sequence.n_left), time.perf_counter()
        matches = find_matches(sequence.tokens, n_levels - 1) if n_nodes > 1 else []
        tree = PredictedTree(self._table, sequence.tokens, copied_paths(matches, self._rates), n_levels)
        n_most = n_nodes if self.limits.fixed_size else min(_N_FIRST, n_nodes)
        while True:
            tree.grow(n_most)
            n = len(tree.parents)
            if n < n_most or n_most == n_nodes:
                break
            rows, draft_s = n_sequences * np.arange(1, n + 1), time.perf_counter() - started
            pass_s = self._cost.seconds(rows, len(sequence.tokens), draft_s)
            if 1 + best_prefix(np.array(tree.chances[1:]), pass_s) <= n_most // 2:
                break
            n_most = min(2 * n_most, n_nodes)
        return _Proposal(tree, matches[0] if matches else None)

    def _finish(self, sequence: Sequence, proposal: _Proposal, n_below: int) -> DraftTree:
        """The root and so many of the best nodes below it."""
        tree, n = proposal.tree, 1 + n_below
        topology, proposal.expected = Topology(np.array(tree.parents[:n])), sum(tree.chances[:n])
        self._proposals[sequence] = proposal
        # One token for each level is the most that can come of it.
        expected = min(self._bias(sequence).corrected(proposal.expected), topology.n_levels)
        return DraftTree(topology, torch.tensor(tree.tokens[:n]), expected=expected)


DRAFTER = DrafterType(Recycling, needs_model=False, gives_draft_probs=False, best_rule="match", default_sizes=_SIZES)
