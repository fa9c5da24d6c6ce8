"""CUDA graphs of a resident model: passes of a few fixed shapes, captured and replayed."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.chunks import GRAPH_WIDTHS, max_captured_rows
from offload_rt.dtypes import DType
from offload_rt.errors import RankError
from offload_rt.kv.cache import KVBuffer, KVCache
from offload_rt.models.architecture import Architecture
from offload_rt.models.layers import Attention, LayerWeights
from offload_rt.ops import extension
from offload_rt.system.ranks import Ranks
from offload_rt.weights.layout import packed_layout

_KEYS = 256
# Minimum keys of a shape if attention skips absent keys.
_LEAST_KEYS = 1024
# Captured shapes per buffer. Each needs some megabytes of driver memory; trees rarely need more
# than twenty shapes.
_MOST_KEPT = 40

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
Replay = Callable[[], None]
# Reduction of logits (rows, vocabulary) on the device to a row each. Equal functions share graphs.
Reduce = Callable[[Tensor], Tensor]
Capture = Callable[[Callable[[], None]], Replay]


@dataclass(frozen=True)
class ResidentModel:
    """A model with all layers on the device.

    taps  layer counts after which hidden states are kept for a drafter
    """

    spec: Architecture
    layers: Sequence[LayerWeights]
    non_layer: LayerWeights
    taps: tuple[int, ...] = ()


def keep_tapped(taps: Sequence[int], tapped: Tensor, hidden: Tensor, n_layers: int) -> None:
    """Copy hidden states (n, hidden_size) after `n_layers` layers to tapped, if a tap matches.

    tapped  (n, len(taps), hidden_size)
    """
    for place, tap in enumerate(taps):
        if tap == n_layers:
            tapped[:, place] = hidden


@dataclass(frozen=True)
class GraphShape:
    """Upper bounds of a pass: computed rows, attended cache rows, and cache rows of the tree."""

    n_rows: int
    n_keys: int
    n_tree_rows: int


@dataclass(frozen=True)
class PassRows:
    """Rows of a sequence in a pass.

    ids         (n,) int64 tokens
    rows        (n,) int64 cache rows to write
    row_inputs  (n, ...) each, see `Architecture.row_inputs`
    mask        visibility, without a window
    """

    ids: Tensor
    rows: Tensor
    row_inputs: tuple[Tensor, ...]
    mask: ops.TreeMask


@dataclass(frozen=True)
class GraphInputs(PassRows):
    """Inputs at fixed addresses for passes up to a shape. The mask's tensors change per pass.

    block  uint8 memory of all inputs
    """

    block: Tensor

    @classmethod
    def empty(
        cls, shape: GraphShape, example_row: Sequence[Tensor], device: torch.device
    ) -> "GraphInputs":
        """Allocate inputs.

        example_row  `row_inputs` of the model for a row
        """
        n = shape.n_rows
        int32 = DType.INT32
        layout = packed_layout((
            ("ids", (n,), DType.INT64), ("rows", (n,), DType.INT64),
            ("bits", (n, -(-shape.n_tree_rows // 32)), int32),
            ("depths", (n,), int32), ("key_depths", (shape.n_tree_rows,), int32),
            ("extent", (2,), int32),
            *((f"row_inputs.{i}", (n, *inputs.shape[1:]), DType.from_torch(inputs.dtype)) for i,
                inputs in enumerate(example_row)),
        ))  # fmt: skip
        block = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        ids, rows, bits, depths, key_depths, extent, *row_inputs = layout.views(block).values()
        mask = ops.TreeMask(bits, depths, key_depths, extent, shape.n_keys, is_exact=False)
        return cls(ids, rows, tuple(row_inputs), mask, block)

    def fill(self, rows: PassRows, spare: int) -> None:
        """Copy the rows of a pass into these inputs on the host.

        Unused rows write to cache row `spare`, with the visibility of the first row: attention
        without keys may result in NaN.
        """
        n = len(rows.ids)
        mask = self.mask
        source = rows.mask
        self.block.zero_()
        self.ids[:n] = rows.ids
        self.rows[:n] = rows.rows
        self.rows[n:] = spare
        for target, inputs in zip(self.row_inputs, rows.row_inputs, strict=True):
            target[:n] = inputs
        mask.bits[:n, : source.bits.shape[1]] = source.bits
        mask.bits[n:] = mask.bits[0]
        mask.depths[:n] = source.depths
        mask.depths[n:] = source.depths[0]
        mask.key_depths[: len(source.key_depths)] = source.key_depths
        mask.extent[:] = source.extent


class _Captured:
    """A computation that runs directly first, is captured second, and is replayed afterwards."""

    def __init__(self) -> None:
        self._n_runs = 0
        self._replay: Replay | None = None

    def run(self, compute: Callable[[], None], capture: Capture) -> None:
        """Compute. After a failed capture, e.g. without memory, later calls run directly."""
        if self._n_runs == 1:
            with suppress(torch.OutOfMemoryError, extension.NotCapturable):
                self._replay = capture(compute)
        (self._replay or compute)()
        self._n_runs += 1


class GraphPass:
    """Pass of a fixed shape over a KV buffer; implements `PassContext`.

    logits, tapped  (>= shape.n_rows, ...) outputs, at fixed addresses like the inputs
    """

    def __init__(
        self,
        model: ResidentModel,
        buffer: KVBuffer,
        shape: GraphShape,
        logits: Tensor,
        tapped: Tensor,
    ) -> None:
        self._model = model
        self._buffer = buffer
        position = torch.ones(1, dtype=torch.int64)
        example_row = model.spec.row_inputs(position, position, buffer.keys.dtype)
        self._host = GraphInputs.empty(shape, example_row, torch.device("cpu"))
        self._inputs = GraphInputs.empty(shape, example_row, buffer.keys.device)
        self.row_inputs = self._inputs.row_inputs
        self._mask = self._inputs.mask
        self._logits = logits[: shape.n_rows]
        self._tapped = tapped[: shape.n_rows]
        self._captured = _Captured()

    def run(self, rows: PassRows, capture: Capture) -> None:
        """Compute these rows."""
        self._host.fill(rows, spare=self._buffer.capacity - 1)
        ops.fill(self._inputs.block, self._host.block)
        self._captured.run(self.compute, capture)

    @torch.inference_mode()
    def compute(self) -> None:
        """Compute embedding, layers and head; write cache rows and logits."""
        model = self._model.spec
        non_layer = self._model.non_layer
        # A copy without cached results: the conversion of the mask must be captured as well.
        self._mask = replace(self._inputs.mask)
        hidden, _ = model.embed(non_layer, self._inputs.ids, self.row_inputs)
        keep_tapped(self._model.taps, self._tapped, hidden, 0)
        for i, weights in enumerate(self._model.layers):
            hidden = model.layer(i, weights, hidden, self)
            keep_tapped(self._model.taps, self._tapped, hidden, i + 1)
        self._logits.copy_(model.head(non_layer, hidden))

    def attend(self, asked: Attention) -> Tensor:
        """See `PassContext.attend`."""
        mask = self._mask.within(asked.window)
        return self._buffer.attend(asked.layer, self._inputs.rows, asked, mask)


class _Reduction:
    """Reduction of a pass's first logits."""

    def __init__(self, reduce: Reduce, logits: Tensor) -> None:
        self._reduce = reduce
        self._logits = logits
        self._captured = _Captured()
        self.out = logits[:0]

    def run(self, capture: Capture) -> None:
        """Reduce the logits of the latest pass."""
        self._captured.run(self._compute, capture)

    @torch.inference_mode()
    def _compute(self) -> None:
        self.out = self._reduce(self._logits)


class GraphRunner:
    """Captured passes of a resident model, by KV buffer and shape.

    limit       largest pass
    new_buffer  allocates a buffer of n rows
    capture     returns the replay of a computation, e.g. a CUDA graph
    capture_pass  `capture` for complete passes, which ranks capture together
    tapped      (rows, len(taps), hidden_size) of the last pass
    """

    def __init__(
        self, model: ResidentModel, limit: GraphShape, new_buffer: Callable[[int], KVBuffer],
        capture: Capture,
        capture_pass: Capture,
    ) -> None:  # fmt: skip
        self._model = model
        self._limit = limit
        self._new_buffer = new_buffer
        self._capture = capture
        self._capture_pass = capture_pass
        self._limit_rows = max_captured_rows(limit.n_rows)
        self._passes: dict[KVBuffer, dict[GraphShape, GraphPass]] = {}
        self._reductions: dict[tuple[int, Reduce], _Reduction] = {}
        self._reusable: KVBuffer | None = None
        self._logits: Tensor | None = None
        self.tapped = torch.empty(0)

    def prepare(self, seconds: float) -> None:
        """Capture passes of all widths at the shortest length, within `seconds`.

        The largest pass is captured first, because smaller passes reuse its memory.
        """
        buffer = self.reuse(self._limit.n_keys, is_alone=True)
        assert buffer is not None, "the capacity is the limit"
        widths = [
            width for width in GRAPH_WIDTHS if width <= self._limit_rows and width < buffer.capacity
        ]
        started = time.perf_counter()
        for width in (*widths[-1:], *widths[:-1]):
            if time.perf_counter() - started > seconds:
                break
            nodes = torch.arange(width)
            row_inputs = self._model.spec.row_inputs(nodes, nodes + 1, buffer.keys.dtype)
            rows = PassRows(
                nodes * 0, nodes, row_inputs, ops.make_tree_mask(nodes.numpy() - 1, 0, 0)
            )
            for _ in range(2):
                self.forward(buffer, rows)

    def reuse(self, capacity: int, is_alone: bool) -> KVBuffer | None:
        """Return the shared buffer of sequences that run alone, in turn; None if too small.

        Any other cache needs its memory, so the shared buffer is dropped.
        """
        if not is_alone or capacity > self._limit.n_keys:
            dropped = self._reusable
            self._reusable = None
            if dropped is not None:
                self.free(dropped)
            return None
        self._reusable = self._reusable or self._new_buffer(self._limit.n_keys)
        self._reusable.clear()
        return self._reusable

    def free(self, buffer: KVBuffer) -> None:
        """Drop the passes of a buffer, unless it is the shared buffer."""
        if buffer is not self._reusable:
            self._passes.pop(buffer, None)

    def fits(self, cache: KVCache, shape: GraphShape) -> bool:
        """Return whether a graph can serve a pass. The cache needs a spare row after its keys."""
        has_rows = shape.n_rows <= self._limit_rows and shape.n_tree_rows <= self._limit.n_tree_rows
        return cache.buffer is not None and has_rows and shape.n_keys < cache.capacity

    def forward(self, buffer: KVBuffer, rows: PassRows, reduce: Reduce | None = None) -> Tensor:
        """Compute n rows and write their keys and values to the buffer.

        Returns logits (n, vocabulary), or n rows of `reduce` output, valid until the next pass.
        """
        n = len(rows.ids)
        if self._logits is None:
            size = (self._limit_rows, self._model.spec.vocab_size)
            self._logits = torch.empty(size, dtype=buffer.keys.dtype, device=buffer.keys.device)
            self.tapped = self._logits.new_empty(
                size[0], len(self._model.taps), self._model.spec.hidden_size
            )
        logits = self._logits
        if buffer not in self._passes:
            self._passes[buffer] = {}
            buffer.clear(rows.mask.n_keys - n)  # 0 times an uninitialised value may be NaN
        shape = self._rounded(n, rows.mask.n_keys, buffer)
        _most_recent(
            self._passes[buffer],
            shape,
            lambda: GraphPass(self._model, buffer, shape, logits, self.tapped),
        ).run(rows, self._capture_pass)
        if reduce is None:
            return logits[:n]
        reduction = _most_recent(
            self._reductions,
            (shape.n_rows, reduce),
            lambda: _Reduction(reduce, logits[: shape.n_rows]),
        )
        reduction.run(self._capture)
        return reduction.out[:n]

    def _rounded(self, n_rows: int, n_keys: int, buffer: KVBuffer) -> GraphShape:
        """Return the captured shape for a pass."""
        steps = -(-n_keys // _KEYS)
        # If attention skips absent keys, few shapes serve a growing cache.
        if ops.goes_by_extent(buffer.keys):
            steps = max(1 << (steps - 1).bit_length(), _LEAST_KEYS // _KEYS)
        n_keys = min(steps * _KEYS, buffer.capacity)
        width = next(width for width in GRAPH_WIDTHS if width >= n_rows)
        return GraphShape(width, n_keys, min(n_keys, self._limit.n_tree_rows))


def _most_recent(kept: dict[_Key, _Value], key: _Key, make: Callable[[], _Value]) -> _Value:
    """Return the value of a key and mark it most recently used; evict the least recently used."""
    kept[key] = kept.pop(key) if key in kept else make()
    if len(kept) > _MOST_KEPT:
        del kept[next(iter(kept))]
    return kept[key]


def capture_together(capture: Capture, ranks: Ranks, compute: Callable[[], None]) -> Replay:
    """Capture a pass with collectives on all ranks, or on none, as NCCL requires.

    Raises OutOfMemoryError if a rank failed.
    """
    replay = None
    with suppress(torch.OutOfMemoryError, extension.NotCapturable, RankError):
        replay = capture(compute)
    if not ranks.least(replay is not None)[0] or replay is None:
        raise torch.OutOfMemoryError("a rank failed to capture the pass")
    return replay


class CudaCapture:
    """Capture CUDA graphs with a shared memory pool; no two graphs run concurrently.

    After an unexpected failure, all further passes launch each kernel.
    """

    def __init__(self) -> None:
        self._is_broken = False
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # A graph that is never dropped. A pool without graphs refuses captures while it contains
        # allocations, and cuBLAS keeps a workspace there (vllm-project/vllm issue 28426). The graph
        # also keeps the workspace mapped, which later graphs use.
        self._flag = torch.zeros(1, device="cuda")
        with suppress(extension.NotCapturable):
            self._anchor = self(self._flag.zero_)

    def __call__(self, compute: Callable[[], object]) -> Replay:
        """Capture the kernels of `compute`, which must have run before.

        Raises OutOfMemoryError without memory for the graph, NotCapturable after other failures.
        """
        if self._is_broken:
            raise extension.NotCapturable
        try:
            with suppress(torch.OutOfMemoryError):
                return self._capture(compute)
            # During a capture torch releases no cached memory.
            torch.cuda.empty_cache()
            return self._capture(compute)
        except (torch.OutOfMemoryError, extension.NotCapturable):
            raise
        except RuntimeError as error:
            self._is_broken = True
            reason = str(error).splitlines()[0]
            print(
                f"CUDA graphs are off, which slows small passes: {reason}",
                file=sys.stderr,
                flush=True,
            )
            raise extension.NotCapturable from error

    def _capture(self, compute: Callable[[], object]) -> Replay:
        """Capture without `torch.cuda.graph`, which waits for all copies and empties the cache."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Further threads enqueue copies during the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                compute()
            except BaseException:
                with suppress(RuntimeError):  # the capture may be invalid
                    graph.capture_end()
                raise
            try:
                graph.capture_end()
            except RuntimeError as error:  # the driver lacks memory for the graph
                if "out of memory" not in str(error):
                    raise
                raise torch.OutOfMemoryError(str(error)) from error
        return graph.replay
