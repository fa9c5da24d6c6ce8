"""offload_rt as it starts without a draft model: it decides by itself whether and what to draft."""

from bench.compare.contract import Job
from bench.compare.peers._offload_rt import OffloadPeer
from offload_rt import LLM

TITLE = "offload_rt, automatic"
PACKAGES = ()
DRAFTS = True


def load(job: Job) -> OffloadPeer:
    """Nothing is set but the budget, the length and the activations."""
    return OffloadPeer(
        LLM(
            str(job.model), device_memory=job.budget, max_model_len=job.max_len,
            activations=job.activations,
        )
    )  # fmt: skip
