"""Verification of a drafted tree on the device of the target's distributions."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from offload_rt.ops import extension

# A block keeps track of no more.
_MOST_LEVELS = 1024


class Candidates(Protocol):
    """A drafted tree without its distributions; the arrays are those of `residual_kernels.Candidates`."""

    starts: np.ndarray
    children: np.ndarray
    tokens: np.ndarray
    is_sampled: np.ndarray
    row_of: np.ndarray
    independent: bool
    n_levels: int


def can_verify(target: Tensor, n_levels: int) -> bool:
    """Whether `verify` serves for these distributions and so many levels; else the rules' own code does."""
    return extension.serves(target) and target.dtype == torch.float32 and n_levels <= _MOST_LEVELS


def arguments(candidates: Candidates, uniforms: Tensor, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """The tree's arrays and the uniforms on a device, by one transfer: the five arrays; uniforms."""
    arrays = [candidates.starts, candidates.children, candidates.tokens, candidates.is_sampled, candidates.row_of]
    arrays = [np.asarray(array, dtype=np.int64) for array in (*arrays, uniforms.numpy().view(np.int64))]
    there = torch.from_numpy(np.concatenate(arrays)).to(device)
    starts, children, tokens, is_sampled, row_of, noise = torch.split(there, [len(array) for array in arrays])
    return [starts, children, tokens, is_sampled.bool(), row_of], noise.view(torch.float64)


def verify(
    candidates: Candidates, draft_probs: Tensor, target: Tensor, uniforms: Tensor, leaf_to_root: bool
) -> tuple[int, int]:
    """The last node accepted and the bonus token.

    draft_probs  (rows, vocabulary) float32: the draft's distributions
    target       (n, vocabulary) float32, on the device of `draft_probs`
    uniforms     (n + 1,) float64 in [0, 1): one for each node, the last for the bonus
    """
    arrays, noise = arguments(candidates, uniforms, target.device)
    verdict = extension.kernels().verify(
        *arrays, draft_probs, target, noise, candidates.n_levels, candidates.independent, leaf_to_root
    )
    end, bonus = verdict.tolist()
    return end, bonus
