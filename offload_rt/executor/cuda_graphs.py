"""CUDA graphs of a resident model: passes of a few fixed shapes, captured and replayed."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.dtypes import DType
from offload_rt.kv.cache import KVBuffer
from offload_rt.models.architecture import Architecture
from offload_rt.models.layers import Attention, LayerWeights, keep_tapped
from offload_rt.ops import extension
from offload_rt.weights.layout import packed_layout

Replay = Callable[[], None]
# Reduction of logits (rows, vocabulary) on the device to a row each. Equal functions share graphs.
Reduce = Callable[[Tensor], Tensor]
Capture = Callable[[Callable[[], None]], Replay]


@dataclass(frozen=True)
class ResidentModel:
    """A model with all layers on the device; `taps` as in `Runner`."""

    spec: Architecture
    layers: Sequence[LayerWeights]
    non_layer: LayerWeights
    taps: tuple[int, ...] = ()


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
    """Inputs in a `block` of memory for passes up to a shape. The mask changes per pass."""

    block: Tensor

    @classmethod
    def empty(
        cls, shape: GraphShape, example_row: Sequence[Tensor], device: torch.device
    ) -> "GraphInputs":
        """Allocate inputs; `example_row` contains the model's `row_inputs` for a row."""
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


class Captured:
    """A computation that runs directly first, is captured second, and is replayed afterwards."""

    result: Any = None  # of the latest run that was no replay
    _n_runs = 0
    _replay: Replay | None = None

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._function = compute

    def run(self, capture: Capture) -> None:
        """Compute. After a failed capture, e.g. without memory, later calls run directly."""
        if self._n_runs == 1:
            with suppress(torch.OutOfMemoryError, extension.NotCapturable):
                self._replay = capture(self._compute)
        (self._replay or self._compute)()
        self._n_runs += 1

    @torch.inference_mode()
    def _compute(self) -> None:
        self.result = self._function()


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
        self._logits = logits[: shape.n_rows]
        self._tapped = tapped[: shape.n_rows]
        self._captured = Captured(self.compute)

    def run(self, rows: PassRows, capture: Capture) -> None:
        """Compute these rows."""
        self._host.fill(rows, spare=self._buffer.capacity - 1)
        ops.fill(self._inputs.block, self._host.block)
        self._captured.run(capture)

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


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of all captures of a process.

    cuBLAS keeps a workspace for each stream, up to 32 MiB on Hopper, until the process ends.
    """
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


class CudaCapture:
    """Capture CUDA graphs with a shared memory pool; no two graphs run concurrently.

    After an unexpected failure, all further passes launch each kernel.
    """

    def __init__(self) -> None:
        self._is_broken = False
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(torch.cuda.current_device())
        # A graph that is never dropped. A pool without graphs refuses captures while it contains
        # allocations, and cuBLAS keeps a workspace there (vllm-project/vllm issue 28426). The graph
        # also keeps the workspace mapped, which later graphs use.
        # Without memory the allocation fails here: if the first capture of a process fails, the
        # destructor of its graph aborts the process (torch 2.11).
        with torch.cuda.stream(self._stream):
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
            notice = "CUDA graphs are off, which slows small passes"
            print(f"{notice}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
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
