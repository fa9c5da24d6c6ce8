"""Memory plan: bytes besides the layers, limits of trees and contexts, placement.

Only the sizes of a model are needed, so a config.json is sufficient.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace

from offload_rt.chunks import CHUNK_ROWS, max_captured_rows
from offload_rt.config import EngineConfig, format_size
from offload_rt.cost.roofline import n_weights
from offload_rt.cost.tree_size import DraftLimits
from offload_rt.dtypes import DType
from offload_rt.errors import CapacityError, UnsupportedModelError
from offload_rt.kv.split import KVBytes, KVSplit, RowFormat, state_rows
from offload_rt.models.architecture import Architecture
from offload_rt.models.layers import TensorShape
from offload_rt.offload.placement import (
    BEST_SLOTS,
    ExpertSizes,
    LinkSizes,
    MemoryBudget,
    Plan,
    ReservedMemory,
    least_budget,
    place_layers,
    with_expert_slots,
)
from offload_rt.speculate.rows import ROWS_PER_NODE, draft_rows, view_rows
from offload_rt.speculate.select import Drafting
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.formats import Matrix, Source, WeightFormat, dense
from offload_rt.weights.layout import Layout, packed_layout
from offload_rt.weights.rounding import rounded_layout

# Share of the free memory, and its minimum in bytes, for other programs.
_MARGIN = 0.05
_LEAST_MARGIN = 256 << 20
# Part of the budget for workspaces of GPU libraries and for fragmentation.
LIBRARIES = 256 << 20
# GPU memory of the driver after planning: kernel modules, graph instances.
DRIVER = 256 << 20
# Host memory of reader threads, while loading a draft model and while streaming from disk: buffers
# of at most 8 MiB and some pages in all.
READ_BUFFERS = 17 << 20
# Maximum share of the budget for the default context.
_CACHE_SHARE = 1 / 8
# Minimum of the default context: an error is better than a context too short to be useful.
SHORTEST_CONTEXT = 256


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model in memory.

    layer_nbytes      bytes of each layer's block
    non_layer_nbytes  bytes of the weights outside the layers
    dtype             of the weights
    view_nbytes       scratch bytes of products on a card, e.g. a dequantised matrix
    host_view_nbytes  the same on a CPU
    stand_in          bytes of a layer's copy, for the copies of a self-drafting target
    link              sizes of the layers in transfer; None if equal
    experts           experts as separate blocks; None if experts are part of their layers
    divided           returns the sizes with experts as separate blocks; None to compute them from
                      the shapes of the architecture
    rounding          format of weights quantised while they are loaded; "none" otherwise
    images            bytes of the vision tower, its activations and features; 0 without images
    streamed_images   bytes of the vision tower that stay on disk
    head_share        stored bytes of the output matrix, relative to its bytes in `dtype`
    matrix            largest quantised matrix of the layers, for timing; None for plain weights
    """

    spec: Architecture
    layer_nbytes: tuple[int, ...]
    non_layer_nbytes: int
    dtype: DType
    view_nbytes: int = 0
    host_view_nbytes: int = 0
    stand_in: int = 0
    link: LinkSizes | None = None
    experts: ExpertSizes | None = None
    divided: "Callable[[], Sizes | None] | None" = field(default=None, compare=False, repr=False)
    rounding: str = "none"
    images: int = 0
    streamed_images: int = 0
    head_share: float = 1.0
    matrix: Matrix | None = field(default=None, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(self.layer_nbytes) + self.non_layer_nbytes

    def by_expert(self) -> "Sizes | None":
        """Return the sizes with experts as separate blocks.

        None without experts, for encoded layers, and for indivisible files.
        """
        mixture = self.spec.mixture
        if mixture is None or self.link is not None:
            return None
        if self.divided is not None:
            return self.divided()
        nbytes = {i: _expert_nbytes(self, i) for i in mixture.layers}
        layers = tuple(
            layer - nbytes.get(i, 0) * mixture.n_experts
            for i, layer in enumerate(self.layer_nbytes)
        )
        experts = ExpertSizes(mixture, max(nbytes.values()))
        return replace(self, layer_nbytes=layers, experts=experts)

    def rounded(self, rounding: str) -> "Sizes":
        """Return the sizes after quantisation while loading, see `weights.rounding`."""
        if rounding == self.rounding:
            return self
        spec = self.spec

        def layout(tensors: Sequence[TensorShape]) -> Layout:
            plain = ((name, shape, self.dtype) for name, shape in tensors)
            return rounded_layout(plain, rounding)

        layouts = {layer: layout(layer) for layer in map(spec.layer_tensors, range(spec.n_layers))}
        non_layer = layout(spec.non_layer_tensors())
        layers = [matrix for part in layouts.values() for matrix in part.matrices.values()]
        heads = tuple(non_layer.matrices.values())
        matrices = (*layers, *heads)

        def scratch(has_card: bool) -> int:
            return max((m.scratch_nbytes(self.dtype, has_card) for m in matrices), default=0)

        head_nbytes = sum(non_layer.by_name[part.name].nbytes for m in heads for part in m.tensors)
        plain_nbytes = sum(math.prod(matrix.shape) for matrix in heads) * self.dtype.itemsize
        return replace(
            self,
            layer_nbytes=tuple(layouts[spec.layer_tensors(i)].nbytes for i in range(spec.n_layers)),
            non_layer_nbytes=non_layer.nbytes,
            view_nbytes=max(self.view_nbytes, scratch(True)),
            host_view_nbytes=max(self.host_view_nbytes, scratch(False)),
            rounding=rounding,
            head_share=head_nbytes / plain_nbytes if heads else 1.0,
            matrix=largest(layers),
        )

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, dtype: DType) -> "Sizes":
        """Return the sizes of stored tensors, for compute in `dtype`."""
        return cls(
            spec=checkpoint.spec,
            layer_nbytes=tuple(layer.nbytes for layer in checkpoint.layers),
            non_layer_nbytes=checkpoint.non_layer.nbytes,
            dtype=dtype if checkpoint.spec.taps else checkpoint.dtype,
            view_nbytes=max(block.scratch_nbytes(dtype, True) for block in checkpoint.blocks),
            host_view_nbytes=max(block.scratch_nbytes(dtype, False) for block in checkpoint.blocks),
            matrix=largest(m for layer in checkpoint.layers for m in layer.matrices.values()),
        )

    @classmethod
    def of_spec(
        cls, spec: Architecture, dtype: DType, layer_format: WeightFormat | None = None
    ) -> "Sizes":
        """Return the sizes of an architecture with weights of `dtype`, in device layout.

        layer_format  format of the layers; None for plain weights
        """
        stores: WeightFormat = layer_format or dense.Format(None)
        nbytes: dict[tuple[TensorShape, ...], int] = {}
        view_nbytes = 0
        host_view_nbytes = 0
        matrices: list[Matrix] = []
        for layer in {spec.layer_tensors(i) for i in range(spec.n_layers)}:
            stored = [
                stores.stored(name, shape, dtype, Source({}))
                for tensor in layer
                for name, shape in _matrices(tensor)
            ]
            matrices += [tensor for tensor in stored if isinstance(tensor, Matrix)]
            nbytes[layer] = packed_layout(
                (part.name, part.shape, part.dtype or dtype)
                for tensor in stored
                for part in tensor.tensors
            ).nbytes
            view_nbytes, host_view_nbytes = (
                max(nbytes, *(matrix.scratch_nbytes(dtype, has_card) for matrix in stored))
                for nbytes, has_card in ((view_nbytes, True), (host_view_nbytes, False))
            )
        non_layer = sum(math.prod(shape) for _, shape in spec.non_layer_tensors()) * dtype.itemsize
        layers = tuple(nbytes[spec.layer_tensors(i)] for i in range(spec.n_layers))
        return cls(
            spec, layers, non_layer, dtype, view_nbytes, host_view_nbytes, matrix=largest(matrices)
        )


def largest(matrices: Iterable[Matrix]) -> Matrix | None:
    """Return the matrix with the most weights, the first of equal ones; None without matrices."""
    return max(matrices, key=lambda matrix: math.prod(matrix.shape), default=None)


def _expert_nbytes(sizes: Sizes, i: int) -> int:
    """Return the bytes of an expert of layer i; other tensors are not quantised."""
    spec = sizes.spec
    assert spec.mixture is not None
    owners = spec.expert_names(i)
    tensors = spec.layer_tensors(i)
    rest = [
        tensor
        for tensor in tensors
        if not owners.keys() & {tensor.name, tensor.name.rpartition(".")[0]}
    ]
    rest_nbytes = n_weights(rest) * sizes.dtype.itemsize
    return (sizes.layer_nbytes[i] - rest_nbytes) // spec.mixture.n_experts


def _matrices(tensor: TensorShape) -> list[TensorShape]:
    """Split a tensor of all experts into the matrices that checkpoints store."""
    name, shape = tensor
    if len(shape) != 3 or shape[1] == 1:  # a convolution
        return [tensor]
    return [TensorShape(f"{name}.{i}.weight", shape[1:]) for i in range(shape[0])]


@dataclass(frozen=True)
class MemoryPlan:
    """Placement and limits.

    max_model_len  maximum tokens of a sequence
    cache_rows     KV rows that fit
    view_rows      KV rows of the views of a self-drafting target
    n_sequences    concurrent sequences of maximum length
    """

    plan: Plan
    limits: DraftLimits
    max_model_len: int
    cache_rows: int
    view_rows: int
    n_sequences: int


def less_margin(free: int) -> int:
    """Return the free bytes minus the margin for other programs."""
    return max(free - max(int(free * _MARGIN), _LEAST_MARGIN), 0)


def plan_memory(
    config: EngineConfig,
    drafting: Drafting,
    models: tuple[Sizes, Sizes | None],
    dtype: DType,
    budget: MemoryBudget,
) -> MemoryPlan:
    """Plan placement, context length and tree limits for memory budgets.

    models  target and draft model

    A mixture has whole layers, or experts as separate blocks. The division with fewer bytes per
    plain decoding pass is used.
    Raises CapacityError if the budgets are too small, UnsupportedModelError if the target cannot
    draft for itself.
    """
    target, draft = models
    whole = None
    with suppress(CapacityError):
        whole = _plan_layers(config, drafting, models, dtype, budget)
    if whole is not None and whole.plan.is_resident:
        return whole
    divided = target.by_expert()
    if divided is not None and divided.experts is not None:
        # Experts on demand need less than whole layers: their error names the least budget.
        with suppress(CapacityError) if whole is not None else nullcontext():
            by_expert = _plan_experts(config, drafting, (divided, draft), dtype, budget)
            is_less = whole is None or (
                by_expert is not None and _moved(by_expert, config) < _moved(whole, config)
            )
            if by_expert is not None and is_less:
                return by_expert
    # The error of whole layers names the missing bytes.
    return whole or _plan_layers(config, drafting, models, dtype, budget)


def _plan_experts(
    config: EngineConfig,
    drafting: Drafting,
    models: tuple[Sizes, Sizes | None],
    dtype: DType,
    budget: MemoryBudget,
) -> MemoryPlan | None:
    """Plan for experts as separate blocks.

    None if the host memory of a GPU machine holds too few experts for a row.
    """
    target, draft = models
    experts = target.experts
    assert experts is not None, "the target is divided into experts"
    if not budget.has_card:
        return _plan_layers(config, drafting, models, dtype, budget)
    # The host also computes some experts.
    budget = replace(budget, buffers=budget.buffers + target.host_view_nbytes)
    # Each pass reads all streamed layers but only some experts: layers have priority on the host.
    layers = _plan_layers(config, drafting, models, dtype, budget).plan
    room = replace(layers.budget, buffers=layers.budget.buffers + layers.host_nbytes)
    n_on_host = min(room.host_room(experts.nbytes), experts.n_blocks)
    if n_on_host < experts.n_blocks:  # host slots for layers from disk
        n_on_host -= -(-BEST_SLOTS * max(target.layer_nbytes) // experts.nbytes)
    if n_on_host <= experts.mixture.n_used:
        return None
    budget = replace(budget, buffers=budget.buffers + n_on_host * experts.nbytes)
    target = replace(target, experts=replace(experts, n_on_host=n_on_host))
    return _plan_layers(config, drafting, (target, draft), dtype, budget)


def _moved(memory: MemoryPlan, config: EngineConfig) -> int:
    """Return the bytes that plain decoding copies to the device per pass."""
    return sum(memory.plan.pass_bytes.at(0, config.max_num_seqs).values())


def _plan_layers(
    config: EngineConfig,
    drafting: Drafting,
    models: tuple[Sizes, Sizes | None],
    dtype: DType,
    budget: MemoryBudget,
) -> MemoryPlan:
    """Plan for the given division into blocks."""
    memory = _Memory(config, *models, dtype, budget, drafting.view_rows)
    target = memory.target
    limit = memory.target.spec.max_positions
    asked = config.max_model_len
    if drafting.type.resources.is_self_draft and not target.spec.supports_self_draft:
        problem = f"a model of type {target.spec.family} cannot draft for itself"
        raise UnsupportedModelError(problem, change="use another --drafter")
    if asked is not None and asked > limit:
        raise CapacityError(
            "--max-model-len",
            need=str(asked),
            have=f"a model of {limit} positions",
            change="lower it",
        )
    shortest = asked or min(SHORTEST_CONTEXT, limit)
    n = config.max_num_seqs

    def together(max_len: int) -> int:
        """Tokens of all sequences; all but the first may need an additional row for the tree."""
        return n * (max_len + 1) - 1

    fits = memory.fits_whole(together(shortest), config.tree_size or 1)
    needed = memory.whole if fits else memory.divided
    plain = needed(together(shortest), 1)
    least_plain = least_budget(target.layer_nbytes, plain, target.link)
    limits = drafting.limits(
        config,
        lambda nodes: needed(together(shortest), nodes).total - plain.total,
        budget.device,
        least_plain,
        max(least_plain + sum(target.layer_nbytes) - budget.device, 0) if budget.has_card else 0,
    )

    def least(max_len: int) -> int:
        """Smallest budget for a context that does not exceed its share of the budget."""
        n_rows = together(max_len) + n * state_rows(target.spec, dtype.itemsize)
        cache = n_rows * target.spec.kv_nbytes(dtype.itemsize)
        reserved = needed(together(max_len), limits.n_nodes)
        return max(
            least_budget(target.layer_nbytes, reserved, target.link), int(cache / _CACHE_SHARE)
        )

    longer = range(shortest + 1, limit + 1) if asked is None and fits else ()
    max_len = shortest + bisect_right(longer, budget.device, key=least)
    n_view_rows = _view_rows(drafting.view_rows, max_len, limits.n_nodes)
    plan = memory.place(together(max_len), limits.n_nodes)
    return MemoryPlan(
        plan, limits, max_len, _cache_rows(together(max_len), limits.n_nodes), n_view_rows, n
    )


@dataclass(frozen=True)
class _Memory:
    """Divide a budget between the layers of a target and its keys and values.

    `max_len` counts the tokens of all sequences together. A resident layer saves its bytes in every
    pass. A resident KV row saves its bytes only after the context reaches it. The row saves less if
    offloaded rows are in fp8 or outside a window. Layers therefore have priority. KV rows use the
    rest, less than a layer if layers are streamed. If all KV rows fit beside the slots for layers,
    all stay on the device.
    """

    config: EngineConfig
    target: Sizes
    draft: Sizes | None
    dtype: DType
    budget: MemoryBudget
    view_rows: int

    def whole(self, max_len: int, n_nodes: int) -> ReservedMemory:
        """Return the bytes besides layers, with all KV rows on the device."""
        spec = self.target.spec
        n = self.config.max_num_seqs
        has_card = self.budget.has_card
        reserved = reserved_memory(
            self.target, self.draft, self.dtype, has_card, max_len, n_nodes, n
        )
        # Selecting rows for a view needs a layer's rows, and about as many bytes again.
        n_rows = _view_rows(self.view_rows, max_len, n_nodes) + 2 * max_len // spec.n_layers
        views = n_rows * spec.kv_nbytes(self.dtype.itemsize) if self.view_rows else 0
        reserved = replace(reserved, draft=reserved.draft + views, libraries=self.budget.libraries)
        return (
            replace(reserved, graphs=self._graphs(reserved.total, n_nodes))
            if has_card
            else reserved
        )

    def _graphs(self, reserved_nbytes: int, n_nodes: int) -> int:
        """Return the bytes of captured passes: draft passes, and target passes if resident."""
        draft = self.draft
        target = replace(self.target, dtype=self.dtype)
        drafts = (draft,) if draft and draft.spec.supports_graphs else ()
        both = _graphs_nbytes((*drafts, target), n_nodes)
        is_captured = target.spec.supports_graphs and self.config.pipeline == 1
        fits = reserved_nbytes + both + sum(target.layer_nbytes) <= self.budget.device
        return both if is_captured and fits else _graphs_nbytes(drafts, n_nodes)

    def divided(self, max_len: int, n_nodes: int) -> ReservedMemory:
        """Return the bytes besides layers, with the minimum of KV rows on the device."""
        return self._reserved(max_len, self._split(max_len, n_nodes))

    def fits_whole(self, max_len: int, n_nodes: int) -> bool:
        """Return whether all KV rows stay on the device.

        They do if they fit, or if offloading saves nothing.
        """
        whole = self.whole(max_len, n_nodes)
        kv_limit = self.config.kv_nbytes
        may_fit = kv_limit is None or whole.cache <= kv_limit
        # Attention inside transformers' code reads neither offloaded rows nor views.
        if not self.target.spec.supports_offloaded_kv:
            return True
        return (may_fit and self._least(whole) <= self.budget.device) or (
            whole.cache <= self.divided(max_len, n_nodes).cache
        )

    def place(self, max_len: int, n_nodes: int) -> Plan:
        """Return the placement. Raises CapacityError if the budgets are too small."""
        is_whole = self.fits_whole(max_len, n_nodes)
        kv_limit = self.config.kv_nbytes
        needed = (self.whole if is_whole else self.divided)(max_len, n_nodes)
        if kv_limit is not None and kv_limit < needed.cache:
            need = f"{format_size(needed.cache)} ({needed.cache} bytes) at least"
            change = "raise it, or lower --max-model-len or --tree-size"
            raise CapacityError(
                "--kv-memory is too small", need=need, have=format_size(kv_limit), change=change
            )
        if is_whole:
            plan = place_layers(self.target.layer_nbytes, needed, self.budget, self.target.link)
            return (
                plan
                if self.target.experts is None
                else with_expert_slots(plan, self.target.experts)
            )
        split = self._split(max_len, n_nodes)
        if kv_limit is None:
            spare = self.budget.device - self._place(max_len, split).device_nbytes
        else:  # an explicit KV budget has priority over layers
            spare = max(min(kv_limit - needed.cache, self.budget.device - self._least(needed)), 0)
        n_on_device = split.n_on_device + spare // self.target.spec.kv_nbytes(self.dtype.itemsize)
        return self._place(max_len, replace(split, n_on_device=min(n_on_device, split.n_rows)))

    def _split(self, max_len: int, n_nodes: int) -> KVSplit:
        spec = self.target.spec
        rows = RowFormat(spec.n_kv_heads, spec.head_dim, self.dtype, self.config.kv_dtype == "fp8")
        n_rows = _cache_rows(max_len, n_nodes)
        return KVSplit.least(spec, n_rows, n_nodes, rows, CHUNK_ROWS, self.budget.has_card)

    def _least(self, reserved: ReservedMemory) -> int:
        return least_budget(self.target.layer_nbytes, reserved, self.target.link)

    def _bytes(self, max_len: int, split: KVSplit) -> KVBytes:
        return split.nbytes(self.target.spec, max_len + split.n_nodes, self.budget.has_card)

    def _reserved(self, max_len: int, split: KVSplit) -> ReservedMemory:
        return replace(self.whole(max_len, split.n_nodes), cache=self._bytes(max_len, split).device)

    def _place(self, max_len: int, split: KVSplit) -> Plan:
        budget = self.budget
        if budget.has_card:
            budget = replace(budget, buffers=budget.buffers + self._bytes(max_len, split).host)
        if budget.host < budget.buffers:
            raise CapacityError(
                "the host memory budget is too small for keys and "
                "values", need=f"{format_size(budget.buffers)} at least",
                have=format_size(budget.host), change="raise --host-memory or --device-memory, or "
                                                      "lower --max-model-len",
            )  # fmt: skip
        reserved = self._reserved(max_len, split)
        link = self.target.link
        return replace(place_layers(self.target.layer_nbytes, reserved, budget, link), split=split)


def reserved_memory(
    target: Sizes,
    draft: Sizes | None,
    dtype: DType,
    has_card: bool,
    max_len: int,
    n_nodes: int,
    n: int = 1,
) -> ReservedMemory:
    """Return the device bytes besides layers.

    max_len  tokens of all n sequences
    n_nodes  maximum nodes of a tree
    """
    spec = target.spec
    hidden = 2 * (max_len + n_nodes) * spec.hidden_size * dtype.itemsize
    rows = min(CHUNK_ROWS, max_len + n_nodes)
    # Input of a head, its output, and a copy of the output in its first pass.
    tapped = hidden // 2 * (len(draft.spec.taps) + 2) if draft and draft.spec.taps else 0
    return ReservedMemory(
        non_layer=target.non_layer_nbytes,
        cache=_cache_nbytes(spec, _cache_rows(max_len, n_nodes), n_nodes, dtype.itemsize, n),
        scratch=hidden
        + tapped
        + (target.view_nbytes if has_card else target.host_view_nbytes)
        + spec.scratch_nbytes(rows, n_nodes, dtype.itemsize),
        draft=_draft_nbytes(draft, spec.vocab_size, max_len, n_nodes, n) if draft else 0,
        stand_in=draft.stand_in if draft else 0,
        experts=target.experts.least if target.experts else 0,
        images=target.images,
        streamed_images=target.streamed_images,
    )


def _cache_nbytes(spec: Architecture, n_rows: int, n_nodes: int, itemsize: int, n: int) -> int:
    """Return the bytes of KV rows and recurrent states of n sequences, including tree rows."""
    tree_nbytes = n_nodes * sum(shape.row_nbytes(itemsize) for shape in spec.state_shapes)
    return (n_rows + n * state_rows(spec, itemsize)) * spec.kv_nbytes(itemsize) + tree_nbytes


def _draft_nbytes(draft: Sizes, vocab_size: int, max_len: int, n_nodes: int, n: int) -> int:
    """Return the bytes of a draft model: weights, cache, activations, draft distributions."""
    itemsize = draft.dtype.itemsize
    cache = _cache_nbytes(
        draft.spec, draft_rows(max_len, n_nodes), ROWS_PER_NODE * n_nodes, itemsize, n
    )
    # float32 noise, its order and a copy of the distribution for a level; all nodes' distributions.
    draft_probs = n_nodes * vocab_size * 4 * 4
    scratch = draft.view_nbytes + draft.spec.scratch_nbytes(n_nodes, n_nodes, itemsize)
    if draft.spec.taps:  # a chunk of a prompt, and the parent states of all tree rows
        rows = CHUNK_ROWS + ROWS_PER_NODE * n_nodes
        scratch += (
            draft.spec.scratch_nbytes(rows, 0, itemsize)
            + 4 * rows * draft.spec.hidden_size * itemsize
        )
    return draft.nbytes + cache + scratch + draft_probs


def _graphs_nbytes(models: Sequence[Sizes], n_nodes: int) -> int:
    """Return the bytes of captured passes: a common pool, and the logits of each model."""
    n = max_captured_rows(n_nodes)
    itemsizes = [model.dtype.itemsize for model in models]
    pools = (
        model.view_nbytes + model.spec.scratch_nbytes(n, n, size)
        for model, size in zip(models, itemsizes, strict=True)
    )
    logits = (
        n * model.spec.vocab_size * size for model, size in zip(models, itemsizes, strict=True)
    )
    return max(pools, default=0) + sum(logits)


def _cache_rows(max_len: int, max_nodes: int) -> int:
    """Return the KV rows of the longest sequence: all tokens but the last, and a tree."""
    return max_len - 1 + max_nodes


def _view_rows(budget: int, max_len: int, max_nodes: int) -> int:
    """Return the KV rows of all views; views of further sequences use an eighth of the cache."""
    return view_rows(min(budget, max_len), max_nodes) + max_len // 8 if budget else 0
