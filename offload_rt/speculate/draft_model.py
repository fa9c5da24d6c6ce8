"""Resident draft model: a cache per sequence, trees computed level by level."""

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from torch import Tensor

from offload_rt.errors import NumericsError
from offload_rt.executor.runner import Runner
from offload_rt.executor.sequence import Sequence
from offload_rt.kv.sparse import SparseCache
from offload_rt.ops import to_host
from offload_rt.speculate.rows import ROWS_PER_NODE, draft_rows, view_rows
from offload_rt.speculate.tree_state import (
    DraftState,
    Path,
    TreeBuilder,
    TreeState,
    captured,
    select_tokens,
)
from offload_rt.system.trace import DRAFT, Trace

# First tokens that stay visible to a draft with a short context.
_N_SINKS = 16


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
        """See `Drafter.begin`; a separate model needs no target cache."""

    def can_draft(self, sequence: Sequence) -> bool:
        """Return whether a tree can be drafted for a sequence."""
        return True

    def observe(self, sequence: Sequence, first: int, states: abc.Sequence[Tensor]) -> None:
        """Receive hidden states of the target, see `Drafter.observe`; draft models ignore them."""

    def start(
        self, sequence: Sequence, n_nodes: int, is_alone: bool, n_coupled: int = 0, path: Path = ()
    ) -> TreeState:
        """Start a tree at the end of a sequence, or of the visible part in a shorter context.

        is_alone   no other sequence is drafted
        n_coupled  levels ranked with the target's sampling noise
        path       tokens assumed to follow the sequence
        """
        state = self._begin(sequence, n_nodes, is_alone, path)
        state.ahead = path
        state.noise = None
        if n_coupled:
            size = len(path) + n_coupled, self.vocab_size
            noise = sequence.noise.at(len(sequence.tokens), *size, self.runner.device)
            state.noise = noise[len(path) :].log().mul_(-sequence.temperature)
        return state

    def _begin(self, sequence: Sequence, n_nodes: int, is_alone: bool, path: Path) -> TreeState:
        known = self._states.get(sequence)
        most_rows = ROWS_PER_NODE * n_nodes
        # A tree may outgrow the first tree, when other sequences have ended.
        if known is None or known.sequence is not sequence or known.most_rows < most_rows:
            if self.runner.replay is not None:  # graphs need a single buffer: free finished caches
                for old in [old for old in self._states if old.finish_reason]:
                    self.end(old)
            longest = min(sequence.longest, self._limit) + self.max_levels
            n_rows = draft_rows(min(longest, sequence.longest), n_nodes)
            if known is None:
                cache = self.runner.new_cache(n_rows, is_alone)
            else:
                cache = self.runner.renew_cache(known.cache, n_rows, most_rows, is_alone)
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
                outs = map(select_tokens, growing, self._forward(growing))
                for builder, tokens in zip(growing, to_host(list(outs)), strict=True):
                    builder.state.computed()
                    try:
                        builder.extend(tokens)
                    except NumericsError as error:
                        builder.state.error = error
            n_passes += 1
        return n_passes

    def _forward(self, builders: abc.Sequence[TreeBuilder]) -> list[Tensor]:
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
    n_rows  rows left for further views
    """

    kind: type[SparseCache] = field(kw_only=True)
    budget: int = field(kw_only=True)
    n_rows: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._limit = self.runner.spec.max_positions
        self._views: dict[Sequence, tuple[int, int]] = {}  # (target cache, rows of its view)

    def begin(self, sequence: Sequence, cache: int, n_nodes: int) -> None:
        """Create a view of the sequence's cache if memory allows."""
        for old in [old for old in self._views if old.finish_reason]:
            self.end(old)
        budget = min(self.budget, sequence.longest)
        n_rows = view_rows(budget, n_nodes)
        if n_nodes > 1 and n_rows <= self.n_rows:
            self.n_rows -= n_rows
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
        self.n_rows += self._views.pop(sequence, (0, 0))[1]
        super().end(sequence)
