"""Draft heads by their config.json: EAGLE-3, P-EAGLE, block drafters, MTP, Medusa.

EAGLE-3 and P-EAGLE: EAGLE, SpecForge, AngelSlim, speculators. Block drafters: DFlash, JetSpec,
DSpark and DFlash2. Their authors and SpecForge nest keys in `dflash_config` or `dspark_config`,
DeepSpec keeps them at the top, speculators nests the layers' config instead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from offload_rt.errors import UnsupportedModelError, check_integer, config_error
from offload_rt.models.architecture import Architecture
from offload_rt.models.block_head import BlockHead, DFlash2
from offload_rt.models.eagle3 import Eagle3
from offload_rt.models.families import parse_architecture
from offload_rt.models.heads import (
    MTP_LAYOUTS,
    Head,
    Medusa,
    MtpLayout,
    NativeMtp,
    check_sizes,
    check_taps,
    fields_of,
    target_mismatch,
)
from offload_rt.models.native import NativeDecoder

_TYPE = "speculators_model_type"
_LAYERS = "transformer_layer_config"
_MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
_EAGLE_CONFIG = "eagle_config"
_EAGLE_CONFIG_KEYS = {"eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state"}
_EAGLE_KEYS = {
    "architectures", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "fc_norm",
    "has_no_defaults_at_init", "norm_before_fc", "norm_before_residual", "norm_output",
    "parallel_drafting", "target_hidden_size", "target_model_type", _EAGLE_CONFIG, *_MASK_KEYS,
}  # fmt: skip
# Windows that configs derived from Qwen's contain although the layers of a Llama have none.
_UNUSED_WINDOWS = {"max_window_layers", "sliding_window", "use_sliding_window"}
# Further keys of speculators' configs, which nest the layers' config.
_SPECULATORS_KEYS = {
    _TYPE, _LAYERS, "auto_map", "dtype", "has_no_defaults_at_init", "speculators_config",
    "speculators_version", "target_hidden_size", "tie_word_embeddings", "torch_dtype",
    "transformers_version",
}  # fmt: skip
_BLOCK_CONFIGS = ("dflash_config", "dspark_config")
_DSPARK_KEYS = {
    "confidence_head_alpha", "confidence_head_with_markov", "enable_confidence_head",
    "markov_head_type", "markov_rank", "num_anchors",
}  # fmt: skip
_DFLASH2_KEYS = {"conv_group_size", "conv_kernel_size", "selector_rank", "selector_top_k"}
_COMMON_KEYS = {"block_size", "mask_token_id", "sample_from_anchor"}
# Keys at the top level or nested.
_AUTHORS_KEYS = _COMMON_KEYS | {
    "attention_mode", "causal", "causal_head", "final_logit_softcapping",
    "input_embedding_scale", "is_causal", "num_target_layers", "output_multiplier",
    "projector_type", "target_hidden_size", "target_layer_ids",
}  # fmt: skip
_BLOCK_SPECULATORS = _COMMON_KEYS | {
    "architectures", "aux_hidden_state_layer_ids", "draft_vocab_size",
    "sliding_window_non_causal",
}  # fmt: skip
_KEYS_OF_KIND = {"dflash": set[str](), "dspark": _DSPARK_KEYS, "dflash2": _DFLASH2_KEYS}


def mtp_of(target: NativeDecoder, layout: MtpLayout) -> NativeMtp:
    """Build the multi-token prediction layer of a native target."""
    n = target.n_layers
    sizes = {"family": "mtp", "n_layers": 1, "windows": (None,), "taps": (n,), "n_mtp": 0}
    names = {"layout": layout.for_target(n), "target_modules": target.shared_modules}
    return NativeMtp(**fields_of(target) | sizes | names)


def _medusa_of(raw: dict[str, Any], target: Architecture) -> Medusa:
    if not isinstance(target, NativeDecoder):
        problem = f"Medusa heads cannot draft for a model of type {target.family}"
        need = "a model of type llama, mistral, qwen2 or qwen3"
        raise UnsupportedModelError(problem, need=need, change="use another draft model")
    n_heads = raw.get("medusa_num_heads", raw.get("num_heads"))
    n_blocks = raw.get("medusa_num_layers", raw.get("num_hidden_layers", 1))
    for name, value in (("medusa_num_heads", n_heads), ("medusa_num_layers", n_blocks)):
        check_integer(name, value, 1, 99)
    changes = {"family": "medusa", "n_layers": n_heads, "taps": (target.n_layers,), "n_mtp": 0}
    return Medusa(**fields_of(target) | changes, n_blocks=n_blocks)


def head_kind(raw: dict[str, Any]) -> str | None:
    """Return the drafter name of a head's config.json, or None for a complete model."""
    if raw.get("model_type") == "medusa" or "medusa_num_heads" in raw:
        return "medusa"
    if _block_kind(raw) is not None:
        return "block"
    is_eagle = "draft_vocab_size" in raw or _TYPE in raw or _is_named(raw, "Eagle3", "PEagle")
    return "eagle" if is_eagle else None


def _is_named(raw: dict[str, Any], *marks: str) -> bool:
    names = " ".join(map(str, raw.get("architectures") or ()))
    return any(mark in names for mark in marks)


def parse_head(raw: dict[str, Any] | None, target: Architecture) -> Head | None:
    """Build the head of a config.json, or without config the target's built-in head, if any.

    Raises UnsupportedModelError for an unsupported config, SettingsError for a different target.
    """
    if raw is None:
        if not isinstance(target, NativeDecoder) or not target.n_mtp:
            return None
        return mtp_of(target, MTP_LAYOUTS[0])
    kind = head_kind(raw)
    if kind is None:
        return None
    if target.shared_modules is None:
        change = "omit --draft-model, or use a complete draft model"
        problem = f"heads cannot draft for a model of type {target.family}: it has no output matrix"
        raise UnsupportedModelError(problem, change=change)
    build = {"medusa": _medusa_of, "eagle": _eagle_of, "block": _block_of}[kind]
    return replace(build(raw, target), target_modules=target.shared_modules)


def _eagle_of(raw: dict[str, Any], target: Architecture) -> Eagle3:
    layers = parse_architecture(_layer_config(raw))
    if not isinstance(layers, NativeDecoder):
        problem = f"an EAGLE-3 head with layers of type {layers.family}"
        raise config_error(problem, need="Llama or Qwen3 layers")
    check_sizes(layers, target, raw.get("target_hidden_size"))
    if raw.get("fc_norm") and raw.get("norm_before_fc"):
        raise config_error("both fc_norm and norm_before_fc are true", need="at most one of them")
    norm_before = "input_norm" if raw.get("norm_before_fc") else ""
    n = target.n_layers
    nested = (raw.get(_EAGLE_CONFIG) or {}).get("eagle_aux_hidden_state_layer_ids")
    # Nested ids name layers by their outputs, from 0, and top-level ids by their inputs.
    top = raw.get("eagle_aux_hidden_state_layer_ids") or [2, n // 2, n - 3]
    taps = check_taps([i + 1 for i in nested] if nested else top, target)
    changes: dict[str, Any] = {
        "family": "eagle",
        "max_positions": target.max_positions,
        "taps": taps,
        "n_tokens": raw.get("draft_vocab_size") or layers.vocab_size,
        "norm_before": bool(raw.get("norm_before_residual")),
        "state_norm": "fc_norm" if raw.get("fc_norm") else norm_before,
    }
    if _TYPE in raw:
        changes["feeds_normed"] = bool(raw.get("norm_output"))
    else:
        changes["is_normed"] = bool(raw.get("norm_output", True))
    if is_parallel := _is_parallel(raw):
        changes |= _parallel_fields(raw, layers, len(taps))
    changes["has_embedding"] = bool(raw.get("embed_requires_grad", is_parallel))
    return Eagle3(**fields_of(layers) | changes)


def _is_parallel(raw: dict[str, Any]) -> bool:
    return (
        raw.get(_TYPE) == "peagle"
        or bool(raw.get("parallel_drafting"))
        or _is_named(raw, "PEagle")
        or any(raw.get(key) is not None for key in _MASK_KEYS)
    )


def _layer_config(raw: dict[str, Any]) -> dict[str, Any]:
    nested = raw.get(_EAGLE_CONFIG) or {}
    if unknown := sorted(set(nested) - _EAGLE_CONFIG_KEYS):
        raise config_error(f"{_EAGLE_CONFIG}: {unknown[0]!r} is not understood")
    if nested.get("use_aux_hidden_state", True) is not True:
        problem = f"{_EAGLE_CONFIG}: use_aux_hidden_state is not true"
        raise config_error(problem, need="a head on hidden states of several layers")
    if _TYPE not in raw:
        known = _EAGLE_KEYS
        if raw.get("model_type") == "llama" and not raw.get("use_sliding_window"):
            known = _EAGLE_KEYS | _UNUSED_WINDOWS
        return {key: value for key, value in raw.items() if key not in known}
    kind = raw[_TYPE]
    if unknown := sorted(set(raw) - _EAGLE_KEYS - _SPECULATORS_KEYS - {"embed_requires_grad"}):
        raise config_error(f"{unknown[0]!r} is not understood for {_TYPE} {kind!r}")
    if kind not in ("eagle3", "peagle"):
        need = "'eagle3', 'peagle', 'dflash', 'dflash2' or 'dspark'"
        raise config_error(f"{_TYPE} {kind!r} is not supported", need=need)
    return dict(raw.get(_LAYERS) or {})


def _parallel_fields(raw: dict[str, Any], layers: NativeDecoder, n_taps: int) -> dict[str, Any]:
    token: Any = next((raw[key] for key in _MASK_KEYS if raw.get(key) is not None), None)
    check_integer("mask_token_id", token, 0, layers.vocab_size - 1)
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    n: int = methods[0].get("speculative_tokens", 8)
    check_integer("speculative_tokens", n, 1, 99)
    shape = (1, 1, n_taps * layers.hidden_size)
    return {"family": "peagle", "mask_token": token, "mask_shape": shape, "n_parallel": n}


def _block_kind(raw: dict[str, Any]) -> str | None:
    """Return "dflash", "dspark" or "dflash2" for the config of a block drafter, else None."""
    if _TYPE in raw:
        return str(raw[_TYPE]) if raw[_TYPE] in _KEYS_OF_KIND else None
    marks = {"DFlash2Draft": "dflash2", "DSpark": "dspark", "DFlashDraft": "dflash"}
    return next((kind for mark, kind in marks.items() if _is_named(raw, mark)), None)


def _block_of(raw: dict[str, Any], target: Architecture) -> BlockHead:
    kind = _block_kind(raw)
    assert kind is not None, "selected by _block_kind"
    by_speculators = _TYPE in raw
    known = _BLOCK_SPECULATORS | _SPECULATORS_KEYS if by_speculators else _AUTHORS_KEYS
    keys, layer_config = _divide(raw, known | _KEYS_OF_KIND[kind])
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
    # By default, layers with a window are causal.
    windowed = [window is not None for window in layers.windows]
    changes |= {
        "family": "block",
        "max_positions": target.max_positions,
        "taps": check_taps(taps, target),
        "n_tokens": keys.get("draft_vocab_size") or target.vocab_size,
        "is_causal": tuple(known if is_causal is None else bool(is_causal) for known in windowed),
    }
    head = DFlash2 if kind == "dflash2" else BlockHead
    return head(**fields_of(layers) | changes)


def _divide(raw: dict[str, Any], known: set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate the keys of the drafter from the config of its layers."""
    if _TYPE in raw:
        if unknown := sorted(set(raw) - known):
            raise config_error(f"{unknown[0]!r} is not understood for {raw[_TYPE]!r}")
        return raw, raw.get(_LAYERS) or {}
    keys = {key: value for key, value in raw.items() if key in known}
    for name in _BLOCK_CONFIGS:
        nested = raw.get(name) or {}
        if unknown := sorted(set(nested) - known):
            raise config_error(f"{name}: {unknown[0]!r} is not understood")
        keys |= nested
    apart = known | {"auto_map", *_BLOCK_CONFIGS}
    return keys, {key: value for key, value in raw.items() if key not in apart}


def _layers(config: dict[str, Any]) -> NativeDecoder:
    config = {key: value for key, value in config.items() if key != "architectures"}
    layers = parse_architecture({"model_type": "qwen3", **config})
    if not isinstance(layers, NativeDecoder) or not layers.qk_norm:
        problem = f"a block drafter with layers of type {layers.family}"
        raise config_error(problem, need="layers of type qwen3")
    return layers


def _sizes(keys: dict[str, Any], kind: str, vocab_size: int) -> dict[str, Any]:
    """Return the fields that do not depend on the layout. Raises UnsupportedModelError."""
    by_speculators = _TYPE in keys
    is_dspark = kind == "dspark"
    counts = {
        "block_size": (keys.get("block_size", 8 if by_speculators else 16), 2, 1024),
        "mask_token": (keys.get("mask_token_id"), 0, vocab_size - 1),
    }
    if is_dspark:
        counts["markov_rank"] = (keys.get("markov_rank", 256 if by_speculators else None), 0, 2**16)
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
