"""Rotary position embeddings, with the frequencies of transformers' own initialisation."""

import math
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from offload_rt.errors import UnsupportedModelError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_FACTORS = ("short_factor", "long_factor")
_NOT_NUMBERS = {"rope_type", "type", "truncate", "finetuned", *_FACTORS}
KEYS = _NOT_NUMBERS | {
    "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale",
    "mscale_all_dim", "partial_rotary_factor",
}  # fmt: skip


class Rope:
    """Compute cosines and sines for rotating queries and keys.

    With `dynamic` scaling the frequencies depend on the sequence length at which a token is
    computed. Each row passes that length, so drafted tokens use the frequencies of plain decoding.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        parameters = config.rope_parameters
        _check(config, parameters)
        self._config = copy(config)
        if parameters["rope_type"] == "default":
            # transformers implements default RoPE inside each model; linear scaling by 1 is equal.
            self._config.rope_parameters = {**parameters, "rope_type": "linear", "factor": 1.0}
        self._init = ROPE_INIT_FUNCTIONS[self._config.rope_parameters["rope_type"]]
        self._is_dynamic = parameters["rope_type"] == "dynamic"
        try:
            self._frequencies, self._scale = self._init(self._config, torch.device("cpu"))
        except Exception as error:  # transformers does not validate values: any exception may occur
            reason = " ".join(str(error).split())
            raise UnsupportedModelError(f"config.json: the rope settings are not understood: {reason}") from error
        if not bool(self._frequencies.isfinite().all()):
            raise UnsupportedModelError("config.json: the rope settings yield NaN or Inf frequencies")

    def cos_sin(self, positions: Tensor, lengths: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each (n, head_dim) in `dtype`.

        positions  (n,) int64
        lengths    (n,) int64 sequence length at which plain decoding computes each row
        """
        angles = positions[:, None].float() * self._rows(lengths).to(positions.device)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)

    def _rows(self, lengths: Tensor) -> Tensor:
        """Return the inverse frequencies per row, (n or 1, head_dim / 2) float32."""
        limit = self._config.max_position_embeddings
        if not self._is_dynamic or int(lengths.max()) <= limit:
            return self._frequencies[None]
        rows = self._frequencies.repeat(len(lengths), 1)
        for length in set(lengths.tolist()):
            if length > limit:
                rows[lengths.cpu() == length] = self._init(self._config, torch.device("cpu"), seq_len=length)[0]
        return rows


def _check(config: PreTrainedConfig, parameters: dict[str, Any]) -> None:
    kind = parameters.get("rope_type")
    if kind not in KINDS:
        raise UnsupportedModelError(f"config.json: rope type {kind!r} is not understood", have=", ".join(KINDS))
    unknown = sorted(set(parameters) - KEYS)
    if unknown:
        raise UnsupportedModelError(f"config.json: rope setting {unknown[0]!r} is not understood")
    for name in sorted(set(parameters) - _NOT_NUMBERS):
        value = parameters[name]
        if value is not None and not (type(value) in (int, float) and abs(value) < math.inf):
            raise UnsupportedModelError(f"config.json: {name} is {value!r}", need="a number")
    short, long = (parameters.get(name) for name in _FACTORS)
    if short != long or (short is None) != (kind != "longrope"):
        problem = "config.json: short_factor and long_factor differ, or rope type is not 'longrope'"
        raise UnsupportedModelError(problem, need="equal factors for short and long contexts")
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnsupportedModelError("config.json: partial_rotary_factor must be 1")
    if config.head_dim < 2 or config.head_dim % 2:
        raise UnsupportedModelError(f"config.json: head_dim is {config.head_dim}", need="an even number")
