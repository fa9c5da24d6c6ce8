"""What sequences ask of a pass, and the rows of a pass as layers see them."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.executor.cuda_graphs import Reduce
from offload_rt.kv.cache import Attention, KVCache
from offload_rt.kv.recurrent import Recurrence, RecurrentCache
from offload_rt.models.architecture import StateShape
from offload_rt.tree.topology import GrowingTree, Topology


@dataclass(frozen=True)
class Step:
    """What one sequence asks of a pass.

    cache     id, from `Runner.new_cache`
    tokens    (n,) int64: those its cache lacks, then those of the tree
    topology  of the n tokens, the lacking ones a chain above the tree
    n_wanted  logits are computed for the last n_wanted tokens
    n_prompt  tokens of the prompt, which plain decoding computes together
    n_done    the first n_done tokens are pending in the cache already, computed by earlier passes
    reduce    what is made of the logits, and given in their place
    n_chain   the first n_chain tokens follow each other and are committed whatever comes out
    states    (n_rows, hidden_size), what the rows of a head have beside their tokens
    read      is given the logits of the rows before the wanted ones, (n, vocabulary), some rows at a time
    """

    cache: int
    tokens: Tensor
    topology: Topology | GrowingTree
    n_wanted: int
    n_prompt: int
    n_done: int = 0
    reduce: Reduce | None = None
    n_chain: int = 0
    states: Tensor | None = None
    read: Callable[[Tensor], None] | None = None

    @property
    def n_rows(self) -> int:
        """Tokens that are computed."""
        return len(self.tokens) - self.n_done

    def __reduce__(self) -> tuple[Any, ...]:
        """What other ranks are sent of it: not what becomes of the logits."""
        counts = self.n_wanted, self.n_prompt, self.n_done, self.n_chain
        return _sent, (self.cache, self.tokens.numpy(), self.topology, *counts, self.read is not None)


def _sent(
    cache: int, tokens: np.ndarray, topology: Topology | GrowingTree, n_wanted: int, n_prompt: int, n_done: int, n_chain: int,
    reads: bool,
) -> Step:  # fmt: skip
    """The step of rank 0, on another one."""
    read = _unread if reads else None
    return Step(cache, torch.from_numpy(tokens), topology, n_wanted, n_prompt, n_done, n_chain=n_chain, read=read)


def _unread(logits: Tensor) -> None:
    """Rank 0 reads them."""


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) of a step, which are rows `rows` of a chunk."""

    step: Step
    cache: KVCache
    start: int
    stop: int
    rows: slice

    def positions(self) -> Tensor:
        """(n,) int64 positions in the sequence."""
        return torch.from_numpy(self.step.topology.depths[self.start : self.stop]).long() + self.cache.n_committed

    def mask(self) -> ops.TreeMask:
        """Which cached rows each row sees, without a window; on the host."""
        return self.step.topology.mask(self.start, self.stop, self.cache.n_seen)

    def inputs(self, kernel: int) -> Tensor:
        """See `Recurrence.inputs`; on the host."""
        parents, rows = self.step.topology.parents, [np.arange(self.start, self.stop)]
        for _ in range(kernel - 1):  # above node 0 stand -1, -2, ...
            rows.append(np.where(rows[-1] > 0, parents[np.maximum(rows[-1], 0)], rows[-1] - 1))
        return torch.from_numpy(np.stack(rows, axis=1)) + (kernel - 1 - min(self.start, self.step.n_chain))


@dataclass(frozen=True)
class Chunk:
    """Rows of a pass that go through a layer together; to the layers it is the `PassContext`.

    masks   one for each segment, without a window
    inputs  one for each segment where layers have a state, see `Recurrence`
    """

    rows: slice
    segments: tuple[Segment, ...]
    masks: tuple[ops.TreeMask, ...]
    row_inputs: tuple[Any, ...]
    inputs: tuple[Tensor, ...] = ()

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, *,
        scale: float, window: int | None = None, rotary: tuple[Tensor, Tensor] | None = None,
        softcap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `PassContext.attend`."""
        outs = []
        for one, mask in zip(self.segments, self.masks, strict=True):
            rows = one.rows
            turn = None if rotary is None else (rotary[0][rows], rotary[1][rows])
            qkv = q[rows], None if k is None else k[rows], None if v is None else v[rows]
            asked = Attention(layer, one.start, *qkv, mask.within(window), scale, turn, softcap, sinks)
            one.cache.asked = asked if one.cache.keeps_query else None  # that of the last layer stays
            outs.append(one.cache.attend(asked))
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def recur(
        self, layer: int, shape: StateShape, x: Tensor, weight: Tensor, log_decays: Tensor, beta: Tensor
    ) -> Tensor:  # fmt: skip
        """See `StateContext.recur`."""
        outs = []
        for one, mask, inputs in zip(self.segments, self.masks, self.inputs, strict=True):
            assert isinstance(one.cache, RecurrentCache), "a model with states has such caches"
            given = x[one.rows], weight, log_decays[one.rows], beta[one.rows]
            outs.append(one.cache.recur(Recurrence(layer, one.start, one.step.n_chain, *given, inputs, mask)))
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    @property
    def tensors(self) -> list[Tensor]:
        """All that the layers need of these rows."""
        return [*self.row_inputs, *self.inputs, *(one for mask in self.masks for one in mask.tensors)]

    def of(self, tensors: Iterator[Tensor]) -> "Chunk":
        """This chunk of the next `tensors`, such as copies on a device."""
        row_inputs, inputs = (tuple(itertools.islice(tensors, len(one))) for one in (self.row_inputs, self.inputs))
        masks = tuple(mask.of(itertools.islice(tensors, len(mask.tensors))) for mask in self.masks)
        return replace(self, row_inputs=row_inputs, inputs=inputs, masks=masks)
