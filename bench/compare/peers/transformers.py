"""transformers with all weights in the memory of the device: the reference for the tokens, not for
the memory. Other peers with a transformers model use its parts.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from bench.common.checkpoints import drop_from_page_cache
from bench.compare.contract import Answer, Job, Supply, System


class _Arrivals(BaseStreamer):
    """Records when tokens arrive; the clock stops while caches are made cold.

    cold  a checkpoint to be made cold after each pass, outside the time measured; None where no
          pass reads a disk
    """

    def __init__(self, cold: Path | None) -> None:
        self._cold = cold
        self._n = 0
        self._has_prompt = False
        self.arrivals: list[tuple[float, int]] = []
        self._started = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then what each pass adds."""
        if self._has_prompt:
            self._n += value.numel()
            self.arrivals.append((time.perf_counter() - self._started, self._n))
        self._has_prompt = True
        if self._cold is not None:
            dropping = time.perf_counter()
            drop_from_page_cache(self._cold)
            self._started += time.perf_counter() - dropping

    def end(self) -> None:
        """Nothing more comes."""


class TransformersPeer:
    """A transformers model with any kind of weight loading.

    cold       a checkpoint that its passes read from the disk
    assistant  a draft model for assisted generation
    """

    def __init__(
        self,
        model: PreTrainedModel,
        supply: Supply,
        cold: Path | None = None,
        assistant: PreTrainedModel | None = None,
    ) -> None:
        self.supply = supply
        self._model = model
        self._cold = cold
        self._options: dict[str, Any] = {"assistant_model": assistant} if assistant else {}

    @torch.inference_mode()
    def generate(self, prompt: list[int], n: int) -> Answer:
        """Continue a prompt greedily; see `Peer`."""
        ids = torch.tensor([prompt], device=device())
        arrivals = _Arrivals(self._cold)
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False,
            streamer=arrivals,
            pad_token_id=0, **self._options,
        )  # fmt: skip
        return Answer(out[0, len(prompt) :].tolist(), arrivals.arrivals)

    def close(self) -> None:
        """There is nothing to stop."""


def device() -> str:
    """Name of the card, else of the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def nbytes(model: PreTrainedModel) -> int:
    """Bytes of all weights a pass reads; of the embedding it reads a row for each token only."""
    total = sum(parameter.nbytes for parameter in model.parameters())
    tied = model.config.tie_word_embeddings
    return total if tied else total - model.get_input_embeddings().weight.nbytes


def layer_nbytes(model: PreTrainedModel) -> int:
    """Bytes of one decoder layer."""
    return sum(parameter.nbytes for parameter in model.model.layers[0].parameters())


def load_draft(job: Job) -> PreTrainedModel:
    """The draft, resident; the number of drafted tokens follows its confidence by default."""
    return AutoModelForCausalLM.from_pretrained(job.draft, dtype="auto").to(device())


def _load(job: Job, is_assisted: bool) -> TransformersPeer:
    """Load all weights to the device, independent of the budget."""
    model = AutoModelForCausalLM.from_pretrained(job.plain, dtype="auto").to(device())
    draft = load_draft(job) if is_assisted else None
    return TransformersPeer(model, Supply("memory", nbytes(model)), assistant=draft)


PACKAGES = ("transformers",)
PEERS = {
    "transformers_resident": System(
        "transformers, resident", partial(_load, is_assisted=False), PACKAGES
    ),
    "transformers_assisted": System(
        "transformers, resident, assisted", partial(_load, is_assisted=True), PACKAGES, drafts=True
    ),
}
