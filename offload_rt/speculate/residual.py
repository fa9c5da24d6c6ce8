"""Verification by residuals: rules that weigh the draft's probabilities against the target's."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.sampling import draw
from offload_rt.speculate.residual_kernels import Candidates, verify_bottom_up
from offload_rt.tree.topology import DraftTree, Verdict

Kernel = Callable[[Candidates, np.ndarray, np.ndarray, np.ndarray], tuple[int, np.ndarray]]


@dataclass(frozen=True)
class Decision:
    """Where a rule stops, and the chances it had.

    end   the last node accepted, 0 for none below the root
    probs   (vocabulary,): the distribution of the bonus
    odds  (n,): the chance with which each node was accepted when it was tried, NaN where it was not tried
    """

    end: int
    probs: Tensor
    odds: np.ndarray


def decide(kernel: Kernel, tree: DraftTree, target: Tensor, uniforms: Tensor) -> Decision:
    """Run a rule's kernel.

    target    (n, vocabulary) float32 or float64
    uniforms  (n,) float64 in [0, 1): a node that is tried is accepted where its number is below its odds
    """
    odds = np.full(len(tree.topology), np.nan)
    draft_probs = _draft_probs_of(tree, target).cpu().numpy()
    end, probs = kernel(_candidates(tree, draft_probs), target.numpy(), uniforms.numpy(), odds)
    return Decision(int(end), torch.from_numpy(probs), odds)


def verdict_of(kernel: Kernel, tree: DraftTree, target: Tensor, generator: torch.Generator) -> Verdict:
    """The verdict with fresh noise for every node."""
    uniforms = torch.rand(len(tree.topology), dtype=torch.float64, generator=generator)
    if ops.can_verify(target, _n_levels(tree)):
        noise = torch.cat((uniforms, torch.rand(1, dtype=torch.float64, generator=generator)))
        draft_probs = _draft_probs_of(tree, target).to(target.device)
        end, bonus = ops.verify(_candidates(tree, _NO_PROBS), draft_probs, target, noise, kernel is verify_bottom_up)
        return Verdict(tuple(tree.topology.path_to(end)), bonus)
    decision = decide(kernel, tree, target.cpu(), uniforms)
    return Verdict(tuple(tree.topology.path_to(decision.end)), draw(decision.probs, generator))


# In place of distributions that stay where they are.
_NO_PROBS = np.zeros((0, 0), dtype=np.float32)


def _n_levels(tree: DraftTree) -> int:
    return int(tree.topology.depths.max()) + 1


def _draft_probs_of(tree: DraftTree, target: Tensor) -> Tensor:
    """The draft's distributions, (rows, vocabulary)."""
    return target.new_empty((0, target.shape[1])) if tree.sampled is None else tree.sampled.draft_probs


def _candidates(tree: DraftTree, draft_probs: np.ndarray) -> Candidates:
    parents, n = tree.topology.parents, len(tree.topology)
    sampled = tree.sampled
    if sampled is None:
        is_sampled, row_of, independent = np.zeros(n, dtype=np.bool_), np.full(n, -1), False
    else:
        is_sampled, row_of, independent = sampled.is_sampled, sampled.row_of, sampled.independent
    order = np.lexsort((np.arange(n), ~is_sampled, parents))[
        1:
    ]  # by parent, the drawn first; the root stands before all
    starts = np.searchsorted(parents[order], np.arange(n + 1))
    return Candidates(
        starts=starts,
        children=order,
        tokens=tree.tokens.cpu().numpy(),
        is_sampled=is_sampled,
        row_of=row_of,
        draft_probs=draft_probs,
        sums=np.full(len(draft_probs), -1.0),
        independent=independent,
        n_levels=_n_levels(tree),
    )
