"""Dynamic trees of a block drafter: rounds condition the block on the best partial paths."""

from dataclasses import dataclass

import numpy as np

from offload_rt.speculate.dynamic_builder import DynamicTreeBuilder
from offload_rt.speculate.pair_stats import Estimates


@dataclass(eq=False)
class BlockTreeBuilder(DynamicTreeBuilder):
    """Grow a tree by conditioned blocks while they pay, then by the blocks of parent rows.

    The estimates of the base class apply to the root.
    conditioned  estimates of rows with a block for their path
    inherited    estimates of rows with the block of their parent
    """

    conditioned: Estimates
    inherited: Estimates

    def _next_round(self, waiting: np.ndarray) -> np.ndarray:
        """Condition the best nodes if the gain covers the drafting time; else inherit blocks.

        The most probable child is accepted more often with a conditioned block. That difference,
        weighted by the chances of the nodes, is a lower bound of the gain in tokens.
        """
        places = self._best(waiting)
        best = places[: self.state.n_recomputable]
        rates = (each.acceptance.by_rank()[0] for each in (self.conditioned, self.inherited))
        conditioned_rate, inherited_rate = rates
        chances = self._nodes.chances
        gain = (conditioned_rate - inherited_rate) * chances[best].sum()
        rate = self.cost.best(chances, self.state.n_passes)[1]
        pays = bool(gain > rate * self.cost.level_s)
        self.state.recomputes = pays
        return best if pays else places

    def _estimates_of(self, row: int) -> Estimates:
        if row == 0:
            return self.estimates
        return self.conditioned if self.state.is_recomputed(row) else self.inherited
