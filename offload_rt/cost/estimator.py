"""Pass cost estimates: the machine's cost model, corrected by measured passes."""

from copy import copy
from dataclasses import replace

import numpy as np

from offload_rt.cost.pass_times import MachineProfile, PassBytes, pass_times, transfer_s
from offload_rt.cost.tree_size import DraftLimits, ExpertsBias, TreeChoice, select_tree

# Weight of the newest pass in the running estimates.
_NEWEST = 0.25


class CostEstimator:
    """Predict pass times; learn the link rate and the cost model's error from each pass.

    draft_nbytes   weight bytes of the draft model, the estimate of a level until measured
    draft_context  attended tokens in self-drafting, without link traffic; else None
    experts        learned bias of the experts per pass
    """

    def __init__(
        self,
        profile: MachineProfile,
        moved: PassBytes,
        draft_nbytes: int = 0,
        draft_context: int | None = None,
        experts: ExpertsBias | None = None,
    ) -> None:
        self.profile = profile
        self._moved = moved
        self._draft_context = draft_context
        self._experts = experts
        if experts is not None:
            near = moved.experts and replace(moved.experts, bias=experts.at)
            disk = moved.disk_experts and replace(moved.disk_experts, bias=experts.at)
            self._moved = replace(moved, experts=near, disk_experts=disk)
        self._slack = 1.0
        # A measured profile counts as a pass.
        self._n_passes = int(profile.compute is not None)
        self._level_slack = 1.0
        self._learns = True
        self.level_s = transfer_s(draft_nbytes, profile.memory_gbps)

    @property
    def is_measured(self) -> bool:
        """Whether predictions follow from a measured profile or pass."""
        return self._n_passes > 0

    def fixed(self, level_s: float) -> "CostEstimator":
        """Return a copy that learns nothing and predicts `level_s` seconds per draft level."""
        estimator = copy(self)
        estimator.level_s = level_s
        estimator._draft_context = None
        estimator._learns = False
        return estimator

    def seconds(
        self,
        n_rows: np.ndarray,
        context: int,
        draft_s: np.ndarray | float = 0.0,
        n_sequences: int = 1,
    ) -> np.ndarray:
        """Predict the seconds of a step by rows of all sequences; `context` is per sequence."""
        return self._slack * pass_times(
            self.profile, self._moved, n_rows, context, draft_s, n_sequences
        )

    def level(self, n_sequences: int) -> float:
        """Predict the seconds of a level of `n_sequences` trees, measured or computed."""
        if self._draft_context is None:
            return self.level_s
        moved = PassBytes((), self._moved.computed)
        rows = np.array([n_sequences])
        times = pass_times(self.profile, moved, rows, self._draft_context, n_sequences=n_sequences)
        return self._level_slack * float(times[0])

    def best_tree(
        self,
        expected: np.ndarray,
        limits: DraftLimits,
        context: int,
        n_sequences: int = 1,
        level_s: float | None = None,
    ) -> TreeChoice:
        """Select the size of each sequence's tree with the least time per token; see `select_tree`.

        context  tokens per sequence
        level_s  seconds per draft level; None for `level`
        """
        level_s = self.level(n_sequences) if level_s is None else level_s
        # The last level needs no draft pass.
        draft_s = level_s * np.arange(limits.n_levels)

        def step_s(sizes: np.ndarray) -> np.ndarray:
            return self.seconds(n_sequences * sizes[:, None], context, draft_s, n_sequences)

        return select_tree(expected, limits, step_s)

    def passed(
        self,
        n_rows: int,
        context: int,
        draft_s: float,
        seconds: float,
        link_gbps: float,
        n_sequences: int = 1,
        n_experts: int = 0,
    ) -> None:
        """Learn from a measured step.

        seconds      duration, including drafting and verification
        link_gbps    link rate while busy; 0 if nothing was streamed
        n_sequences  number of sequences that shared the rows
        n_experts    experts copied to the device
        """
        if not self._learns:
            return
        if (experts := self._moved.experts) is not None and self._experts is not None:
            expected_nbytes = float(replace(experts, bias=None).pass_nbytes(np.array(n_rows)))
            actual = n_experts * experts.nbytes
            self._experts.observe(n_rows, actual / expected_nbytes if expected_nbytes else 1.0)
        if link_gbps:
            streamed = list(self._moved.at(context))
            rates = dict(self.profile.link_gbps)
            if len(streamed) == 1:  # with several links, the rate cannot be attributed
                rates[streamed[0]] = _towards(rates[streamed[0]], link_gbps)
            self.profile = replace(self.profile, link_gbps=tuple(rates.items()))
        rows = np.array([n_rows])
        predicted = pass_times(self.profile, self._moved, rows, context, draft_s, n_sequences)[0]
        self._n_passes += 1
        self._slack += max(_NEWEST, 1 / self._n_passes) * (seconds / float(predicted) - self._slack)

    def drafted(self, n_levels: int, seconds: float, n_sequences: int = 1) -> None:
        """Learn from drafting `n_levels` levels in `seconds`."""
        if n_levels == 0 or not self._learns:
            return
        if self._draft_context is None:
            self.level_s = _towards(self.level_s, seconds / n_levels)
        else:
            self._level_slack *= _towards(1.0, seconds / n_levels / self.level(n_sequences))


def _towards(old: float, new: float) -> float:
    return old + _NEWEST * (new - old)
