"""llama.cpp on a GGUF of the same weights, `model.gguf` beside the checkpoint. It has not been run here.

Where there is no GPU the file is read into memory: pages of a mapped file cannot be made cold while they are mapped.
"""

import time

import torch

from bench.compare.contract import Answer, Job, Supply

TITLE, PACKAGES, DRAFTS = "llama.cpp", ("llama_cpp",), False


class LlamaCppPeer:
    """A model that llama.cpp has loaded."""

    def __init__(self, model: object, supply: Supply) -> None:
        self.supply, self._model = supply, model

    def generate(self, prompt: list[int], n: int) -> Answer:
        """Continue a prompt greedily; see `Peer`."""
        self._model.reset()
        token_ids: list[int] = []
        arrivals = []
        started = time.perf_counter()
        for token in self._model.generate(prompt, temp=0.0):
            token_ids.append(token)
            arrivals.append((time.perf_counter() - started, len(token_ids)))
            if len(token_ids) == n or token == self._model.token_eos():
                break
        return Answer(token_ids, arrivals)

    def close(self) -> None:
        """Release the weights."""
        self._model.close()


def load(job: Job) -> LlamaCppPeer:
    """As many layers on a GPU as the others have. Raises FileNotFoundError where no GGUF was made."""
    from llama_cpp import Llama

    path = job.model / "model.gguf"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: make it by llama.cpp's convert_hf_to_gguf.py")
    has_gpu = torch.cuda.is_available()
    n_layers = job.n_resident if has_gpu else 0
    model = Llama(str(path), n_ctx=job.max_len, n_gpu_layers=n_layers, use_mmap=False, verbose=False)
    return LlamaCppPeer(model, Supply("memory", path.stat().st_size))
