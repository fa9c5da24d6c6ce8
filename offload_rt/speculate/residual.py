"""Residual verification: rules that compare draft and target distributions."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.executor.sequence import Sequence
from offload_rt.ops import Candidates
from offload_rt.sampling import NodeProbs, draw
from offload_rt.speculate.verify.match import MatchRule
from offload_rt.tree.topology import DraftTree, Verdict


@dataclass(frozen=True)
class Decision:
    """Result of a rule, with its acceptance probabilities.

    end         last accepted node; 0 if no node below the root was accepted
    probs       (vocabulary,) distribution of the bonus token
    acceptance  (n,) acceptance probability of each tried node, NaN for untried nodes
    """

    end: int
    probs: Tensor
    acceptance: np.ndarray


@dataclass(frozen=True)
class ResidualRule:
    """Rule that subtracts the distributions of rejected children from the target's.

    bottom_up       verify from the leaves to the root instead of top-down
    child_sampling  required sibling sampling
    """

    bottom_up: bool
    child_sampling: str
    coupled_up_to: float = 0.0

    def verify(self, tree: DraftTree, target: NodeProbs | Tensor, sequence: Sequence) -> Verdict:
        """See `VerificationRule.verify`."""
        generator = sequence.generator
        uniforms = torch.rand(len(tree.topology), dtype=torch.float64, generator=generator)
        if tree.sampled is None:  # `match` accepts as much, for the distributions of a path alone
            return MatchRule().verify(tree, target, sequence)
        probs = target[:]
        if ops.can_verify(probs, tree.topology.n_levels):
            noise = torch.cat((uniforms, torch.rand(1, dtype=torch.float64, generator=generator)))
            drafted = tree.sampled.draft_probs.to(probs.device)
            end, bonus = ops.verify(candidates(tree), drafted, probs, noise, self.bottom_up)
        else:
            decision = self.decide(tree, probs.cpu(), uniforms)
            end = decision.end
            (bonus,) = draw(decision.probs[None], generator)
        return Verdict(tuple(tree.topology.path_to(end)), bonus)

    def decide(self, tree: DraftTree, target: Tensor, uniforms: Tensor) -> Decision:
        """Verify a tree with sampled nodes by given noise.

        target    (n, vocabulary) float32 or float64, on the CPU
        uniforms  (n,) float64 in [0, 1); a tried node is accepted if its number is below its
                  acceptance probability
        """
        from offload_rt.speculate.residual_kernels import verify_bottom_up, verify_top_down

        assert tree.sampled is not None, "see `verify`"
        acceptance = np.full(len(tree.topology), np.nan)
        kernel = verify_bottom_up if self.bottom_up else verify_top_down
        numbered = candidates(tree, tree.sampled.draft_probs.cpu().numpy())
        end, probs = kernel(numbered, target.numpy(), uniforms.numpy(), acceptance)
        return Decision(int(end), torch.from_numpy(probs), acceptance)


# Placeholder for distributions that remain on the device.
_NO_PROBS = np.zeros((0, 0), dtype=np.float32)


def candidates(tree: DraftTree, draft_probs: np.ndarray = _NO_PROBS) -> Candidates:
    """Convert a tree with sampled nodes to the kernels' input format."""
    parents = tree.topology.parents
    n = len(tree.topology)
    sampled = tree.sampled
    assert sampled is not None, "see `ResidualRule.verify`"
    # Sort by parent, sampled children first; drop the root.
    order = np.lexsort((np.arange(n), ~sampled.is_sampled, parents))[1:]
    return Candidates(
        starts=np.searchsorted(parents[order], np.arange(n + 1)),
        children=order,
        tokens=tree.tokens.cpu().numpy(),
        is_sampled=sampled.is_sampled,
        row_of=sampled.row_of,
        draft_probs=draft_probs,
        sums=np.full(len(draft_probs), -1.0),
        independent=sampled.independent,
        n_levels=tree.topology.n_levels,
    )
