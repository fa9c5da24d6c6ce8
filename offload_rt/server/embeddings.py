"""/v1/embeddings: pooled hidden states of texts."""

import base64
from typing import Annotated, Literal

from pydantic import BaseModel, PlainValidator
from torch import Tensor

from offload_rt.server.bodies import Json
from offload_rt.server.protocol import prompts_of


class EmbeddingsRequest(BaseModel):
    """Body of /v1/embeddings."""

    model: str | None = None
    input: Annotated[list[str] | list[list[int]], PlainValidator(prompts_of)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Literal[None] = None

    def whole(self, vectors: Tensor, n_tokens: int, name: str) -> Json:
        """Return the response to embeddings (n, hidden_size) of prompts with `n_tokens` tokens."""
        data = [
            {"object": "embedding", "index": i, "embedding": self._encode(vector)}
            for i, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return {"object": "list", "model": name, "data": data, "usage": usage}

    def _encode(self, vector: Tensor) -> list[float] | str:
        if self.encoding_format == "base64":
            return base64.b64encode(vector.numpy().tobytes()).decode()
        values: list[float] = vector.tolist()
        return values
