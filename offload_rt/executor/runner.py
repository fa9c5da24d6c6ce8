"""One model, one pass: every layer is visited once, for all sequences of the batch."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.executor.cuda_graphs import Capture, GraphRunner, GraphShape, PassRows, ResidentModel
from offload_rt.kv.cache import KVBuffer, KVCache, ReusableKVBuffer
from offload_rt.models.architecture import Architecture, LayerWeights
from offload_rt.offload.streamer import LayerView, Streamer
from offload_rt.system.trace import COMPUTE, Trace
from offload_rt.tree.topology import Topology
from offload_rt.weights.formats import WeightFormat

# Rows that go through a layer together. A long prompt is cut here layer by layer, so that one pass over the weights serves
# all of it while its activations stay small. Where even that is too much, chunks shrink down to the least.
CHUNK_ROWS, _LEAST_CHUNK_ROWS = 512, 16


@dataclass(frozen=True)
class Placing:
    """Where and in what dtype a model computes."""

    device: torch.device
    dtype: torch.dtype


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

    @property
    def size(self) -> GraphShape:
        """Of the pass that computes it: rows of the cache up to the last of its tokens; all tokens may be of the tree rows."""
        return GraphShape(self.n_rows, self.cache.n_committed + len(self.tokens), len(self.tokens))


@dataclass
class _Segment:
    """Rows [start, stop) of a step, which are rows `rows` of a chunk; masks are made on `device`."""

    step: Step
    start: int
    stop: int
    rows: slice
    device: torch.device
    masks: dict[int | None, ops.TreeMask] = field(default_factory=dict)

    def positions(self) -> Tensor:
        """(n,) int64 positions in the sequence."""
        return torch.from_numpy(self.step.topology.depths[self.start : self.stop]) + self.step.cache.n_committed

    @cached_property
    def _forest(self) -> ops.TreeMask:
        trunk, parents = self.step.topology.tree_rows(self.start, self.stop)
        return ops.make_tree_mask(parents, self.start - trunk, self.step.cache.n_committed + trunk, self.device)

    def mask(self, window: int | None) -> ops.TreeMask:
        """Which cached rows each row looks at."""
        if window not in self.masks:
            self.masks[window] = replace(self._forest, window=window)
        return self.masks[window]


@dataclass(frozen=True)
class Chunk:
    """Rows [first, last) of a pass; to the layers it is the `PassContext`."""

    first: int
    last: int
    segments: tuple[_Segment, ...]
    row_inputs: tuple[Tensor, ...]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None) -> Tensor:
        """See `PassContext.attend`."""
        outs = []
        for segment in self.segments:
            keys, values = segment.step.cache.write(layer, segment.start, k[segment.rows], v[segment.rows])
            outs.append(ops.tree_attention(q[segment.rows], keys, values, segment.mask(window), scale))
        return torch.cat(outs) if len(outs) > 1 else outs[0]


class Runner:
    """Computes logits. Layers come from the streamer; embedding, last norm and head are resident."""

    def __init__(
        self,
        spec: Architecture,
        streamer: Streamer,
        non_layer: LayerWeights,
        weight_format: WeightFormat,
        place: Placing,
        trace: Trace,
    ) -> None:
        self.spec, self.streamer, self.dtype, self.device = spec, streamer, place.dtype, place.device
        self.non_layer, self.format, self._trace = non_layer, weight_format, trace
        self._chunk_rows = CHUNK_ROWS
        self._fixed: GraphRunner | None = None

    @torch.inference_mode()
    def forward(self, steps: Sequence[Step]) -> list[Tensor]:
        """One sweep over the layers; writes the pending rows of every cache.

        Returns per step logits (n_wanted, vocabulary) in the dtype of the computation.
        Raises CapacityError if a cache is too small, LinkError if a layer does not arrive.
        """
        for step in steps:
            step.cache.begin(step.tokens.tolist())
        if self._fixed is not None and len(steps) == 1 and self._fixed.fits(steps[0].cache, steps[0].size):
            return [self._replay(steps[0])]
        ids = torch.cat([step.tokens[step.n_done :] for step in steps]).to(self.device)
        hidden = self.spec.embed(self.non_layer, ids)
        chunks = self.chunks(steps)
        with closing(self.streamer.sweep()) as sweep:
            for block in sweep:
                with self._trace.span(COMPUTE, f"layer {block.i}"):
                    self.layer(block, hidden, chunks)
        with self._trace.span(COMPUTE, "head"):
            return self.logits(hidden, steps)

    @property
    def is_resident(self) -> bool:
        """Whether all layers lie on the device."""
        return not self.streamer.order

    def finish(self) -> None:
        """Wait until all that was given to the device to compute has ended; copies go on."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def use_graphs(self, most: GraphShape, capture: Capture) -> None:
        """From now on compute passes of one sequence at fixed sizes up to the most; all layers must be resident."""
        layers = [self.format.view(block.layout, block.data, self.dtype) for block in self.streamer.sweep()]
        model = ResidentModel(self.spec, layers, self.non_layer)
        self._fixed = GraphRunner(model, most, ReusableKVBuffer(most.n_keys, self._new_store), capture)

    def drop_graphs(self) -> None:
        """Drop what was captured, which holds the weights."""
        self._fixed = None

    def _replay(self, step: Step) -> Tensor:
        whole = _Segment(step, step.n_done, len(step.tokens), slice(0, step.n_rows), torch.device("cpu"))
        rows = torch.arange(step.size.n_keys - step.n_rows, step.size.n_keys)
        tokens = step.tokens[step.n_done :]
        inputs = PassRows(tokens, rows, self._row_inputs([whole]), whole.mask(window=None))
        with self._trace.span(COMPUTE, "all layers"):
            return self._fixed.forward(step.cache, inputs)[step.n_rows - step.n_wanted :]

    def layer(self, block: LayerView, hidden: Tensor, chunks: Sequence["Chunk"]) -> None:
        """One layer on all rows, in place: hidden (n, hidden_size)."""
        weights = self.format.view(block.layout, block.data, self.dtype)
        for chunk in chunks:
            rows = slice(chunk.first, chunk.last)
            hidden[rows] = self.spec.layer(block.i, weights, hidden[rows], chunk)

    def shrink_chunks(self) -> bool:
        """Halve the rows that go through a layer together; returns whether they could be halved."""
        could = self._chunk_rows > _LEAST_CHUNK_ROWS
        self._chunk_rows = max(self._chunk_rows // 2, _LEAST_CHUNK_ROWS)
        return could

    def new_cache(self, capacity: int, is_alone: bool = False) -> KVCache:
        """An empty cache for one sequence. One that runs alone finds what was captured for the one before it."""
        reusable = self._fixed.cache(capacity, is_alone) if self._fixed is not None else None
        return reusable or KVCache(self._new_store(capacity))

    def _new_store(self, capacity: int) -> KVBuffer:
        return KVBuffer.empty(self.spec, capacity, self.dtype, self.device)

    def chunks(self, steps: Sequence[Step]) -> list[Chunk]:
        """Cut the rows of all steps, one behind the other, into chunks."""
        chunks: list[Chunk] = []
        first, n_rows, segments = 0, 0, []
        for step in steps:
            start = step.n_done
            while start < len(step.tokens):
                n = min(self._chunk_rows - n_rows, len(step.tokens) - start)
                segments.append(_Segment(step, start, start + n, slice(n_rows, n_rows + n), self.device))
                start, n_rows = start + n, n_rows + n
                if n_rows == self._chunk_rows:
                    chunks.append(self._chunk(first, n_rows, segments))
                    first, n_rows, segments = first + n_rows, 0, []
        if segments:
            chunks.append(self._chunk(first, n_rows, segments))
        return chunks

    def _chunk(self, first: int, n_rows: int, segments: list[_Segment]) -> Chunk:
        row_inputs = tuple(one.to(self.device) for one in self._row_inputs(segments))
        return Chunk(first, first + n_rows, tuple(segments), row_inputs)

    def _row_inputs(self, segments: list[_Segment]) -> tuple[Tensor, ...]:
        """What the architecture's layers need to know of all rows, on the host."""
        positions = torch.cat([segment.positions() for segment in segments])
        prompts = torch.cat(
            [torch.full((segment.stop - segment.start,), segment.step.n_prompt) for segment in segments]
        )
        return self.spec.row_inputs(positions, torch.maximum(prompts, positions + 1), self.dtype)

    def logits(self, hidden: Tensor, steps: Sequence[Step]) -> list[Tensor]:
        """The head on the rows that each step wants: hidden (n, hidden_size) -> per step (n_wanted, vocabulary)."""
        ends = torch.tensor([step.n_rows for step in steps]).cumsum(0).tolist()
        wanted = torch.cat([hidden[end - step.n_wanted : end] for end, step in zip(ends, steps, strict=True)])
        return list(self.spec.head(self.non_layer, wanted).split([step.n_wanted for step in steps]))
