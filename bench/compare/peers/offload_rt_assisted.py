"""offload_rt with the assistant of its peers as the draft model."""

from bench.compare.contract import Job
from bench.compare.peers._offload_rt import OffloadPeer
from offload_rt import LLM

TITLE = "offload_rt, assisted"
PACKAGES = ()
DRAFTS = True


def load(job: Job) -> OffloadPeer:
    """Nothing is set but the budget and the length; the draft is paid from the same budget."""
    draft = str(job.draft)
    return OffloadPeer(
        LLM(str(job.model), draft_model=draft, device_memory=job.budget, max_model_len=job.max_len)
    )
