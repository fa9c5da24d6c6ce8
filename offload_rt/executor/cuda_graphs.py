"""Passes of a model that lies on the device as a whole, at sizes that come again and again: captured once, then replayed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.kv.cache import KVBuffer, KVCache, ReusableKVBuffer
from offload_rt.models.architecture import Architecture, LayerWeights
from offload_rt.weights.layout import packed_layout

# Widths and lengths are rounded up to these, so that few sizes are captured: a level of 5 rows is computed as 8.
_WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_KEYS = 256
# Captured sizes of one cache. Each keeps some megabytes of the driver's; a tree seldom needs more than twenty.
_MOST_KEPT = 40

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


@dataclass(frozen=True)
class ResidentModel:
    """A model whose layers all lie on the device."""

    spec: Architecture
    layers: Sequence[LayerWeights]
    non_layer: LayerWeights


@dataclass(frozen=True)
class GraphShape:
    """The largest pass that a graph serves: rows computed, rows of the cache attended to, and those of them inside the tree."""

    n_rows: int
    n_keys: int
    n_tree_rows: int


@dataclass(frozen=True)
class GraphInputs:
    """What a pass of at most n rows reads, in memory that stays where it is.

    ids, rows   (n,) int64: tokens, and the rows of the cache that they are written to
    row_inputs  (n, ...) each, see `Architecture.row_inputs`
    mask        what the rows look at, whatever lies in its tensors by then
    block       uint8, of which all these are views
    """

    ids: Tensor
    rows: Tensor
    row_inputs: tuple[Tensor, ...]
    mask: ops.TreeMask
    block: Tensor

    @classmethod
    def empty(cls, size: GraphShape, of_row: Sequence[Tensor], device: torch.device) -> "GraphInputs":
        """Inputs of a model whose `row_inputs` of one row are `of_row`."""
        n, int32 = size.n_rows, torch.int32
        layout = packed_layout((
            ("ids", (n,), torch.int64), ("rows", (n,), torch.int64), ("bits", (n, -(-size.n_tree_rows // 32)), int32),
            ("depths", (n,), int32), ("key_depths", (size.n_tree_rows,), int32), ("extent", (2,), int32),
            *((f"row_inputs.{i}", (n, *one.shape[1:]), one.dtype) for i, one in enumerate(of_row)),
        ))  # fmt: skip
        block = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        ids, rows, bits, depths, key_depths, extent, *row_inputs = layout.views(block).values()
        mask = ops.TreeMask(bits, depths, key_depths, extent, size.n_keys, is_exact=False)
        return cls(ids, rows, tuple(row_inputs), mask, block)

    def fill(self, rows: "PassRows", spare: int) -> None:
        """Take over the rows of a pass, where these inputs lie on the host.

        What is left over is written to a spare row of the cache and looks where the first row does: what looked nowhere
        might be no number.
        """
        n, mask, given = len(rows.ids), self.mask, rows.mask
        self.block.zero_()
        self.ids[:n], self.rows[:n], self.rows[n:] = rows.ids, rows.rows, spare
        for mine, one in zip(self.row_inputs, rows.row_inputs, strict=True):
            mine[:n] = one
        mask.bits[:n, : given.bits.shape[1]] = given.bits
        mask.bits[n:] = mask.bits[0]
        mask.depths[:n], mask.depths[n:] = given.depths, given.depths[0]
        mask.key_depths[: len(given.key_depths)] = given.key_depths
        mask.extent[:] = given.extent


@dataclass(frozen=True)
class PassRows:
    """The rows of one sequence in a pass, on the host.

    ids, rows   (n,) int64: tokens, and their rows in the cache
    row_inputs  (n, ...) each, see `Architecture.row_inputs`
    mask        what they look at, without a window
    """

    ids: Tensor
    rows: Tensor
    row_inputs: tuple[Tensor, ...]
    mask: ops.TreeMask


class GraphPass:
    """One pass of a fixed size over the memory of one cache, from inputs to logits at fixed addresses.

    To the layers it is the `PassContext`.

    logits  (>= size.n_rows, vocabulary), written
    """

    def __init__(self, model: ResidentModel, store: KVBuffer, size: GraphShape, logits: Tensor) -> None:
        # Not the store itself: what is captured for one ends with it.
        self._model, self._stores = model, (store.keys, store.values)
        one = torch.ones(1, dtype=torch.int64)
        of_row = model.spec.row_inputs(one, one, store.keys.dtype)
        self._host = GraphInputs.empty(size, of_row, torch.device("cpu"))
        self._inputs = GraphInputs.empty(size, of_row, store.keys.device)
        self.row_inputs = self._inputs.row_inputs
        self._masks: dict[int | None, ops.TreeMask] = {}
        self._logits = logits[: size.n_rows]

    def take(self, rows: PassRows, spare: int) -> None:
        """Bring the rows of a pass to where it reads them, by one copy; `spare` is a row of the cache that nobody needs."""
        self._host.fill(rows, spare)
        self._inputs.block.copy_(self._host.block)

    @torch.inference_mode()
    def compute(self) -> None:
        """Embedding, layers and head; writes the rows of the cache and the logits."""
        model, non_layer = self._model.spec, self._model.non_layer
        # Masks of this computation's own: what the reference makes of one is part of what is captured.
        self._masks = {}
        hidden = model.embed(non_layer, self._inputs.ids)
        for i, weights in enumerate(self._model.layers):
            hidden = model.layer(i, weights, hidden, self)
        self._logits.copy_(model.head(non_layer, hidden))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None) -> Tensor:
        """See `PassContext.attend`."""
        if window not in self._masks:
            self._masks[window] = replace(self._inputs.mask, window=window)
        (keys, values), mask = self._stores, self._masks[window]
        for store, new in ((keys, k), (values, v)):
            store[layer].index_copy_(1, self._inputs.rows, new.transpose(0, 1))
        return ops.tree_attention(q, keys[layer, :, : mask.n_keys], values[layer, :, : mask.n_keys], mask, scale)


class GraphRunner:
    """The passes of a resident model, one for each size and memory of a cache, kept as long as that memory.

    most     of a pass
    reusable     memory for sequences that run alone, one after the other
    capture  turns a computation into one that replays it; a CUDA graph on a card
    """

    def __init__(self, model: ResidentModel, most: GraphShape, reusable: ReusableKVBuffer, capture: Capture) -> None:
        self._model, self._most, self._reusable, self._capture = model, most, reusable, capture
        self._most_rows = max(width for width in _WIDTHS if width <= max(most.n_rows, 1))
        self._passes: WeakKeyDictionary[KVBuffer, dict[GraphShape, _Captured]] = WeakKeyDictionary()
        self._logits: Tensor | None = None

    def cache(self, capacity: int, is_alone: bool) -> KVCache | None:
        """An empty cache in the memory that passes were captured for, if it is free; else that gives way to others."""
        cache = self._reusable.acquire(capacity) if is_alone else None
        if cache is None:
            self._reusable.release()
        return cache

    def fits(self, cache: KVCache, size: GraphShape) -> bool:
        """Whether there is room for such a pass, and in the cache for one spare row behind its keys."""
        has_rows = size.n_rows <= self._most_rows and size.n_tree_rows <= self._most.n_tree_rows
        return has_rows and size.n_keys < cache.capacity

    def forward(self, cache: KVCache, rows: PassRows) -> Tensor:
        """Logits (n, vocabulary) of the rows, valid until the next pass; their keys and values are in the cache then.

        The first pass of a size is computed as it is, the second one captured and replayed.
        """
        n = len(rows.ids)
        if self._logits is None:
            shape = (self._most_rows, self._model.spec.vocab_size)
            self._logits = torch.empty(shape, dtype=cache.keys.dtype, device=cache.keys.device)
        if cache.store not in self._passes:
            self._passes[cache.store] = {}
            for store in (cache.keys, cache.values):  # a weight of 0 times what lay in memory before may be no number
                store[:, :, rows.mask.n_keys - n :].zero_()
        found = self._found(cache.store, self._rounded(n, rows.mask.n_keys, cache))
        found.fixed.take(rows, cache.capacity - 1)
        if found.n_computed == 1:
            found.replay = self._capture(found.fixed.compute)
        (found.replay or found.fixed.compute)()
        found.n_computed += 1
        return self._logits[:n]

    def _rounded(self, n_rows: int, n_keys: int, cache: KVCache) -> GraphShape:
        """The size that serves a pass."""
        steps = -(-n_keys // _KEYS)
        # Where keys that are not there cost nothing, few sizes serve a growing cache.
        if ops.goes_by_extent(cache.keys):
            steps = 1 << (steps - 1).bit_length()
        n_keys = min(steps * _KEYS, cache.capacity)
        return GraphShape(
            next(width for width in _WIDTHS if width >= n_rows), n_keys, min(n_keys, self._most.n_tree_rows)
        )

    def _found(self, store: KVBuffer, size: GraphShape) -> "_Captured":
        """The pass of a size, which is the last to be dropped from now on."""
        sizes = self._passes[store]
        found = sizes.pop(size, None)
        if found is None:
            found = _Captured(GraphPass(self._model, store, size, self._logits))
            if len(sizes) == _MOST_KEPT:
                del sizes[next(iter(sizes))]
        sizes[size] = found
        return found


@dataclass
class _Captured:
    """A pass, and what replays it once it has been computed as it is."""

    fixed: GraphPass
    replay: Replay | None = None
    n_computed: int = 0


class CudaCapture:
    """CUDA graphs that share one pool of memory: none of them runs while another does."""

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        # A pool that its last graph has left cannot be captured into again while anything still lies in it, and cuBLAS keeps
        # there what it took in the first capture (vllm-project/vllm issue 28426). So one graph stays for ever. It also keeps
        # that memory mapped where a graph that is dropped gives up cuBLAS's workspace, which others were captured with.
        self._flag = torch.zeros(1, device="cuda")
        self._anchor = self(self._flag.zero_)

    def __call__(self, compute: Callable[[], object]) -> Replay:
        """Capture what `compute` launches; it has run before, so that nothing is set up for the first time."""
        graph = torch.cuda.CUDAGraph()
        # Other threads go on enqueueing copies while this one captures.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            compute()
        return graph.replay
