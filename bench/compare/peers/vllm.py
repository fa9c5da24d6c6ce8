"""vLLM with its prefetch offloader: layers come from pinned CPU memory one step ahead. It has not
been run here.
"""

import json
import time
from math import ceil

import torch

from bench.compare.contract import Answer, Job, Supply, System

# The largest group of layers of which some are streamed: large enough for any share, small enough
# to spread them evenly.
_MOST_IN_GROUP = 8


class VllmPeer:
    """An engine of vLLM, stepped by hand so that each pass can be timed."""

    def __init__(self, llm: object, supply: Supply) -> None:
        self.supply = supply
        self._engine = llm.llm_engine
        self._n_requests = 0

    def generate(self, prompt: list[int], n: int) -> Answer:
        """Continue a prompt greedily; see `Peer`."""
        from vllm import SamplingParams

        token_ids: list[int] = []
        arrivals = []
        self._n_requests += 1
        started = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=n)
        self._engine.add_request(str(self._n_requests), {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                token_ids = list(output.outputs[0].token_ids)
                arrivals.append((time.perf_counter() - started, len(token_ids)))
        return Answer(token_ids, arrivals)

    def close(self) -> None:
        """The engine ends with the process."""


def load(job: Job) -> VllmPeer:
    """As many layers resident as the others have, spread evenly; two layers are under way or in use
    beside them.
    """
    from vllm import LLM

    config = json.loads((job.model / "config.json").read_text(encoding="utf-8"))
    n_layers = config["num_hidden_layers"]
    size, n_streamed = _group((n_layers - job.n_resident) / n_layers)
    share = job.budget / torch.cuda.get_device_properties(0).total_memory
    llm = LLM(
        str(job.model), max_model_len=job.max_len, gpu_memory_utilization=share,
        offload_backend="prefetch",
        offload_group_size=size, offload_num_in_group=n_streamed, offload_prefetch_step=1,
    )  # fmt: skip
    nbytes = sum(path.stat().st_size for path in job.model.glob("*.safetensors"))
    return VllmPeer(llm, Supply("host", nbytes * n_streamed // size))


def _group(share: float) -> tuple[int, int]:
    """Size of a group and how many of it are streamed: the least share that is not below this
    one.
    """
    sizes = range(1, _MOST_IN_GROUP + 1)
    return min((ceil(share * n) / n, n, ceil(share * n)) for n in sizes)[1:]


def _lacks_card() -> str | None:
    needs = "its offloader needs a CUDA device, and there is none"
    return None if torch.cuda.is_available() else needs


PEERS = {
    "vllm_prefetch": System("vLLM, prefetch offloader", load, ("vllm",), unfit=_lacks_card),
}
