"""Device bytes besides layers: caches, activations, a draft model, captured passes."""

from collections.abc import Sequence

from offload_rt.chunks import CHUNK_ROWS, max_captured_rows
from offload_rt.dtypes import DType
from offload_rt.engine.model_sizes import Sizes
from offload_rt.kv.split import state_rows
from offload_rt.models.architecture import Architecture
from offload_rt.offload.placement import ReservedMemory
from offload_rt.speculate.rows import ROWS_PER_NODE, draft_rows


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
        cache=_cache_nbytes(spec, cache_rows(max_len, n_nodes), n_nodes, dtype.itemsize, n),
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


def graphs_nbytes(models: Sequence[Sizes], n_nodes: int) -> int:
    """Return the bytes of captured passes: a common pool, and the logits of each model."""
    n = max_captured_rows(n_nodes)
    pools = (
        model.view_nbytes + model.spec.scratch_nbytes(n, n, model.dtype.itemsize)
        for model in models
    )
    logits = (n * model.spec.vocab_size * model.dtype.itemsize for model in models)
    return max(pools, default=0) + sum(logits)


def cache_rows(max_len: int, max_nodes: int) -> int:
    """Return the KV rows of the longest sequence: all tokens but the last, and a tree."""
    return max_len - 1 + max_nodes
