"""The draft model: resident, one cache for each sequence, computing trees level by level."""

from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import Protocol, TypeVar

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
from offload_rt.sampling import generator_on
from offload_rt.speculate.child_sampling import fitted
from offload_rt.speculate.protocols import ROWS_PER_NODE, draft_rows, view_rows
from offload_rt.system.trace import DRAFT, Trace
from offload_rt.tree.topology import GrowingTree, Topology

# Tokens of the beginning that a draft with a short context goes on to see, where nothing tells which ones are wanted; and
# those of a chunk where something does.
_N_SINKS, _CHUNK = 16, 32
# What a softmax of logits with noise is divided by: the size of a draft's errors, at any temperature of the sequence.
_ERROR = 0.75


class TreeState:
    """Rows of a tree below the last token of a sequence; leaves that need no logits have none. Row 0 is the root.

    vocab_size  of the target
    most_rows   of a tree
    lacking     tokens of the sequence that are to be computed before its rows
    generator   of the sequence, on the device; children are drawn with it
    noise       (levels, vocabulary) float32: what the target's tokens after the nodes of each level are drawn with, times the
                sequence's temperature; None where the tree is not coupled
    error       why the tree is of no use; None where it is
    """

    error: NumericsError | None = None

    def __init__(self, vocab_size: int, most_rows: int, sequence: Sequence, device: torch.device) -> None:
        self.vocab_size, self.sequence = vocab_size, sequence
        self.generator = generator_on(device, sequence.generator)
        self.tokens: list[int] = []
        self.lacking: list[int] = []
        self._tree = GrowingTree(most_rows)
        self.n_done = 0
        self.noise: Tensor | None = None
        self._most_rows, self._probs = most_rows, torch.empty(0)

    @property
    def new_rows(self) -> slice:
        """Those added since the last step."""
        return slice(self.n_done, len(self.tokens))

    @property
    def new_depths(self) -> np.ndarray:
        """(n,) of the rows added since the last step."""
        return self._tree.depths[self.new_rows]

    def computed(self) -> None:
        """The rows added last have been computed."""
        self.n_done = len(self.tokens)

    def clear(self, token: int) -> None:
        """Begin with the last token of the sequence."""
        self.tokens, self.n_done, self.error = [token], 0, None
        self._tree.clear()

    def room(self, n: int, like: Tensor) -> Tensor:
        """(n, vocabulary) for the distributions of a tree, until the next one; memory for the largest is taken once."""
        if len(self._probs) < n:
            self._probs = like.new_empty(self._most_rows // ROWS_PER_NODE, like.shape[1])
        return self._probs[:n]

    def perturbed(self, logits: Tensor) -> Tensor:
        """The logits (rows, vocabulary) of the rows added last, with their noise: the largest is the guess of the token."""
        assert self.noise is not None, "the tree is coupled"
        (levels,) = to_device([torch.tensor(self._tree.depths[-len(logits) :])], self.noise.device)
        return self.noise.index_select(0, levels).add_(fitted(logits, self.vocab_size)).div_(_ERROR)

    def add(self, parents: Several[int], tokens: Several[int]) -> range:
        """Add rows, to be computed next; returns them."""
        self.tokens += tokens
        return self._tree.add(parents)


class DraftState(TreeState):
    """What the draft has computed for one sequence: its tokens, and rows of a tree, which are rows of its cache.

    In place of a token that only the target has the draft is given its own last one.
    """

    def __init__(self, runner: Runner, cache: int, vocab_size: int, most_rows: int, sequence: Sequence) -> None:
        super().__init__(vocab_size, most_rows, sequence, runner.device)
        self._runner, self.cache = runner, cache
        self._last_token = runner.spec.vocab_size - 1
        self.n_prompt = 0

    def start(self, tokens: list[int], n_prompt: int) -> None:
        """Begin a tree below the last of `tokens`, keeping the rows that an earlier tree has of them."""
        self.commit_path(tokens)
        n_kept = self._runner.rewind(self.cache, self._known(tokens[:-1]))
        self.lacking, self.n_prompt = tokens[n_kept:-1], n_prompt
        self.clear(tokens[-1])

    def step(self, reduce: Reduce | None) -> Step:
        """What is to be computed: what the cache lacks of the sequence, and the rows added since the last step."""
        tokens = torch.tensor(self._known(self.lacking + self.tokens))
        # What is lacking comes with the root, before any other row.
        tree = Topology.chain(len(tokens)) if self.lacking else self._tree
        n_new = len(self.tokens) - self.n_done
        return Step(self.cache, tokens, tree, n_new, self.n_prompt, self.n_done, reduce, len(self.lacking))

    def computed(self) -> None:
        """The step has been taken."""
        if self.lacking:
            self._runner.commit(self.cache, range(len(self.lacking)))
            self.lacking = []
        super().computed()

    def commit_path(self, tokens: list[int]) -> None:
        """Commit the rows of the earlier tree along which the sequence has gone on."""
        n = self._runner.n_committed(self.cache)
        if self.n_done == 0 or n >= len(tokens) - 1 or tokens[n] != self.tokens[0]:
            return
        self._runner.commit(self.cache, self._path(tokens[n + 1 : -1]))

    def _path(self, tokens: list[int]) -> list[int]:
        """The root and the rows below it that have these tokens, as far as there are some."""
        children = {(int(self._tree.parents[row]), self.tokens[row]): row for row in range(1, self.n_done)}
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
    """A tree of one sequence while it grows."""

    state: TreeState

    @property
    def reduce(self) -> Reduce | None:
        """What is to be made of the logits of the rows added last, such as their most probable tokens; None: nothing."""

    def choose(self, out: Tensor) -> Tensor:
        """What the host needs to know of these logits (rows, vocabulary), or of what `reduce` made of them, on the device."""

    def take(self, chosen: Tensor) -> None:
        """Grow by what was chosen, on the host; add the rows to be computed next. Raises NumericsError for wrong logits."""


_Builder = TypeVar("_Builder", bound=TreeBuilder)


class DraftModel:
    """Computes the draft's logits for the trees of several sequences at once.

    vocab_size  of the target
    max_levels  of a tree: room for so many tokens stays free in the draft's context
    trace       gets a span for each pass, a level or round of the trees
    context     tokens that the draft sees at most; None: as many as it has positions
    target      its attention chooses which older tokens a draft sees of a longer text; None: the draft sees the first few
    """

    state_type: type[DraftState] = DraftState
    target: Runner | None = None

    def __init__(
        self, runner: Runner, vocab_size: int, max_levels: int, trace: Trace, context: int | None = None
    ) -> None:
        self._runner, self.vocab_size, self.max_levels, self._trace = runner, vocab_size, max_levels, trace
        self._limit = max(min(context or runner.spec.max_positions, runner.spec.max_positions) - max_levels, 1)
        self._states: dict[Sequence, DraftState] = {}
        self._sources: dict[Sequence, int] = {}  # caches of the target
        self._older: dict[Sequence, tuple[int, list[int]]] = {}  # where the window begins, and the tokens chosen for it

    def begin(self, sequence: Sequence, cache: int, n_nodes: int) -> None:
        """A sequence joins, with this cache of the target and trees of up to `n_nodes`."""
        self._sources[sequence] = cache

    def can_draft(self, sequence: Sequence) -> bool:
        """Whether there is what drafting for a sequence needs."""
        return True

    def observe(self, sequence: Sequence, first: int, states: Several[Tensor]) -> None:
        """Keep hidden states of the target, see `Drafter.observe`; a model of its own needs none."""

    def start(
        self, sequence: Sequence, n_nodes: int, is_alone: bool, n_coupled: int = 0, path: Several[int] = ()
    ) -> TreeState:
        """Begin a tree at the end of a sequence; where the draft's context is shorter, it sees as much as fits.

        is_alone   no other sequence is drafted for
        n_coupled  levels whose children are ranked after the noise that the target's tokens are drawn with
        path       tokens that are taken to follow the sequence's
        """
        state, n_ahead = self._begin(sequence, n_nodes, is_alone, path), len(path)
        state.noise = None
        if n_coupled:
            place, n_levels = len(sequence.tokens), n_ahead + n_coupled
            noise = sequence.noise.at(place, n_levels, self.vocab_size, self._runner.device)[n_ahead:]
            state.noise = noise.log().mul_(-sequence.temperature)
        return state

    def _begin(self, sequence: Sequence, n_nodes: int, is_alone: bool, path: Several[int] = ()) -> TreeState:
        known = self._states.get(sequence)
        if known is None or known.sequence is not sequence:
            if self._runner.has_graphs:  # of one buffer, which is not to be had while others have caches
                for one in [one for one in self._states if one.finish_reason]:
                    self.end(one)
            longest = min(sequence.longest, self._limit) + self.max_levels
            n_rows = draft_rows(min(longest, sequence.longest), n_nodes)
            if known is None:
                cache = self._runner.new_cache(n_rows, is_alone)
            else:
                cache = self._runner.renew_cache(known.cache, n_rows, ROWS_PER_NODE * n_nodes, is_alone)
            self._add_state(sequence, cache, n_nodes)
        state, seen = self._states[sequence], self._seen(sequence)
        n_gone = len(sequence.tokens) - len(seen)
        state.start([*seen, *path], max(sequence.n_prompt - n_gone, 1))
        return state

    def _add_state(self, sequence: Sequence, cache: int, n_nodes: int) -> None:
        self._states[sequence] = self.state_type(
            self._runner, cache, self.vocab_size, ROWS_PER_NODE * n_nodes, sequence
        )

    def _seen(self, sequence: Sequence) -> list[int]:
        """All tokens, or some older ones and a window of the most recent, at positions from 0 on.

        Older ones are those that the target's last token attended to most when the window moved on (SpecExtend), or the first
        few (StreamingLLM).
        """
        tokens, n_chunks = sequence.tokens, self._limit // 2 // _CHUNK if self.target is not None else 0
        if len(tokens) <= self._limit:
            return tokens
        n_older = n_chunks * _CHUNK or min(_N_SINKS, self._limit // 8)
        stride = max((self._limit - n_older) // 2, 1)  # the window moves on by half of its length at a time
        start = n_older + -(-(len(tokens) - self._limit) // stride) * stride
        first, older = self._older.get(sequence, (0, tokens[:n_older]))
        if self.target is not None and n_chunks > 1 and first != start:
            best = self.target.best_chunks(self._sources[sequence], start, n_chunks, _CHUNK)
            if best:
                older = [token for i in best for token in tokens[i * _CHUNK : (i + 1) * _CHUNK]]
                self._older[sequence] = start, older
        return older + tokens[start:]

    def follow(self, old: Sequence, new: Sequence, n: int) -> int:
        """See `Drafter.follow`; the draft's cache is rewound when the first tree begins."""
        state = self._states.pop(old, None)
        if state is not None:
            if len(old.tokens) <= self._limit:  # else a window begins anew in any case
                state.commit_path(self._seen(old))
            self._states[new] = state
        return n

    def end(self, sequence: Sequence) -> None:
        """Release the cache of a sequence."""
        self._sources.pop(sequence, None)
        self._older.pop(sequence, None)
        state = self._states.pop(sequence, None)
        if state is not None:
            self._runner.free_cache(state.cache)

    def grow(self, builders: Several[_Builder], guess: Callable[[list[_Builder]], None] | None = None) -> int:
        """Let all tree builders grow to their end, a level or round of all of them in each pass; returns the passes made.

        The device is waited for once in each. A tree with a logit that is no number ends there, with its error.

        guess  may add rows to those that the next pass computes
        """
        growing, n_passes = list(builders), 0
        while growing := [one for one in growing if len(one.state.tokens) > one.state.n_done]:
            if guess is not None:
                guess(growing)
            with self._trace.span(DRAFT, f"level {n_passes + 1}"):
                outs = self._forward(growing)
                chosen = to_host([chosen_of(one, out) for one, out in zip(growing, outs, strict=True)])
                for one, tokens in zip(growing, chosen, strict=True):
                    one.state.computed()
                    try:
                        one.take(tokens)
                    except NumericsError as error:
                        one.state.error = error
            n_passes += 1
        return n_passes

    def _forward(self, builders: Several[TreeBuilder]) -> list[Tensor]:
        """One pass over the rows added last."""
        states = [(one.state, captured(one)) for one in builders]
        return self._runner.forward([state.step(reduce) for state, reduce in states if isinstance(state, DraftState)])


class SelfDraftModel(DraftModel):
    """The target itself, drafting by views of its caches; sequences beyond the room there is for views are not drafted for.

    kind    of the views
    budget  verified rows that a view has at most
    n_rows  there is memory for, in all views together
    """

    def __init__(
        self, runner: Runner, max_levels: int, trace: Trace, kind: type[SparseCache], budget: int, n_rows: int
    ) -> None:
        super().__init__(runner, runner.spec.vocab_size, max_levels, trace)
        self._limit = runner.spec.max_positions
        self._kind, self._budget, self._n_rows = kind, budget, n_rows
        self._views: dict[Sequence, tuple[int, int]] = {}  # caches of the target, and the rows of their views

    def begin(self, sequence: Sequence, cache: int, n_nodes: int) -> None:
        """Take a view of its cache, if there is room for one beside those of others that run."""
        for one in [one for one in self._views if one.finish_reason]:
            self.end(one)
        budget = min(self._budget, sequence.longest)
        n_rows = view_rows(budget, n_nodes)
        if n_nodes > 1 and n_rows <= self._n_rows:
            self._n_rows -= n_rows
            self._views[sequence] = cache, n_rows
            view = self._runner.new_view(cache, self._kind, budget, ROWS_PER_NODE * n_nodes)
            self._add_state(sequence, view, n_nodes)

    def can_draft(self, sequence: Sequence) -> bool:
        """Not before the target has computed its prompt."""
        source = self._views.get(sequence)
        return source is not None and self._runner.n_committed(source[0]) == len(sequence.tokens) - 1

    def follow(self, old: Sequence, new: Sequence, n: int) -> int:
        """See `Drafter.follow`: a view is filled anew from the target's cache."""
        self.end(old)
        return n

    def end(self, sequence: Sequence) -> None:
        """Release the view of a sequence."""
        self._n_rows += self._views.pop(sequence, (0, 0))[1]
        super().end(sequence)


def captured(builder: TreeBuilder) -> Reduce | None:
    """What is made of logits as part of the pass; nothing in a coupled tree, where noise is added to them first."""
    return builder.reduce if builder.state.noise is None else None


def chosen_of(builder: TreeBuilder, out: Tensor) -> Tensor:
    """What the host needs to know of the rows added last; `out` is what the pass gave for them."""
    if builder.state.noise is not None and builder.reduce is not None:
        out = builder.reduce(builder.state.perturbed(out))
    return builder.choose(out)
