"""One entry point per op. A kernel of csrc/ serves where it is built and fits, else the plain torch reference."""

import torch
from torch import Tensor

from offload_rt.ops import extension, reference
from offload_rt.ops.reference import merge, rms_norm, rotate
from offload_rt.ops.transfer import fill, to_device, to_host
from offload_rt.ops.tree_mask import TreeMask, make_tree_mask
from offload_rt.ops.verification import Candidates, can_verify, verify

__all__ = [
    "Candidates", "TreeMask", "can_verify", "commit_rows", "fill", "goes_by_extent", "make_tree_mask", "merge",
    "partial_attention", "rms_norm", "rotate", "to_device", "to_host", "tree_attention", "tree_masks", "verify",
]  # fmt: skip

_HEAD_DIMS = (64, 96, 128)
# A block holds the whole tree in shared memory.
_MOST_MASKED_ROWS = 6144
_VECTOR_BYTES = 16


def tree_attention(q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, scale: float) -> Tensor:
    """Attention of the rows of a tree to the keys before it, to their ancestors and to themselves.

    q     (n, heads, head_dim)
    k, v  (kv_heads, mask.n_keys, head_dim), heads a multiple of kv_heads; finite numbers where there is no key
    Returns (n, heads, head_dim).
    """
    if goes_by_extent(q):
        return partial_attention(q, k, v, mask, scale)[0]
    return reference.tree_attention(q, k, v, mask.dense(), scale)


def partial_attention(q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, scale: float) -> tuple[Tensor, Tensor]:
    """`tree_attention` to a part of the keys, and the log-sum-exp (n, heads) by which `merge` joins it with other parts."""
    if not goes_by_extent(q):
        return reference.partial_attention(q, k, v, mask.dense(), scale)
    tensors = mask.bits, mask.depths, mask.key_depths, mask.extent
    out, lse = extension.kernels().tree_attention(q, k, v, *tensors, mask.window or 0, scale)
    return out, lse


def goes_by_extent(x: Tensor) -> bool:
    """Whether the kernel serves for queries or keys (..., head_dim); its time does not depend on absent keys."""
    return extension.serves(x) and x.dtype in (torch.float16, torch.bfloat16) and x.shape[-1] in _HEAD_DIMS


def tree_masks(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Packed ancestor masks and depths; see the reference."""
    if extension.serves(parents) and len(parents) <= _MOST_MASKED_ROWS:
        bits, depths = extension.kernels().tree_masks(parents)
        return bits, depths
    return reference.tree_masks(parents)


def commit_rows(keys: Tensor, values: Tensor, rows: Tensor, first: int) -> None:
    """Move rows `first + rows`, of the host, of a cache to `first` and on, in place; see the reference."""
    if extension.serves(keys) and keys.shape[3] * keys.element_size() % _VECTOR_BYTES == 0:
        extension.kernels().commit_rows(keys, values, rows, first)
    else:
        reference.commit_rows(keys, values, to_device([rows], keys.device)[0], first)
