"""Write models of transformers as GGUF files."""

from pathlib import Path
from typing import Any

import write_gguf
from torch import Tensor
from transformers import PreTrainedModel


def build(
    path: Path, model: PreTrainedModel, type: str, more: dict[str, Any] | None = None
) -> PreTrainedModel:
    """Write a model to a GGUF file and return it with the weights of the file."""
    metadata, stored, exact = write_gguf.model(model.config.to_dict(), stored_tensors(model), type)
    path.write_bytes(write_gguf.file_bytes(metadata | (more or {}), stored))
    model.load_state_dict(exact, strict=False)
    return model.float()


def stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
