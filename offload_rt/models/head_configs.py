"""Draft heads by their config.json: EAGLE-3, block drafters, multi-token prediction, Medusa."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from offload_rt.errors import UnsupportedModelError
from offload_rt.models.architecture import Architecture
from offload_rt.models.block_configs import block_head_of
from offload_rt.models.families import spec_of
from offload_rt.models.heads import (
    MTP_LAYOUTS,
    Eagle3,
    Head,
    Medusa,
    MtpLayout,
    NativeMtp,
    target_mismatch,
)
from offload_rt.models.native import NativeDecoder

_EAGLE_KEYS = {
    "architectures",
    "draft_vocab_size",
    "eagle_config",
    "eagle_aux_hidden_state_layer_ids",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "target_hidden_size",
    "target_model_type",
    "has_no_defaults_at_init",
}
# Further keys of speculators' configs, which nest the layer's config.
_SPECULATORS = "speculators_model_type"
_LAYER_CONFIG = "transformer_layer_config"
_SPECULATORS_KEYS = {
    _SPECULATORS,
    _LAYER_CONFIG,
    "auto_map",
    "dtype",
    "embed_requires_grad",
    "speculators_config",
    "speculators_version",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
}


def _layer_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the decoder layer. Raises UnsupportedModelError for unknown keys."""
    if _SPECULATORS not in raw:
        return {key: value for key, value in raw.items() if key not in _EAGLE_KEYS}
    unknown = sorted(set(raw) - _EAGLE_KEYS - _SPECULATORS_KEYS)
    if unknown:
        kind = raw[_SPECULATORS]
        problem = f"config.json: {unknown[0]!r} is not understood for {_SPECULATORS} {kind!r}"
        raise UnsupportedModelError(problem)
    if raw[_SPECULATORS] != "eagle3":
        problem = f"config.json: {_SPECULATORS} {raw[_SPECULATORS]!r} is not supported"
        raise UnsupportedModelError(problem, need="'eagle3', 'dflash' or 'dspark'")
    return dict(raw.get(_LAYER_CONFIG) or {})


def _eagle_of(raw: dict[str, Any], target: NativeDecoder) -> Eagle3:
    llama = spec_of(_layer_config(raw))
    if llama.n_layers != 1 or not isinstance(llama, NativeDecoder):
        kind = f"{llama.n_layers} layers of type {llama.family}"
        problem = f"config.json: an EAGLE-3 head with {kind} is not supported"
        raise UnsupportedModelError(problem, need="1 Llama layer")
    for quantity, have, need in (
        ("hidden size", raw.get("target_hidden_size") or llama.hidden_size, target.hidden_size),
        ("hidden size", llama.hidden_size, target.hidden_size),
        ("vocabulary", llama.vocab_size, target.vocab_size),
    ):
        if have != need:
            raise target_mismatch(quantity, str(have), str(need))
    n = target.n_layers
    nested = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    # Nested ids name the layers whose outputs are read, from 0. Top-level ids name the layers whose
    # inputs are read.
    top = raw.get("eagle_aux_hidden_state_layer_ids") or [2, n // 2, n - 3]
    taps = [i + 1 for i in nested] if nested else top
    if not all(isinstance(tap, int) and 0 <= tap <= n for tap in taps):
        raise target_mismatch("hidden states", f"those after {taps} layers", f"at most {n}")
    changes = {
        "family": "eagle",
        "max_positions": target.max_positions,
        "taps": tuple(taps),
        "n_tokens": raw.get("draft_vocab_size") or llama.vocab_size,
        "norm_before": bool(raw.get("norm_before_residual")),
        "state_norm": _state_norm(raw),
    }
    if _SPECULATORS in raw:
        changes |= {
            "prefix": "layers.0.",
            "feeds_normed": bool(raw.get("norm_output")),
            "has_embedding": bool(raw.get("embed_requires_grad")),
        }
    else:
        changes["is_normed"] = bool(raw.get("norm_output", True))
    return Eagle3(**{**_shape(llama), **changes})


def _shape(model: NativeDecoder) -> dict[str, Any]:
    """Return the fields of a model; `vars` would include cached properties."""
    return {item.name: getattr(model, item.name) for item in fields(model)}


def _state_norm(raw: dict[str, Any]) -> str:
    if raw.get("fc_norm") and raw.get("norm_before_fc"):
        problem = "config.json: both fc_norm and norm_before_fc are true"
        raise UnsupportedModelError(problem, need="at most one of them")
    if raw.get("fc_norm"):
        return "fc_norm"
    return "input_norm" if raw.get("norm_before_fc") else ""


def mtp_of(target: NativeDecoder, layout: MtpLayout) -> NativeMtp:
    """Build the multi-token prediction layer of a native target."""
    n = target.n_layers
    changes = {
        "family": "mtp",
        "n_layers": 1,
        "windows": (None,),
        "taps": (n,),
        "n_mtp": 0,
        "layout": layout.for_target(n),
    }
    return NativeMtp(**{**_shape(target), **changes})


def _medusa_of(raw: dict[str, Any], target: NativeDecoder) -> Medusa:
    """Build Medusa heads from a config in the authors' layout."""
    n_heads = raw.get("medusa_num_heads", raw.get("num_heads"))
    n_blocks = raw.get("medusa_num_layers", raw.get("num_hidden_layers", 1))
    for name, value in (("medusa_num_heads", n_heads), ("medusa_num_layers", n_blocks)):
        if type(value) is not int or not 0 < value < 100:
            raise UnsupportedModelError(
                f"config.json: {name} is {value!r}", need="an integer from 1 to 99"
            )
    changes = {"family": "medusa", "n_layers": n_heads, "taps": (target.n_layers,), "n_mtp": 0}
    return Medusa(**{**_shape(target), **changes, "n_blocks": n_blocks})


def head_kind(raw: dict[str, Any]) -> str | None:
    """Return the drafter name of a head's config.json, or None for a complete model."""
    if raw.get("model_type") == "medusa" or "medusa_num_heads" in raw:
        return "medusa"
    names = [str(name) for name in raw.get("architectures") or ()]
    if raw.get(_SPECULATORS) in ("dflash", "dspark") or any(
        "DFlashDraft" in name for name in names
    ):
        return "block"
    is_eagle = not {"draft_vocab_size", _SPECULATORS}.isdisjoint(raw) or any(
        "Eagle3" in name for name in names
    )
    return "eagle" if is_eagle else None


def head_of(raw: dict[str, Any] | None, target: Architecture) -> Head | None:
    """Build the head of a config.json, or without config the target's built-in head, if any.

    Raises UnsupportedModelError for an unsupported config, SettingsError for a different target.
    """
    if raw is None:
        return (
            mtp_of(target, MTP_LAYOUTS[0])
            if isinstance(target, NativeDecoder) and target.n_mtp
            else None
        )
    kind = head_kind(raw)
    if kind is None:
        return None
    if not isinstance(target, NativeDecoder):
        change = "omit --draft-model, or use a complete draft model"
        raise UnsupportedModelError(
            f"heads cannot draft for a model of type {target.family}", change=change
        )
    build = {"medusa": _medusa_of, "eagle": _eagle_of, "block": block_head_of}[kind]
    return build(raw, target)
