"""Times and traffic of a pass, compared with the cost estimate."""

import time
from collections.abc import Sequence

import numpy as np

from offload_rt.cost.estimator import CostEstimator
from offload_rt.executor.runner import Runner
from offload_rt.executor.sequence import PassTimes
from offload_rt.executor.step import Step
from offload_rt.system.trace import DRAFT, VERIFY, Trace


class PassMeter:
    """Record the phases of a pass; predict its time before and correct the estimator after."""

    def __init__(self, runner: Runner, cost: CostEstimator, trace: Trace) -> None:
        self._started = time.perf_counter()
        self._runner = runner
        self._cost = cost
        self._trace = trace
        self._counts_before = self._counts()

    def _counts(self) -> np.ndarray:
        """Return link bytes, busy and waiting seconds of the link, and fetched experts so far."""
        link = self._runner.streamer.meter
        experts = self._runner.experts
        return np.array((*link.read(), link.waited_s, experts.n_fetched if experts else 0))

    def drafted(self) -> None:
        """Mark the end of drafting."""
        self._drafted = time.perf_counter()
        self._draft_s = self._drafted - self._started
        self._trace.add(DRAFT, "tree", self._started, self._drafted)

    def predict(self, steps: Sequence[Step], n_trees: int, has_prompt: bool) -> None:
        """Predict the time of a pass by its largest context, unless it computes a prompt."""
        self._n_rows = sum(step.n_rows for step in steps)
        self._context = max(self._runner.n_committed(step.cache) for step in steps)
        self._n_trees = n_trees
        n_rows = np.array([self._n_rows])
        seconds = self._cost.seconds(n_rows, self._context, self._draft_s, n_trees)
        self._predicted_s = None if has_prompt else float(seconds[0])

    def computed(self) -> None:
        """Mark the end of the forward pass."""
        self._computed = time.perf_counter()

    def finish(self, n_tokens: int, n_nodes: int) -> PassTimes:
        """Mark the end of verification; return all times."""
        ended = time.perf_counter()
        self._trace.add(VERIFY, f"{n_tokens} tokens of {n_nodes} nodes", self._computed, ended)
        nbytes, busy_s, waited_s, n_experts = (self._counts() - self._counts_before).tolist()
        pass_s = ended - self._started
        predicted_s = self._predicted_s
        if predicted_s is not None:  # prompts say nothing about later passes
            # Plain decoding measures no profile: its first pass is the first measurement.
            predicted_s = predicted_s if self._cost.is_measured else pass_s
            gbps = nbytes / busy_s / 1e9 if busy_s > 0 else 0.0
            size = self._n_rows, self._context, self._draft_s
            self._cost.passed(*size, pass_s, gbps, self._n_trees, int(n_experts))
        moments = self._started, self._drafted, self._computed, ended
        return PassTimes(*moments, int(nbytes), busy_s, waited_s, predicted_s, self._n_rows)
