"""Draw by noise that is a function of seed, position and token, and go on while a child carries the token.

The text is then the one that plain decoding with this rule and seed gives, whatever the tree. A drafter that knows the noise
proposes what is likely to be drawn.
"""

from torch import Tensor

from offload_rt.executor.sequence import Sequence
from offload_rt.speculate.verify.match import walk
from offload_rt.tree.topology import DraftTree, Verdict


class Coupled:
    """As `match`, with the draw that argmax(log p + g) is, for Gumbel noise g."""

    child_sampling = "coupled"

    def verify(self, tree: DraftTree, target: Tensor, sequence: Sequence) -> Verdict:
        """What to accept, given the target's distribution (n, vocabulary) after each node."""
        depths, n_tokens = tree.topology.depths.tolist(), target.shape[1]
        noise = sequence.noise.at(len(sequence.tokens), tree.topology.n_levels, n_tokens, target.device)
        return walk(tree, lambda node: draw(target[node], noise[depths[node]]))


def draw(probs: Tensor, noise: Tensor) -> int:
    """One token from a distribution (vocabulary,) by exponential noise: argmax(log p + g), without its rounding."""
    return int((probs / noise).argmax())


RULE = Coupled()
