"""Sample by noise that depends only on seed, position and token, and follow the matching child.

The generated text equals plain decoding with the same rule and seed, for any tree. A drafter with
access to the noise proposes the tokens with the highest perturbed draft probability.
"""

import math

import torch
from torch import Tensor

from offload_rt.executor.sequence import Sequence
from offload_rt.ops import to_device, to_host
from offload_rt.speculate.verify.match import walk
from offload_rt.tree.topology import DraftTree, Verdict

# Rows per draw; bounds the temporary memory of the division.
_N_ROWS = 64


class Coupled:
    """Variant of `match` that draws argmax(log p + g) with Gumbel noise g."""

    child_sampling = None
    coupled_up_to = math.inf

    def verify(self, tree: DraftTree, target: Tensor, sequence: Sequence) -> Verdict:
        """Verify a tree; see `MatchRule.verify`."""
        depths = torch.from_numpy(tree.topology.depths)
        n_tokens = target.shape[1]
        noise = sequence.noise.at(
            len(sequence.tokens), tree.topology.n_levels, n_tokens, target.device
        )
        if target.is_cuda:
            (rows,) = to_device([depths], target.device)
            parts = zip(torch.split(target, _N_ROWS), torch.split(rows, _N_ROWS), strict=True)
            tokens = torch.cat(
                [draw(probs, noise.index_select(0, levels)) for probs, levels in parts]
            )
            return walk(tree, to_host([tokens])[0].tolist().__getitem__)
        return walk(tree, lambda node: int(draw(target[node], noise[depths[node]])))


def draw(probs: Tensor, noise: Tensor) -> Tensor:
    """Draw a token per distribution (..., vocabulary) using exponential noise.

    Equals argmax(log p + g) without the rounding of the logarithm.
    """
    return (probs / noise).argmax(-1)


RULE = Coupled()
