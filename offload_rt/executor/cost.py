"""What passes cost here and now: the cost model with the machine's profile, corrected by the passes that were made."""

from copy import copy
from dataclasses import replace

import numpy as np

from offload_rt.system.machine import MachineProfile, PassBytes, pass_time, pass_times

# Weight of the newest pass in the running estimates.
_NEWEST = 0.25
# Until a level of the draft was timed.
_LEVEL_S = 2e-3


class CostEstimator:
    """Predicts passes, and learns from each how fast the link is and how far the model of the costs is off."""

    def __init__(self, profile: MachineProfile, moved: PassBytes) -> None:
        self.profile, self._moved = profile, moved
        self._slack, self.level_s, self._learns = 1.0, _LEVEL_S, True

    def fixed(self, level_s: float) -> "CostEstimator":
        """One that predicts as this one does now, at so many seconds for a level of the draft, and learns nothing."""
        found = copy(self)
        found.level_s, found._learns = level_s, False
        return found

    def seconds(self, n_rows: np.ndarray, context: int, draft_s: np.ndarray | float = 0.0) -> np.ndarray:
        """Seconds of a step with a pass of each number of rows, after `context` tokens and drafting of `draft_s` seconds."""
        return self._slack * pass_times(self.profile, self._moved, n_rows, context, draft_s)

    def passed(self, n_rows: int, context: int, draft_s: float, seconds: float, link_gbps: float) -> None:
        """A step has taken so long, drafting and verification included.

        link_gbps  at which bytes came in while the link was busy; 0 where none came
        """
        if not self._learns:
            return
        if link_gbps:
            links = tuple(
                (tier, _towards(rate, link_gbps) if self._is_only_link(tier) else rate)
                for tier, rate in self.profile.link_gbps
            )
            self.profile = replace(self.profile, link_gbps=links)
        predicted = pass_time(self.profile, self._moved, n_rows, context, draft_s)
        self._slack = _towards(self._slack, seconds / predicted)

    def drafted(self, n_levels: int, seconds: float) -> None:
        """The draft has computed so many levels in so many seconds."""
        if n_levels > 0 and self._learns:
            self.level_s = _towards(self.level_s, seconds / n_levels)

    def _is_only_link(self, tier: str) -> bool:
        return [name for name, nbytes in self._moved.streamed if nbytes] == [tier]


def _towards(old: float, new: float) -> float:
    return old + _NEWEST * (new - old)
