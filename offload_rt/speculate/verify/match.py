"""Draw from the target's distribution and go on while a child carries the token. Lossless for any drafter."""

import torch
from torch import Tensor

from offload_rt.sampling import draw
from offload_rt.tree.topology import DraftTree, Verdict


class Match:
    """It need not know where a tree comes from. Of siblings with the same token it follows all at once."""

    child_sampling = None

    def verify(self, tree: DraftTree, target: Tensor, generator: torch.Generator) -> Verdict:
        """What to accept, given the target's distribution (n, vocabulary) after each node."""
        nodes = [0]
        while True:
            token = draw(target[nodes[0]], generator)
            children = [child for node in nodes for child in tree.topology.children[node]]
            carriers = [child for child in children if int(tree.tokens[child]) == token]
            if not carriers:
                return Verdict(tuple(tree.topology.path_to(nodes[0])), token)
            nodes = carriers


RULE = Match()
