"""Passes of a single sequence by CUDA graphs, in place of a runner of resident layers."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.chunks import GRAPH_WIDTHS, max_captured_rows
from offload_rt.errors import RankError
from offload_rt.executor.cuda_graphs import (
    Capture,
    Captured,
    GraphPass,
    GraphShape,
    PassRows,
    Reduce,
    Replay,
    ResidentModel,
)
from offload_rt.executor.rank_runner import RankRunner
from offload_rt.executor.runner import Runner, row_inputs
from offload_rt.executor.step import Segment, Step
from offload_rt.kv.cache import ContiguousCache, KVBuffer, KVCache
from offload_rt.kv.memory import KVMemory
from offload_rt.kv.split import KVShare
from offload_rt.ops import extension
from offload_rt.system.ranks import Ranks
from offload_rt.system.trace import COMPUTE, Trace

_KEYS = 256
# Minimum keys of a shape if attention skips absent keys.
_LEAST_KEYS = 1024
# Captured shapes per buffer. Each needs some megabytes of driver memory; trees rarely need more
# than twenty shapes.
_MOST_KEPT = 40

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def capture_passes(
    runner: Runner, limit: GraphShape, capture: Capture, seconds: float = 0.0
) -> None:
    """Use CUDA graphs for passes of a single sequence. All layers must be resident.

    limit    largest captured shape
    seconds  time limit for capturing likely shapes in advance
    """
    spec = runner.spec
    if spec.state_shapes or not spec.supports_graphs:
        return
    runner.memory = SharedMemory(spec, runner.dtype, runner.device, limit.n_keys)
    model = ResidentModel(spec, runner.resident_layers(), runner.non_layer, runner.taps)
    capture_pass = capture
    if isinstance(runner, RankRunner):
        capture_pass = partial(_capture_together, capture, runner.ranks)
    graphs = GraphRunner(model, limit, capture, capture_pass, runner.trace)
    runner.replay = graphs.replay
    # Ranks have separate clocks but must capture equal shapes: nothing is captured in advance.
    if seconds and capture_pass is capture:
        graphs.prepare(runner.memory, seconds)


@dataclass
class SharedMemory(KVMemory):
    """Memory in which sequences that run alone, in turn, share a buffer and its graphs."""

    n_rows: int
    _shared: KVBuffer | None = None

    def new_cache(
        self, capacity: int, is_alone: bool = False, share: KVShare | None = None
    ) -> KVCache:
        if not is_alone or capacity > self.n_rows:
            self._shared = None  # the new cache needs its memory
            return super().new_cache(capacity)
        self._shared = self._shared or self.new_buffer(self.n_rows)
        self._shared.clear()
        return ContiguousCache(self._shared)


@dataclass(eq=False, repr=False)
class GraphRunner:
    """Captured passes of a resident model, by KV buffer and shape.

    capture       returns the replay of a computation, e.g. a CUDA graph
    capture_pass  `capture` for complete passes, which ranks capture together
    """

    model: ResidentModel
    limit: GraphShape
    capture: Capture
    capture_pass: Capture
    trace: Trace

    def __post_init__(self) -> None:
        self._limit_rows = max_captured_rows(self.limit.n_rows)
        # Passes refer to the memory of a buffer, not to the buffer: freeing a cache frees them.
        self._passes = WeakKeyDictionary[KVBuffer, dict[GraphShape, GraphPass]]()
        self._reductions: dict[tuple[int, Reduce], Captured] = {}
        self._logits: Tensor | None = None
        self._tapped = torch.empty(0)

    def prepare(self, memory: KVMemory, seconds: float) -> None:
        """Capture passes of all widths at the shortest length, within `seconds`.

        The largest pass is captured first, because smaller passes reuse its memory.
        """
        buffer = memory.new_cache(self.limit.n_keys, is_alone=True).buffer
        assert buffer is not None, "all rows are on the device"
        limit = min(self._limit_rows, buffer.capacity - 1)
        widths = [width for width in GRAPH_WIDTHS if width <= limit]
        started = time.perf_counter()
        for width in (*widths[-1:], *widths[:-1]):
            if time.perf_counter() - started > seconds:
                break
            nodes = torch.arange(width)
            per_row = self.model.spec.row_inputs(nodes, nodes + 1, buffer.keys.dtype)
            rows = PassRows(nodes * 0, nodes, per_row, ops.make_tree_mask(nodes.numpy() - 1, 0, 0))
            for _ in range(2):
                self.forward(buffer, rows)

    def replay(self, step: Step, cache: KVCache) -> tuple[Tensor, Tensor] | None:
        """See `Runner.replay`. The cache needs a spare row after its keys."""
        n_tokens = len(step.tokens)
        buffer = cache.buffer
        has_rows = step.n_rows <= self._limit_rows and n_tokens <= self.limit.n_tree_rows
        has_spare = cache.n_held + n_tokens < cache.capacity
        reads = step.read is not None or step.read_hidden is not None
        has_all_keys = cache.n_seen == cache.n_held and cache.leader is None
        if buffer is None or reads or not (has_rows and has_spare and has_all_keys):
            return None
        segment = Segment(step, cache, step.n_done, n_tokens, slice(0, step.n_rows))
        inputs = PassRows(
            step.tokens[step.n_done :],
            torch.arange(step.n_done, n_tokens) + cache.n_held,
            row_inputs(self.model.spec, [segment], buffer.keys.dtype),
            segment.mask(),
        )
        with self.trace.span(COMPUTE, "all layers"):
            out = self.forward(buffer, inputs, step.reduce)
        return out[step.n_rows - step.n_wanted :], self._tapped[: step.n_rows]

    def forward(self, buffer: KVBuffer, rows: PassRows, reduce: Reduce | None = None) -> Tensor:
        """Compute n rows and write their keys and values to the buffer.

        Returns logits (n, vocabulary), or n rows of `reduce` output, valid until the next pass.
        """
        n = len(rows.ids)
        if self._logits is None:
            spec = self.model.spec
            self._logits = buffer.keys.new_empty(self._limit_rows, spec.vocab_size)
            tapped = self._limit_rows, len(self.model.taps), spec.hidden_size
            self._tapped = self._logits.new_empty(tapped)
        logits = self._logits
        if buffer not in self._passes:
            self._passes[buffer] = {}
            buffer.clear(rows.mask.n_keys - n)  # 0 times an uninitialised value may be NaN
        shape = self._rounded(n, rows.mask.n_keys, buffer)
        new_pass = partial(GraphPass, self.model, replace(buffer), shape, logits, self._tapped)
        _most_recent(self._passes[buffer], shape, new_pass).run(rows, self.capture_pass)
        if reduce is None:
            return logits[:n]
        new = partial(Captured, partial(reduce, logits[: shape.n_rows]))
        reduction = _most_recent(self._reductions, (shape.n_rows, reduce), new)
        reduction.run(self.capture)
        out: Tensor = reduction.result[:n]
        return out

    def _rounded(self, n_rows: int, n_keys: int, buffer: KVBuffer) -> GraphShape:
        steps = -(-n_keys // _KEYS)
        # If attention skips absent keys, few shapes serve a growing cache.
        if ops.goes_by_extent(buffer.keys):
            steps = max(1 << (steps - 1).bit_length(), _LEAST_KEYS // _KEYS)
        n_keys = min(steps * _KEYS, buffer.capacity)
        width = next(width for width in GRAPH_WIDTHS if width >= n_rows)
        return GraphShape(width, n_keys, min(n_keys, self.limit.n_tree_rows))


def _most_recent(kept: dict[_Key, _Value], key: _Key, make: Callable[[], _Value]) -> _Value:
    """Return the value of a key and mark it most recently used; evict the least recently used."""
    kept[key] = kept.pop(key) if key in kept else make()
    if len(kept) > _MOST_KEPT:
        del kept[next(iter(kept))]
    return kept[key]


def _capture_together(capture: Capture, ranks: Ranks, compute: Callable[[], None]) -> Replay:
    """Capture a pass with collectives on all ranks, or on none, as NCCL requires.

    Raises OutOfMemoryError if a rank failed.
    """
    replay = None
    with suppress(torch.OutOfMemoryError, extension.NotCapturable, RankError):
        replay = capture(compute)
    if not ranks.least(replay is not None)[0] or replay is None:
        raise torch.OutOfMemoryError("a rank failed to capture the pass")
    return replay
