"""Requests of sequences to a pass, and the rows of a pass as layers see them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.executor.cuda_graphs import Reduce
from offload_rt.kv.cache import KVCache
from offload_rt.kv.recurrent import Recurrence, RecurrentCache
from offload_rt.models.image_prompt import ImagePrompt, ImageRows
from offload_rt.models.layers import Attention, StateShape
from offload_rt.ops.decoder_cpu import CachedRows
from offload_rt.tree.topology import GrowingTree, Topology


@dataclass(frozen=True)
class Step:
    """Request of a sequence to a pass.

    cache     cache id, from `Runner.new_cache`
    tokens    (n,) int64: tokens missing in the cache, followed by the tree's tokens
    topology  topology of the n tokens; missing tokens form a chain above the tree
    n_wanted  number of trailing tokens with logits
    n_prompt  prompt length, which some rotary tables depend on
    n_done    number of leading tokens already pending in the cache
    reduce    function applied to the logits on the device
    n_chain   number of leading tokens that form a chain and are always committed
    states    (n_rows, hidden_size) additional inputs of a draft head
    read      receives the logits (n, vocabulary) of `n_read` rows before the wanted rows, in parts
    read_hidden  receives the normed hidden states (n_rows, hidden_size)
    images    prompt of the sequence if it has images; image tokens have the key of their image
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
    n_read: int = 0
    read_hidden: Callable[[Tensor], None] | None = None
    images: ImagePrompt | None = None

    @property
    def n_rows(self) -> int:
        """Number of tokens to compute."""
        return len(self.tokens) - self.n_done

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for further ranks: only rank 0 reads logits and encodes images."""
        read = None if self.read is None else _unread
        absent = dict.fromkeys(("reduce", "states", "read_hidden", "images"))
        return {**vars(self), **absent, "tokens": self.tokens.numpy(), "read": read}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "tokens": torch.from_numpy(state["tokens"])})


def _unread(logits: Tensor) -> None:
    """Ignore logits: only rank 0 reads them."""


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) of a step, stored as rows `rows` of a chunk."""

    step: Step
    cache: KVCache
    start: int
    stop: int
    rows: slice

    def positions(self) -> Tensor:
        """Return the positions in the sequence, (n,) or multimodal (3, n) int64."""
        indices = (
            torch.from_numpy(self.step.topology.depths[self.start : self.stop]).long()
            + self.cache.n_committed
        )
        return indices if self.step.images is None else self.step.images.positions_at(indices)

    def mask(self, is_causal: bool = False) -> ops.TreeMask:
        """Return the visibility of cached rows, without a window, on the host.

        is_causal  tokens of an image do not see later tokens
        """
        mask = self.step.topology.mask(self.start, self.stop, self.cache.n_seen)
        blocks = () if is_causal or self.step.images is None else self.step.images.blocks
        first = self.cache.n_committed + self.start
        for start, stop in blocks:
            rows = range(max(start - first, 0), min(stop - first, self.stop - self.start))
            if rows:
                mask.connect(rows)
        return mask

    def image_rows(self, token_id: int) -> list[ImageRows]:
        """Return the image tokens of the rows, in order."""
        first = self.cache.n_committed + self.start
        stop = self.cache.n_committed + self.stop
        parts = () if self.step.images is None else self.step.images.rows(first, stop)
        ordered = [(int(image.rows[rows.start]), ImageRows(image, rows)) for image, rows in parts]
        others = np.flatnonzero(self.step.tokens[self.start : self.stop].numpy() == token_id)
        ordered += [(first + row, ImageRows(None, slice(0, 1))) for row in others.tolist()]
        return [part for _, part in sorted(ordered, key=itemgetter(0))]

    def inputs(self, kernel: int) -> Tensor:
        """Return the convolution inputs on the host, see `Recurrence.inputs`."""
        parents = self.step.topology.parents
        rows = [np.arange(self.start, self.stop)]
        for _ in range(kernel - 1):  # predecessors of node 0 are -1, -2, ...
            rows.append(np.where(rows[-1] > 0, parents[np.maximum(rows[-1], 0)], rows[-1] - 1))
        n_before = kernel - 1 - min(self.start, self.step.n_chain)
        return torch.from_numpy(np.stack(rows, axis=1)) + n_before


@dataclass(frozen=True)
class Chunk:
    """Rows of a pass that share a layer call; implements `PassContext`.

    masks   visibility per segment, without a window
    inputs  convolution inputs per segment if layers have a state, see `Recurrence`
    images  image tokens of all segments, in order
    causal  masks of layers without a window, if they differ from `masks`
    """

    rows: slice
    segments: tuple[Segment, ...]
    masks: tuple[ops.TreeMask, ...]
    row_inputs: tuple[Any, ...]
    inputs: tuple[Tensor, ...] = ()
    images: tuple[ImageRows, ...] = ()
    causal: tuple[ops.TreeMask, ...] = ()

    def attend(self, asked: Attention) -> Tensor:
        """See `PassContext.attend`."""
        outs = []
        masks = self.causal if self.causal and asked.window is None else self.masks
        for segment, mask in zip(self.segments, masks, strict=True):
            part = asked if len(self.segments) == 1 else asked.of_rows(segment.rows)
            outs.append(segment.cache.attend(part, segment.start, mask.within(asked.window)))
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def in_place(self) -> list[CachedRows] | None:
        """See `CachedContext.in_place`."""
        rows = []
        for segment, mask in zip(self.segments, self.masks, strict=True):
            buffer = segment.cache.in_place()
            if buffer is None or self.causal:
                return None
            first = segment.cache.n_held + segment.start
            n = segment.stop - segment.start
            rows.append(CachedRows(n, buffer.keys, buffer.values, first, mask))
        return rows

    def recur(
        self, layer: int, shape: StateShape, x: Tensor, weight: Tensor, *gates: Tensor
    ) -> Tensor:
        """See `StateContext.recur`; gates are its `log_decays` and `beta`."""
        outs = []
        for segment, mask, inputs in zip(self.segments, self.masks, self.inputs, strict=True):
            assert isinstance(segment.cache, RecurrentCache), "models with states use this cache"
            log_decays, beta = (gate[segment.rows] for gate in gates)
            rows = x[segment.rows], weight, log_decays, beta
            request = Recurrence(layer, segment.start, segment.step.n_chain, *rows, inputs, mask)
            outs.append(segment.cache.recur(request))
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that layers read."""
        masks = (*self.masks, *self.causal)
        return [*self.row_inputs, *self.inputs, *(part for mask in masks for part in mask.tensors)]

    def with_tensors(self, tensors: Iterator[Tensor]) -> "Chunk":
        """Return this chunk with the next tensors of an iterator, e.g. device copies."""
        row_inputs = tuple(islice(tensors, len(self.row_inputs)))
        inputs = tuple(islice(tensors, len(self.inputs)))
        masks, causal = (
            tuple(mask.with_tensors(islice(tensors, len(mask.tensors))) for mask in group)
            for group in (self.masks, self.causal)
        )
        return replace(self, row_inputs=row_inputs, inputs=inputs, masks=masks, causal=causal)
