"""Sample by noise that depends only on seed, position and token, and follow the matching child.

The generated text equals plain decoding with the same rule and seed, for any tree. A drafter with
access to the noise proposes the tokens with the highest perturbed draft probability.
"""

import math

import torch
from torch import Tensor

from offload_rt.executor.sequence import Sequence
from offload_rt.ops import to_device, to_host
from offload_rt.sampling import NodeProbs, largest
from offload_rt.speculate.verify.match import walk
from offload_rt.tree.topology import DraftTree, Verdict

# Rows per draw; bounds the temporary memory of the division.
_N_ROWS = 64


class Coupled:
    """Variant of `match` that draws argmax(log p + g) with Gumbel noise g."""

    child_sampling = None
    coupled_up_to = math.inf

    def verify(self, tree: DraftTree, target: NodeProbs | Tensor, sequence: Sequence) -> Verdict:
        """See `VerificationRule.verify`."""
        depths = torch.from_numpy(tree.topology.depths)
        n_levels = tree.topology.n_levels
        noise = sequence.noise.at(len(sequence.tokens), n_levels, target.shape[1], target.device)

        def tokens_after(nodes: slice) -> list[int]:
            (levels,) = to_device([depths[nodes]], target.device)
            split = (torch.split(part, _N_ROWS) for part in (target[nodes], levels))
            parts = zip(*split, strict=True)
            tokens = [draw(probs, noise.index_select(0, rows)) for probs, rows in parts]
            drawn: list[int] = to_host([torch.cat(tokens)])[0].tolist()
            return drawn

        return walk(tree, target, tokens_after)


def draw(probs: Tensor, noise: Tensor) -> Tensor:
    """Draw a token per distribution (n, vocabulary) using exponential noise.

    Equals argmax(log p + g) without the rounding of the logarithm.
    """
    return largest(probs / noise)[1]


RULE = Coupled()
