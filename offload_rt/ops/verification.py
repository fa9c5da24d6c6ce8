"""Verification of a drafted tree on the device of the target's distributions."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload_rt.ops import extension
from offload_rt.ops.transfer import to_device, to_host

# A block keeps track of no more.
_MOST_LEVELS = 1024


class Candidates(NamedTuple):
    """A drafted tree as the kernels read it.

    starts, children      the children of node v in the order of their verification, the sampled
                          ones first:
                          children[starts[v] : starts[v + 1]]
    tokens                (n,) int64
    is_sampled            (n,) bool
    row_of, draft_probs   the draft's distribution after node v is draft_probs[row_of[v]]
    sums                  (rows,) of each distribution, filled in when first needed, negative until
                          then
    independent           sampled siblings were drawn with replacement
    n_levels              of the tree, the root's included
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
    """Whether `verify` serves for these distributions and so many levels; else the rules' own code
    does.
    """
    return extension.serves(target) and target.dtype == torch.float32 and n_levels <= _MOST_LEVELS


def arguments(
    candidates: Candidates, uniforms: Tensor, device: torch.device
) -> tuple[list[Tensor], Tensor]:
    """The tree's arrays and the uniforms on a device, by one transfer: the five arrays;
    uniforms.
    """
    arrays = [
        candidates.starts,
        candidates.children,
        candidates.tokens,
        candidates.is_sampled,
        candidates.row_of,
    ]
    arrays = [
        np.asarray(array, dtype=np.int64) for array in (*arrays, uniforms.numpy().view(np.int64))
    ]
    (there,) = to_device([torch.from_numpy(np.concatenate(arrays))], device)
    starts, children, tokens, is_sampled, row_of, noise = torch.split(
        there, [len(array) for array in arrays]
    )
    return [starts, children, tokens, is_sampled.bool(), row_of], noise.view(torch.float64)


def verify(
    candidates: Candidates,
    draft_probs: Tensor,
    target: Tensor,
    uniforms: Tensor,
    leaf_to_root: bool,
) -> tuple[int, int]:
    """The last node accepted and the bonus token.

    draft_probs  (rows, vocabulary) float32: the draft's distributions
    target       (n, vocabulary) float32, on the device of `draft_probs`
    uniforms     (n + 1,) float64 in [0, 1): one for each node, the last for the bonus
    """
    arrays, noise = arguments(candidates, uniforms, target.device)
    verdict = extension.kernels().verify(
        *arrays,
        draft_probs,
        target,
        noise,
        candidates.n_levels,
        candidates.independent,
        leaf_to_root,
    )
    end, bonus = to_host([verdict])[0].tolist()
    return end, bonus
