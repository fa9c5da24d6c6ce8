"""Times and traffic of a pass, compared with the cost estimate."""

import time
from collections.abc import Sequence

import numpy as np

from offload_rt.cost.estimator import CostEstimator
from offload_rt.executor.runner import Runner
from offload_rt.executor.stats import PassTimes
from offload_rt.executor.step import Step
from offload_rt.system.trace import DRAFT, VERIFY, Trace


class PassMeter:
    """Record the phases of a pass; predict its time before and correct the estimator after."""

    def __init__(self, runner: Runner, cost: CostEstimator, trace: Trace) -> None:
        self._started = time.perf_counter()
        self._runner = runner
        self._link = runner.streamer.meter
        self._experts = runner.experts
        self._cost = cost
        self._trace = trace
        self._nbytes, self._busy_s = self._link.read()
        self._waited_s = self._link.waited_s
        self._n_experts = self._count_experts()

    def _count_experts(self) -> int:
        return self._experts.n_fetched if self._experts else 0

    def drafted(self) -> None:
        """Mark the end of drafting."""
        self._drafted = time.perf_counter()
        self._trace.add(DRAFT, "tree", self._started, self._drafted)

    def predict(self, steps: Sequence[Step], n_trees: int, has_prompt: bool) -> None:
        """Predict the time of a pass by its largest context, unless it computes a prompt."""
        self._n_rows = sum(step.n_rows for step in steps)
        self._context = max(self._runner.n_committed(step.cache) for step in steps)
        self._n_trees = n_trees
        self._draft_s = self._drafted - self._started
        rows = np.array([self._n_rows])
        (seconds,) = self._cost.seconds(rows, self._context, self._draft_s, n_trees).tolist()
        self._predicted_s = None if has_prompt else seconds

    def computed(self) -> None:
        """Mark the end of the forward pass."""
        self._computed = time.perf_counter()

    def finish(self, n_tokens: int, n_nodes: int) -> PassTimes:
        """Mark the end of verification; return all times."""
        ended = time.perf_counter()
        self._trace.add(VERIFY, f"{n_tokens} tokens of {n_nodes} nodes", self._computed, ended)
        nbytes, busy_s = self._link.read()
        if self._predicted_s is not None and not self._cost.is_measured:
            # Plain decoding measures no profile: its first pass is the first measurement.
            self._predicted_s = ended - self._started
        times = PassTimes(
            self._started,
            self._drafted,
            self._computed,
            ended,
            nbytes - self._nbytes,
            busy_s - self._busy_s,
            self._link.waited_s - self._waited_s,
            self._predicted_s,
            self._n_rows,
        )
        if self._predicted_s is not None:  # prompts say nothing about later passes
            link_s = times.link_busy_s
            gbps = times.link_nbytes / link_s / 1e9 if link_s > 0 else 0.0
            self._cost.passed(
                self._n_rows,
                self._context,
                self._draft_s,
                ended - self._started,
                gbps,
                self._n_trees,
                self._count_experts() - self._n_experts,
            )
        return times
