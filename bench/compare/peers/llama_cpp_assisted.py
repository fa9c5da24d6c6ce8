"""llama.cpp on the job's GGUF file; a second model proposes a chain of 6 tokens."""

from bench.common.checkpoints import gguf_model
from bench.compare.contract import Job
from bench.compare.peers import _llama_cpp as llama_cpp

TITLE = "llama.cpp, assisted"
PACKAGES = llama_cpp.PACKAGES
DRAFTS = True
unfit = llama_cpp.unfit


def load(job: Job) -> llama_cpp.LlamaCppPeer:
    """Load both files."""
    return llama_cpp.load(job, gguf_model(job.draft, "BF16", job.scratch))
