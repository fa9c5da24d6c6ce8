"""Draw from the target's distribution and go on while a child carries the token. Lossless for any drafter."""

import torch
from torch import Tensor

from offload_rt.sampling import draw
from offload_rt.tree.topology import DraftTree, Verdict

NEEDS_DRAFT_PROBS = False


def verify(tree: DraftTree, target: Tensor, generator: torch.Generator) -> Verdict:
    """Walk down from the root along the tokens drawn.

    target     (n, vocabulary): the target's distribution after each node
    generator  of the sequence
    """
    node, path = 0, []
    while True:
        token = draw(target[node], generator)
        node = next((child for child in tree.topology.children[node] if int(tree.tokens[child]) == token), None)
        if node is None:
            return Verdict(tuple(path), token)
        path.append(node)
