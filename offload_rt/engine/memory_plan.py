"""Memory plan: bytes besides layers, limits of trees and contexts, placement.

Only the sizes of a model are needed, so a config.json is sufficient.
"""

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

from offload_rt.chunks import CHUNK_ROWS, max_captured_rows
from offload_rt.config import EngineConfig, format_size
from offload_rt.cost.tree_size import DraftLimits
from offload_rt.dtypes import DType
from offload_rt.engine.model_sizes import Sizes
from offload_rt.errors import CapacityError, UnsupportedModelError
from offload_rt.kv.split import KVSplit, RowFormat, state_rows
from offload_rt.models.architecture import Architecture
from offload_rt.offload.placement import (
    BEST_SLOTS,
    MemoryBudget,
    Plan,
    ReservedMemory,
    least_budget,
    place_layers,
    with_expert_slots,
)
from offload_rt.speculate.rows import ROWS_PER_NODE, changed_rows, draft_rows, view_rows
from offload_rt.speculate.select import Drafting


def reserved_memory(
    target: Sizes,
    draft: Sizes | None,
    dtype: DType,
    has_card: bool,
    max_len: int,
    n_nodes: int,
    n: int = 1,
) -> ReservedMemory:
    """Return the device bytes besides layers, for `max_len` tokens of all n sequences.

    Excludes draft distributions, see `_Memory.whole`.
    """
    spec = target.spec
    hidden = 2 * (max_len + n_nodes) * spec.hidden_size * dtype.itemsize
    rows = min(CHUNK_ROWS, max_len + n_nodes)
    # Input of a head, its output, and a copy of the output in its first pass.
    tapped = hidden // 2 * (len(draft.spec.taps) + 2) if draft and draft.spec.taps else 0
    return ReservedMemory(
        non_layer=target.non_layer_nbytes,
        cache=_cache_nbytes(spec, cache_rows(max_len, n_nodes), n_nodes, dtype.itemsize, n),
        scratch=hidden
        + tapped
        + (target.view_nbytes if has_card else target.host_view_nbytes)
        + spec.scratch_nbytes(rows, n_nodes, dtype.itemsize),
        draft=_draft_nbytes(draft, max_len, n_nodes, n) if draft else 0,
        stand_in=draft.stand_in if draft else 0,
        experts=target.experts.least if target.experts else 0,
        images=target.images,
        streamed_images=target.streamed_images,
    )


def _cache_nbytes(spec: Architecture, n_rows: int, n_nodes: int, itemsize: int, n: int) -> int:
    """Return the bytes of KV rows and recurrent states of n sequences, including tree rows."""
    tree_nbytes = n_nodes * sum(shape.row_nbytes(itemsize) for shape in spec.state_shapes)
    return (n_rows + n * state_rows(spec, itemsize)) * spec.kv_nbytes(itemsize) + tree_nbytes


def _draft_nbytes(draft: Sizes, max_len: int, n_nodes: int, n: int) -> int:
    spec = draft.spec
    itemsize = draft.dtype.itemsize
    n_tree_rows = ROWS_PER_NODE * n_nodes
    cache = _cache_nbytes(spec, draft_rows(max_len, n_nodes), n_tree_rows, itemsize, n)
    scratch = draft.view_nbytes + spec.scratch_nbytes(n_nodes, n_nodes, itemsize)
    if spec.taps:  # a chunk of a prompt, and the parent states of all tree rows
        rows = CHUNK_ROWS + n_tree_rows
        scratch += spec.scratch_nbytes(rows, 0, itemsize) + 4 * rows * spec.hidden_size * itemsize
    return draft.nbytes + cache + scratch


def graphs_nbytes(models: Sequence[Sizes], n_nodes: int) -> int:
    """Return the bytes of captured passes: a common pool, and the logits of each model."""
    n = max_captured_rows(n_nodes)
    pool = logits = 0
    for model in models:
        itemsize = model.dtype.itemsize
        pool = max(pool, model.view_nbytes + model.spec.scratch_nbytes(n, n, itemsize))
        logits += n * model.spec.vocab_size * itemsize
    return pool + logits


def cache_rows(max_len: int, max_nodes: int) -> int:
    """Return the KV rows of the longest sequence: all tokens but the last, and a tree."""
    return max_len - 1 + max_nodes


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
class MemoryPlan:
    """Placement and limits.

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

    A mixture has whole layers, or experts as separate blocks. The division with fewer bytes per
    plain decoding pass is used.
    Raises CapacityError if the budgets are too small, UnsupportedModelError if the target cannot
    draft for itself.
    """
    memory = _Memory(config, drafting, *models, dtype, budget)
    whole = None
    with suppress(CapacityError):
        whole = memory.plan()
        if whole.plan.is_resident:
            return whole

    def moved(plan: MemoryPlan) -> int:
        return sum(plan.plan.pass_bytes.at(0, config.max_num_seqs).values())

    divided = memory.target.by_expert()
    if divided is not None:
        # Experts on demand need less than whole layers: their error names the least budget.
        with suppress(CapacityError) if whole is not None else nullcontext():
            by_expert = replace(memory, target=divided).plan_experts()
            if by_expert is not None and (whole is None or moved(by_expert) < moved(whole)):
                return by_expert
    # The error of whole layers names the missing bytes.
    return whole or memory.plan()


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
    drafting: Drafting
    target: Sizes
    draft: Sizes | None
    dtype: DType
    budget: MemoryBudget

    def plan(self) -> MemoryPlan:
        target = self.target
        limit = target.spec.max_positions
        asked = self.config.max_model_len
        if self.drafting.type.resources.is_self_draft and not target.spec.supports_self_draft:
            problem = f"a model of type {target.spec.family} cannot draft for itself"
            raise UnsupportedModelError(problem, change="use another --drafter")
        if asked is not None and asked > limit:
            have = f"a model of {limit} positions"
            raise CapacityError("--max-model-len", need=str(asked), have=have, change="lower it")
        shortest = asked or min(SHORTEST_CONTEXT, limit)
        n = self.config.max_num_seqs

        def together(max_len: int) -> int:
            """Tokens of all sequences; all but the first may need another row for the tree."""
            return n * (max_len + 1) - 1

        fits = self.fits_whole(together(shortest), self.config.tree_size or 1)
        needed = self.whole if fits else self.divided
        plain = needed(together(shortest), 1)
        least_plain = self._least(plain)
        limits = self.drafting.limits(
            self.config,
            lambda nodes: needed(together(shortest), nodes).total - plain.total,
            self.budget.device,
            least_plain,
            max(least_plain + sum(target.layer_nbytes) - self.budget.device, 0),
        )

        def least(max_len: int) -> int:
            """Smallest budget for a context that does not exceed its share of the budget."""
            n_rows = together(max_len) + n * state_rows(target.spec, self.dtype.itemsize)
            cache = n_rows * target.spec.kv_nbytes(self.dtype.itemsize)
            reserved = needed(together(max_len), limits.n_nodes)
            return max(self._least(reserved), int(cache / _CACHE_SHARE))

        longer = range(shortest + 1, limit + 1) if asked is None and fits else ()
        max_len = shortest + bisect_right(longer, self.budget.device, key=least)
        n_view_rows = self._view_rows(max_len, limits.n_nodes)
        n_rows = cache_rows(together(max_len), limits.n_nodes)
        plan = self.place(together(max_len), limits.n_nodes)
        return MemoryPlan(plan, limits, max_len, n_rows, n_view_rows, n)

    def plan_experts(self) -> MemoryPlan | None:
        """Plan for experts as separate blocks; None if the host holds too few experts for a row."""
        target = self.target
        experts = target.experts
        assert experts is not None, "the target is divided into experts"
        if not self.budget.has_card:
            return self.plan()
        # The host also computes some experts.
        memory = self._with_buffers(target.host_view_nbytes)
        # Each pass reads all streamed layers but only some experts: layers come first.
        layers = memory.plan().plan
        room = replace(layers.budget, buffers=layers.budget.buffers + layers.host_nbytes)
        n_on_host = min(room.host_room(experts.nbytes), experts.n_blocks)
        if n_on_host < experts.n_blocks:  # host slots for layers from disk
            n_on_host -= -(-BEST_SLOTS * max(target.layer_nbytes) // experts.nbytes)
        if n_on_host <= experts.mixture.n_used:
            return None
        target = replace(target, experts=replace(experts, n_on_host=n_on_host))
        return replace(memory._with_buffers(n_on_host * experts.nbytes), target=target).plan()

    def _with_buffers(self, nbytes: int) -> "_Memory":
        return replace(self, budget=replace(self.budget, buffers=self.budget.buffers + nbytes))

    def whole(self, max_len: int, n_nodes: int) -> ReservedMemory:
        """Return the bytes besides layers, with all KV rows on the device."""
        spec = self.target.spec
        has_card = self.budget.has_card
        models = self.target, self.draft, self.dtype
        reserved = reserved_memory(*models, has_card, max_len, n_nodes, self.config.max_num_seqs)
        # Selecting rows for a view needs a layer's rows, and about as many bytes again.
        n_rows = self._view_rows(max_len, n_nodes) + 2 * max_len // spec.n_layers
        views = n_rows * spec.kv_nbytes(self.dtype.itemsize) if self.drafting.view_rows else 0
        draft = reserved.draft + views + (self._probs_nbytes(n_nodes) if self.draft else 0)
        reserved = replace(reserved, draft=draft, libraries=self.budget.libraries)
        return replace(reserved, graphs=self._graphs(reserved.total, n_nodes) if has_card else 0)

    def _probs_nbytes(self, n_nodes: int) -> int:
        vocab_size = self.target.spec.vocab_size
        is_kept = self.drafting.type.gives_draft_probs
        n_rows = n_nodes if is_kept else min(n_nodes, changed_rows(vocab_size))
        # float32 noise, its order and a copy of the distribution for a level; all distributions.
        return n_rows * vocab_size * 4 * 4

    def _graphs(self, reserved_nbytes: int, n_nodes: int) -> int:
        """Return the bytes of captured passes: draft passes, and target passes if resident."""
        draft = self.draft
        target = replace(self.target, dtype=self.dtype)
        drafts = (draft,) if draft and draft.spec.supports_graphs else ()
        both = graphs_nbytes((*drafts, target), n_nodes)
        is_captured = target.spec.supports_graphs and self.config.pipeline == 1
        fits = reserved_nbytes + both + sum(target.layer_nbytes) <= self.budget.device
        return both if is_captured and fits else graphs_nbytes(drafts, n_nodes)

    def divided(self, max_len: int, n_nodes: int) -> ReservedMemory:
        """Return the bytes besides layers, with the minimum of KV rows on the device."""
        return self._reserved(max_len, self._split(max_len, n_nodes))

    def fits_whole(self, max_len: int, n_nodes: int) -> bool:
        """Return whether all KV rows fit on the device, or offloading saves nothing."""
        # Attention inside transformers' code reads neither offloaded rows nor views.
        if not self.target.spec.supports_offloaded_kv:
            return True
        whole = self.whole(max_len, n_nodes)
        kv_limit = self.config.kv_nbytes
        may_fit = kv_limit is None or whole.cache <= kv_limit
        fits = may_fit and self._least(whole) <= self.budget.device
        return fits or whole.cache <= self.divided(max_len, n_nodes).cache

    def place(self, max_len: int, n_nodes: int) -> Plan:
        is_whole = self.fits_whole(max_len, n_nodes)
        kv_limit = self.config.kv_nbytes
        needed = (self.whole if is_whole else self.divided)(max_len, n_nodes)
        if kv_limit is not None and kv_limit < needed.cache:
            problem = "--kv-memory is too small"
            need = f"{format_size(needed.cache)} ({needed.cache} bytes) at least"
            change = "raise it, or lower --max-model-len or --tree-size"
            raise CapacityError(problem, need=need, have=format_size(kv_limit), change=change)
        if is_whole:
            plan = place_layers(self.target.layer_nbytes, needed, self.budget, self.target.link)
            experts = self.target.experts
            return plan if experts is None else with_expert_slots(plan, experts)
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
        n_rows = cache_rows(max_len, n_nodes)
        return KVSplit.least(spec, n_rows, n_nodes, rows, self.budget.has_card)

    def _least(self, reserved: ReservedMemory) -> int:
        return least_budget(self.target.layer_nbytes, reserved, self.target.link)

    def _reserved(self, max_len: int, split: KVSplit) -> ReservedMemory:
        longest = max_len + split.n_nodes
        nbytes = split.device_nbytes(self.target.spec, longest, self.budget.has_card)
        return replace(self.whole(max_len, split.n_nodes), cache=nbytes)

    def _place(self, max_len: int, split: KVSplit) -> Plan:
        more = split.host_nbytes(self.target.spec) if self.budget.has_card else 0
        budget = self._with_buffers(more).budget
        if budget.host < budget.buffers:
            problem = "the host memory budget is too small for keys and values"
            need = f"{format_size(budget.buffers)} at least"
            change = "raise --host-memory or --device-memory, or lower --max-model-len"
            raise CapacityError(problem, need=need, have=format_size(budget.host), change=change)
        reserved = self._reserved(max_len, split)
        link = self.target.link
        return replace(place_layers(self.target.layer_nbytes, reserved, budget, link), split=split)

    def _view_rows(self, max_len: int, n_nodes: int) -> int:
        """Return the KV rows of all views; views of further sequences use 1/8 of the cache."""
        budget = self.drafting.view_rows
        return view_rows(min(budget, max_len), n_nodes) + max_len // 8 if budget else 0
