"""What passes cost: the cost model with the machine's profile, corrected by the passes that were made."""

from copy import copy
from dataclasses import replace

import numpy as np

from offload_rt.system.machine import MachineProfile, PassBytes, pass_times
from offload_rt.tree.choose import ExpertsBias

# Weight of the newest pass in the running estimates.
_NEWEST = 0.25


class CostEstimator:
    """Predicts the seconds of passes; learns from each how fast the link is and how far off the cost model is.

    draft_nbytes   of the draft model's weights: until a level was timed, it takes as long as reading these
    draft_context  tokens that the target attends to where it drafts itself, for which nothing crosses a link; else None
    experts        what is known of those that passes bring
    """

    def __init__(
        self, profile: MachineProfile, moved: PassBytes, draft_nbytes: int = 0, draft_context: int | None = None,
        experts: ExpertsBias | None = None,
    ) -> None:  # fmt: skip
        self.profile, self._moved, self._draft_context = profile, moved, draft_context
        self._experts = experts
        if experts is not None:
            near, far = (one and replace(one, bias=experts.at) for one in (moved.experts, moved.far))
            self._moved = replace(moved, experts=near, far=far)
        self._slack, self._level_slack, self._learns = 1.0, 1.0, True
        self.level_s = draft_nbytes / (profile.memory_gbps * 1e9)

    def fixed(self, level_s: float) -> "CostEstimator":
        """One that predicts as this one does now, with `level_s` seconds for a level of the draft, and learns nothing."""
        found = copy(self)
        found.level_s, found._draft_context, found._learns = level_s, None, False
        return found

    def seconds(
        self, n_rows: np.ndarray, context: int, draft_s: np.ndarray | float = 0.0, n_sequences: int = 1
    ) -> np.ndarray:
        """Seconds of a step for each number of rows in its pass, after `context` tokens and `draft_s` seconds of drafting.

        n_sequences  that share the rows, with so many tokens each
        """
        return self._slack * pass_times(self.profile, self._moved, n_rows, context, draft_s, n_sequences)

    def level(self, n_sequences: int) -> float:
        """Seconds of a level of the trees of so many sequences: as levels were timed, or a pass of the target that drafts."""
        if self._draft_context is None:
            return self.level_s
        own = PassBytes((), self._moved.computed), np.array([n_sequences]), self._draft_context
        return self._level_slack * float(pass_times(self.profile, *own, n_sequences=n_sequences)[0])

    def passed(
        self, n_rows: int, context: int, draft_s: float, seconds: float, link_gbps: float, n_sequences: int = 1,
        n_experts: int = 0,
    ) -> None:  # fmt: skip
        """Learn from a step that took `seconds`, drafting and verification included.

        link_gbps    rate of the link while it was busy; 0 if nothing was streamed
        n_sequences  that shared the rows
        n_experts    that it brought to the device
        """
        if not self._learns:
            return
        if (experts := self._moved.experts) is not None and self._experts is not None:
            plainly = float(replace(experts, bias=None).of_pass(np.array(n_rows)))
            self._experts.observe(n_rows, n_experts * experts.nbytes / plainly if plainly else 1.0)
        if link_gbps:
            streamed = list(self._moved.at(context))
            rates = dict(self.profile.link_gbps)
            if len(streamed) == 1:  # of several links it is not known which one moved what
                rates[streamed[0]] = _towards(rates[streamed[0]], link_gbps)
            self.profile = replace(self.profile, link_gbps=tuple(rates.items()))
        predicted = pass_times(self.profile, self._moved, np.array([n_rows]), context, draft_s, n_sequences)[0]
        self._slack = _towards(self._slack, seconds / float(predicted))

    def drafted(self, n_levels: int, seconds: float, n_sequences: int = 1) -> None:
        """Learn from a draft that computed `n_levels` levels in `seconds`."""
        if n_levels == 0 or not self._learns:
            return
        if self._draft_context is None:
            self.level_s = _towards(self.level_s, seconds / n_levels)
        else:
            self._level_slack *= _towards(1.0, seconds / n_levels / self.level(n_sequences))


def _towards(old: float, new: float) -> float:
    return old + _NEWEST * (new - old)
