"""Select `coupled` at temperatures in (0, 0.8], otherwise `traversal`.

Each rule accepts more tokens per pass in its range (`python -m bench.speculate.systems`).
"""

from torch import Tensor

from offload_rt.executor.sequence import Sequence
from offload_rt.sampling import NodeProbs
from offload_rt.speculate.verify import coupled, traversal
from offload_rt.tree.topology import DraftTree, Verdict


class Adaptive:
    """Default verification rule for drafters with a draft model."""

    child_sampling = traversal.RULE.child_sampling
    coupled_up_to = 0.8

    def verify(self, tree: DraftTree, target: NodeProbs | Tensor, sequence: Sequence) -> Verdict:
        """See `VerificationRule.verify`."""
        rule = coupled.RULE if 0 < sequence.temperature <= self.coupled_up_to else traversal.RULE
        return rule.verify(tree, target, sequence)


RULE = Adaptive()
