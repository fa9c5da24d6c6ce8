"""Shared parts of the offload_rt peers."""

import time
from typing import Any

from bench.compare.contract import Answer, Job, Supply
from offload_rt import LLM, SamplingParams


class OffloadPeer:
    """A loaded `LLM`. Its direct reads pass the page cache by, so nothing has to be made cold."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        source, moved = max(llm.plan.pass_bytes.streamed, key=lambda pair: pair[1])
        self.supply = (
            Supply(source, moved) if moved else Supply("memory", llm.plan.pass_bytes.computed)
        )

    def generate(self, prompt: list[int], n: int) -> Answer:
        """Continue a prompt greedily; see `Peer`."""
        token_ids: list[int] = []
        arrivals = []
        started = time.perf_counter()
        for piece in self._llm.stream(prompt, SamplingParams(max_new_tokens=n, temperature=0.0)):
            token_ids += piece.token_ids
            arrivals.append((time.perf_counter() - started, len(token_ids)))
        return Answer(token_ids, arrivals)

    def close(self) -> None:
        """Join the threads and store statistics of the pair."""
        self._llm.close()


def load(job: Job, **settings: Any) -> OffloadPeer:
    """Load the job's model; beside `settings`, only the budget, length and activations are set."""
    return OffloadPeer(
        LLM(
            str(job.model), device_memory=job.budget, max_model_len=job.max_len,
            activations=job.activations, **settings,
        )
    )  # fmt: skip
