"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057). Needs no draft model.

A window of guessed tokens is computed beside the candidates. Each pass extends every trajectory of
the window by the target's prediction at its end (Jacobi iteration). The resulting n-grams become
candidates of later passes.
"""

import random
from collections import OrderedDict, abc
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from offload_rt.cost.tree_size import sizes_up_to
from offload_rt.executor.sequence import Sequence
from offload_rt.sampling import TopTokens
from offload_rt.speculate.protocols import Drafter, DrafterType, DraftParts
from offload_rt.tree.topology import DraftTree, Topology, Verdict

# Rows of a pass: half for the window, half for n-grams. The authors use n-grams of 5 tokens; 120
# rows equal their 15 columns and 15 n-grams. More than 60 columns gained nothing, longer n-grams
# almost nothing.
_SIZES = (840, 480, 240, 120, 56, 24, 8, 1)
_LENGTH = 5
_LONGEST = 8
_MOST_COLUMNS = 60
# Levels of the largest window.
_N_LEVELS = _MOST_COLUMNS + _LONGEST - 2
# Rows count as free while they extend the pass by at most this factor.
_FREE = 1.05
# Maximum n-grams per sequence, about 200 bytes each.
_MOST_NGRAMS = 1 << 15
# Weight of the newest pass in the expected tokens per pass.
_NEWEST = 0.1


class NgramPool:
    """N-grams indexed by first token. The least recently updated first tokens are evicted."""

    def __init__(self, capacity: int = _MOST_NGRAMS) -> None:
        self._capacity = capacity
        self._n = 0
        self._ngrams: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()

    def add(self, ngrams: Iterable[tuple[int, ...]]) -> None:
        """Add n-grams, each as the newest of its first token."""
        for first, *rest in ngrams:
            known = self._ngrams.pop(first, [])
            newer = [*(ngram for ngram in known if ngram != tuple(rest)), tuple(rest)]
            self._ngrams[first] = newer[-_MOST_COLUMNS:]
            self._n += len(self._ngrams[first]) - len(known)
        while self._n > self._capacity:
            self._n -= len(self._ngrams.popitem(last=False)[1])

    def after(self, token: int, n: int) -> list[tuple[int, ...]]:
        """Return the n newest continuations of a token, newest first."""
        return self._ngrams.get(token, [])[: -n - 1 : -1]


@dataclass
class _State:
    """Lookahead state of a sequence: n-grams, and a window of trajectories.

    length     tokens per n-gram
    rows       entry i of row k is a guess k + i tokens after the sequence's last token; the first
               row omits entry 0, the last token itself; a new window has a single row, a full
               window `length - 1` rows
    n_columns  columns of the window in the current pass
    """

    length: int
    pool: NgramPool = field(default_factory=NgramPool)
    rows: list[list[int]] = field(default_factory=lambda: [[]])
    random_numbers: random.Random = field(default_factory=lambda: random.Random(0))
    n_columns: int = 0

    def fit(self, text: list[int], n_columns: int, n_levels: int) -> None:
        """Resize the window to `n_columns`, limited by `n_levels`; new entries are random."""
        height = len(self.rows)
        # A window with missing rows has an extra column per missing row, and loses a column with
        # each added row.
        by_rows = n_columns * (self.length - 1) // height
        by_levels = n_levels - height + 1
        wanted = n_columns + self.length - 1 - height
        self.n_columns = max(min(wanted, by_rows, by_levels), 0)
        for level, row in enumerate(self.rows if self.n_columns else ()):
            n = self.n_columns - (level == 0)
            row[n:] = self.random_numbers.choices(text, k=max(n - len(row), 0))

    def advance(self, last: int, predicted: list[int]) -> None:
        """Advance the window by a token, whatever number was accepted; store completed n-grams.

        last       last token of the sequence, before it was extended
        predicted  target predictions after each entry of the last row
        """
        if len(self.rows) < self.length - 1:
            self.rows = [*(row[1:] for row in self.rows), predicted[1:]]
            return
        self.pool.add(zip([last, *self.rows[0]], *self.rows[1:], predicted, strict=True))
        self.rows = [self.rows[1][1:], *self.rows[2:], predicted]

    def add_text(self, tokens: list[int]) -> None:
        """Add all n-grams of a text."""
        self.pool.add(zip(*(tokens[k:] for k in range(self.length)), strict=False))


class Lookahead(Drafter):
    """Propose a window within the free rows, and n-grams starting with the last token."""

    n_predicted = 1

    def __init__(self, parts: DraftParts) -> None:
        self.limits = parts.limits
        self._cost = parts.cost
        self._states: dict[Sequence, _State] = {}
        self._expected = 1.0

    def propose(self, sequences: abc.Sequence[Sequence], n_nodes: int) -> list[DraftTree]:
        """Propose a tree per sequence; its window follows its candidates as unverified nodes."""
        n = len(sequences)
        return [self._tree(sequence, self._n_free(sequence, n_nodes, n)) for sequence in sequences]

    def learn(
        self, sequence: Sequence, tree: DraftTree, verdict: Verdict, predicted: TopTokens | None
    ) -> None:
        """Advance the window, and add its n-grams and the n-grams of the accepted text."""
        state = self._states[sequence]
        taken = [*tree.tokens[list(verdict.path)].tolist(), verdict.bonus]
        self._expected += _NEWEST * (len(taken) - self._expected)
        if state.n_columns and predicted is not None:
            n = len(tree.topology)
            # A window with a single row starts at the root.
            last_row = [0, *range(n - tree.n_unverified, n)][-state.n_columns :]
            tokens = predicted.tokens[last_row, 0].tolist()
            state.advance(sequence.tokens[-1], tokens)
        state.add_text([*sequence.tokens[1 - state.length :], *taken])

    def end(self, sequence: Sequence) -> None:
        self._states.pop(sequence, None)

    def _n_free(self, sequence: Sequence, n_nodes: int, n_sequences: int) -> int:
        """Return the number of nearly free rows, including the root; all for a fixed size."""
        if self.limits.fixed_size:
            return n_nodes
        sizes = sizes_up_to(n_nodes)
        seconds = self._cost.seconds(n_sequences * sizes, len(sequence.tokens))
        return int(sizes[seconds <= _FREE * seconds[0]].max())

    def _tree(self, sequence: Sequence, n_rows: int) -> DraftTree:
        state = self._states.get(sequence)
        if state is None:
            length = min(max(_LENGTH, 1 + n_rows // (2 * _MOST_COLUMNS)), _LONGEST)
            state = self._states[sequence] = _State(length)
            state.add_text(sequence.tokens)
        n_levels = min(self.limits.n_levels, sequence.n_left)
        n_columns = min(n_rows // (2 * (state.length - 1)), _MOST_COLUMNS)
        state.fit(sequence.tokens, n_columns, n_levels)
        ngrams = state.pool.after(sequence.tokens[-1], max(n_columns, 1))
        # Each path of this prefix tree extends an earlier path by a token.
        paths = dict.fromkeys(
            ngram[:k]
            for ngram in ((), *ngrams)
            for k in range(min(sequence.n_allowed(ngram) + 1, n_levels))
        )
        n_candidates = n_rows - max(n_columns * (state.length - 1) - 1, 0)
        nodes = {path: node for node, path in enumerate([*paths][:n_candidates])}
        parents = [nodes[path[:-1]] if path else -1 for path in nodes]
        tokens = [path[-1] if path else sequence.tokens[-1] for path in nodes]
        if state.n_columns:
            _append_window(parents, tokens, state.rows)
        expected = min(self._expected, max(map(len, paths)) + 1)
        n_unverified = len(tokens) - len(nodes)
        topology = Topology(np.array(parents))
        return DraftTree(topology, torch.tensor(tokens), None, expected, n_unverified)


def _append_window(parents: list[int], tokens: list[int], rows: list[list[int]]) -> None:
    """Append the window: row 0 as a chain below the root, row k entry by entry below row k - 1."""
    above: list[int] = []
    for level, row in enumerate(rows):
        places = [*range(len(tokens), len(tokens) + len(row))]
        above = [0, *places] if level == 0 else above
        parents += above[: len(row)]
        above = above if level == 0 else places
        tokens += row


DRAFTER = DrafterType(
    Lookahead, gives_draft_probs=False, best_rule="match", default_sizes=_SIZES, n_levels=_N_LEVELS
)
