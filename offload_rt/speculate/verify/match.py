"""Draw from the target's distribution and follow the matching child. Lossless for any drafter."""

from collections.abc import Callable

from torch import Tensor

from offload_rt.executor.sequence import Sequence
from offload_rt.sampling import NodeProbs, draw
from offload_rt.tree.topology import DraftTree, Verdict


class MatchRule:
    """Accept children equal to a sampled target token. Duplicate siblings are followed together."""

    child_sampling = None
    coupled_up_to = 0.0

    def verify(self, tree: DraftTree, target: NodeProbs | Tensor, sequence: Sequence) -> Verdict:
        """See `VerificationRule.verify`."""
        return walk(tree, target, lambda nodes: draw(target[nodes], sequence.generator))


def walk(
    tree: DraftTree, target: NodeProbs | Tensor, tokens_after: Callable[[slice], list[int]]
) -> Verdict:
    """Descend from the root through children equal to the token chosen at their parent.

    tokens_after  chooses tokens after nodes: of all nodes on CUDA, with a single synchronization
    """
    tokens = None if target.device.type == "cpu" else tokens_after(slice(None))
    nodes = [0]
    while True:
        node = nodes[0]
        token = tokens[node] if tokens else tokens_after(slice(node, node + 1))[0]
        children = [child for node in nodes for child in tree.topology.children[node]]
        carriers = [child for child in children if int(tree.tokens[child]) == token]
        if not carriers:
            return Verdict(tuple(tree.topology.path_to(node)), token)
        nodes = carriers


RULE = MatchRule()
