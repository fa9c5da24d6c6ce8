"""Families of the native decoder, and the interpretation of their config.json."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from offload_rt.errors import UnsupportedModelError
from offload_rt.models.architecture import Architecture
from offload_rt.models.native import GATE_UP, QKV, NativeDecoder
from offload_rt.models.rope import Rope, RopeConfig

_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
_SIZES = (*_REQUIRED[:-1], "num_key_value_heads", "head_dim")
# Keys of every family; most describe training or saving.
_COMMON = {
    *_REQUIRED, "num_key_value_heads", "head_dim", "hidden_act", "tie_word_embeddings",
    "rope_theta", "rope_scaling",
    "rope_parameters", "torch_dtype", "initializer_range", "attention_dropout", "pretraining_tp",
    "auto_map",
    "unk_token_id", "sep_token_id", "cls_token_id", "max_sequence_length", "rope_interleaved",
    "unsloth_fixed",
    "unsloth_version", "num_parameters", "num_nextn_predict_layers", "architectures", "model_type",
    "dtype",
    "transformers_version", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
}  # fmt: skip
# Larger than any real size. Bounds allocations from an invalid config before weights are checked.
_MOST = 2**24
_DTYPES = ("bfloat16", "float16", "float32", "float64")
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
# Of a config.json without one, as transformers has it.
_WINDOW = 4096
_FIRST_WINDOWED = 28


@dataclass(frozen=True)
class Family:
    """A model_type, and the construction of its architecture from a parsed config.

    architecture    class name in config.json
    required, keys  required and optional keys of config.json besides the common keys
    """

    architecture: str
    build: Callable[[dict[str, Any]], Architecture]
    keys: frozenset[str]
    required: tuple[str, ...] = ()


def parse_architecture(raw: dict[str, Any]) -> Architecture:
    """Build the architecture of a config.json, without its quantization_config.

    Raises UnsupportedModelError for an unknown architecture, key or value; nothing is guessed.
    """
    kind = raw.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        from offload_rt.models import native_mixture, transformers  # import takes a second

        return native_mixture.with_native_attention(transformers.parse_architecture(raw))
    named = raw.get("architectures")
    if named not in (None, [family.architecture]):
        raise UnsupportedModelError(
            f"config.json: architecture {named!r} is not supported", need=family.architecture
        )
    _check_keys(raw, family)
    return family.build(raw)


def _check_keys(raw: dict[str, Any], family: Family) -> None:
    for key in (*_REQUIRED, *family.required):
        if raw.get(key) is None:
            raise UnsupportedModelError(f"config.json: key {key!r} is missing")
    for key in _SIZES:
        value = raw.get(key)
        if value is not None and (type(value) is not int or not 1 <= value <= _MOST):
            raise UnsupportedModelError(
                f"config.json: {key} is {value!r}", need=f"an integer from 1 to {_MOST}"
            )
    for key in _SWITCHES:
        if type(raw.get(key, False)) is not bool:
            raise UnsupportedModelError(f"config.json: {key} is {raw[key]!r}", need="true or false")
    unknown = [key for key in raw if key not in _COMMON | family.keys and not key.startswith("_")]
    if unknown and (unknown := sorted({*unknown} - _keys_of_any_model())):
        problem = (
            f"config.json: {unknown[0]!r} is not understood for model_type {raw['model_type']!r}"
        )
        raise UnsupportedModelError(problem)


def _keys_of_any_model() -> set[str]:
    """Keys that transformers writes for any model, generation defaults included."""
    # takes seconds, for configs with rare keys
    from transformers import GenerationConfig, PreTrainedConfig

    return {*PreTrainedConfig().to_dict(), *GenerationConfig().to_dict()}  # type: ignore[no-untyped-call]  # theirs


def native_decoder(raw: dict[str, Any], **changes: Any) -> NativeDecoder:
    """Build a decoder from a config.json; `changes`: biases, head norms and windows of families."""
    dtype_name = raw.get("dtype") or raw.get("torch_dtype")
    hidden_size, n_heads, n_layers = (
        raw[key] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    n_kv_heads = raw.get("num_key_value_heads") or n_heads
    eps = raw["rms_norm_eps"]
    activation = raw.get("hidden_act", "silu")
    n_mtp = raw.get("num_nextn_predict_layers") or 0
    for name, value, holds, need in (
        ("dtype", dtype_name, dtype_name in (None, *_DTYPES), ", ".join(_DTYPES)),
        (
            "num_key_value_heads",
            n_kv_heads,
            n_heads % n_kv_heads == 0,
            f"a divisor of {n_heads} heads",
        ),
        (
            "hidden_size",
            hidden_size,
            raw.get("head_dim") or hidden_size % n_heads == 0,
            f"a multiple of {n_heads} heads",
        ),
        ("hidden_act", activation, activation == "silu", "silu"),
        ("rms_norm_eps", eps, type(eps) in (int, float) and 0 <= eps < math.inf, "a number >= 0"),
        (
            "num_nextn_predict_layers",
            n_mtp,
            type(n_mtp) is int and 0 <= n_mtp <= _MOST,
            "a number of layers",
        ),
    ):
        if not holds:
            raise UnsupportedModelError(
                f"config.json: {name} {value!r} is not supported", need=need
            )
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


def _window(raw: dict[str, Any]) -> int | None:
    """Return the attention window in positions; None without a window."""
    window: int | None = raw.get("sliding_window", _WINDOW)
    if window is not None and (type(window) is not int or not 1 <= window <= _MOST):
        raise UnsupportedModelError(
            f"config.json: sliding_window is {window!r}", need=f"a number from 1 to {_MOST}"
        )
    return window


def _windows(raw: dict[str, Any]) -> tuple[int | None, ...]:
    """Return the window per layer from `layer_types` (Qwen families)."""
    window = _window(raw) if raw.get("use_sliding_window") else None
    n = raw["num_hidden_layers"]
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw.get("max_window_layers", _FIRST_WINDOWED)
        if type(first) is not int:
            raise UnsupportedModelError(
                f"config.json: max_window_layers is {first!r}", need="a number of layers"
            )
        return tuple(window if i >= first else None for i in range(n))
    if not isinstance(kinds, list) or len(kinds) != n:
        raise UnsupportedModelError(
            f"config.json: layer_types is {str(kinds)[:80]}", need=f"a list for {n} layers"
        )
    known = {"full_attention": None, "sliding_attention": window}
    for kind in kinds:
        if not isinstance(kind, str) or kind not in known:
            raise UnsupportedModelError(
                f"config.json: layer type {kind!r} is not understood", have=", ".join(known)
            )
    return tuple(known[kind] for kind in kinds)


def _llama(raw: dict[str, Any]) -> NativeDecoder:
    # Published Llamas have no biases; the config can enable them.
    bias = raw.get("attention_bias", False)
    return native_decoder(raw, qkv_bias=bias, o_bias=bias, mlp_bias=raw.get("mlp_bias", False))


def _mistral(raw: dict[str, Any]) -> NativeDecoder:
    return native_decoder(raw, windows=(_window(raw),) * raw["num_hidden_layers"])


def _qwen2(raw: dict[str, Any]) -> NativeDecoder:
    return native_decoder(raw, windows=_windows(raw), qkv_bias=True)


def _mimo(raw: dict[str, Any]) -> NativeDecoder:
    # Qwen2 with a multi-token prediction layer; the config can disable the biases.
    return native_decoder(raw, windows=_windows(raw), qkv_bias=raw.get("attention_bias", True))


def _qwen3(raw: dict[str, Any]) -> NativeDecoder:
    bias = raw.get("attention_bias", False)
    return native_decoder(raw, windows=_windows(raw), qkv_bias=bias, o_bias=bias, qk_norm=True)


# How transformers divides the modules of these families among ranks.
_TP_PLAN = {
    **{f"layers.*.{name}": "colwise" for name in (*QKV, *GATE_UP)},
    **{f"layers.*.{name}": "rowwise" for name in ("self_attn.o_proj", "mlp.down_proj")},
    **{
        f"layers.*.self_attn.{name}": "replicated_with_grad_allreduce"
        for name in ("q_norm", "k_norm")
    },
}
_KV = ("num_key_value_heads",)
_QWEN_KEYS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
FAMILIES = {
    "llama": Family("LlamaForCausalLM", _llama, frozenset({"attention_bias", "mlp_bias"})),
    "mistral": Family("MistralForCausalLM", _mistral, frozenset({"sliding_window"}), _KV),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2, _QWEN_KEYS | {"use_mrope"}, _KV),
    "mimo": Family("MiMoForCausalLM", _mimo, _QWEN_KEYS | {"use_mrope", "attention_bias"}, _KV),
    "qwen3": Family(
        "Qwen3ForCausalLM", _qwen3, _QWEN_KEYS | {"attention_bias"}, (*_KV, "head_dim")
    ),
}
