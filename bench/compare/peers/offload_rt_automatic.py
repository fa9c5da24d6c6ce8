"""offload_rt as it starts without a draft model: it decides by itself whether and what to draft."""

from bench.compare.contract import Job
from bench.compare.peers import _offload_rt as offload_rt

TITLE = "offload_rt, automatic"
PACKAGES = ()
DRAFTS = True


def load(job: Job) -> offload_rt.OffloadPeer:
    """Load the model with default settings."""
    return offload_rt.load(job)
