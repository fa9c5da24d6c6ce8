"""One model, one pass: every layer is visited once, for all sequences of the batch."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.executor.cuda_graphs import Capture, GraphRunner, GraphShape, PassRows, ResidentModel
from offload_rt.kv.cache import ContiguousCache, KVBuffer, KVCache
from offload_rt.models.architecture import Architecture, LayerWeights
from offload_rt.offload.streamer import LayerView, Streamer
from offload_rt.system.trace import COMPUTE, Trace
from offload_rt.tree.topology import Topology
from offload_rt.weights.formats import WeightFormat

# Rows that go through a layer together. One pass over the weights serves a long prompt chunk by chunk, and activations stay
# small. When memory runs out, chunks shrink down to the least.
CHUNK_ROWS, _LEAST_CHUNK_ROWS = 512, 16


@dataclass(frozen=True)
class Step:
    """What one sequence asks of a pass.

    cache     id, from `Runner.new_cache`
    tokens    (n,) int64: those its cache lacks, then those of the tree
    topology  of the n tokens, the lacking ones a chain above the tree
    n_wanted  logits are computed for the last n_wanted tokens
    n_prompt  tokens of the prompt, which plain decoding computes together
    n_done    the first n_done tokens are pending in the cache already, computed by earlier passes
    """

    cache: int
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
    """Rows [start, stop) of a step, which are rows `rows` of a chunk; masks are made on `device`."""

    step: Step
    cache: KVCache
    start: int
    stop: int
    rows: slice
    device: torch.device
    masks: dict[int | None, ops.TreeMask] = field(default_factory=dict)

    def positions(self) -> Tensor:
        """(n,) int64 positions in the sequence."""
        return torch.from_numpy(self.step.topology.depths[self.start : self.stop]) + self.cache.n_committed

    def mask(self, window: int | None) -> ops.TreeMask:
        """Which cached rows each row looks at."""
        if not self.masks:
            trunk, parents = self.step.topology.tree_rows(self.start, self.stop)
            n_before = self.cache.n_committed + trunk
            self.masks[None] = ops.make_tree_mask(parents, self.start - trunk, n_before, self.device)
        if window not in self.masks:
            self.masks[window] = replace(self.masks[None], window=window)
        return self.masks[window]


@dataclass(frozen=True)
class Chunk:
    """Rows of a pass that go through a layer together; to the layers it is the `PassContext`."""

    rows: slice
    segments: tuple[_Segment, ...]
    row_inputs: tuple[Tensor, ...]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *,
        scale: float, window: int | None = None, rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """See `PassContext.attend`."""
        outs = []
        for one in self.segments:
            rows, mask = one.rows, one.mask(window)
            turn = None if rotary is None else (rotary[0][rows], rotary[1][rows])
            outs.append(one.cache.attend(layer, one.start, q[rows], k[rows], v[rows], mask, scale, turn))
        return torch.cat(outs) if len(outs) > 1 else outs[0]


@dataclass(eq=False, repr=False)
class Runner:
    """Computes logits and owns the caches. Layers come from the streamer; embedding, last norm and head are resident."""

    spec: Architecture
    streamer: Streamer
    non_layer: LayerWeights
    format: WeightFormat
    device: torch.device
    dtype: torch.dtype
    trace: Trace
    kv: type[KVCache] = ContiguousCache

    def __post_init__(self) -> None:
        self._chunk_rows, self._ids = CHUNK_ROWS, count()
        self._caches: dict[int, KVCache] = {}
        self._graphs: GraphRunner | None = None

    @torch.inference_mode()
    def forward(self, steps: Sequence[Step]) -> list[Tensor]:
        """One sweep over the layers; writes the pending rows of every cache.

        Returns per step logits (n_wanted, vocabulary) in the dtype of the computation.
        Raises CapacityError if a cache is too small, LinkError if a layer does not arrive.
        """
        for step in steps:
            self._caches[step.cache].begin(step.tokens.tolist())
        if len(steps) == 1 and (logits := self._replay(steps[0])) is not None:
            return [logits]
        ids = torch.cat([step.tokens[step.n_done :] for step in steps]).to(self.device)
        hidden = self.spec.embed(self.non_layer, ids)
        chunks = self.chunks(steps)
        with closing(self.streamer.sweep()) as sweep:
            for block in sweep:
                with self.trace.span(COMPUTE, f"layer {block.i}"):
                    self.layer(block, hidden, chunks)
        with self.trace.span(COMPUTE, "head"):
            return self.logits(hidden, steps)

    def finish(self) -> None:
        """Wait until the device has computed all that was enqueued; copies go on."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def use_graphs(self, most: GraphShape, capture: Capture) -> None:
        """From now on compute passes of one sequence by graphs, up to this shape; all layers must be resident."""
        if self.kv is not ContiguousCache:
            return
        layers = [self.format.view(block.layout, block.data, self.dtype) for block in self.streamer.sweep()]
        model = ResidentModel(self.spec, layers, self.non_layer)
        new_buffer = partial(KVBuffer.empty, self.spec, dtype=self.dtype, device=self.device)
        self._graphs = GraphRunner(model, most, new_buffer, capture)

    def close(self) -> None:
        """End all transfers, and drop what was captured, which holds the weights."""
        self._graphs = None
        self.streamer.close()

    def _replay(self, step: Step) -> Tensor | None:
        """Logits of a step (n_wanted, vocabulary) by graphs; None where they do not serve."""
        cache, n_tokens = self._caches[step.cache], len(step.tokens)
        shape = GraphShape(step.n_rows, cache.n_committed + n_tokens, n_tokens)
        if self._graphs is None or not isinstance(cache, ContiguousCache) or not self._graphs.fits(cache.buffer, shape):
            return None
        whole = _Segment(step, cache, step.n_done, n_tokens, slice(0, step.n_rows), torch.device("cpu"))
        rows = torch.arange(shape.n_keys - step.n_rows, shape.n_keys)
        inputs = PassRows(step.tokens[step.n_done :], rows, self._row_inputs([whole]), whole.mask(window=None))
        with self.trace.span(COMPUTE, "all layers"):
            return self._graphs.forward(cache.buffer, inputs)[step.n_rows - step.n_wanted :]

    def layer(self, block: LayerView, hidden: Tensor, chunks: Sequence[Chunk]) -> None:
        """One layer on all rows, in place: hidden (n, hidden_size)."""
        weights = self.format.view(block.layout, block.data, self.dtype)
        for chunk in chunks:
            hidden[chunk.rows] = self.spec.layer(block.i, weights, hidden[chunk.rows], chunk)

    def shrink_chunks(self) -> bool:
        """Halve the rows that go through a layer together; returns whether they could be halved."""
        could = self._chunk_rows > _LEAST_CHUNK_ROWS
        self._chunk_rows = max(self._chunk_rows // 2, _LEAST_CHUNK_ROWS)
        return could

    def new_cache(self, capacity: int, is_alone: bool = False) -> int:
        """Id of an empty cache for one sequence, with room for `capacity` rows. The caller frees it.

        is_alone  no other sequence will run beside it: it reuses the graphs of the one before
        """
        buffer = self._graphs.reuse(capacity, is_alone and not self._caches) if self._graphs is not None else None
        cache = ContiguousCache(buffer) if buffer else self.kv.empty(self.spec, capacity, self.dtype, self.device)
        id = next(self._ids)
        self._caches[id] = cache
        return id

    def free_cache(self, id: int) -> None:
        """Release the memory of a cache."""
        cache = self._caches.pop(id)
        if self._graphs is not None and isinstance(cache, ContiguousCache):
            self._graphs.free(cache.buffer)

    def n_committed(self, id: int) -> int:
        """Committed rows of a cache."""
        return self._caches[id].n_committed

    def rewind(self, id: int, tokens: Sequence[int]) -> int:
        """Keep the rows of the longest common prefix with `tokens`; returns how many."""
        return self._caches[id].rewind_to(tokens)

    def commit(self, id: int, rows: Sequence[int]) -> None:
        """Keep these pending rows, in ascending order; see `KVCache.commit`."""
        self._caches[id].commit(rows)

    def discard(self, id: int) -> None:
        """Drop the pending rows of a cache."""
        self._caches[id].discard()

    def assume_context(self, id: int, n: int) -> None:
        """Take the first n rows of a cache for committed, whatever they hold, to time passes after n tokens."""
        self._caches[id].committed = [0] * n

    def chunks(self, steps: Sequence[Step]) -> list[Chunk]:
        """Cut the rows of all steps, one behind the other, into chunks."""
        parts: list[list[_Segment]] = []
        n_rows = 0
        for step in steps:
            start, cache = step.n_done, self._caches[step.cache]
            while start < len(step.tokens):
                at = n_rows % self._chunk_rows
                if at == 0:
                    parts.append([])
                n = min(self._chunk_rows - at, len(step.tokens) - start)
                parts[-1].append(_Segment(step, cache, start, start + n, slice(at, at + n), self.device))
                start, n_rows = start + n, n_rows + n
        chunks = []
        for first, segments in zip(range(0, n_rows, self._chunk_rows), parts, strict=True):
            row_inputs = tuple(one.to(self.device) for one in self._row_inputs(segments))
            chunks.append(Chunk(slice(first, first + segments[-1].rows.stop), tuple(segments), row_inputs))
        return chunks

    def _row_inputs(self, segments: list[_Segment]) -> tuple[Tensor, ...]:
        """What the architecture's layers need to know of all rows, on the host."""
        positions = torch.cat([one.positions() for one in segments])
        prompts = torch.cat([torch.full((one.stop - one.start,), one.step.n_prompt) for one in segments])
        return self.spec.row_inputs(positions, torch.maximum(prompts, positions + 1), self.dtype)

    def logits(self, hidden: Tensor, steps: Sequence[Step]) -> list[Tensor]:
        """The head on the rows that each step wants: hidden (n, hidden_size) -> per step (n_wanted, vocabulary)."""
        parts = zip(steps, torch.split(hidden, [step.n_rows for step in steps]), strict=True)
        wanted = torch.cat([rows[step.n_rows - step.n_wanted :] for step, rows in parts])
        return list(torch.split(self.spec.head(self.non_layer, wanted), [step.n_wanted for step in steps]))
