"""Times and traffic of a pass, compared with the cost estimate."""

import time
from dataclasses import dataclass

import numpy as np

from offload_rt.cost.estimator import CostEstimator
from offload_rt.executor.runner import Runner
from offload_rt.executor.stats import PassTimes
from offload_rt.system.trace import DRAFT, VERIFY, Trace


@dataclass(frozen=True)
class PassLoad:
    """Work of a pass, with the largest `context`; prompts say nothing about later passes."""

    n_rows: int
    context: int
    n_sequences: int
    has_prompt: bool


class PassMeter:
    """Record the phases of a pass; predict its time before and correct the estimator after."""

    def __init__(self, runner: Runner, cost: CostEstimator, trace: Trace) -> None:
        self._started = time.perf_counter()
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
        self._draft_s = self._drafted - self._started
        self._trace.add(DRAFT, "tree", self._started, self._drafted)

    def predict(self, load: PassLoad) -> None:
        """Predict the time of the pass."""
        self._load = load
        rows = np.array([load.n_rows])
        seconds = self._cost.seconds(rows, load.context, self._draft_s, load.n_sequences)
        self._predicted_s = float(seconds[0])

    def computed(self) -> None:
        """Mark the end of the forward pass."""
        self._computed = time.perf_counter()

    def finish(self, n_tokens: int, n_nodes: int) -> PassTimes:
        """Mark the end of verification; return all times."""
        ended = time.perf_counter()
        load = self._load
        self._trace.add(VERIFY, f"{n_tokens} tokens of {n_nodes} nodes", self._computed, ended)
        nbytes, busy_s = self._link.read()
        times = PassTimes(
            self._started,
            self._drafted,
            self._computed,
            ended,
            nbytes - self._nbytes,
            busy_s - self._busy_s,
            self._link.waited_s - self._waited_s,
            None if load.has_prompt else self._predicted_s,
            load.n_rows,
        )
        if not load.has_prompt:
            link_s = times.link_busy_s
            gbps = times.link_nbytes / link_s / 1e9 if link_s > 0 else 0.0
            self._cost.passed(
                load.n_rows,
                load.context,
                self._draft_s,
                ended - self._started,
                gbps,
                load.n_sequences,
                self._count_experts() - self._n_experts,
            )
        return times
