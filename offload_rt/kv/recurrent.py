"""Caches of sequences whose layers keep a state besides keys and values: gated delta nets."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.kv.cache import ContiguousCache, KVCache, MovedRows
from offload_rt.kv.split import N_KEPT
from offload_rt.models.architecture import Architecture, StateShape
from offload_rt.ops.delta_rule import BLOCK_ROWS, DeltaRows, DeltaTerms, convolve, delta_rule, fold, normed


@dataclass(frozen=True, eq=False)
class Recurrence:
    """What a layer asks of a cache for pending rows [start, start + n), see `StateContext.recur`.

    layer    among those with a state
    n_chain  the first so many pending rows follow each other and are committed in any case
    inputs   (n, kernel) int64: what the convolution of each row takes, itself first, among the last inputs that the state
             has seen, those of later pending rows, and x, one behind the other
    mask     what the rows look at among the n_committed + start + n first ones
    """

    layer: int
    start: int
    n_chain: int
    x: Tensor
    weight: Tensor
    log_decays: Tensor
    beta: Tensor
    inputs: Tensor
    mask: ops.TreeMask

    def sees(self, n_committed: int) -> Tensor:
        """Which of the pending rows behind the chain are seen by those of them that are asked for, (n, m) bool."""
        first = n_committed + self.n_chain
        start = min(first, self.mask.n_keys - len(self.mask.key_depths))
        dense = self.mask.part(start, self.mask.n_keys).dense()
        if dense is None:
            return self.beta.new_ones(1, self.mask.n_keys - first, dtype=torch.bool)
        return dense[max(self.n_chain - self.start, 0) :, first - start :]


class State(NamedTuple):
    """What all layers hold of the tokens up to a place.

    memory  (n_layers, n_v_heads, k_dim, v_dim)
    inputs  (n_layers, kernel - 1, n_channels) of the convolution, the last ones
    """

    memory: Tensor
    inputs: Tensor

    def copy_(self, other: "State", layers: slice = slice(None)) -> None:
        """Take over another one, or some layers of it."""
        for to, source in zip(self, other, strict=True):
            to[layers] = source[layers]


class RecurrentCache(ContiguousCache):
    """Keys and values as ever, the state behind the committed tokens, and what pending rows would add to it.

    Rows that are committed in any case are added when they are computed. A state cannot be taken back, so those at a few
    borders of blocks are kept; a rewind goes to the last one before the place, as does a pass that failed.
    """

    shape: StateShape
    state: State

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept, self._coming = dict[int, State](), dict[int, State]()  # by position
        self._followers: list[tuple[int, State]] = []  # where others begin in the same pass, and their states
        # Of each layer inputs and terms of the pending rows that are not added.
        self._n_added, self._held = 0, dict[int, list[Tensor]]()

    @classmethod
    def empty(cls, model: Architecture, capacity: int, dtype: torch.dtype, device: torch.device) -> Self:
        """See `ContiguousCache.empty`."""
        made = super().empty(model, capacity, dtype, device)
        n, one, wide = len(model.state_shapes), model.state_shapes[0], torch.promote_types(dtype, torch.float32)
        memory = torch.zeros(n, one.n_v_heads, one.k_dim, one.v_dim, dtype=wide, device=device)
        inputs = torch.zeros(n, one.kernel - 1, sum(one.widths), dtype=dtype, device=device)
        made.shape, made.state = one, State(memory, inputs)
        return made

    def recur(self, asked: Recurrence) -> Tensor:
        """The outputs (n, n_v_heads, v_dim) of rows, in the dtype of x."""
        layer, shape = asked.layer, self.shape
        if layer == 0 and asked.start == 0:
            self._begin_chain(asked.n_chain)
        outs, borders = list[Tensor](), [*self._coming.items(), *self._followers]
        memory, last = (one[layer] for one in self.state)
        heads = (shape.n_k_heads, shape.k_dim), (shape.n_v_heads, shape.v_dim), (shape.n_v_heads,), (shape.n_v_heads,)
        held = self._held.get(layer) or [last[:0], *(memory.new_empty(0, *dims) for dims in heads)]
        inputs = torch.cat((last, held[0], asked.x))
        first, n_chain, kernel = 0, min(max(asked.n_chain - asked.start, 0), len(asked.x)), shape.kernel
        taps = [inputs[kernel - 1 - one :][:n_chain] for one in range(kernel)]
        if n_chain < len(asked.x):
            others = (inputs[rows] for rows in asked.inputs[n_chain:].unbind(1))
            taps = [torch.cat(pair) if n_chain else pair[1] for pair in zip(taps, others, strict=True)]
        mixed = torch.split(convolve(taps, asked.weight).to(memory.dtype), list(shape.widths), 1)
        dims = shape.k_dim, shape.k_dim, shape.v_dim
        q, k, v = (one.view(len(one), -1, dim) for one, dim in zip(mixed, dims, strict=True))
        decays, beta = asked.log_decays.to(memory.dtype), asked.beta.to(memory.dtype)
        rows = DeltaRows(normed(q) * shape.k_dim**-0.5, normed(k), v, decays, beta)
        while first < n_chain:
            position = self.n_committed + asked.start + first
            ends = [n_chain, first + BLOCK_ROWS - position % BLOCK_ROWS, *(n - position + first for n, _ in borders)]
            stop = min(one for one in ends if one > first)
            sees = torch.ones(stop - first, stop - first, dtype=torch.bool, device=memory.device).tril_()
            out, own = delta_rule(rows.part(first, stop), memory, sees, DeltaTerms(*held[1:]))
            fold(memory, own)
            last.copy_(inputs[stop : stop + len(last)])
            for border, state in borders:
                if border == position + stop - first:
                    state.copy_(self.state, slice(layer, layer + 1))
            outs.append(out)
            first = stop
        if n_chain < len(asked.x):
            out, own = delta_rule(rows.part(n_chain), memory, asked.sees(self.n_committed), DeltaTerms(*held[1:]))
            self._held[layer] = [torch.cat(pair) for pair in zip(held, (asked.x[n_chain:], *own), strict=True)]
            outs.append(out)
        return torch.cat(outs).to(asked.x.dtype)

    def _begin_chain(self, n: int) -> None:
        """The first n rows are added for good; choose the borders among them whose states are kept, and make room for these."""
        self._held, self._n_added, last = {}, n, (self.n_committed + n) // BLOCK_ROWS * BLOCK_ROWS
        if last <= self.n_committed:
            return
        middle = (self.n_committed + last) // 2 // BLOCK_ROWS * BLOCK_ROWS
        wanted = sorted({*self._kept, last} | ({middle} if middle > self.n_committed else set()))
        while len(wanted) > N_KEPT:  # the one that is nearest to another before it, but for the last
            gaps = [stop - start for start, stop in pairwise([0, *wanted[:-1]])]
            del wanted[gaps.index(min(gaps))]
        free = [self._kept.pop(one) for one in self._kept.keys() - set(wanted)]
        for one in set(wanted) - self._kept.keys():
            self._coming[one] = free.pop() if free else State(*map(torch.empty_like, self.state))

    @torch.inference_mode()
    def commit(self, rows: Sequence[int]) -> None:
        """See `KVCache.commit`; the rows that were added at once are the first of them."""
        assert list(rows[: self._n_added]) == list(range(self._n_added)), "they are committed in any case"
        path = [row - self._n_added for row in rows[self._n_added :]]
        if path:
            memory, last = self.state
            (at,) = ops.to_device([torch.tensor(path)], last.device)
            of_layers = ([one.index_select(0, at) for one in held] for held in self._held.values())
            inputs, *added = (torch.stack(parts) for parts in zip(*of_layers, strict=True))
            terms = DeltaTerms(*added)
            fold(memory, terms)
            last.copy_(torch.cat((last, inputs), 1)[:, len(path) :])
            for layer, held in self._held.items():
                self._held[layer] = [one[len(path) :] for one in held]
                held[-1] -= terms.totals[layer, -1]
        super().commit(rows)
        self._kept |= self._coming
        self._coming, self._followers, self._n_added = {}, [], 0
        if not self._pending:
            self._held = {}

    def discard(self) -> None:
        """See `KVCache.discard`."""
        is_spoilt = self._n_added > 0 or self.leader is not None
        super().discard()
        self._held, self._followers = {}, []
        if is_spoilt:
            self._go_back()

    def rewind_to(self, tokens: Sequence[int]) -> int:
        """Keep as many of the common tokens as there is a state behind; return how many."""
        if self._n_added:  # by a pass that failed
            self.discard()
        n_before = self.n_committed
        if super().rewind_to(tokens) < n_before:
            self._go_back()
        return self.n_committed

    def _go_back(self) -> None:
        """To the last border whose state is kept."""
        n = max((one for one in self._kept if one <= self.n_committed), default=0)
        if n:
            self.state.copy_(self._kept[n])
        else:
            for one in self.state:
                one.zero_()
        del self.committed[n:]
        self._kept = {position: state for position, state in self._kept.items() if position <= n}
        self._coming, self._n_added = {}, 0

    def follow(self, leader: KVCache, tokens: list[int]) -> None:
        """See `ContiguousCache.follow`; no further than there is a state of the other one, or comes in the next pass."""
        assert isinstance(leader, RecurrentCache), "caches of one model are alike"
        n = len(tokens)
        if n > leader.n_committed:
            leader._followers.append((n, self.state))
        else:
            last = {leader.n_committed: leader.state} if leader.leader is None else {}
            states = {0: self.state} | leader._kept | last
            n = max(one for one in states if one <= n)
            self.state.copy_(states[n])
        super().follow(leader, tokens[:n])

    def to_host(self) -> MovedRows:
        """See `ContiguousCache.to_host`; states stay where they are."""
        moved = super().to_host()
        return moved._replace(states={**self._kept, self.n_committed: self.state})

    def load(self, moved: MovedRows) -> None:
        """See `ContiguousCache.load`."""
        super().load(moved)
        self._kept = dict(moved.states)
        self.state = self._kept.pop(self.n_committed)
