"""Passes of a resident model at a few fixed shapes, captured as CUDA graphs and replayed."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.chunks import GRAPH_WIDTHS, max_captured_rows
from offload_rt.dtypes import DType
from offload_rt.errors import RankError
from offload_rt.kv.cache import Attention, ContiguousCache, KVBuffer, KVCache
from offload_rt.models.architecture import Architecture, LayerWeights
from offload_rt.ops import extension
from offload_rt.system.ranks import Ranks
from offload_rt.weights.layout import packed_layout

_KEYS = 256
# Where keys that are not there cost nothing, a pass has room for so many at least.
_LEAST_KEYS = 1024
# Captured shapes of one buffer. Each takes some megabytes of the driver's; a tree seldom needs more
# than twenty.
_MOST_KEPT = 40

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
Replay = Callable[[], None]
# What is made of logits (rows, vocabulary) on the device: one row for each. Of equal ones the first
# is captured for all.
Reduce = Callable[[Tensor], Tensor]
Capture = Callable[[Callable[[], None]], Replay]


@dataclass(frozen=True)
class ResidentModel:
    """A model whose layers are all on the device, and after which of them a drafter takes hidden
    states.
    """

    spec: Architecture
    layers: Sequence[LayerWeights]
    non_layer: LayerWeights
    taps: tuple[int, ...] = ()


def keep_tapped(taps: Sequence[int], tapped: Tensor, hidden: Tensor, n_layers: int) -> None:
    """Copy hidden states (n, hidden_size) behind `n_layers` layers to their places in tapped (n,
    len(taps), hidden_size).
    """
    for place, tap in enumerate(taps):
        if tap == n_layers:
            tapped[:, place] = hidden


@dataclass(frozen=True)
class GraphShape:
    """The most a pass may have: rows computed, cache rows attended to, and those of them that
    belong to the tree.
    """

    n_rows: int
    n_keys: int
    n_tree_rows: int


@dataclass(frozen=True)
class PassRows:
    """The n rows of one sequence in a pass.

    ids, rows   (n,) int64: tokens, and the rows of the cache that they are written to
    row_inputs  (n, ...) each, see `Architecture.row_inputs`
    mask        what the rows look at, without a window
    """

    ids: Tensor
    rows: Tensor
    row_inputs: tuple[Tensor, ...]
    mask: ops.TreeMask


@dataclass(frozen=True)
class GraphInputs(PassRows):
    """Rows at fixed addresses, for passes of at most so many; what the mask's tensors hold changes
    from pass to pass.

    block  uint8, of which all these are views
    """

    block: Tensor

    @classmethod
    def empty(
        cls, shape: GraphShape, of_row: Sequence[Tensor], device: torch.device
    ) -> "GraphInputs":
        """Inputs of a model whose `row_inputs` of one row are `of_row`."""
        n = shape.n_rows
        int32 = DType.INT32
        layout = packed_layout((
            ("ids", (n,), DType.INT64), ("rows", (n,), DType.INT64),
            ("bits", (n, -(-shape.n_tree_rows // 32)), int32),
            ("depths", (n,), int32), ("key_depths", (shape.n_tree_rows,), int32),
            ("extent", (2,), int32),
            *((f"row_inputs.{i}", (n, *one.shape[1:]), DType.from_torch(one.dtype)) for i,
                one in enumerate(of_row)),
        ))  # fmt: skip
        block = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        ids, rows, bits, depths, key_depths, extent, *row_inputs = layout.views(block).values()
        mask = ops.TreeMask(bits, depths, key_depths, extent, shape.n_keys, is_exact=False)
        return cls(ids, rows, tuple(row_inputs), mask, block)

    def fill(self, rows: PassRows, spare: int) -> None:
        """Copy the rows of a pass into these inputs, which are on the host.

        Rows left over write to cache row `spare` and see what the first row sees: attention to
        nothing may give NaN.
        """
        n = len(rows.ids)
        mask = self.mask
        source = rows.mask
        self.block.zero_()
        self.ids[:n] = rows.ids
        self.rows[:n] = rows.rows
        self.rows[n:] = spare
        for mine, one in zip(self.row_inputs, rows.row_inputs, strict=True):
            mine[:n] = one
        mask.bits[:n, : source.bits.shape[1]] = source.bits
        mask.bits[n:] = mask.bits[0]
        mask.depths[:n], mask.depths[n:] = source.depths, source.depths[0]
        mask.key_depths[: len(source.key_depths)] = source.key_depths
        mask.extent[:] = source.extent


class _Captured:
    """A computation that runs as it is the first time, is captured the second time, and replayed
    from then on.
    """

    def __init__(self) -> None:
        self._n_runs = 0
        self._replay: Replay | None = None

    def run(self, compute: Callable[[], None], capture: Capture) -> None:
        """Compute. Where memory runs out while it is captured, or it cannot be captured, it goes on
        running as it is.
        """
        if self._n_runs == 1:
            with suppress(torch.OutOfMemoryError, extension.NotCapturable):
                self._replay = capture(compute)
        (self._replay or compute)()
        self._n_runs += 1


class GraphPass:
    """One pass of a fixed shape over one KV buffer; to the layers it is the `PassContext`.

    logits, tapped  (>= shape.n_rows, ...), written; at fixed addresses as the inputs are
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
        one = torch.ones(1, dtype=torch.int64)
        of_row = model.spec.row_inputs(one, one, buffer.keys.dtype)
        self._host = GraphInputs.empty(shape, of_row, torch.device("cpu"))
        self._inputs = GraphInputs.empty(shape, of_row, buffer.keys.device)
        self.row_inputs = self._inputs.row_inputs
        self._mask = self._inputs.mask
        self._logits, self._tapped = logits[: shape.n_rows], tapped[: shape.n_rows]
        self._captured = _Captured()

    def run(self, rows: PassRows, capture: Capture) -> None:
        """Compute these rows."""
        self._host.fill(rows, spare=self._buffer.capacity - 1)
        ops.fill(self._inputs.block, self._host.block)
        self._captured.run(self.compute, capture)

    @torch.inference_mode()
    def compute(self) -> None:
        """Embedding, layers and head; writes the rows of the cache and the logits."""
        model = self._model.spec
        non_layer = self._model.non_layer
        # what the reference makes of a mask is part of what is captured
        self._mask = replace(self._inputs.mask)
        hidden, _ = model.embed(non_layer, self._inputs.ids, self.row_inputs)
        keep_tapped(self._model.taps, self._tapped, hidden, 0)
        for i, weights in enumerate(self._model.layers):
            hidden = model.layer(i, weights, hidden, self)
            keep_tapped(self._model.taps, self._tapped, hidden, i + 1)
        self._logits.copy_(model.head(non_layer, hidden))

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, *,
        scale: float, window: int | None = None, rotary: tuple[Tensor, Tensor] | None = None,
        softcap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `PassContext.attend`."""
        asked = Attention(
            layer, 0, q, k, v, self._mask.within(window), scale, rotary, softcap, sinks
        )
        return self._buffer.attend(layer, self._inputs.rows, asked)


class _Reduction:
    """What is made of the first logits of a pass."""

    def __init__(self, reduce: Reduce, logits: Tensor) -> None:
        self._reduce, self._logits, self._captured = reduce, logits, _Captured()
        self.out = logits[:0]

    def run(self, capture: Capture) -> None:
        """Reduce the logits that the pass has written."""
        self._captured.run(self._compute, capture)

    @torch.inference_mode()
    def _compute(self) -> None:
        self.out = self._reduce(self._logits)


class GraphRunner:
    """The captured passes of a resident model, by KV buffer and shape.

    most        the largest pass
    new_buffer  makes one of so many rows
    capture     turns a computation into one that replays it; a CUDA graph on a card
    ranks       among which the model is divided; None: it is whole
    tapped      (rows, len(taps), hidden_size) of the last pass
    """

    def __init__(
        self, model: ResidentModel, most: GraphShape, new_buffer: Callable[[int], KVBuffer],
        capture: Capture,
        ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self._most = most
        self._new_buffer = new_buffer
        self._capture = capture
        self._capture_pass = capture if ranks is None else partial(capture_together, capture, ranks)
        self._most_rows = max_captured_rows(most.n_rows)
        self._passes: dict[KVBuffer, dict[GraphShape, GraphPass]] = {}
        self._reductions: dict[tuple[int, Reduce], _Reduction] = {}
        self._reusable: KVBuffer | None = None
        self._logits: Tensor | None = None
        self.tapped = torch.empty(0)

    def prepare(self, seconds: float) -> None:
        """Capture passes of all widths, each at the shortest length, for as long as `seconds`
        allow.

        The largest comes first: the others find room in the memory that it took.
        """
        buffer = self.reuse(self._most.n_keys, is_alone=True)
        assert buffer is not None, "it is as large as the largest"
        widths = [
            width for width in GRAPH_WIDTHS if width <= self._most_rows and width < buffer.capacity
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
        """The buffer that sequences use which run alone, one after the other, with its passes; None
        if it is too small.

        For any other cache it is dropped, since that one needs the memory.
        """
        if not is_alone or capacity > self._most.n_keys:
            dropped = self._reusable
            self._reusable = None
            if dropped is not None:
                self.free(dropped)
            return None
        self._reusable = self._reusable or self._new_buffer(self._most.n_keys)
        self._reusable.clear()
        return self._reusable

    def free(self, buffer: KVBuffer) -> None:
        """Drop the passes of a buffer that is not kept for reuse."""
        if buffer is not self._reusable:
            self._passes.pop(buffer, None)

    def fits(self, cache: KVCache, shape: GraphShape) -> bool:
        """Whether such a pass can be served; the cache needs one spare row behind its keys."""
        has_rows = shape.n_rows <= self._most_rows and shape.n_tree_rows <= self._most.n_tree_rows
        return isinstance(cache, ContiguousCache) and has_rows and shape.n_keys < cache.capacity

    def forward(self, buffer: KVBuffer, rows: PassRows, reduce: Reduce | None = None) -> Tensor:
        """Logits (n, vocabulary) of the rows, or what `reduce` makes of them, one row for each;
        valid until the next pass.

        Writes their keys and values to the buffer.
        """
        n = len(rows.ids)
        if self._logits is None:
            size = (self._most_rows, self._model.spec.vocab_size)
            self._logits = torch.empty(size, dtype=buffer.keys.dtype, device=buffer.keys.device)
            self.tapped = self._logits.new_empty(
                size[0], len(self._model.taps), self._model.spec.hidden_size
            )
        logits = self._logits
        if buffer not in self._passes:
            self._passes[buffer] = {}
            buffer.clear(rows.mask.n_keys - n)  # 0 times what an uninitialised row holds may be NaN
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
        """The shape that serves a pass."""
        steps = -(-n_keys // _KEYS)
        # Where absent keys cost nothing, few shapes serve a growing cache.
        if ops.goes_by_extent(buffer.keys):
            steps = max(1 << (steps - 1).bit_length(), _LEAST_KEYS // _KEYS)
        n_keys = min(steps * _KEYS, buffer.capacity)
        width = next(width for width in GRAPH_WIDTHS if width >= n_rows)
        return GraphShape(width, n_keys, min(n_keys, self._most.n_tree_rows))


def _most_recent(kept: dict[_Key, _Value], key: _Key, make: Callable[[], _Value]) -> _Value:
    """The value of a key, which becomes the most recently used one; of too many the least recently
    used one goes.
    """
    kept[key] = kept.pop(key) if key in kept else make()
    if len(kept) > _MOST_KEPT:
        del kept[next(iter(kept))]
    return kept[key]


def capture_together(capture: Capture, ranks: Ranks, compute: Callable[[], None]) -> Replay:
    """Capture what ranks exchange between their products on all of them, or, as NCCL asks, on none.

    Raises OutOfMemoryError where one of them could not.
    """
    replay = None
    with suppress(torch.OutOfMemoryError, extension.NotCapturable, RankError):
        replay = capture(compute)
    if not ranks.least(replay is not None)[0] or replay is None:
        raise torch.OutOfMemoryError("not all ranks could capture it")
    return replay


class CudaCapture:
    """Capture CUDA graphs that share one memory pool: no two of them run at once.

    After the first unexpected failure nothing is captured, and passes launch each kernel.
    """

    def __init__(self) -> None:
        self._is_broken = False
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # This graph stays for ever. A pool that its last graph has left cannot be captured into
        # again while anything still lies in it, and cuBLAS keeps there what it took in the first
        # capture (vllm-project/vllm issue 28426). It also keeps that memory mapped where a graph
        # that is dropped gives up cuBLAS's workspace, which others were captured with.
        self._flag = torch.zeros(1, device="cuda")
        with suppress(extension.NotCapturable):
            self._anchor = self(self._flag.zero_)

    def __call__(self, compute: Callable[[], object]) -> Replay:
        """Capture what `compute` launches; it has run before, so that nothing is set up for the
        first time.

        Raises OutOfMemoryError without room for the graph, and NotCapturable after any other
        failure.
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
        """By the graph's own methods: `torch.cuda.graph` waits for the device, copies included, and
        empties the cache.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Other threads go on enqueueing copies during the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                compute()
            except BaseException:
                with suppress(RuntimeError):  # the capture may have become invalid
                    graph.capture_end()
                raise
            try:
                graph.capture_end()
            except RuntimeError as error:  # the driver has no room for the graph
                if "out of memory" not in str(error):
                    raise
                raise torch.OutOfMemoryError(str(error)) from error
        return graph.replay
