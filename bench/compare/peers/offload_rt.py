"""offload_rt without a draft, with its own choice, with the peers' assistant, and with a head."""

import time
from functools import partial

from bench.compare.contract import Answer, Job, Supply, System
from offload_rt import LLM, SamplingParams


class OffloadPeer:
    """A loaded `LLM`. Its direct reads pass the page cache by, so nothing has to be made cold."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        moved = llm.plan.pass_bytes
        source, nbytes = max(moved.streamed, key=lambda pair: pair[1])
        self.supply = Supply(source, nbytes) if nbytes else Supply("memory", moved.computed)

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


def load(job: Job, drafter: str = "auto", draft: str = "") -> OffloadPeer:
    """Load the job's model; else only the budget, length and activations are set.

    draft  "draft": with the assistant; "head": with the head if there is one
    """
    head = job.head if draft == "head" else None
    return OffloadPeer(
        LLM(
            str(job.model), str(head or job.draft) if draft else None, drafter=drafter,
            device_memory=job.budget, max_model_len=job.max_len, activations=job.activations,
        )
    )  # fmt: skip


PEERS = {
    "offload_rt_plain": System("offload_rt, plain", partial(load, drafter="none")),
    "offload_rt_automatic": System("offload_rt, automatic", load, drafts=True),
    "offload_rt_assisted": System(
        "offload_rt, assisted", partial(load, draft="draft"), drafts=True
    ),
    "offload_rt_speculative": System(
        "offload_rt, speculative", partial(load, draft="head"), drafts=True
    ),
}
