"""Forward passes of a model: each pass visits every layer once, for all sequences of the batch."""

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.chunks import CHUNK_ROWS
from offload_rt.cost.pass_times import ComputeTimes
from offload_rt.executor.image_encoder import ImageEncoder
from offload_rt.executor.step import Chunk, Segment, Step
from offload_rt.kv.cache import KVCache
from offload_rt.kv.memory import KVMemory
from offload_rt.kv.sparse import SparseCache
from offload_rt.kv.split import KVShare
from offload_rt.models.architecture import Architecture
from offload_rt.models.heads import HeadDecoder
from offload_rt.models.layers import LayerWeights, keep_tapped
from offload_rt.offload.expert_cache import ExpertCache
from offload_rt.offload.streamer import LayerView, Streamer
from offload_rt.sampling import largest
from offload_rt.system.trace import COMPUTE, Trace
from offload_rt.weights.formats import WeightFormat

# Chunks shrink to the minimum when memory runs out.
_LEAST_CHUNK_ROWS = 16
# Rows of logits per call of `Step.read`.
_READ_ROWS = 64

Result = TypeVar("Result")


def row_inputs(
    spec: Architecture, segments: Sequence[Segment], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return the inputs that layers need per row, on the host."""
    parts = [segment.positions() for segment in segments]
    if any(part.dim() > 1 for part in parts):  # of texts: three equal positions
        parts = [part.expand(3, -1) for part in parts]
    positions = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    n_rows = [segment.stop - segment.start for segment in segments]
    prompts = np.repeat([segment.step.n_prompt for segment in segments], n_rows)
    lengths = torch.from_numpy(np.maximum(prompts, positions.numpy() + 1))
    return spec.row_inputs(positions, lengths, dtype)


@dataclass(eq=False, repr=False)
class Runner:
    """Compute logits and own the caches. The streamer provides layers; other weights are resident.

    images      vision tower; None for texts alone
    taps        layer counts after which hidden states are kept for a drafter, see `tapped`
    tapped      (n_rows, len(taps), hidden_size) per step, valid until the next pass

    A dense model on one device needs no more. Other parts of a run replace these attributes:
    memory      creates caches, and loads their rows during a pass
    prepare     receives index and weights of each layer before its computation
    meanwhile   called after each layer, while the next layer may be in transfer
    replay      computes a step on its cache in place of the runner: returns output and tapped
                states, or None
    experts     experts loaded on demand, if any, for measurements
    """

    spec: Architecture
    streamer: Streamer
    non_layer: LayerWeights
    format: WeightFormat
    device: torch.device
    dtype: torch.dtype
    trace: Trace
    images: ImageEncoder | None = None
    taps: tuple[int, ...] = ()
    tapped: Sequence[Tensor] = field(default=(), init=False)
    memory: KVMemory = field(init=False)
    prepare: Callable[[int, LayerWeights], None] = lambda i, weights: None
    meanwhile: Callable[[], None] = lambda: None
    replay: Callable[[Step, KVCache], tuple[Tensor, Tensor] | None] | None = None
    experts: ExpertCache | None = None

    def __post_init__(self) -> None:
        self._chunk_rows = CHUNK_ROWS
        self._ids = itertools.count()
        self._caches: dict[int, KVCache] = {}
        self._views: dict[int, LayerWeights] = {}  # of resident layers
        self.memory = KVMemory(self.spec, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, steps: Sequence[Step]) -> list[Tensor]:
        """Run a pass over all layers and write the pending rows of every cache.

        Returns per step the logits (n_wanted, vocabulary) in the compute dtype, or the result of
        its `reduce`.
        Raises CapacityError if a cache is too small, LinkError if a layer fails to arrive.
        """
        self.tapped = ()
        for step in steps:
            self._caches[step.cache].begin(step.tokens.tolist())
        if self.replay is not None and len(steps) == 1:
            replayed = self.replay(steps[0], self._caches[steps[0].cache])
            if replayed is not None:
                out, *self.tapped = replayed
                return [out]
        ids, chunks = self.upload(steps)
        hidden, chunks = self.embed(ids, chunks)
        if states := [step.states for step in steps if step.states is not None]:
            assert isinstance(self.spec, HeadDecoder), "only draft heads have additional inputs"
            hidden = self.spec.combine(self.non_layer, hidden, torch.cat(states))
        tapped = hidden.new_empty(len(hidden), len(self.taps), hidden.shape[1])
        keep_tapped(self.taps, tapped, hidden, 0)
        for group in self._groups(chunks):
            caches = [segment.cache for chunk in group for segment in chunk.segments]
            with self.memory.load(caches), closing(self.streamer.sweep()) as sweep:
                blocks: list[LayerView] = []
                for block in sweep:
                    blocks.append(block)
                    if self._continues(block, group):
                        continue
                    several = f"s {blocks[0].i} to" if len(blocks) > 1 else ""
                    with self.trace.span(COMPUTE, f"layer{several} {block.i}"):
                        self.layers(blocks, hidden, group)
                    keep_tapped(self.taps, tapped, hidden, block.i + 1)
                    for _ in blocks:
                        self.meanwhile()
                    blocks.clear()
        self.tapped = torch.split(tapped, [step.n_rows for step in steps])
        with self.trace.span(COMPUTE, "head"):
            logits = self.logits(hidden, steps)
        pairs = zip(steps, logits, strict=True)
        return [step.reduce(rows) if step.reduce else rows for step, rows in pairs]

    def finish(self, logits: Sequence[Tensor] = ()) -> list[bool]:
        """Wait until the device has finished all queued work; copies continue.

        Returns a flag per tensor of logits: free of NaN and Inf.
        """
        done = torch.ones((), dtype=torch.bool, device=self.device)
        _, *best = ops.to_host([done, *(largest(rows)[0] for rows in logits)], is_long=True)
        return [all(map(math.isfinite, values.tolist())) for values in best]

    def resident_layers(self) -> list[LayerWeights]:
        """Return the weights of all layers, which must be resident."""
        view = partial(self.format.view, dtype=self.dtype)
        return [view(block.layout, block.data) for block in self.streamer.sweep()]

    def close(self) -> None:
        """Stop all transfers and drop references to the weights."""
        self._views.clear()
        self.replay = None
        self.streamer.close()

    def embed(self, ids: Tensor, chunks: Sequence[Chunk]) -> tuple[Tensor, list[Chunk]]:
        """Embed tokens (n,); return hidden states (n, hidden_size) and chunks with layer inputs."""
        parts = []
        embedded = []
        for chunk in chunks:
            if chunk.images and self.images is not None:
                part, inputs = self.images.embed(self.non_layer, ids[chunk.rows], chunk)
            else:
                part, inputs = self.spec.embed(self.non_layer, ids[chunk.rows], chunk.row_inputs)
            parts.append(part)
            embedded.append(replace(chunk, row_inputs=inputs))
        return parts[0] if len(parts) == 1 else torch.cat(parts), embedded

    def _continues(self, block: LayerView, chunks: Sequence[Chunk]) -> bool:
        """Whether a layer and the next one are computed by one call: both are resident on a CPU."""
        following = block.i + 1
        return (
            block.is_resident
            and self.spec.supports_layer_groups
            and self.device.type == "cpu"
            and len(chunks) == 1
            and following < self.spec.n_layers
            and following not in self.taps
            and self.streamer.resident(following) is not None
        )

    def layers(self, blocks: Sequence[LayerView], hidden: Tensor, chunks: Sequence[Chunk]) -> None:
        """Apply layers to all rows of hidden (n, hidden_size), in place."""
        weights = {block.i: self._weights(block) for block in blocks}
        for chunk in chunks:
            rows = hidden[chunk.rows]
            out = self.spec.layer_group(weights, rows, chunk)
            if out is not rows:
                hidden[chunk.rows] = out

    def _weights(self, block: LayerView) -> LayerWeights:
        if (weights := self._views.get(block.i)) is None:
            weights = self.format.view(block.layout, block.data, self.dtype)
        if block.is_resident:
            self._views[block.i] = weights
        self.prepare(block.i, weights)
        return weights

    def shrink_chunks(self) -> bool:
        """Halve the rows per layer call; return whether that was possible."""
        could = self._chunk_rows > _LEAST_CHUNK_ROWS
        self._chunk_rows = max(self._chunk_rows // 2, _LEAST_CHUNK_ROWS)
        return could

    def new_cache(self, capacity: int, is_alone: bool = False, share: KVShare | None = None) -> int:
        """Create an empty cache for a sequence with `capacity` rows; return its id.

        The caller frees the cache.
        is_alone  no other sequence runs concurrently
        share     rows on the device; None for all rows
        """
        id = next(self._ids)
        self._caches[id] = self.memory.new_cache(capacity, is_alone and not self._caches, share)
        return id

    def renew_cache(
        self,
        old: int,
        capacity: int,
        n_nodes: int,
        is_alone: bool = False,
        share: KVShare | None = None,
        may_move: bool = True,
    ) -> int:
        """Resize a cache, or replace it; keep its rows if possible. Return the new or old id.

        n_nodes   largest tree; further arguments as in `new_cache`
        may_move  allow copying rows to another cache
        """
        cache = self._caches[old]
        # Captured passes serve a sequence that runs alone in a shared buffer.
        if (is_alone or self.replay is None) and cache.extend(capacity, n_nodes):
            if self.replay is not None and cache.buffer is not None:
                cache.buffer.clear(cache.n_committed)
            return old
        # Copy through host memory: the device may not have memory for both caches.
        moved = cache.to_host() if may_move else None
        del cache
        self.free_cache(old)
        id = self.new_cache(capacity, is_alone, share)
        if moved is not None:
            self._caches[id].load(moved)
        return id

    def copy_prefix(self, id: int, source: int, tokens: list[int]) -> None:
        """Start an empty cache with tokens of a source cache, present or computed in this pass.

        If either cache stores rows off the device, the rows are recomputed instead.
        """
        self._caches[id].copy_prefix(self._caches[source], tokens)

    def new_view(self, source: int, kind: type[SparseCache], budget: int, n_pending: int) -> int:
        """Create a sparse view of a cache for drafts with a budget of verified rows; return its id.

        n_pending  rows for drafted tokens
        """
        buffer = self.memory.new_buffer(budget + n_pending + 1)  # a captured pass: a spare row
        id = next(self._ids)
        self._caches[id] = kind(self._caches[source], buffer, budget, self.spec)
        return id

    def free_cache(self, id: int) -> None:
        """Free the memory of a cache."""
        self._caches.pop(id).close()

    def n_committed(self, id: int) -> int:
        """Return the number of committed tokens of a cache."""
        return self._caches[id].n_committed

    def rewind(self, id: int, tokens: Sequence[int]) -> int:
        """Keep the rows of the longest common prefix with `tokens`; return its length."""
        return self._caches[id].rewind_to(tokens)

    def commit(self, id: int, rows: Sequence[int]) -> None:
        """Commit pending rows in ascending order; see `KVCache.commit`."""
        self._caches[id].commit(rows)

    def discard(self, id: int) -> None:
        """Drop the pending rows of a cache."""
        self._caches[id].discard()

    def do(self, work: Callable[..., Result], *args: Any) -> Result:
        """Call a function with this runner; ranks call it together, as a single broadcast."""
        return work(self, *args)

    def overlap(self, times: ComputeTimes) -> ComputeTimes:
        """Overlap the stages of a pipeline; return the times of a pass, here unchanged."""
        return times

    def sum_over_stages(self, seconds: float) -> float:
        """Return the sum of seconds over all stages of a pipeline."""
        return seconds

    def least_of_ranks(self, n: int) -> int:
        """Return the smallest n of all ranks that exchange results within a layer."""
        return n

    def assume_context(self, id: int, n: int) -> None:
        """Mark n rows of a cache as committed, with arbitrary content, to time passes."""
        self._caches[id].assume(n)

    def upload(self, steps: Sequence[Step]) -> tuple[Tensor, list[Chunk]]:
        """Copy tokens and all layer inputs of a pass to the device in a single transfer."""
        chunks = self._chunks(steps)
        ids = torch.cat([step.tokens[step.n_done :] for step in steps])
        if self.images is not None:
            ids = ids.where(ids >= 0, self.images.tower.token_id)
        inputs = [tensor for chunk in chunks for tensor in chunk.tensors]
        tensors = iter(ops.to_device([ids, *inputs], self.device))
        return next(tensors), [chunk.with_tensors(tensors) for chunk in chunks]

    def _chunks(self, steps: Sequence[Step]) -> list[Chunk]:
        """Cut the concatenated rows of all steps into chunks, on the host."""
        parts: list[list[Segment]] = []
        room = 0
        chunk_rows = self._chunk_size(sum(step.n_rows for step in steps))
        for step in steps:
            start = step.n_done
            cache = self._caches[step.cache]
            while start < len(step.tokens):
                if room <= 0:
                    parts.append([])
                    room = chunk_rows
                n = min(room, len(step.tokens) - start)
                at = parts[-1][-1].rows.stop if parts[-1] else 0
                if step.images is not None:
                    n = step.images.whole_blocks(cache.n_committed + start, n)
                    if n > room and at:
                        room = 0
                        continue
                parts[-1].append(Segment(step, cache, start, start + n, slice(at, at + n)))
                start += n
                room -= n
        chunks = []
        stop = 0
        kernels = [shape.kernel for shape in self.spec.state_shapes[:1]]
        for segments in parts:
            masks = tuple(segment.mask() for segment in segments)
            rows = slice(stop, stop := stop + segments[-1].rows.stop)
            inputs = tuple(segment.inputs(kernel) for segment in segments for kernel in kernels)
            per_row = row_inputs(self.spec, segments, self.dtype)
            chunk = Chunk(rows, tuple(segments), masks, per_row, inputs)
            chunks.append(chunk if self.images is None else self.images.with_images(chunk))
        return chunks

    def _chunk_size(self, n_rows: int) -> int:
        return self._chunk_rows

    def _groups(self, chunks: Sequence[Chunk]) -> list[Sequence[Chunk]]:
        """Group the chunks of a pass; a group visits all layers before the next group starts."""
        return [chunks]

    def logits(self, hidden: Tensor, steps: Sequence[Step]) -> list[Tensor]:
        """Apply the head to wanted rows: (n, hidden_size) -> (n_wanted, vocabulary) per step."""
        wanted = []
        n_wanted = [step.n_wanted for step in steps]
        parts = torch.split(hidden, [step.n_rows for step in steps])
        for step, rows in zip(steps, parts, strict=True):
            n_others = step.n_rows - step.n_wanted
            wanted.append(rows[n_others:])
            if step.read_hidden is not None:
                step.read_hidden(self.spec.final_states(self.non_layer, rows))
            if step.read is not None and step.n_read:
                for part in torch.split(rows[n_others - step.n_read : n_others], _READ_ROWS):
                    step.read(self.spec.head(self.non_layer, part))
        return list(torch.split(self.spec.head(self.non_layer, torch.cat(wanted)), n_wanted))
