"""offload_rt with a draft head: a tree of drafted tokens is verified in each pass over the
weights.
"""

from bench.compare.contract import Job
from bench.compare.peers._offload_rt import OffloadPeer
from offload_rt import LLM

TITLE = "offload_rt, speculative"
PACKAGES = ()
DRAFTS = True


def load(job: Job) -> OffloadPeer:
    """Nothing is set but the budget and the length; the head and its trees are paid from the same
    budget. Without a head, the assistant drafts.
    """
    draft = str(job.head or job.draft)
    return OffloadPeer(
        LLM(str(job.model), draft_model=draft, device_memory=job.budget, max_model_len=job.max_len)
    )
