"""Verification of a draft tree on the device of the target distributions."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload_rt.ops import extension
from offload_rt.ops.transfer import to_device, to_host


class Candidates(NamedTuple):
    """Arrays of a draft tree for the kernels.

    starts, children      children of node v in verification order, sampled children first:
                          children[starts[v] : starts[v + 1]]
    tokens                (n,) int64
    is_sampled            (n,) bool
    row_of, draft_probs   draft distribution after node v: draft_probs[row_of[v]]
    sums                  (rows,) sums of the distributions, computed at first use, negative before
    independent           sampled siblings are drawn with replacement
    n_levels              levels of the tree including the root
    """

    starts: np.ndarray
    children: np.ndarray
    tokens: np.ndarray
    is_sampled: np.ndarray
    row_of: np.ndarray
    draft_probs: np.ndarray
    sums: np.ndarray
    independent: bool
    n_levels: int


def can_verify(target: Tensor, n_levels: int) -> bool:
    """Whether `verify` applies; a thread block has at most 1024 levels."""
    return extension.serves(target) and target.dtype == torch.float32 and n_levels <= 1024


def arguments(
    candidates: Candidates, uniforms: Tensor, device: torch.device
) -> tuple[list[Tensor], Tensor]:
    """Copy five tree arrays and the uniforms to a device in one transfer."""
    arrays = (*candidates[:5], uniforms.numpy().view(np.int64))
    packed = np.concatenate([np.asarray(array, dtype=np.int64) for array in arrays])
    (there,) = to_device([torch.from_numpy(packed)], device)
    parts = torch.split(there, [len(array) for array in arrays])
    starts, children, tokens, is_sampled, row_of, noise = parts
    return [starts, children, tokens, is_sampled.bool(), row_of], noise.view(torch.float64)


def verify(
    candidates: Candidates,
    draft_probs: Tensor,
    target: Tensor,
    uniforms: Tensor,
    leaf_to_root: bool,
) -> tuple[int, int]:
    """Return the last accepted node and the bonus token.

    draft_probs  (rows, vocabulary) float32: draft distributions
    target       (n, vocabulary) float32, on the device of `draft_probs`
    uniforms     (n + 1,) float64 in [0, 1): per node, and the last for the bonus
    """
    arrays, noise = arguments(candidates, uniforms, target.device)
    settings = candidates.n_levels, candidates.independent, leaf_to_root
    verdict = extension.kernels().verify(*arrays, draft_probs, target, noise, *settings)
    end, bonus = to_host([verdict])[0].tolist()
    return end, bonus
