"""Verification by residuals: rules that weigh the draft's distributions against the target's."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.executor.sequence import Sequence
from offload_rt.ops import Candidates
from offload_rt.sampling import draw
from offload_rt.speculate.verify.match import Match
from offload_rt.tree.topology import DraftTree, Verdict


@dataclass(frozen=True)
class Decision:
    """Where a rule stops, and the acceptance probabilities it went by.

    end         the last node accepted, 0 for none below the root
    probs       (vocabulary,): the distribution of the bonus
    acceptance  (n,): the probability with which each node was accepted when it was tried, NaN where it was not tried
    """

    end: int
    probs: Tensor
    acceptance: np.ndarray


@dataclass(frozen=True)
class ResidualRule:
    """A rule that subtracts from the target's distribution those of rejected children.

    bottom_up       from the leaves to the root, else from the root down
    child_sampling  by which siblings have to be drawn
    """

    bottom_up: bool
    child_sampling: str
    coupled_up_to: float = 0.0

    def verify(self, tree: DraftTree, target: Tensor, sequence: Sequence) -> Verdict:
        """What to accept, given the target's distribution (n, vocabulary) after each node, with fresh noise for each."""
        generator = sequence.generator
        uniforms = torch.rand(len(tree.topology), dtype=torch.float64, generator=generator)
        if ops.can_verify(target, tree.topology.n_levels):
            noise = torch.cat((uniforms, torch.rand(1, dtype=torch.float64, generator=generator)))
            probs = draft_probs(tree, target).to(target.device)
            end, bonus = ops.verify(candidates(tree), probs, target, noise, self.bottom_up)
            return Verdict(tuple(tree.topology.path_to(end)), bonus)
        if tree.sampled is None:  # as at temperature 0: no rule accepts more, and the compiler stays out of memory
            return Match().verify(tree, target, sequence)
        decision = self.decide(tree, target.cpu(), uniforms)
        return Verdict(tuple(tree.topology.path_to(decision.end)), draw(decision.probs[None], generator)[0])

    def decide(self, tree: DraftTree, target: Tensor, uniforms: Tensor) -> Decision:
        """Verify with given noise.

        target    (n, vocabulary) float32 or float64, on the CPU
        uniforms  (n,) float64 in [0, 1): a node that is tried is accepted where its number is below its acceptance
        """
        from offload_rt.speculate.residual_kernels import verify_bottom_up, verify_top_down

        acceptance = np.full(len(tree.topology), np.nan)
        kernel = verify_bottom_up if self.bottom_up else verify_top_down
        numbered = candidates(tree, draft_probs(tree, target).cpu().numpy())
        end, probs = kernel(numbered, target.numpy(), uniforms.numpy(), acceptance)
        return Decision(int(end), torch.from_numpy(probs), acceptance)


# In place of distributions that stay on the device.
_NO_PROBS = np.zeros((0, 0), dtype=np.float32)


def draft_probs(tree: DraftTree, target: Tensor) -> Tensor:
    """The draft's distributions, (rows, vocabulary)."""
    return target.new_empty((0, target.shape[1])) if tree.sampled is None else tree.sampled.draft_probs


def candidates(tree: DraftTree, draft_probs: np.ndarray = _NO_PROBS) -> Candidates:
    """The tree as the kernels read it."""
    parents, n, sampled = tree.topology.parents, len(tree.topology), tree.sampled
    is_sampled = np.zeros(n, dtype=np.bool_) if sampled is None else sampled.is_sampled
    # By parent, the sampled first; the root stands before all.
    order = np.lexsort((np.arange(n), ~is_sampled, parents))[1:]
    return Candidates(
        starts=np.searchsorted(parents[order], np.arange(n + 1)),
        children=order,
        tokens=tree.tokens.cpu().numpy(),
        is_sampled=is_sampled,
        row_of=np.full(n, -1) if sampled is None else sampled.row_of,
        draft_probs=draft_probs,
        sums=np.full(len(draft_probs), -1.0),
        independent=sampled is not None and sampled.independent,
        n_levels=tree.topology.n_levels,
    )
