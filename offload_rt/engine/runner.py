"""One model, one pass: every layer is visited once, for all sequences of the batch."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.kv.cache import KVCache
from offload_rt.models._decoder import LayerWeights, decoder_layer
from offload_rt.models._spec import EMBED, HEAD, NORM, ModelSpec
from offload_rt.stream._streamer import Block, Streamer
from offload_rt.trace import Trace
from offload_rt.tree.topology import Topology
from offload_rt.weights._image import Layout

# Rows that go through a layer together. A long prompt is cut here layer by layer, so that one pass over the weights serves
# all of it while its activations stay small.
CHUNK_ROWS = 512


@dataclass(frozen=True)
class Placing:
    """Where and in what dtype a model computes."""

    device: torch.device
    dtype: torch.dtype


class OuterWeights(LayerWeights, Protocol):
    """The weights outside the layers."""

    def rows(self, ids: Tensor, name: str) -> Tensor:
        """Rows `ids` (n,) of the table `name`: (n, width)."""


Viewer = Callable[[Layout, Tensor, torch.dtype], LayerWeights]


@dataclass(frozen=True)
class Step:
    """What one sequence asks of a pass.

    tokens    (n,) int64: those its cache lacks, then those of the tree
    topology  of the n tokens, the lacking ones a chain above the tree
    n_wanted  logits are computed for the last so many
    n_prompt  tokens of the prompt, which plain decoding computes together
    n_done    the first so many are pending in the cache already, computed by passes before this one
    """

    cache: KVCache
    tokens: Tensor
    topology: Topology
    n_wanted: int
    n_prompt: int
    n_done: int = 0

    @property
    def n_rows(self) -> int:
        """Tokens that are computed."""
        return len(self.tokens) - self.n_done


@dataclass
class _Segment:
    """Rows [start, stop) of a step, which are rows `rows` of a chunk."""

    step: Step
    start: int
    stop: int
    rows: slice
    masks: dict[int | None, ops.TreeMask] = field(default_factory=dict)

    def positions(self) -> Tensor:
        """(n,) int64 positions in the sequence."""
        return torch.from_numpy(self.step.topology.depths[self.start : self.stop]) + self.step.cache.n_committed

    @cached_property
    def _forest(self) -> tuple[int, Tensor, Tensor]:
        """Pending rows that all rows see; the mask and the depths of those behind."""
        trunk, parents = self.step.topology.forest(self.start, self.stop)
        bits, depths = ops.tree_masks(torch.from_numpy(parents).to(self.step.cache.keys.device))
        return trunk, bits, depths

    def mask(self, window: int | None) -> ops.TreeMask:
        """Which cached rows each row looks at."""
        if window not in self.masks:
            trunk, bits, depths = self._forest
            n_before = self.step.cache.n_committed + trunk
            self.masks[window] = ops.TreeMask(bits, depths, self.start - trunk, n_before, window)
        return self.masks[window]


@dataclass(frozen=True)
class Chunk:
    """Rows [first, last) of a pass, with their cosines and sines."""

    first: int
    last: int
    segments: tuple[_Segment, ...]
    rope: tuple[Tensor, Tensor]


class Runner:
    """Computes logits. Layers come from the streamer; embedding, last norm and head are resident."""

    def __init__(
        self, spec: ModelSpec, streamer: Streamer, outer: OuterWeights, view: Viewer, place: Placing, trace: Trace
    ) -> None:
        self.spec, self.streamer, self.dtype, self.device = spec, streamer, place.dtype, place.device
        self.outer, self._view, self._trace = outer, view, trace

    @torch.inference_mode()
    def forward(self, steps: Sequence[Step]) -> list[Tensor]:
        """One sweep over the layers; writes the pending rows of every cache.

        Returns per step logits (n_wanted, vocabulary) in the dtype of the computation.
        Raises CapacityError if a cache is too small, LinkError if a layer does not arrive.
        """
        for step in steps:
            step.cache.begin(step.tokens.tolist())
        hidden = self.outer.rows(torch.cat([step.tokens[step.n_done :] for step in steps]).to(self.device), EMBED)
        chunks = self.chunks(steps)
        with closing(self.streamer.sweep()) as sweep:
            for block in sweep:
                with self._trace.span("compute", f"layer {block.i}"):
                    self.layer(block, hidden, chunks)
        with self._trace.span("compute", "head"):
            return self.logits(hidden, steps)

    def layer(self, block: Block, hidden: Tensor, chunks: Sequence["Chunk"]) -> None:
        """One layer on all rows, in place: hidden (n, hidden_size)."""
        weights = self._view(block.layout, block.data, self.dtype)
        for chunk in chunks:
            rows = slice(chunk.first, chunk.last)
            hidden[rows] = decoder_layer(self.spec, weights, hidden[rows], chunk.rope, self._attend(block.i, chunk))

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for one sequence."""
        return KVCache(self.spec, capacity, self.dtype, self.device)

    def _attend(self, layer: int, chunk: Chunk) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        window, scale = self.spec.windows[layer], self.spec.head_dim**-0.5

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            outs = []
            for segment in chunk.segments:
                keys, values = segment.step.cache.write(layer, segment.start, k[segment.rows], v[segment.rows])
                outs.append(ops.tree_attention(q[segment.rows], keys, values, segment.mask(window), scale))
            return torch.cat(outs) if len(outs) > 1 else outs[0]

        return attend

    def chunks(self, steps: Sequence[Step]) -> list[Chunk]:
        """Cut the rows of all steps, one behind the other, into chunks."""
        chunks: list[Chunk] = []
        first, n_rows, segments = 0, 0, []
        for step in steps:
            start = step.n_done
            while start < len(step.tokens):
                n = min(CHUNK_ROWS - n_rows, len(step.tokens) - start)
                segments.append(_Segment(step, start, start + n, slice(n_rows, n_rows + n)))
                start, n_rows = start + n, n_rows + n
                if n_rows == CHUNK_ROWS:
                    chunks.append(self._chunk(first, n_rows, segments))
                    first, n_rows, segments = first + n_rows, 0, []
        if segments:
            chunks.append(self._chunk(first, n_rows, segments))
        return chunks

    def _chunk(self, first: int, n_rows: int, segments: list[_Segment]) -> Chunk:
        positions = torch.cat([segment.positions() for segment in segments])
        prompts = torch.cat(
            [torch.full((segment.stop - segment.start,), segment.step.n_prompt) for segment in segments]
        )
        cos, sin = self.spec.rope.cos_sin(positions, torch.maximum(prompts, positions + 1), self.dtype)
        return Chunk(first, first + n_rows, tuple(segments), (cos.to(self.device), sin.to(self.device)))

    def logits(self, hidden: Tensor, steps: Sequence[Step]) -> list[Tensor]:
        """Last norm and head on the rows that each step wants: hidden (n, hidden_size) -> per step (n_wanted, vocabulary)."""
        ends = torch.tensor([step.n_rows for step in steps]).cumsum(0).tolist()
        wanted = torch.cat([hidden[end - step.n_wanted : end] for end, step in zip(ends, steps, strict=True)])
        normed = ops.rms_norm(wanted, self.outer.vector(NORM), self.spec.eps)
        logits = self.outer.linear(normed, EMBED if self.spec.tied else HEAD)
        return list(logits.split([step.n_wanted for step in steps]))
