"""llama.cpp on the job's GGUF file, verifying a chain of tokens that its own copy of the draft
model proposes.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.common.checkpoints import gguf_model
from bench.compare.contract import Job
from bench.compare.peers import _llama_cpp as llama_cpp
from bench.compare.peers._llama_cpp import LlamaCppPeer

TITLE = "llama.cpp, assisted"
PACKAGES = llama_cpp.PACKAGES
DRAFTS = True
unfit = llama_cpp.unfit
_N_DRAFTED = 6


class _Draft:
    """The draft as `llama_cpp.llama_speculative.LlamaDraftModel` defines it; its cache keeps the
    common prefix.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, input_ids: NDArray[np.intc], /, **_: Any) -> NDArray[np.intc]:
        """Propose the greedy continuation."""
        tokens = self._model.generate(input_ids.tolist(), temp=0.0)
        return np.array(
            [token for _, token in zip(range(_N_DRAFTED), tokens, strict=False)], dtype=np.intc
        )


def load(job: Job) -> LlamaCppPeer:
    """Load both files."""
    path = gguf_model(job.draft, "BF16", job.scratch)
    return llama_cpp.load(job, _Draft(llama_cpp.open_file(path, job)))
