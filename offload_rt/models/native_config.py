"""Native decoders of a config.json, with the windows of its layers."""

import math
from dataclasses import replace
from typing import Any

from offload_rt.errors import check_integer, config_error
from offload_rt.models.native import GATE_UP, QKV, NativeDecoder
from offload_rt.models.rope import Rope, RopeConfig

# Larger than any real size. Bounds allocations from an invalid config before weights are checked.
MOST = 2**24
_DTYPES = ("bfloat16", "float16", "float32", "float64")
# Of a config.json without one, as transformers has it.
_WINDOW = 4096
_FIRST_WINDOWED = 28
# How transformers divides the modules of these families among ranks.
_TP_PLAN = {
    **{f"layers.*.{name}": "colwise" for name in (*QKV, *GATE_UP)},
    **{f"layers.*.{name}": "rowwise" for name in ("self_attn.o_proj", "mlp.down_proj")},
    **{
        f"layers.*.self_attn.{name}": "replicated_with_grad_allreduce"
        for name in ("q_norm", "k_norm")
    },
}


def native_decoder(raw: dict[str, Any], **changes: Any) -> NativeDecoder:
    """Build a decoder from a config.json; `changes`: biases, head norms and windows of families."""
    dtype_name = raw.get("dtype") or raw.get("torch_dtype")
    hidden_size, n_heads, n_layers = (
        raw[key] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    n_kv_heads = raw.get("num_key_value_heads") or n_heads
    eps = raw["rms_norm_eps"]
    activation = raw.get("hidden_act", "silu")
    is_grouped = n_heads % n_kv_heads == 0
    is_even = raw.get("head_dim") or hidden_size % n_heads == 0
    n_mtp = raw.get("num_nextn_predict_layers") or 0
    check_integer("num_nextn_predict_layers", n_mtp, 0, MOST)
    for name, value, holds, need in (
        ("dtype", dtype_name, dtype_name in (None, *_DTYPES), ", ".join(_DTYPES)),
        ("num_key_value_heads", n_kv_heads, is_grouped, f"a divisor of {n_heads} heads"),
        ("hidden_size", hidden_size, is_even, f"a multiple of {n_heads} heads"),
        ("hidden_act", activation, activation == "silu", "silu"),
        ("rms_norm_eps", eps, type(eps) in (int, float) and 0 <= eps < math.inf, "a number >= 0"),
    ):
        if not holds:
            raise config_error(f"{name} {value!r} is not supported", need=need)
    head_dim = raw.get("head_dim") or hidden_size // n_heads
    decoder = NativeDecoder(
        family=raw["model_type"],
        dtype_name=dtype_name,
        n_layers=n_layers,
        vocab_size=raw["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=raw["intermediate_size"],
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        max_positions=raw["max_position_embeddings"],
        eps=eps,
        tied=raw.get("tie_word_embeddings", False),
        windows=(None,) * n_layers,
        rope=Rope(RopeConfig.from_config(raw, head_dim)),
        n_mtp=n_mtp,
        tp_plan=_TP_PLAN,
    )
    return replace(decoder, **changes)


def window_of(raw: dict[str, Any]) -> int | None:
    """Return the attention window in positions; None without a window."""
    window: int | None = raw.get("sliding_window", _WINDOW)
    if window is not None:
        check_integer("sliding_window", window, 1, MOST)
    return window


def windows_of(raw: dict[str, Any]) -> tuple[int | None, ...]:
    """Return the window per layer from `layer_types` (Qwen families)."""
    window = window_of(raw) if raw.get("use_sliding_window") else None
    n = raw["num_hidden_layers"]
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw.get("max_window_layers", _FIRST_WINDOWED)
        if type(first) is not int:
            raise config_error(f"max_window_layers is {first!r}", need="a number of layers")
        return tuple(window if i >= first else None for i in range(n))
    if not isinstance(kinds, list) or len(kinds) != n:
        raise config_error(f"layer_types is {str(kinds)[:80]}", need=f"a list for {n} layers")
    known = {"full_attention": None, "sliding_attention": window}
    for kind in kinds:
        if not isinstance(kind, str) or kind not in known:
            raise config_error(f"layer type {kind!r} is not understood", have=", ".join(known))
    return tuple(known[kind] for kind in kinds)
