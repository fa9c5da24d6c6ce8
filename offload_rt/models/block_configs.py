"""Configs of block drafters: authors' DFlash and JetSpec, speculators' DFlash and DSpark."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from offload_rt.errors import UnsupportedModelError
from offload_rt.models.block_head import BlockHead
from offload_rt.models.families import spec_of
from offload_rt.models.heads import target_mismatch
from offload_rt.models.native import NativeDecoder

_NESTED = "dflash_config"
_LAYER_CONFIG = "transformer_layer_config"
_AUTHORS_KEYS = {
    "architectures",
    "auto_map",
    "block_size",
    "is_causal",
    "num_target_layers",
    _NESTED,
}
_NESTED_KEYS = {"block_size", "causal_head", "mask_token_id", "target_layer_ids"}
_SPECULATORS_KEYS = {
    "architectures",
    "auto_map",
    "aux_hidden_state_layer_ids",
    "block_size",
    "confidence_head_with_markov",
    "draft_vocab_size",
    "dtype",
    "enable_confidence_head",
    "has_no_defaults_at_init",
    "markov_head_type",
    "markov_rank",
    "mask_token_id",
    "sample_from_anchor",
    "sliding_window_non_causal",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "target_hidden_size",
    "tie_word_embeddings",
    "torch_dtype",
    _LAYER_CONFIG,
    "transformers_version",
}


def block_head_of(raw: dict[str, Any], target: NativeDecoder) -> BlockHead:
    """Build a block drafter from its config.json.

    Raises UnsupportedModelError for an unsupported config, SettingsError for another target.
    """
    by_speculators = "speculators_model_type" in raw
    changes = _of_speculators(raw) if by_speculators else _of_authors(raw)
    layers = _layers(raw, by_speculators)
    for quantity, own, required in (
        ("hidden size", raw.get("target_hidden_size") or layers.hidden_size, target.hidden_size),
        ("hidden size", layers.hidden_size, target.hidden_size),
        ("vocabulary", layers.vocab_size, target.vocab_size),
        ("number of layers", raw.get("num_target_layers", target.n_layers), target.n_layers),
    ):
        if own != required:
            raise target_mismatch(quantity, str(own), str(required))
    taps = changes["taps"]
    if not taps or not all(type(tap) is int and 0 <= tap <= target.n_layers for tap in taps):
        have = f"those after {list(taps)} layers"
        raise target_mismatch("hidden states", have, f"at most {target.n_layers}")
    for name, least, most in (("block_size", 2, 1024), ("mask_token", 0, target.vocab_size - 1)):
        value = changes[name]
        if type(value) is not int or not least <= value <= most:
            need = f"an integer from {least} to {most}"
            raise UnsupportedModelError(f"config.json: {name} is {value!r}", need=need)
    is_causal = changes.pop("is_causal")
    # By default, layers with a window are causal.
    changes["is_causal"] = tuple(
        window is not None if is_causal is None else is_causal for window in layers.windows
    )
    shape = {item.name: getattr(layers, item.name) for item in fields(NativeDecoder)}
    return BlockHead(
        **shape
        | {
            "family": "block",
            "max_positions": target.max_positions,
            "tied": target.tied,
            "n_tokens": raw.get("draft_vocab_size") or target.vocab_size,
        }
        | changes
    )


def _layers(raw: dict[str, Any], by_speculators: bool) -> NativeDecoder:
    """Return the layers of a block drafter. Raises UnsupportedModelError."""
    known = _SPECULATORS_KEYS if by_speculators else _AUTHORS_KEYS
    config = raw.get(_LAYER_CONFIG) or {}
    if by_speculators and (unknown := sorted(set(raw) - known)):
        kind = raw["speculators_model_type"]
        raise UnsupportedModelError(f"config.json: {unknown[0]!r} is not understood for {kind!r}")
    if not by_speculators:
        config = {key: value for key, value in raw.items() if key not in known}
    config = {key: value for key, value in config.items() if key != "architectures"}
    layers = spec_of({"model_type": "qwen3", **config})
    if not isinstance(layers, NativeDecoder) or not layers.qk_norm:
        problem = f"config.json: a block drafter with layers of type {layers.family}"
        raise UnsupportedModelError(problem, need="layers of type qwen3")
    return layers


def _of_authors(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that the authors' configs of DFlash and JetSpec determine."""
    nested = raw.get(_NESTED) or {}
    if unknown := sorted(set(nested) - _NESTED_KEYS):
        raise UnsupportedModelError(f"config.json: {_NESTED}: {unknown[0]!r} is not understood")
    is_causal = raw.get("is_causal")
    return {
        "block_size": nested.get("block_size", raw.get("block_size", 16)),
        "mask_token": nested.get("mask_token_id"),
        # The ids count layers from 0, taps count their outputs from 1.
        "taps": tuple(i + 1 for i in nested.get("target_layer_ids") or ()),
        "is_causal": True if nested.get("causal_head") else is_causal,
    }


def _of_speculators(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that speculators' configs of DFlash and DSpark determine."""
    kind = raw["speculators_model_type"]
    head_type = raw.get("markov_head_type", "vanilla")
    if kind == "dspark" and head_type != "vanilla":
        problem = f"config.json: markov_head_type {head_type!r} is not supported"
        raise UnsupportedModelError(problem, need="'vanilla'")
    return {
        "block_size": raw.get("block_size", 8),
        "mask_token": raw.get("mask_token_id"),
        "taps": tuple(raw.get("aux_hidden_state_layer_ids") or ()),
        "is_causal": False if raw.get("sliding_window_non_causal") else None,
        "anchored": True,
        "predicts_first": bool(raw.get("sample_from_anchor", kind == "dspark")),
        "markov_rank": raw.get("markov_rank", 256) if kind == "dspark" else 0,
    }
