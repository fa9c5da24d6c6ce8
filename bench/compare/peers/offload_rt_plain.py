"""offload_rt without a draft: one pass over the weights for each token."""

from bench.compare.contract import Job
from bench.compare.peers import _offload_rt as offload_rt

TITLE = "offload_rt, plain"
PACKAGES = ()
DRAFTS = False


def load(job: Job) -> offload_rt.OffloadPeer:
    """Load the model without a drafter."""
    return offload_rt.load(job, drafter="none")
