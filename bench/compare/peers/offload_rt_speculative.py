"""offload_rt with a draft head: a tree of drafted tokens is verified in each pass over the
weights.
"""

from bench.compare.contract import Job
from bench.compare.peers import _offload_rt as offload_rt

TITLE = "offload_rt, speculative"
PACKAGES = ()
DRAFTS = True


def load(job: Job) -> offload_rt.OffloadPeer:
    """Load the model and the head, or the assistant without a head, in the same budget."""
    return offload_rt.load(job, draft_model=str(job.head or job.draft))
