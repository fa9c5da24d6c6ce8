"""KV caches for models with recurrent state: gated delta nets."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.kv.cache import ContiguousCache, KVCache, MovedRows
from offload_rt.kv.split import N_KEPT
from offload_rt.models.architecture import Architecture
from offload_rt.models.layers import StateShape
from offload_rt.ops.delta_rule import (
    BLOCK_ROWS,
    DeltaRows,
    DeltaTerms,
    convolve,
    delta_rule,
    fold,
    normed,
)


@dataclass(frozen=True, eq=False)
class Recurrence:
    """Request of a layer for pending rows [start, start + n), see `StateContext.recur`.

    layer    index among the layers with a state
    n_chain  number of leading pending rows that form a chain and are always committed
    inputs   (n, kernel) int64 convolution inputs of each row, the row itself first; indices into
             the concatenation of the state's last inputs, earlier pending rows, and x
    mask     visibility of the first n_committed + start + n rows
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
        """Return the visibility (n, m) bool among pending rows after the chain."""
        first = n_committed + self.n_chain
        start = min(first, self.mask.n_keys - len(self.mask.key_depths))
        dense = self.mask.part(start, self.mask.n_keys).dense()
        if dense is None:
            return self.beta.new_ones(1, self.mask.n_keys - first, dtype=torch.bool)
        return dense[max(self.n_chain - self.start, 0) :, first - start :]


class State(NamedTuple):
    """Recurrent state of all layers at a position.

    memory  (n_layers, n_v_heads, k_dim, v_dim)
    inputs  (n_layers, kernel - 1, n_channels) last inputs of the convolution
    """

    memory: Tensor
    inputs: Tensor

    def copy_(self, source: "State", layers: slice = slice(None)) -> None:
        """Copy a state, or the selected layers of a state."""
        for part, source_part in zip(self, source, strict=True):
            part[layers] = source_part[layers]


class RecurrentCache(ContiguousCache):
    """KV cache with a recurrent state of the committed tokens and updates of pending rows.

    Rows that are certain to be committed update the state immediately. States are not invertible,
    so states at a few block boundaries are kept. A rewind or a failed pass returns to the last kept
    state before the position.
    """

    shape: StateShape
    state: State

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept = dict[int, State]()  # by position
        self._coming = dict[int, State]()  # by position, written in the current pass
        # Start positions and states of caches that copy a prefix in the same pass.
        self._followers: list[tuple[int, State]] = []
        # Chain rows added to the state; inputs and terms of the remaining pending rows per layer.
        self._n_added = 0
        self._held = dict[int, list[Tensor]]()

    @classmethod
    def empty(
        cls, model: Architecture, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        made = super().empty(model, capacity, dtype, device)
        n = len(model.state_shapes)
        made.shape = shape = model.state_shapes[0]
        inputs = torch.zeros(n, shape.kernel - 1, sum(shape.widths), dtype=dtype, device=device)
        wide = torch.promote_types(dtype, torch.float32)
        memory = inputs.new_zeros(n, shape.n_v_heads, shape.k_dim, shape.v_dim, dtype=wide)
        made.state = State(memory, inputs)
        return made

    def recur(self, asked: Recurrence) -> Tensor:
        """Return the outputs (n, n_v_heads, v_dim) of the rows, in the dtype of x."""
        layer = asked.layer
        shape = self.shape
        if layer == 0 and asked.start == 0:
            self._begin_chain(asked.n_chain)
        outs = list[Tensor]()
        borders = [*self._coming.items(), *self._followers]
        memory, last = (part[layer] for part in self.state)
        n_v_heads = shape.n_v_heads
        heads = (shape.n_k_heads, shape.k_dim), (n_v_heads, shape.v_dim), (n_v_heads,), (n_v_heads,)
        held = self._held.get(layer) or [last[:0], *(memory.new_empty(0, *dims) for dims in heads)]
        inputs = torch.cat((last, held[0], asked.x))
        kernel = shape.kernel
        n_chain = min(max(asked.n_chain - asked.start, 0), len(asked.x))
        taps = [inputs[kernel - 1 - offset :][:n_chain] for offset in range(kernel)]
        if n_chain < len(asked.x):
            tree_taps = [inputs[rows] for rows in asked.inputs[n_chain:].unbind(1)]
            taps = list(map(torch.cat, zip(taps, tree_taps, strict=True))) if n_chain else tree_taps
        mixed = torch.split(convolve(taps, asked.weight).to(memory.dtype), list(shape.widths), 1)
        dims = shape.k_dim, shape.k_dim, shape.v_dim
        q, k, v = (part.view(len(part), -1, dim) for part, dim in zip(mixed, dims, strict=True))
        decays = asked.log_decays.to(memory.dtype)
        beta = asked.beta.to(memory.dtype)
        rows = DeltaRows(normed(q) * shape.k_dim**-0.5, normed(k), v, decays, beta)
        origin = self.n_committed + asked.start
        first = 0
        while first < n_chain:
            block_end = first + BLOCK_ROWS - (origin + first) % BLOCK_ROWS
            ends = [n_chain, block_end, *(border - origin for border, _ in borders)]
            stop = min(end for end in ends if end > first)
            n = stop - first
            sees = torch.ones(n, n, dtype=torch.bool, device=memory.device).tril_()
            out, terms = delta_rule(rows.part(first, stop), memory, sees, DeltaTerms(*held[1:]))
            fold(memory, terms)
            last.copy_(inputs[stop : stop + len(last)])
            for border, state in borders:
                if border == origin + stop:
                    state.copy_(self.state, slice(layer, layer + 1))
            outs.append(out)
            first = stop
        if n_chain < len(asked.x):
            sees = asked.sees(self.n_committed)
            out, terms = delta_rule(rows.part(n_chain), memory, sees, DeltaTerms(*held[1:]))
            pairs = zip(held, (asked.x[n_chain:], *terms), strict=True)
            self._held[layer] = list(map(torch.cat, pairs))
            outs.append(out)
        return torch.cat(outs).to(asked.x.dtype)

    def _begin_chain(self, n: int) -> None:
        """Start adding the first n rows; select the block boundaries whose states are kept."""
        self._held = {}
        self._n_added = n
        last = (self.n_committed + n) // BLOCK_ROWS * BLOCK_ROWS
        if last <= self.n_committed:
            return
        middle = (self.n_committed + last) // 2 // BLOCK_ROWS * BLOCK_ROWS
        wanted = sorted({*self._kept, last} | ({middle} if middle > self.n_committed else set()))
        # drop the boundary closest to its predecessor, but not the last
        while len(wanted) > N_KEPT:
            gaps = [stop - start for start, stop in pairwise([0, *wanted[:-1]])]
            del wanted[gaps.index(min(gaps))]
        free = [self._kept.pop(position) for position in self._kept.keys() - set(wanted)]
        for position in set(wanted) - self._kept.keys():
            state = free.pop() if free else State(*map(torch.empty_like, self.state))
            self._coming[position] = state

    @torch.inference_mode()
    def commit(self, rows: Sequence[int]) -> None:
        assert list(rows[: self._n_added]) == list(range(self._n_added)), "chain rows are committed"
        path = [row - self._n_added for row in rows[self._n_added :]]
        if path:
            memory, last = self.state
            (at,) = ops.to_device([torch.tensor(path)], last.device)
            layers = ([part.index_select(0, at) for part in held] for held in self._held.values())
            inputs, *added = map(torch.stack, zip(*layers, strict=True))
            terms = DeltaTerms(*added)
            fold(memory, terms)
            last.copy_(torch.cat((last, inputs), 1)[:, len(path) :])
            for layer, held in self._held.items():
                self._held[layer] = [held_part[len(path) :] for held_part in held]
                held[-1] -= terms.totals[layer, -1]
        super().commit(rows)
        self._kept |= self._coming
        self._coming = {}
        self._followers = []
        self._n_added = 0
        if not self._pending:
            self._held = {}

    def discard(self) -> None:
        is_spoilt = self._n_added > 0 or self.leader is not None
        super().discard()
        self._held = {}
        self._followers = []
        if is_spoilt:
            self._go_back()

    def rewind_to(self, tokens: Sequence[int]) -> int:
        """Keep the common prefix up to the last kept state; return its length."""
        if self._n_added:  # a failed pass
            self.discard()
        n_before = self.n_committed
        if super().rewind_to(tokens) < n_before:
            self._go_back()
        return self.n_committed

    def _go_back(self) -> None:
        """Return to the last boundary with a kept state."""
        n = max((position for position in self._kept if position <= self.n_committed), default=0)
        if n:
            self.state.copy_(self._kept[n])
        else:
            for part in self.state:
                part.zero_()
        del self.committed[n:]
        self._kept = {position: state for position, state in self._kept.items() if position <= n}
        self._coming = {}
        self._n_added = 0

    def copy_prefix(self, leader: KVCache, tokens: list[int]) -> None:
        assert isinstance(leader, RecurrentCache), "caches of a model share a class"
        n = len(tokens)
        if n > leader.n_committed:
            leader._followers.append((n, self.state))
        else:
            last = {leader.n_committed: leader.state} if leader.leader is None else {}
            states = {0: self.state} | leader._kept | last
            n = max(position for position in states if position <= n)
            self.state.copy_(states[n])
        super().copy_prefix(leader, tokens[:n])

    def to_host(self) -> MovedRows:
        return super().to_host()._replace(states={**self._kept, self.n_committed: self.state})

    def load(self, moved: MovedRows) -> None:
        super().load(moved)
        self._kept = dict(moved.states)
        self.state = self._kept.pop(self.n_committed)
