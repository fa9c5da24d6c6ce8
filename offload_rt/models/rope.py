"""Rotary position embeddings, with the frequencies of transformers' own initialisation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from offload_rt.errors import config_error

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_FACTORS = ("short_factor", "long_factor")
# Settings that each kind needs.
_LENGTH = "original_max_position_embeddings"
KINDS = {
    "default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor", _LENGTH),
    "longrope": (*_FACTORS, _LENGTH),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH),
}  # fmt: skip
_NOT_NUMBERS = {"rope_type", "type", "truncate", "finetuned", *_FACTORS}
KEYS = _NOT_NUMBERS | {
    "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale",
    "mscale_all_dim", "partial_rotary_factor",
}  # fmt: skip


@dataclass(frozen=True)
class RopeConfig:
    """Config of rotary embeddings, in the names that transformers' functions read."""

    rope_parameters: Mapping[str, Any]
    head_dim: int
    max_position_embeddings: int
    hidden_size: int = 0
    num_attention_heads: int = 1

    @classmethod
    def from_config(cls, raw: Mapping[str, Any], head_dim: int) -> RopeConfig:
        """Read a config.json of any age: `rope_scaling` and `rope_theta`, or `rope_parameters`.

        Raises UnsupportedModelError for settings that are not understood.
        """
        given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        if not isinstance(given, dict):
            raise config_error(f"the rope settings are {given!r}", need="a table")
        limit = raw["max_position_embeddings"]
        kind = given.get("type", "default")
        settings = {"rope_theta": raw.get("rope_theta", 10_000.0), "rope_type": kind, **given}
        if _LENGTH in KINDS.get(str(settings["rope_type"]), ()):
            settings.setdefault(_LENGTH, limit)
        return cls(settings, head_dim, limit)

    def standardize_rope_params(self) -> None:
        """Do nothing: the settings are complete. transformers' functions call this."""


class Rope:
    """Compute cosines and sines for rotating queries and keys.

    With `dynamic` scaling the frequencies depend on the sequence length at which a token is
    computed. Each row passes that length, so drafted tokens use the frequencies of plain decoding.

    config  a `RopeConfig`, or a config of transformers
    """

    def __init__(self, config: Any) -> None:
        parameters = config.rope_parameters
        _check(config, parameters)
        kind = parameters["rope_type"]
        if kind == "default":  # inside each model of transformers; linear scaling by one is equal
            parameters = {**parameters, "rope_type": "linear", "factor": 1.0}
        self._config = RopeConfig(parameters, config.head_dim, config.max_position_embeddings)
        self._is_dynamic = kind == "dynamic"

    def _init(self, length: int | None = None) -> tuple[Tensor, float]:
        """Return inverse frequencies (head_dim / 2,), and the scale of cosines and sines."""
        import torch  # not at the top, nor transformers: a plan rotates nothing
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        compute: Any = ROPE_INIT_FUNCTIONS[self._config.rope_parameters["rope_type"]]
        found: tuple[Tensor, float] = compute(self._config, torch.device("cpu"), seq_len=length)
        return found

    @cached_property
    def _plain(self) -> tuple[Tensor, float]:
        try:
            frequencies, scale = self._init()
        except Exception as error:  # transformers does not check the values
            said = " ".join(str(error).split())
            raise config_error(f"the rope settings are not understood: {said}") from error
        if not bool(frequencies.isfinite().all()):
            raise config_error("the rope settings give frequencies that are not numbers")
        return frequencies, scale

    def cos_sin(
        self, positions: Tensor, lengths: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each (n, head_dim) in `dtype`.

        positions  (n,) int64
        lengths    (n,) int64 sequence length at which plain decoding computes each row
        """
        angles = positions[:, None].float() * self._rows(lengths).to(positions.device)
        scale = self._plain[1]
        parts = angles.cos(), angles.sin()
        cos, sin = ((part if scale == 1 else part * scale).to(dtype) for part in parts)
        return cos.repeat(1, 2), sin.repeat(1, 2)

    def _rows(self, lengths: Tensor) -> Tensor:
        """Return the inverse frequencies per row, (n or 1, head_dim / 2) float32."""
        limit = self._config.max_position_embeddings
        plain = self._plain[0]
        if not self._is_dynamic or int(lengths.max()) <= limit:
            return plain[None]
        rows = plain.repeat(len(lengths), 1)
        for length in set(lengths.tolist()):
            if length > limit:
                rows[lengths.cpu() == length] = self._init(length)[0]
        return rows


def _check(config: Any, parameters: Mapping[str, Any]) -> None:
    kind = parameters.get("rope_type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise config_error(f"rope type {kind!r} is not understood", have=", ".join(KINDS))
    for name in ("rope_theta", *KINDS[kind]):
        if parameters.get(name) is None:
            raise config_error(f"rope setting {name!r} is missing for rope type {kind!r}")
    if unknown := sorted(set(parameters) - KEYS):
        raise config_error(f"rope setting {unknown[0]!r} is not understood")
    for name in sorted(set(parameters) - _NOT_NUMBERS):
        value = parameters[name]
        if value is not None and not (type(value) in (int, float) and abs(value) < math.inf):
            raise config_error(f"{name} is {value!r}", need="a number")
    low, high = (parameters.get(f"{name}_freq_factor") for name in ("low", "high"))
    positive = [parameters.get(name) for name in ("rope_theta", "factor", _LENGTH)]
    if any(value is not None and value <= 0 for value in positive) or (
        low is not None and low == high
    ):
        raise config_error("the rope settings give frequencies that are not numbers")
    short, long = (parameters.get(name) for name in _FACTORS)
    if short != long or (short is None) != (kind != "longrope"):
        problem = "short_factor and long_factor differ, or rope type is not 'longrope'"
        raise config_error(problem, need="equal factors for short and long contexts")
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise config_error("partial_rotary_factor must be 1")
    if config.head_dim < 2 or config.head_dim % 2:
        raise config_error(f"head_dim is {config.head_dim}", need="an even number")
