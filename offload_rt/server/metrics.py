"""What the server counts, in Prometheus' text format."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from offload_rt.llm import LLM

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)


class Metrics:
    """Counters of one server; the link's are the engine's own."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._registry = llm, CollectorRegistry()
        self.requests = Counter("offload_rt_requests", "Requests by how they ended", ["end"], registry=self._registry)
        self.prompt_tokens = Counter("offload_rt_prompt_tokens", "Tokens of prompts", registry=self._registry)
        self.tokens = Counter("offload_rt_tokens", "Tokens produced", registry=self._registry)
        self.first_token = Histogram(
            "offload_rt_first_token_seconds",
            "From a request to its first token",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.request_seconds = Histogram(
            "offload_rt_request_seconds", "From a request to its end", buckets=_SECONDS, registry=self._registry
        )
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """What is read off the engine when it is asked for."""
        engine = self._llm.engine
        nbytes, busy_s = engine.runner.streamer.meter.read()
        yield CounterMetricFamily("offload_rt_passes", "Passes over the weights", engine.n_passes)
        yield CounterMetricFamily("offload_rt_link_bytes", "Bytes that crossed the link", nbytes)
        yield CounterMetricFamily("offload_rt_link_busy_seconds", "Seconds in which the link moved bytes", busy_s)
        yield GaugeMetricFamily("offload_rt_running", "Sequences that are computed", engine.n_running)
        yield GaugeMetricFamily("offload_rt_waiting", "Sequences that wait for room", engine.n_waiting)

    def text(self) -> bytes:
        """All of them."""
        return generate_latest(self._registry)
