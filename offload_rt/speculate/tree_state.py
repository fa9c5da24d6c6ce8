"""Trees in growth: the rows of a sequence's tree, and the protocol of tree builders."""

from collections import abc
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from offload_rt.errors import NumericsError
from offload_rt.executor.cuda_graphs import Reduce
from offload_rt.executor.runner import Runner
from offload_rt.executor.sequence import Sequence
from offload_rt.executor.step import Step
from offload_rt.ops import to_device
from offload_rt.sampling import generator_on, rejected
from offload_rt.speculate.child_sampling import fitted
from offload_rt.speculate.rows import ROWS_PER_NODE, changed_rows
from offload_rt.tree.topology import GrowingTree, Topology

# Divisor of logits with noise before the softmax: the size of a draft's errors, at any temperature.
_ERROR = 0.75
# Logit of tokens outside the draft's vocabulary beside a grammar.
_LEAST = -1e30

Path = tuple[int, ...]  # tokens below a node


class TreeState:
    """Draft rows of a tree below a sequence's last token. Row 0 is the root.

    Leaves without need for logits have no row.

    vocab_size  vocabulary of the target
    most_rows   row capacity
    lacking     sequence tokens missing in the draft's cache, computed before the tree's rows
    generator   the sequence's generator on the device, for drawing children
    ahead       tokens assumed between the sequence and the root's children
    noise       (levels, vocabulary) float32: the target's sampling noise per level, times the
                sequence's temperature; None if the tree is not coupled
    error       reason to discard the tree, or None
    n_missing   sequence tokens that the draft's cache lacked when the tree started
    """

    error: NumericsError | None = None
    n_missing = 0

    def __init__(
        self, vocab_size: int, most_rows: int, sequence: Sequence, device: torch.device
    ) -> None:
        self.vocab_size = vocab_size
        self.sequence = sequence
        self.generator = generator_on(device, sequence.generator)
        self.lacking: list[int] = []
        self._tree = GrowingTree(most_rows)
        self.clear(sequence.tokens[-1])
        self.ahead: Path = ()
        self.noise: Tensor | None = None
        self.most_rows = most_rows
        self._probs = torch.empty(0)

    @property
    def new_rows(self) -> slice:
        """Rows added since the last step."""
        return slice(self.n_done, len(self.tokens))

    @property
    def new_depths(self) -> np.ndarray:
        """(n,) depths of the rows added since the last step."""
        return self._tree.depths[self.new_rows]

    def computed(self) -> None:
        """Mark all rows as computed."""
        self.n_done = len(self.tokens)

    def clear(self, token: int) -> None:
        """Restart from the last token of the sequence."""
        self.tokens = [token]
        self.n_done = 0
        self.error = None
        self._tree.clear()

    def room(self, n: int, like: Tensor) -> Tensor:
        """Return a buffer (n, vocabulary) for a tree's distributions, reused by later trees."""
        if len(self._probs) < n:
            self._probs = like.new_empty(self.most_rows // ROWS_PER_NODE, like.shape[1])
        return self._probs[:n]

    def changed(self, logits: Tensor, start: int) -> Tensor:
        """Apply grammar and noise to logits (rows, vocabulary) of the latest rows from `start` on.

        With noise, the argmax of a row is the guess of the target's token. A thread would not pay
        on a CPU: waiting for the interpreter lock takes longer.
        """
        rows = slice(self.n_done + start, self.n_done + start + len(logits))
        if self.sequence.grammar is not None:
            paths = Topology(self._tree.parents[: len(self.tokens)]).paths(self.tokens)
            new_paths = [self.ahead + path for path in paths[rows]]
            (masks,) = to_device([self.sequence.grammar.masks_after(new_paths)], logits.device)
            # Tokens outside the draft's vocabulary remain candidates: a row is never empty.
            logits = fitted(logits, self.vocab_size).clamp_min(_LEAST)
            logits = logits.masked_fill_(rejected(masks, self.vocab_size), -torch.inf)
        if self.noise is not None:
            levels = torch.from_numpy(self._tree.depths[rows]).long()
            noise = self.noise.index_select(0, *to_device([levels], self.noise.device))
            logits = noise.add_(fitted(logits, self.vocab_size)).div_(_ERROR)
        return logits

    def add(self, parents: abc.Sequence[int], tokens: abc.Sequence[int]) -> range:
        """Add rows to compute next; return them."""
        self.tokens += tokens
        return self._tree.add(parents)


class DraftState(TreeState):
    """Draft cache of a sequence: its committed tokens, and the rows of a tree.

    Target tokens outside the draft's vocabulary are replaced by the draft's last token.
    """

    def __init__(
        self, runner: Runner, cache: int, vocab_size: int, most_rows: int, sequence: Sequence
    ) -> None:
        super().__init__(vocab_size, most_rows, sequence, runner.device)
        self._runner = runner
        self.cache = cache
        self._last_token = runner.spec.vocab_size - 1
        self.n_prompt = 0

    def start(self, tokens: list[int], n_prompt: int) -> None:
        """Start a tree below the last of `tokens`, reusing rows of the previous tree."""
        self.commit_path(tokens)
        n_kept = self._runner.rewind(self.cache, self._known(tokens[:-1]))
        self.lacking = tokens[n_kept:-1]
        self.n_missing = len(self.lacking)
        self.n_prompt = n_prompt
        self.clear(tokens[-1])

    def step(self, reduce: Reduce | None) -> Step:
        """Return the next step: tokens missing in the cache, and rows added since the last step."""
        tokens = torch.tensor(self._known(self.lacking + self.tokens))
        # Missing tokens are computed together with the root, before all further rows.
        tree = Topology.chain(len(tokens)) if self.lacking else self._tree
        places = len(self.tokens) - self.n_done, self.n_prompt, self.n_done
        return Step(self.cache, tokens, tree, *places, reduce, len(self.lacking))

    def computed(self) -> None:
        """Commit missing tokens and mark all rows as computed."""
        if self.lacking:
            self._runner.commit(self.cache, range(len(self.lacking)))
            self.lacking = []
        super().computed()

    def commit_path(self, tokens: list[int]) -> None:
        """Commit the rows of the previous tree that the sequence continued along, once."""
        n = self._runner.n_committed(self.cache)
        if self.n_done > 0 and n < len(tokens) - 1 and tokens[n] == self.tokens[0]:
            self._runner.commit(self.cache, self._path(tokens[n + 1 : -1]))
        self.n_done = 0

    def _path(self, tokens: list[int]) -> list[int]:
        rows = [0]
        for row, parent in enumerate(self._tree.parents[1 : self.n_done].tolist(), 1):
            if parent == rows[-1] and tokens[len(rows) - 1 : len(rows)] == [self.tokens[row]]:
                rows.append(row)
        return rows

    def _known(self, tokens: list[int]) -> list[int]:
        if max(tokens, default=0) <= self._last_token:
            return tokens
        return [min(token, self._last_token) for token in tokens]


class TreeBuilder(Protocol):
    """A growing tree of a sequence."""

    state: TreeState

    @property
    def reduce(self) -> Reduce | None:
        """Reduction of the latest logits on the device, e.g. to top tokens, or None."""

    def select(self, out: Tensor) -> Tensor:
        """Select the host's input from logits (rows, vocabulary) or `reduce` output."""

    def extend(self, selected: Tensor) -> None:
        """Grow by the selection, on the host, and add rows to compute next.

        Raises NumericsError for NaN or Inf logits.
        """


def captured(builder: TreeBuilder) -> Reduce | None:
    """Return the reduction to run within the pass; None if noise or masks change logits first."""
    state = builder.state
    is_final = state.noise is None and state.sequence.grammar is None
    return builder.reduce if is_final else None


def select_tokens(builder: TreeBuilder, out: Tensor) -> Tensor:
    """Select the host's input from the pass output `out` of the latest rows."""
    if captured(builder) is not None:
        return builder.select(out)
    state = builder.state
    reduce = builder.reduce
    if reduce is None:
        return builder.select(state.changed(out, 0))
    n_rows = changed_rows(state.vocab_size)
    starts = range(0, len(out), n_rows)
    changed = [reduce(state.changed(out[start : start + n_rows], start)) for start in starts]
    return builder.select(torch.cat(changed))
