"""Parts shared by the two llama.cpp peers: one GGUF file, all cores, weights mapped only under a
memory limit.
"""

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.common.measure import AVX2_ENVIRONMENT
from bench.compare.contract import Answer, Job, Supply
from offload_rt.errors import SettingsError
from offload_rt.weights.gguf import read_gguf

PACKAGES = ("llama_cpp",)


def unfit() -> str | None:
    """Refuse a build with AVX-512 in a comparison of AVX2; the compiler fixes the instruction
    set.
    """
    import llama_cpp

    features = llama_cpp.llama_print_system_info().decode()
    is_restricted = os.environ.keys() >= AVX2_ENVIRONMENT.keys()
    if is_restricted and "AVX512 = 1" in features:
        return "built with AVX-512; set LLAMA_CPP_LIB_PATH to a build without"
    return None


class LlamaCppPeer:
    """A model loaded by llama.cpp."""

    def __init__(self, model: Any, supply: Supply) -> None:
        self.supply = supply
        self._model = model
        self._n_passes = 0
        self._eval = model.eval
        model.eval = self._count

    def _count(self, tokens: list[int]) -> None:
        self._n_passes += 1
        self._eval(tokens)

    def generate(self, prompt: list[int], n: int) -> Answer:
        """Continue a prompt greedily; see `Peer`. Tokens of one pass arrive together."""
        self._model.reset()
        token_ids: list[int] = []
        arrivals: dict[int, tuple[float, int]] = {}
        started = time.perf_counter()
        for token in self._model.generate(prompt, temp=0.0):
            token_ids.append(token)
            arrivals[self._n_passes] = (time.perf_counter() - started, len(token_ids))
            if len(token_ids) == n or token == self._model.token_eos():
                break
        return Answer(token_ids, list(arrivals.values()))

    def close(self) -> None:
        """Release the weights."""
        self._model.close()


def open_file(path: Path, job: Job, draft: object = None) -> Any:
    """Load a file on all cores of a CPU, or the job's layers on a GPU.

    Under a memory limit the file is mapped, and Q4_0 is not copied to llama.cpp's packed layout.
    """
    import llama_cpp

    default_params = llama_cpp.llama_cpp.llama_model_default_params
    is_limited = job.limit is not None

    def model_params() -> Any:
        params = default_params()
        params.use_extra_bufts = not is_limited
        return params

    n_layers = job.n_resident if torch.cuda.is_available() else 0
    n_threads = torch.get_num_threads()
    # llama_cpp.Llama has no argument for repacking.
    with mock.patch.object(llama_cpp.llama_cpp, "llama_model_default_params", model_params):
        return llama_cpp.Llama(
            str(path), n_ctx=job.max_len, n_gpu_layers=n_layers, use_mmap=is_limited, verbose=False,
            n_threads=n_threads, n_threads_batch=n_threads, draft_model=draft,
        )  # fmt: skip


def load(job: Job, draft: object = None) -> LlamaCppPeer:
    """Load the job's GGUF file. A pass reads all weights but the embedding, under a limit the
    excess from the disk.
    """
    if job.model.suffix != ".gguf":
        raise SettingsError(
            "llama.cpp reads GGUF files only", have=str(job.model), change="give --gguf BF16"
        )
    records = read_gguf(job.model)[1]
    is_read = {"model.embed_tokens.weight": "lm_head.weight" not in records}
    nbytes = sum(record.nbytes for name, record in records.items() if is_read.get(name, True))
    supply = (
        Supply("memory", nbytes)
        if job.limit is None
        else Supply("disk", max(nbytes - job.limit, 0))
    )
    return LlamaCppPeer(open_file(job.model, job, draft), supply)
