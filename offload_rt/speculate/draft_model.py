"""Resident draft model: a cache per sequence, trees computed level by level."""

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from offload_rt.errors import NumericsError
from offload_rt.executor.cuda_graphs import Reduce
from offload_rt.executor.runner import Runner
from offload_rt.executor.sequence import Sequence
from offload_rt.executor.step import Step
from offload_rt.kv.sparse import SparseCache
from offload_rt.ops import to_device, to_host
from offload_rt.sampling import generator_on, rejected
from offload_rt.speculate.child_sampling import fitted
from offload_rt.speculate.protocols import ROWS_PER_NODE, draft_rows, view_rows
from offload_rt.system.trace import DRAFT, Trace
from offload_rt.tree.topology import GrowingTree, Topology

# First tokens that stay visible to a draft with a short context.
_N_SINKS = 16
# Divisor of logits with noise before the softmax: the size of a draft's errors, at any temperature.
_ERROR = 0.75
# Logit of tokens outside the draft's vocabulary beside a grammar.
_LEAST = -1e30


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
    recomputes  block drafters: compute blocks for the rows to add, instead of using those of their
                parents
    """

    error: NumericsError | None = None
    recomputes = True

    def __init__(
        self, vocab_size: int, most_rows: int, sequence: Sequence, device: torch.device
    ) -> None:
        self.vocab_size = vocab_size
        self.sequence = sequence
        self.generator = generator_on(device, sequence.generator)
        self.tokens: list[int] = []
        self.lacking: list[int] = []
        self._tree = GrowingTree(most_rows)
        self.n_done = 0
        self.ahead: tuple[int, ...] = ()
        self.noise: Tensor | None = None
        self._most_rows = most_rows
        self._probs = torch.empty(0)

    @property
    def new_rows(self) -> slice:
        """Rows added since the last step."""
        return slice(self.n_done, len(self.tokens))

    @property
    def new_depths(self) -> np.ndarray:
        """(n,) depths of the rows added since the last step."""
        return self._tree.depths[self.new_rows]

    @property
    def n_recomputable(self) -> int:
        """Maximum rows of a round with blocks of their own."""
        return self._most_rows

    def is_recomputed(self, row: int) -> bool:
        """Return whether a row does not depend on the block of its parent."""
        return True

    def computed(self) -> None:
        """Mark all rows as computed."""
        self.n_done = len(self.tokens)

    def clear(self, token: int) -> None:
        """Restart from the last token of the sequence."""
        self.tokens = [token]
        self.n_done = 0
        self.error = None
        self._tree.clear()

    def has_room(self, n_nodes: int) -> bool:
        """Return whether a tree of this size fits."""
        return ROWS_PER_NODE * n_nodes <= self._most_rows

    def room(self, n: int, like: Tensor) -> Tensor:
        """Return a buffer (n, vocabulary) for a tree's distributions, reused by later trees."""
        if len(self._probs) < n:
            self._probs = like.new_empty(self._most_rows // ROWS_PER_NODE, like.shape[1])
        return self._probs[:n]

    def masked(self, logits: Tensor) -> Tensor:
        """Exclude tokens outside the grammar in logits (rows, vocabulary) of the latest rows.

        A thread would not pay on a CPU: waiting for the interpreter lock takes longer.
        """
        if self.sequence.grammar is None:
            return logits
        paths = Topology(self._tree.parents[: len(self.tokens)]).paths(self.tokens)
        new_paths = [self.ahead + path for path in paths[self.new_rows]]
        (masks,) = to_device([self.sequence.grammar.masks_after(new_paths)], logits.device)
        # Tokens outside the draft's vocabulary remain candidates: a row is never empty.
        logits = fitted(logits, self.vocab_size).clamp_min(_LEAST)
        return logits.masked_fill_(rejected(masks, self.vocab_size), -torch.inf)

    def perturbed(self, logits: Tensor) -> Tensor:
        """Add noise to the logits (rows, vocabulary) of the latest rows.

        The argmax of a row is the guess of the target's token.
        """
        assert self.noise is not None, "the tree is coupled"
        (levels,) = to_device([torch.tensor(self._tree.depths[-len(logits) :])], self.noise.device)
        return self.noise.index_select(0, levels).add_(fitted(logits, self.vocab_size)).div_(_ERROR)

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
        self.n_prompt = n_prompt
        self.clear(tokens[-1])

    def step(self, reduce: Reduce | None) -> Step:
        """Return the next step: tokens missing in the cache, and rows added since the last step."""
        tokens = torch.tensor(self._known(self.lacking + self.tokens))
        # Missing tokens are computed together with the root, before all further rows.
        tree = Topology.chain(len(tokens)) if self.lacking else self._tree
        n_new = len(self.tokens) - self.n_done
        return Step(
            self.cache, tokens, tree, n_new, self.n_prompt, self.n_done, reduce, len(self.lacking)
        )

    def computed(self) -> None:
        """Commit missing tokens and mark all rows as computed."""
        if self.lacking:
            self._runner.commit(self.cache, range(len(self.lacking)))
            self.lacking = []
        super().computed()

    def commit_path(self, tokens: list[int]) -> None:
        """Commit the rows of the previous tree that the sequence continued along."""
        n = self._runner.n_committed(self.cache)
        if self.n_done == 0 or n >= len(tokens) - 1 or tokens[n] != self.tokens[0]:
            return
        self._runner.commit(self.cache, self._path(tokens[n + 1 : -1]))

    def _path(self, tokens: list[int]) -> list[int]:
        """Return the root and the longest path of rows with these tokens."""
        children = {
            (int(self._tree.parents[row]), self.tokens[row]): row for row in range(1, self.n_done)
        }
        rows = [0]
        for token in tokens:
            row = children.get((rows[-1], token))
            if row is None:
                break
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


_Builder = TypeVar("_Builder", bound=TreeBuilder)


@dataclass(eq=False, repr=False)
class DraftModel:
    """Compute draft logits for the trees of all sequences together.

    runner      computes the draft model
    vocab_size  vocabulary of the target
    max_levels  maximum tree levels; the draft's context reserves as many tokens
    trace       receives a span per pass
    context     context limit in tokens; None for all positions of the draft
    """

    state_type: ClassVar[type[DraftState]] = DraftState

    runner: Runner
    vocab_size: int
    max_levels: int
    trace: Trace
    context: int | None = None

    def __post_init__(self) -> None:
        n_positions = self.runner.spec.max_positions
        self._limit = max(min(self.context or n_positions, n_positions) - self.max_levels, 1)
        self._states: dict[Sequence, DraftState] = {}

    def begin(self, sequence: Sequence, cache: int, n_nodes: int) -> None:
        """Register a sequence with its target cache and maximum tree size, see `SelfDraftModel`."""

    def can_draft(self, sequence: Sequence) -> bool:
        """Return whether a tree can be drafted for a sequence."""
        return True

    def observe(self, sequence: Sequence, first: int, states: abc.Sequence[Tensor]) -> None:
        """Receive hidden states of the target, see `Drafter.observe`; draft models ignore them."""

    def start(
        self,
        sequence: Sequence,
        n_nodes: int,
        is_alone: bool,
        n_coupled: int = 0,
        path: abc.Sequence[int] = (),
    ) -> TreeState:
        """Start a tree at the end of a sequence, or of the visible part in a shorter context.

        is_alone   no other sequence is drafted
        n_coupled  levels ranked with the target's sampling noise
        path       tokens assumed to follow the sequence
        """
        state = self._begin(sequence, n_nodes, is_alone, path)
        n_ahead = len(path)
        state.ahead = tuple(path)
        state.noise = None
        if n_coupled:
            place = len(sequence.tokens)
            n_levels = n_ahead + n_coupled
            noise = sequence.noise.at(place, n_levels, self.vocab_size, self.runner.device)[
                n_ahead:
            ]
            state.noise = noise.log().mul_(-sequence.temperature)
        return state

    def _begin(
        self, sequence: Sequence, n_nodes: int, is_alone: bool, path: abc.Sequence[int] = ()
    ) -> TreeState:
        known = self._states.get(sequence)
        # A tree may outgrow the first tree, when other sequences have ended.
        if known is None or known.sequence is not sequence or not known.has_room(n_nodes):
            if self.runner.has_graphs:  # graphs need a single buffer, so free finished caches
                for old in [old for old in self._states if old.finish_reason]:
                    self.end(old)
            longest = min(sequence.longest, self._limit) + self.max_levels
            n_rows = draft_rows(min(longest, sequence.longest), n_nodes)
            if known is None:
                cache = self.runner.new_cache(n_rows, is_alone)
            else:
                cache = self.runner.renew_cache(
                    known.cache, n_rows, ROWS_PER_NODE * n_nodes, is_alone
                )
            self._add_state(sequence, cache, n_nodes)
        state = self._states[sequence]
        seen = self._seen(sequence)
        n_gone = len(sequence.tokens) - len(seen)
        state.start([*seen, *path], max(sequence.n_prompt - n_gone, 1))
        return state

    def _add_state(self, sequence: Sequence, cache: int, n_nodes: int) -> None:
        self._states[sequence] = self.state_type(
            self.runner, cache, self.vocab_size, ROWS_PER_NODE * n_nodes, sequence
        )

    def _seen(self, sequence: Sequence) -> list[int]:
        """Return all tokens, or the first tokens and a window of recent tokens (StreamingLLM).

        Positions start at 0. The window shifts by half of its length.
        """
        tokens = sequence.tokens
        if len(tokens) <= self._limit:
            return tokens
        n_first = min(_N_SINKS, self._limit // 8)
        stride = max((self._limit - n_first) // 2, 1)
        start = n_first + -(-(len(tokens) - self._limit) // stride) * stride
        return tokens[:n_first] + tokens[start:]

    def transfer(self, old: Sequence, new: Sequence, n: int) -> int:
        """See `Drafter.transfer`. The draft's cache is rewound when the next tree starts."""
        state = self._states.pop(old, None)
        if state is not None:
            if len(old.tokens) <= self._limit:  # otherwise a new window starts anyway
                state.commit_path(self._seen(old))
            self._states[new] = state
        return n

    def end(self, sequence: Sequence) -> None:
        """Release the draft cache of a sequence."""
        state = self._states.pop(sequence, None)
        if state is not None:
            self.runner.free_cache(state.cache)

    def grow(
        self,
        builders: abc.Sequence[_Builder],
        guess: Callable[[list[_Builder]], None] | None = None,
    ) -> int:
        """Grow all trees to completion, a level or round per pass; return the number of passes.

        Each pass synchronizes with the device once. A tree with NaN or Inf logits stops with an
        error.

        guess  may add rows to the next pass
        """
        growing = list(builders)
        n_passes = 0
        while growing := [
            builder for builder in growing if len(builder.state.tokens) > builder.state.n_done
        ]:
            if guess is not None:
                guess(growing)
            with self.trace.span(DRAFT, f"level {n_passes + 1}"):
                outs = self._forward(growing)
                selected = to_host(
                    [
                        select_tokens(builder, out)
                        for builder, out in zip(growing, outs, strict=True)
                    ]
                )
                for builder, tokens in zip(growing, selected, strict=True):
                    builder.state.computed()
                    try:
                        builder.extend(tokens)
                    except NumericsError as error:
                        builder.state.error = error
            n_passes += 1
        return n_passes

    def _forward(self, builders: abc.Sequence[TreeBuilder]) -> list[Tensor]:
        """Compute the latest rows in a single pass."""
        states = [(builder.state, captured(builder)) for builder in builders]
        return self.runner.forward(
            [state.step(reduce) for state, reduce in states if isinstance(state, DraftState)]
        )


@dataclass(eq=False, repr=False)
class SelfDraftModel(DraftModel):
    """Self-drafting: the target drafts with views of its caches.

    Sequences without memory for a view are not drafted.

    kind    cache class of the views
    budget  maximum verified rows per view
    n_rows  total rows available to views
    """

    kind: type[SparseCache] = field(kw_only=True)
    budget: int = field(kw_only=True)
    n_rows: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._limit = self.runner.spec.max_positions
        self._n_rows = self.n_rows
        self._views: dict[Sequence, tuple[int, int]] = {}  # (target cache, rows of its view)

    def begin(self, sequence: Sequence, cache: int, n_nodes: int) -> None:
        """Create a view of the sequence's cache if memory allows."""
        for old in [old for old in self._views if old.finish_reason]:
            self.end(old)
        budget = min(self.budget, sequence.longest)
        n_rows = view_rows(budget, n_nodes)
        if n_nodes > 1 and n_rows <= self._n_rows:
            self._n_rows -= n_rows
            self._views[sequence] = cache, n_rows
            view = self.runner.new_view(cache, self.kind, budget, ROWS_PER_NODE * n_nodes)
            self._add_state(sequence, view, n_nodes)

    def can_draft(self, sequence: Sequence) -> bool:
        """Return whether the target has computed the prompt."""
        source = self._views.get(sequence)
        return source is not None and self.runner.n_committed(source[0]) == len(sequence.tokens) - 1

    def transfer(self, old: Sequence, new: Sequence, n: int) -> int:
        """Drop the view; a new view is filled from the target's cache. See `Drafter.transfer`."""
        self.end(old)
        return n

    def end(self, sequence: Sequence) -> None:
        """Release the view of a sequence."""
        self._n_rows += self._views.pop(sequence, (0, 0))[1]
        super().end(sequence)


def captured(builder: TreeBuilder) -> Reduce | None:
    """Return the reduction to run within the pass; None if noise or masks change logits first."""
    state = builder.state
    is_final = state.noise is None and state.sequence.grammar is None
    return builder.reduce if is_final else None


def select_tokens(builder: TreeBuilder, out: Tensor) -> Tensor:
    """Select the host's input from the pass output `out` of the latest rows."""
    state = builder.state
    out = state.masked(out)
    if captured(builder) is None and builder.reduce is not None:
        out = builder.reduce(out if state.noise is None else state.perturbed(out))
    return builder.select(out)
