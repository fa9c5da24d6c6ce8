"""Draw by noise that is a function of seed, position and token, and go on while a child carries the token.

The text is then the one that plain decoding with this rule and seed gives, whatever the tree. A drafter that knows the noise
proposes what is likely to be drawn.
"""

import math

import torch
from torch import Tensor

from offload_rt.executor.sequence import Sequence
from offload_rt.ops import to_device, to_host
from offload_rt.speculate.verify.match import walk
from offload_rt.tree.topology import DraftTree, Verdict

# Nodes that are drawn after together: what is divided takes no more memory than so many rows.
_N_ROWS = 64


class Coupled:
    """As `match`, with the draw that argmax(log p + g) is, for Gumbel noise g."""

    child_sampling = None
    coupled_up_to = math.inf

    def verify(self, tree: DraftTree, target: Tensor, sequence: Sequence) -> Verdict:
        """What to accept, given the target's distribution (n, vocabulary) after each node; see `Match.verify`."""
        depths, n_tokens = torch.from_numpy(tree.topology.depths), target.shape[1]
        noise = sequence.noise.at(len(sequence.tokens), tree.topology.n_levels, n_tokens, target.device)
        if target.is_cuda:
            (rows,) = to_device([depths], target.device)
            parts = zip(torch.split(target, _N_ROWS), torch.split(rows, _N_ROWS), strict=True)
            tokens = torch.cat([draw(probs, noise.index_select(0, levels)) for probs, levels in parts])
            return walk(tree, to_host([tokens])[0].tolist().__getitem__)
        return walk(tree, lambda node: int(draw(target[node], noise[depths[node]])))


def draw(probs: Tensor, noise: Tensor) -> Tensor:
    """A token from each distribution (..., vocabulary) by exponential noise: argmax(log p + g), without its rounding."""
    return (probs / noise).argmax(-1)


RULE = Coupled()
