"""How much of what fits: the bytes beside the layers, how large trees and how long contexts may be, and the placement.

It needs only the sizes of a model, so a machine can be planned for from a config.json alone.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace

import torch

from offload_rt.config import EngineConfig
from offload_rt.errors import CapacityError
from offload_rt.executor.runner import CHUNK_ROWS
from offload_rt.kv.cache import ContiguousCache
from offload_rt.models.architecture import Architecture
from offload_rt.offload.placement import LinkSizes, MemoryBudget, Plan, ReservedMemory, least_budget, place_layers
from offload_rt.speculate.draft_model import ROWS_PER_NODE, draft_rows, view_rows
from offload_rt.speculate.protocols import DraftLimits
from offload_rt.speculate.select import Drafting
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.formats import StoredTensor
from offload_rt.weights.layout import packed_layout

# Part of the free memory that is left to others, and at least so many bytes of it.
_MARGIN, _LEAST_MARGIN = 0.05, 256 << 20
# What libraries of a GPU take of the budget for their own work, and what is lost between blocks of different sizes.
LIBRARIES = 256 << 20
# What threads that read take of the host's budget: buffers of at most 8 MiB and some pages in all, while loading a draft
# model and while layers come from the disk.
READ_BUFFERS = 17 << 20
# Part of the budget that the default context may take.
_CACHE_SHARE = 1 / 8
# The default context is never shorter, however small the budget: a refusal is better than a model that forgets at once.
_SHORTEST_CONTEXT = 256


@dataclass(frozen=True)
class Sizes:
    """What planning has to know of a model.

    layer_nbytes      bytes of each layer's block
    non_layer_nbytes  bytes of the weights outside the layers
    dtype             of the weights
    view_nbytes       bytes that using the weights where they lie takes besides, such as a copy of a converted matrix
    link              sizes of the layers on their way; None: as where they are computed
    """

    spec: Architecture
    layer_nbytes: tuple[int, ...]
    non_layer_nbytes: int
    dtype: torch.dtype
    view_nbytes: int = 0
    link: LinkSizes | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(self.layer_nbytes) + self.non_layer_nbytes

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, dtype: torch.dtype) -> "Sizes":
        """Of the tensors as they are stored, computed with in `dtype`."""
        stored = [StoredTensor(one.key, one.shape, one.torch_dtype()) for one in checkpoint.records]
        return cls(
            spec=checkpoint.spec,
            layer_nbytes=tuple(sum(one.stop - one.start for one in layer) for layer in checkpoint.layers),
            non_layer_nbytes=sum(record.stop - record.start for record in checkpoint.non_layer),
            dtype=dtype if checkpoint.spec.taps else checkpoint.dtype,
            view_nbytes=max(checkpoint.format.scratch_nbytes(one, CHUNK_ROWS, dtype) for one in stored),
        )

    @classmethod
    def of_spec(cls, spec: Architecture, dtype: torch.dtype) -> "Sizes":
        """Of a model whose weights are all of `dtype`, laid out as they are on a device."""
        layers = (spec.layer_tensors(i) for i in range(spec.n_layers))
        nbytes = tuple(packed_layout((name, shape, dtype) for name, shape in layer).nbytes for layer in layers)
        non_layer = sum(math.prod(shape) for _, shape in spec.non_layer_tensors())
        return cls(spec, nbytes, non_layer * dtype.itemsize, dtype)


@dataclass(frozen=True)
class MemoryPlan:
    """What fits.

    max_model_len  most tokens of a sequence
    cache_rows     rows of keys and values that the plan has room for
    view_rows      and of views of them, by which the target drafts itself
    """

    plan: Plan
    limits: DraftLimits
    max_model_len: int
    cache_rows: int
    view_rows: int


def less_margin(free: int) -> int:
    """Free bytes without those that are left to others."""
    return max(free - max(int(free * _MARGIN), _LEAST_MARGIN), 0)


def plan_memory(
    config: EngineConfig,
    drafting: Drafting,
    models: tuple[Sizes, Sizes | None],
    dtype: torch.dtype,
    budget: MemoryBudget,
) -> MemoryPlan:
    """How large trees and contexts may be, and what lies where.

    models  the target and the draft model
    Raises CapacityError if it cannot lie anywhere.
    """
    target, draft = models
    limit, asked = target.spec.max_positions, config.max_model_len
    if asked is not None and asked > limit:
        raise CapacityError("--max-model-len", need=str(asked), have=f"a model of {limit} positions", change="lower it")

    def needed(max_len: int, n_nodes: int) -> ReservedMemory:
        reserved = reserved_memory(target, draft, dtype, max_len, n_nodes)
        # Besides the views a layer's rows, and about as much again, while some of them are chosen.
        n_rows = _view_rows(drafting.view_rows, max_len, n_nodes) + 2 * max_len // target.spec.n_layers
        views = n_rows * target.spec.kv_nbytes(dtype.itemsize) if drafting.view_rows else 0
        return replace(reserved, draft=reserved.draft + views, libraries=budget.libraries)

    shortest = asked or min(_SHORTEST_CONTEXT, limit)
    plain = needed(shortest, 1)
    least_plain = least_budget(target.layer_nbytes, plain, target.link)
    limits = drafting.limits(config, lambda n: needed(shortest, n).total - plain.total, budget.device, least_plain)

    def least(max_len: int) -> int:
        """The smallest budget that holds a context, which takes no more of it than its share."""
        cache = ContiguousCache.nbytes(target.spec, max_len, dtype.itemsize).device
        reserved = needed(max_len, limits.n_nodes)
        return max(least_budget(target.layer_nbytes, reserved, target.link), int(cache / _CACHE_SHARE))

    longer = range(shortest + 1, limit + 1) if asked is None else ()
    max_len = shortest + bisect_right(longer, budget.device, key=least)
    plan = place_layers(target.layer_nbytes, needed(max_len, limits.n_nodes), budget, target.link)
    n_view_rows = _view_rows(drafting.view_rows, max_len, limits.n_nodes)
    return MemoryPlan(plan, limits, max_len, _cache_rows(max_len, limits.n_nodes), n_view_rows)


def reserved_memory(
    target: Sizes, draft: Sizes | None, dtype: torch.dtype, max_len: int, n_nodes: int
) -> ReservedMemory:
    """Bytes on the device besides layers, for sequences of up to `max_len` tokens and trees of up to `n_nodes`."""
    spec = target.spec
    hidden = 2 * (max_len + n_nodes) * spec.hidden_size * dtype.itemsize
    rows = min(CHUNK_ROWS, max_len + n_nodes)
    # Hidden states that a head takes, what it makes of them, and a copy of that in its first pass.
    tapped = hidden // 2 * (len(draft.spec.taps) + 2) if draft and draft.spec.taps else 0
    return ReservedMemory(
        non_layer=target.non_layer_nbytes,
        cache=ContiguousCache.nbytes(spec, _cache_rows(max_len, n_nodes), dtype.itemsize).device,
        scratch=hidden + tapped + target.view_nbytes + spec.scratch_nbytes(rows, n_nodes, dtype.itemsize),
        draft=_draft_nbytes(draft, spec.vocab_size, max_len, n_nodes) if draft else 0,
    )


def _draft_nbytes(draft: Sizes, vocab_size: int, max_len: int, n_nodes: int) -> int:
    """Bytes a draft model takes on the device: weights, cache, activations, and the distributions its trees were drawn from."""
    itemsize = draft.dtype.itemsize
    cache = ContiguousCache.nbytes(draft.spec, draft_rows(max_len, n_nodes), itemsize).device
    # Noise, its order and a copy of the distribution, of float32, for one level; and the distributions of all nodes.
    draft_probs = n_nodes * vocab_size * 4 * 4
    scratch = draft.view_nbytes + draft.spec.scratch_nbytes(n_nodes, n_nodes, itemsize)
    if draft.spec.taps:  # a part of a prompt, and what all rows of a tree take of their parents
        rows = CHUNK_ROWS + ROWS_PER_NODE * n_nodes
        scratch += draft.spec.scratch_nbytes(rows, 0, itemsize) + 4 * rows * draft.spec.hidden_size * itemsize
    return draft.nbytes + cache + scratch + draft_probs


def _cache_rows(max_len: int, max_nodes: int) -> int:
    """Rows of one sequence of the longest kind: all its tokens but the last, and a tree."""
    return max_len - 1 + max_nodes


def _view_rows(budget: int, max_len: int, max_nodes: int) -> int:
    """Rows for the views of a few sequences together, which take an eighth of the cache beyond the first one's."""
    return view_rows(min(budget, max_len), max_nodes) + max_len // 8 if budget else 0
