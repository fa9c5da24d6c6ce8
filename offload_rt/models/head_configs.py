"""Draft heads by their config.json: EAGLE-3, block drafters, multi-token prediction, Medusa."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from offload_rt.errors import UnsupportedModelError, check_integer
from offload_rt.models.architecture import Architecture
from offload_rt.models.block_configs import block_head_of, block_kind
from offload_rt.models.eagle_configs import TYPE, eagle_of
from offload_rt.models.heads import MTP_LAYOUTS, Head, Medusa, MtpLayout, NativeMtp, fields_of
from offload_rt.models.native import NativeDecoder


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
        "target_modules": target.shared_modules,
    }
    return NativeMtp(**{**fields_of(target), **changes})


def _medusa_of(raw: dict[str, Any], target: Architecture) -> Medusa:
    """Build Medusa heads from a config in the authors' layout."""
    if not isinstance(target, NativeDecoder):
        raise UnsupportedModelError(
            f"Medusa heads cannot draft for a model of type {target.family}",
            need="a model of type llama, mistral, qwen2 or qwen3",
            change="use another draft model",
        )
    n_heads = raw.get("medusa_num_heads", raw.get("num_heads"))
    n_blocks = raw.get("medusa_num_layers", raw.get("num_hidden_layers", 1))
    for name, value in (("medusa_num_heads", n_heads), ("medusa_num_layers", n_blocks)):
        check_integer(name, value, 1, 99)
    changes = {"family": "medusa", "n_layers": n_heads, "taps": (target.n_layers,), "n_mtp": 0}
    return Medusa(**{**fields_of(target), **changes, "n_blocks": n_blocks})


def head_kind(raw: dict[str, Any]) -> str | None:
    """Return the drafter name of a head's config.json, or None for a complete model."""
    if raw.get("model_type") == "medusa" or "medusa_num_heads" in raw:
        return "medusa"
    if block_kind(raw) is not None:
        return "block"
    names = [str(name) for name in raw.get("architectures") or ()]
    is_eagle = not {"draft_vocab_size", TYPE}.isdisjoint(raw) or any(
        mark in name for name in names for mark in ("Eagle3", "PEagle")
    )
    return "eagle" if is_eagle else None


def parse_head(raw: dict[str, Any] | None, target: Architecture) -> Head | None:
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
    if target.shared_modules is None:
        change = "omit --draft-model, or use a complete draft model"
        problem = f"heads cannot draft for a model of type {target.family}: it has no output matrix"
        raise UnsupportedModelError(problem, change=change)
    build = {"medusa": _medusa_of, "eagle": eagle_of, "block": block_head_of}[kind]
    return replace(build(raw, target), target_modules=target.shared_modules)
