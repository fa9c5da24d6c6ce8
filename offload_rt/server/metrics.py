"""Counters in the text format of Prometheus."""

from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from offload_rt.llm import LLM

_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)


class Metrics:
    """Counters of requests, and of the engine at the time of the query."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="offload_rt", registry=self.registry)
        histogram = partial(
            Histogram, namespace="offload_rt", registry=self.registry, buckets=_BUCKETS_S
        )
        self.requests = counter("requests", "Requests by finish reason", ["end"])
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens")
        self.tokens = counter("tokens", "Generated tokens")
        self.first_token = histogram("first_token_seconds", "Time to the first token")
        self.request_seconds = histogram("request_seconds", "Duration of a request")
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Read the counters of the engine."""
        engine = self._llm.engine
        nbytes, busy_s = engine.runner.streamer.meter.read()
        counters = (
            ("passes", "Forward passes", engine.n_passes),
            ("link_bytes", "Bytes copied over the link", nbytes),
            ("link_busy_seconds", "Busy time of the link", busy_s),
        )
        for name, text, value in counters:
            yield CounterMetricFamily(f"offload_rt_{name}", text, value)
        yield GaugeMetricFamily("offload_rt_running", "Running sequences", engine.n_running)
        yield GaugeMetricFamily("offload_rt_waiting", "Waiting sequences", engine.n_waiting)
