"""Configs of EAGLE-3 and P-EAGLE heads: EAGLE, SpecForge, AngelSlim, speculators."""

from __future__ import annotations

from typing import Any

from offload_rt.errors import check_integer, config_error
from offload_rt.models.architecture import Architecture
from offload_rt.models.eagle3 import Eagle3
from offload_rt.models.families import parse_architecture
from offload_rt.models.heads import check_sizes, check_taps, fields_of
from offload_rt.models.native import NativeDecoder

TYPE = "speculators_model_type"
LAYERS = "transformer_layer_config"
_MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
_NESTED = "eagle_config"
_NESTED_KEYS = {"eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state"}
_KEYS = {
    "architectures",
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "fc_norm",
    "has_no_defaults_at_init",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "parallel_drafting",
    "target_hidden_size",
    "target_model_type",
    _NESTED,
    *_MASK_KEYS,
}
# Windows that configs derived from Qwen's contain although the layers of a Llama have none.
_UNUSED_WINDOWS = {"max_window_layers", "sliding_window", "use_sliding_window"}
# Further keys of speculators' configs, which nest the layers' config.
SPECULATORS_KEYS = {
    TYPE,
    LAYERS,
    "auto_map",
    "dtype",
    "has_no_defaults_at_init",
    "speculators_config",
    "speculators_version",
    "target_hidden_size",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
}
# Tokens that P-EAGLE heads predict unless the config tells.
_N_PARALLEL = 8


def eagle_of(raw: dict[str, Any], target: Architecture) -> Eagle3:
    """Build an EAGLE-3 or P-EAGLE head from its config.json.

    Raises UnsupportedModelError for an unsupported config, SettingsError for another target.
    """
    layers = parse_architecture(_layer_config(raw))
    if not isinstance(layers, NativeDecoder):
        problem = f"an EAGLE-3 head with layers of type {layers.family}"
        raise config_error(problem, need="Llama or Qwen3 layers")
    check_sizes(layers, target, raw.get("target_hidden_size"))
    taps = _taps(raw, target)
    changes: dict[str, Any] = {
        "family": "eagle",
        "max_positions": target.max_positions,
        "taps": taps,
        "n_tokens": raw.get("draft_vocab_size") or layers.vocab_size,
        "norm_before": bool(raw.get("norm_before_residual")),
        "state_norm": _state_norm(raw),
    }
    if TYPE in raw:
        changes["feeds_normed"] = bool(raw.get("norm_output"))
    else:
        changes["is_normed"] = bool(raw.get("norm_output", True))
    if is_parallel := _is_parallel(raw):
        changes |= {
            "family": "peagle",
            "mask_token": _mask_token(raw, layers.vocab_size),
            "mask_shape": (1, 1, len(taps) * layers.hidden_size),
            "n_parallel": _n_parallel(raw),
        }
    changes["has_embedding"] = bool(raw.get("embed_requires_grad", is_parallel))
    return Eagle3(**fields_of(layers) | changes)


def _is_parallel(raw: dict[str, Any]) -> bool:
    """Return whether a config describes a P-EAGLE head."""
    return (
        raw.get(TYPE) == "peagle"
        or bool(raw.get("parallel_drafting"))
        or any("PEagle" in str(name) for name in raw.get("architectures") or ())
        or any(raw.get(key) is not None for key in _MASK_KEYS)
    )


def _layer_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the layers. Raises UnsupportedModelError for unknown keys."""
    nested = raw.get(_NESTED) or {}
    if unknown := sorted(set(nested) - _NESTED_KEYS):
        raise config_error(f"{_NESTED}: {unknown[0]!r} is not understood")
    if nested.get("use_aux_hidden_state", True) is not True:
        problem = f"{_NESTED}: use_aux_hidden_state is not true"
        raise config_error(problem, need="a head on hidden states of several layers")
    if TYPE not in raw:
        known = _KEYS
        if raw.get("model_type") == "llama" and not raw.get("use_sliding_window"):
            known = _KEYS | _UNUSED_WINDOWS
        return {key: value for key, value in raw.items() if key not in known}
    kind = raw[TYPE]
    if unknown := sorted(set(raw) - _KEYS - SPECULATORS_KEYS - {"embed_requires_grad"}):
        raise config_error(f"{unknown[0]!r} is not understood for {TYPE} {kind!r}")
    if kind not in ("eagle3", "peagle"):
        need = "'eagle3', 'peagle', 'dflash', 'dflash2' or 'dspark'"
        raise config_error(f"{TYPE} {kind!r} is not supported", need=need)
    return dict(raw.get(LAYERS) or {})


def _taps(raw: dict[str, Any], target: Architecture) -> tuple[int, ...]:
    n = target.n_layers
    nested = (raw.get(_NESTED) or {}).get("eagle_aux_hidden_state_layer_ids")
    # Nested ids name the layers whose outputs are read, from 0. Top-level ids name the layers whose
    # inputs are read.
    top = raw.get("eagle_aux_hidden_state_layer_ids") or [2, n // 2, n - 3]
    return check_taps([i + 1 for i in nested] if nested else top, target)


def _state_norm(raw: dict[str, Any]) -> str:
    if raw.get("fc_norm") and raw.get("norm_before_fc"):
        raise config_error("both fc_norm and norm_before_fc are true", need="at most one of them")
    if raw.get("fc_norm"):
        return "fc_norm"
    return "input_norm" if raw.get("norm_before_fc") else ""


def _mask_token(raw: dict[str, Any], vocab_size: int) -> int:
    token: Any = next((raw[key] for key in _MASK_KEYS if raw.get(key) is not None), None)
    check_integer("mask_token_id", token, 0, vocab_size - 1)
    return int(token)


def _n_parallel(raw: dict[str, Any]) -> int:
    """Return the number of tokens that speculators' config proposes, or the published number."""
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    n: int = methods[0].get("speculative_tokens", _N_PARALLEL)
    check_integer("speculative_tokens", n, 1, 99)
    return n
