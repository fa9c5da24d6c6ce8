"""Write models of transformers as GGUF files."""

from pathlib import Path
from typing import Any

import torch
import write_gguf
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from write_gguf import Stored


def build(
    path: Path, model: PreTrainedModel, type: str, more: dict[str, Any] | None = None
) -> PreTrainedModel:
    """Write a model to a GGUF file and return it with the weights of the file.

    A Llama 3 has a divisor per rotary frequency.
    """
    metadata, stored, exact = write_gguf.model(model.config.to_dict(), stored_tensors(model), type)
    if model.config.rope_parameters["rope_type"] == "llama3":
        scaled = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))[0]
        plain = 1 / 500.0 ** (torch.arange(0, 16, 2) / 16)
        stored["rope_freqs.weight"] = Stored(0, (8,), (plain / scaled).numpy().tobytes())
    path.write_bytes(write_gguf.file_bytes(metadata | (more or {}), stored))
    model.load_state_dict(exact, strict=False)
    return model.float()


def stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
