"""Configs of block drafters: DFlash, JetSpec, DSpark and DFlash2.

Their authors and SpecForge nest keys in `dflash_config` or `dspark_config`, DeepSpec keeps them at
the top, speculators nests the layers' config instead.
"""

from __future__ import annotations

from typing import Any

from offload_rt.errors import check_integer, config_error
from offload_rt.models.architecture import Architecture
from offload_rt.models.block_head import BlockHead
from offload_rt.models.dflash2 import DFlash2
from offload_rt.models.eagle_configs import LAYERS, SPECULATORS_KEYS, TYPE
from offload_rt.models.families import parse_architecture
from offload_rt.models.heads import check_sizes, check_taps, fields_of, target_mismatch
from offload_rt.models.native import NativeDecoder

_NESTED = ("dflash_config", "dspark_config")
_DSPARK_KEYS = {
    "confidence_head_alpha",
    "confidence_head_with_markov",
    "enable_confidence_head",
    "markov_head_type",
    "markov_rank",
    "num_anchors",
}
_DFLASH2_KEYS = {"conv_group_size", "conv_kernel_size", "selector_rank", "selector_top_k"}
_COMMON_KEYS = {"block_size", "mask_token_id", "sample_from_anchor"}
# Keys at the top level or nested.
_AUTHORS_KEYS = _COMMON_KEYS | {
    "attention_mode",
    "causal",
    "causal_head",
    "final_logit_softcapping",
    "input_embedding_scale",
    "is_causal",
    "num_target_layers",
    "output_multiplier",
    "projector_type",
    "target_hidden_size",
    "target_layer_ids",
}
_SPECULATORS = _COMMON_KEYS | {
    "architectures",
    "aux_hidden_state_layer_ids",
    "draft_vocab_size",
    "sliding_window_non_causal",
}
_KEYS_OF_KIND = {"dflash": set[str](), "dspark": _DSPARK_KEYS, "dflash2": _DFLASH2_KEYS}


def block_kind(raw: dict[str, Any]) -> str | None:
    """Return "dflash", "dspark" or "dflash2" for the config of a block drafter, else None."""
    if TYPE in raw:
        return str(raw[TYPE]) if raw[TYPE] in _KEYS_OF_KIND else None
    names = " ".join(str(name) for name in raw.get("architectures") or ())
    marks = {"DFlash2Draft": "dflash2", "DSpark": "dspark", "DFlashDraft": "dflash"}
    return next((kind for mark, kind in marks.items() if mark in names), None)


def block_head_of(raw: dict[str, Any], target: Architecture) -> BlockHead:
    """Build a block drafter from its config.json.

    Raises UnsupportedModelError for an unsupported config, SettingsError for another target.
    """
    kind = block_kind(raw)
    assert kind is not None, "selected by block_kind"
    by_speculators = TYPE in raw
    known = _KEYS_OF_KIND[kind] | (
        _SPECULATORS | SPECULATORS_KEYS if by_speculators else _AUTHORS_KEYS
    )
    keys, layer_config = _divide(raw, known, by_speculators)
    layers = _layers(layer_config)
    check_sizes(layers, target, keys.get("target_hidden_size"))
    if keys.get("num_target_layers", target.n_layers) != target.n_layers:
        have = str(keys["num_target_layers"])
        raise target_mismatch("number of layers", have, str(target.n_layers))
    changes = _sizes(keys, kind, target.vocab_size)
    if by_speculators:
        taps = tuple(keys.get("aux_hidden_state_layer_ids") or ())
        is_free = keys.get("sliding_window_non_causal", kind == "dflash2")
        is_causal = False if is_free else None
        changes["anchored"] = True
    else:
        # The ids count layers from 0, taps count their outputs from 1.
        taps = tuple(i + 1 for i in keys.get("target_layer_ids") or ())
        is_causal = keys.get("causal", keys.get("is_causal"))
        is_causal = True if keys.get("causal_head") else is_causal
    changes |= {
        "family": "block",
        "max_positions": target.max_positions,
        "taps": check_taps(taps, target),
        "n_tokens": keys.get("draft_vocab_size") or target.vocab_size,
        # By default, layers with a window are causal.
        "is_causal": tuple(
            window is not None if is_causal is None else bool(is_causal)
            for window in layers.windows
        ),
    }
    head = DFlash2 if kind == "dflash2" else BlockHead
    return head(**fields_of(layers) | changes)


def _divide(
    raw: dict[str, Any], known: set[str], by_speculators: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate the keys of the drafter from the config of its layers.

    Raises UnsupportedModelError for unknown keys; unknown keys of the layers remain with them.
    """
    if by_speculators:
        if unknown := sorted(set(raw) - known):
            raise config_error(f"{unknown[0]!r} is not understood for {raw[TYPE]!r}")
        return raw, raw.get(LAYERS) or {}
    keys = {key: value for key, value in raw.items() if key in known}
    for name in _NESTED:
        nested = raw.get(name) or {}
        if unknown := sorted(set(nested) - known):
            raise config_error(f"{name}: {unknown[0]!r} is not understood")
        keys |= nested
    apart = known | {"auto_map", *_NESTED}
    return keys, {key: value for key, value in raw.items() if key not in apart}


def _layers(config: dict[str, Any]) -> NativeDecoder:
    """Return the layers of a block drafter. Raises UnsupportedModelError."""
    config = {key: value for key, value in config.items() if key != "architectures"}
    layers = parse_architecture({"model_type": "qwen3", **config})
    if not isinstance(layers, NativeDecoder) or not layers.qk_norm:
        problem = f"a block drafter with layers of type {layers.family}"
        raise config_error(problem, need="layers of type qwen3")
    return layers


def _sizes(keys: dict[str, Any], kind: str, vocab_size: int) -> dict[str, Any]:
    """Return the fields that do not depend on the layout. Raises UnsupportedModelError."""
    by_speculators = TYPE in keys
    is_dspark = kind == "dspark"
    counts = {
        "block_size": (keys.get("block_size", 8 if by_speculators else 16), 2, 1024),
        "mask_token": (keys.get("mask_token_id"), 0, vocab_size - 1),
    }
    if is_dspark:
        rank = keys.get("markov_rank", 256 if by_speculators else None)
        counts["markov_rank"] = (rank, 0, 2**16)
    elif kind == "dflash2":
        counts |= {name: (keys.get(name), 1, 2**16) for name in sorted(_DFLASH2_KEYS)}
    for name, (value, low, high) in counts.items():
        check_integer(name, value, low, high)
    chosen = {
        "attention_mode": ("gqa", "mha"),
        "projector_type": ("dflash", "dspark"),
        "markov_head_type": ("vanilla", "gated"),
    }
    for name, values in chosen.items():
        value = keys.get(name, values[0])
        if value not in values:
            need = " or ".join(map(repr, values))
            raise config_error(f"{name} {value!r} is not supported", need=need)
    return {name: value for name, (value, _, _) in counts.items()} | {
        "predicts_first": bool(keys.get("sample_from_anchor", is_dspark)),
        "is_gated": is_dspark and keys.get("markov_head_type") == "gated",
        "input_scale": float(keys.get("input_embedding_scale") or 1.0),
        "logit_scale": float(keys.get("output_multiplier") or 1.0),
        "logit_softcap": float(keys.get("final_logit_softcapping") or 0.0),
    }
