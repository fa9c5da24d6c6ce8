"""llama.cpp on the job's GGUF file in a control group whose limit is the budget and its imports.

The file is mapped, so the kernel evicts pages that the next pass reads again.
"""

from bench.compare.contract import Job
from bench.compare.peers import _llama_cpp as llama_cpp
from offload_rt.errors import SettingsError

TITLE = "llama.cpp, mapped within the budget"
PACKAGES = llama_cpp.PACKAGES
DRAFTS = False
LIMITED = True
unfit = llama_cpp.unfit


def load(job: Job) -> llama_cpp.LlamaCppPeer:
    """Load the file. Raises SettingsError without a memory limit."""
    if job.limit is None:
        raise SettingsError(
            "needs a control group with a memory limit", change="run as root, or give --cgroup"
        )
    return llama_cpp.load(job)
