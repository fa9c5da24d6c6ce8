"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057). Needs no draft model.

Guessed tokens, the window, are computed beside the candidates. In each pass every trajectory of the window grows by what the
target predicts at its end (Jacobi iteration), and its n-grams become candidates of later passes.
"""

import random
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field

import numpy as np
import torch

from offload_rt.executor.sequence import Sequence
from offload_rt.sampling import TopTokens
from offload_rt.speculate.ngrams import path_tree
from offload_rt.speculate.protocols import Drafter, DrafterType, DraftParts
from offload_rt.tree.choose import sizes_up_to
from offload_rt.tree.topology import DraftTree, Topology, Verdict

# Rows of a pass: half of them for the window, half for n-grams. The authors' n-grams have 5 tokens; 120 rows are their 15
# columns and 15 n-grams. More columns than the most brought nothing, longer n-grams next to nothing.
_SIZES = (840, 480, 240, 120, 56, 24, 8, 1)
_LENGTH, _LONGEST, _MOST_COLUMNS = 5, 8, 60
# Levels of the largest window.
_N_LEVELS = _MOST_COLUMNS + _LONGEST - 2
# Rows are free while a pass with them takes no longer than this factor of one without.
_FREE = 1.05
# N-grams kept for a sequence, some 200 bytes each.
_MOST_NGRAMS = 1 << 15
# Weight of the newest pass in the tokens that are expected of one.
_NEWEST = 0.1


class NgramPool:
    """N-grams by their first token, the newest of each; those whose first token was not met for long are dropped."""

    def __init__(self, n_most: int = _MOST_NGRAMS) -> None:
        self._n_most, self._n = n_most, 0
        self._ngrams: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()

    def add(self, ngrams: Iterable[tuple[int, ...]]) -> None:
        """Keep n-grams, each as the newest of its first token."""
        for first, *rest in ngrams:
            known = self._ngrams.pop(first, [])
            newer = [*(one for one in known if one != tuple(rest)), tuple(rest)][-_MOST_COLUMNS:]
            self._ngrams[first] = newer
            self._n += len(newer) - len(known)
        while self._n > self._n_most:
            self._n -= len(self._ngrams.popitem(last=False)[1])

    def after(self, token: int, n: int) -> list[tuple[int, ...]]:
        """What followed a token, the n newest first."""
        return self._ngrams.get(token, [])[: -n - 1 : -1]


@dataclass
class Window:
    """Trajectories: entry i of row k stands k + i tokens behind the last token of the sequence.

    rows  the first lacks its entry 0, which is that last token; a new window has one row, a full one a row less than an
          n-gram has tokens
    """

    rows: list[list[int]] = field(default_factory=lambda: [[]])

    def fit(self, n_columns: int, tokens: list[int], random_numbers: random.Random) -> None:
        """Cut it to so many columns, or fill it up by random ones of these tokens."""
        for level, row in enumerate(self.rows):
            n = n_columns - (level == 0)
            row[n:] = random_numbers.choices(tokens, k=max(n - len(row), 0))

    def advance(self, last: int, predicted: list[int], length: int) -> list[tuple[int, ...]]:
        """Go on by one token, however many were accepted; returns the n-grams of this length that were completed.

        last       token of the sequence, before it grew
        predicted  by the target after each entry of the last row
        """
        if len(self.rows) < length - 1:
            self.rows = [*(row[1:] for row in self.rows), predicted[1:]]
            return []
        ngrams = list(zip([last, *self.rows[0]], *self.rows[1:], predicted, strict=True))
        self.rows = [self.rows[1][1:], *self.rows[2:], predicted]
        return ngrams


@dataclass
class _State:
    """Of one sequence.

    length     of its n-grams, in tokens
    n_columns  that the window has in the pass under way
    """

    length: int
    pool: NgramPool = field(default_factory=NgramPool)
    window: Window = field(default_factory=Window)
    random_numbers: random.Random = field(default_factory=lambda: random.Random(0))
    n_columns: int = 0

    def fit(self, text: list[int], n_columns: int, n_levels: int) -> None:
        """Give the window so many columns, or as many as so many levels leave room for."""
        height = len(self.window.rows)
        # While rows are lacking it has a column more for each: it loses one with each that is added.
        most = n_columns * (self.length - 1) // height, n_levels - height + 1
        self.n_columns = max(min(n_columns + self.length - 1 - height, *most), 0)
        if self.n_columns:
            self.window.fit(self.n_columns, text, self.random_numbers)

    def add_text(self, tokens: list[int]) -> None:
        """Keep the n-grams of a text."""
        self.pool.add(zip(*(tokens[k:] for k in range(self.length)), strict=False))


class Lookahead(Drafter):
    """A window as large as rows are free, and the n-grams that begin with the last token."""

    n_predicted = 1

    def __init__(self, parts: DraftParts) -> None:
        self.limits, self._cost = parts.limits, parts.cost
        self._states: dict[Sequence, _State] = {}
        self._expected = 1.0

    def propose(self, sequences: Several[Sequence], n_nodes: int) -> list[DraftTree]:
        """One tree for each sequence, the window behind its candidates."""
        return [self._tree(one, self._n_free(one, n_nodes, len(sequences))) for one in sequences]

    def learn(self, sequence: Sequence, tree: DraftTree, verdict: Verdict, predicted: TopTokens | None) -> None:
        """Let the window go on, and keep its n-grams and those of the text."""
        state, taken = self._states[sequence], [*tree.tokens[list(verdict.path)].tolist(), verdict.bonus]
        self._expected += _NEWEST * (len(taken) - self._expected)
        if state.n_columns and predicted is not None:
            n = len(tree.topology)
            # In a window of one row the first entry is the root.
            last_row = [0, *range(n - tree.n_unverified, n)][-state.n_columns :]
            tokens = predicted.tokens[last_row, 0].tolist()
            state.pool.add(state.window.advance(sequence.tokens[-1], tokens, state.length))
        state.add_text([*sequence.tokens[1 - state.length :], *taken])

    def end(self, sequence: Sequence) -> None:
        """Forget its window and its n-grams."""
        self._states.pop(sequence, None)

    def _n_free(self, sequence: Sequence, n_nodes: int, n_sequences: int) -> int:
        """Rows that cost next to nothing, the root's included; all where a size was asked for."""
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
        paths = dict.fromkeys(one[:k] for one in ngrams for k in range(1, min(len(one) + 1, n_levels)))
        n_candidates = n_rows - max(n_columns * (state.length - 1) - 1, 0)
        parents, tokens = path_tree(sequence.tokens[-1], [*paths][: n_candidates - 1])
        n_candidates = len(tokens)
        if state.n_columns:
            _append_window(parents, tokens, state.window.rows)
        expected = min(self._expected, max(map(len, paths), default=0) + 1)
        n_unverified = len(tokens) - n_candidates
        return DraftTree(Topology(np.array(parents)), torch.tensor(tokens), None, expected, n_unverified)


def _append_window(parents: list[int], tokens: list[int], rows: list[list[int]]) -> None:
    """Add its rows: the first a chain below the root, each other one below the row before it, entry by entry."""
    above: list[int] = []
    for level, row in enumerate(rows):
        places = [*range(len(tokens), len(tokens) + len(row))]
        above = [0, *places] if level == 0 else above
        parents += above[: len(row)]
        above = above if level == 0 else places
        tokens += row


DRAFTER = DrafterType(
    Lookahead, needs_model=False, gives_draft_probs=False, best_rule="match", default_sizes=_SIZES, n_levels=_N_LEVELS
)
