"""Draw from the target's distribution and go on while a child carries the token. Lossless for any drafter."""

from collections.abc import Callable

from torch import Tensor

from offload_rt.executor.sequence import Sequence
from offload_rt.sampling import draw
from offload_rt.tree.topology import DraftTree, Verdict


class Match:
    """It need not know where a tree comes from. Of siblings with the same token it follows all at once."""

    child_sampling = None
    coupled_up_to = 0.0

    def verify(self, tree: DraftTree, target: Tensor, sequence: Sequence) -> Verdict:
        """What to accept, given the target's distribution (n, vocabulary) after each node.

        A card draws after all nodes at once, and is waited for once.
        """
        if target.is_cuda:
            return walk(tree, draw(target, sequence.generator).__getitem__)
        return walk(tree, lambda node: draw(target[node : node + 1], sequence.generator)[0])


def walk(tree: DraftTree, token_after: Callable[[int], int]) -> Verdict:
    """Go from the root to the child that carries the token drawn after its parent, until none does."""
    nodes = [0]
    while True:
        token = token_after(nodes[0])
        children = [child for node in nodes for child in tree.topology.children[node]]
        carriers = [child for child in children if int(tree.tokens[child]) == token]
        if not carriers:
            return Verdict(tuple(tree.topology.path_to(nodes[0])), token)
        nodes = carriers


RULE = Match()
