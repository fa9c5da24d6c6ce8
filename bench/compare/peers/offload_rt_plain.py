"""offload_rt without a draft: one pass over the weights for each token."""

from bench.compare.contract import Job
from bench.compare.peers._offload_rt import OffloadPeer
from offload_rt import LLM

TITLE = "offload_rt, plain"
PACKAGES = ()
DRAFTS = False


def load(job: Job) -> OffloadPeer:
    """Nothing is set but the budget and the length."""
    return OffloadPeer(
        LLM(
            str(job.model), device_memory=job.budget, max_model_len=job.max_len, drafter="none",
            activations=job.activations,
        )
    )  # fmt: skip
