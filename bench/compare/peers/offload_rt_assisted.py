"""offload_rt with the assistant of its peers as the draft model."""

from bench.compare.contract import Job
from bench.compare.peers import _offload_rt as offload_rt

TITLE = "offload_rt, assisted"
PACKAGES = ()
DRAFTS = True


def load(job: Job) -> offload_rt.OffloadPeer:
    """Load the model and the assistant in the same budget."""
    return offload_rt.load(job, draft_model=str(job.draft))
