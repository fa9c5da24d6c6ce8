"""Draw from the target's distribution and follow the matching child. Lossless for any drafter."""

from collections.abc import Callable

from torch import Tensor

from offload_rt.executor.sequence import Sequence
from offload_rt.sampling import draw
from offload_rt.tree.topology import DraftTree, Verdict


class MatchRule:
    """Accept children equal to a sampled target token. Duplicate siblings are followed together."""

    child_sampling = None
    coupled_up_to = 0.0

    def verify(self, tree: DraftTree, target: Tensor, sequence: Sequence) -> Verdict:
        """Verify a tree against the target's distribution (n, vocabulary) after each node.

        On CUDA, tokens after all nodes are drawn at once, with a single synchronization.
        """
        if target.is_cuda:
            return walk(tree, draw(target, sequence.generator).__getitem__)
        return walk(tree, lambda node: draw(target[node : node + 1], sequence.generator)[0])


def walk(tree: DraftTree, token_after: Callable[[int], int]) -> Verdict:
    """Descend from the root through children equal to the token drawn at their parent."""
    nodes = [0]
    while True:
        token = token_after(nodes[0])
        children = [child for node in nodes for child in tree.topology.children[node]]
        carriers = [child for child in children if int(tree.tokens[child]) == token]
        if not carriers:
            return Verdict(tuple(tree.topology.path_to(nodes[0])), token)
        nodes = carriers


RULE = MatchRule()
