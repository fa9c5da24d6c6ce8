"""Families of the native decoder, and the interpretation of their config.json."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from offload_rt.errors import UnsupportedModelError
from offload_rt.models.architecture import Architecture
from offload_rt.models.native import NativeDecoder
from offload_rt.models.rope import Rope

_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
_SIZES = (*_REQUIRED[:-1], "num_key_value_heads", "head_dim")
# Keys beyond transformers' standard keys; most describe how a model was trained or saved.
_COMMON = {
    *_REQUIRED, "num_key_value_heads", "head_dim", "hidden_act", "tie_word_embeddings",
    "rope_theta", "rope_scaling", "rope_parameters", "torch_dtype", "initializer_range",
    "attention_dropout", "pretraining_tp", "auto_map", "unk_token_id", "sep_token_id",
    "cls_token_id", "max_sequence_length", "rope_interleaved", "unsloth_fixed",
    "unsloth_version", "num_parameters", "num_nextn_predict_layers",
}  # fmt: skip
# Larger than any real size. Bounds allocations from an invalid config before weights are checked.
_MOST = 2**24
_DTYPES = (None, "bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class Family:
    """A model_type, and the construction of its architecture from a parsed config.

    architecture    class name in config.json
    required, keys  required and optional keys of config.json besides the common keys
    """

    architecture: str
    config: type[PreTrainedConfig]
    build: Callable[[Any], Architecture]
    keys: frozenset[str]
    required: tuple[str, ...] = ()


def spec_of(raw: dict[str, Any]) -> Architecture:
    """Build the architecture of a config.json, without its quantization_config.

    Raises UnsupportedModelError for an unknown architecture, key or value; nothing is guessed.
    """
    kind = raw.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        from offload_rt.models import transformers  # import takes a second

        return transformers.spec_of(raw)
    named = raw.get("architectures")
    if named not in (None, [family.architecture]):
        raise UnsupportedModelError(f"config.json: architecture {named!r} is not supported", need=family.architecture)
    _check_keys(raw, family)
    try:
        config = family.config(**{key: value for key, value in raw.items() if key not in ("auto_map", "model_type")})
    except Exception as error:  # transformers' strict configs raise a dozen unrelated classes
        raise UnsupportedModelError(f"config.json is not understood: {' '.join(str(error).split())}") from error
    return family.build(config)


def _check_keys(raw: dict[str, Any], family: Family) -> None:
    for key in (*_REQUIRED, *family.required):
        if raw.get(key) is None:
            raise UnsupportedModelError(f"config.json: key {key!r} is missing")
    for key in _SIZES:
        value = raw.get(key)
        if value is not None and (type(value) is not int or not 1 <= value <= _MOST):
            raise UnsupportedModelError(f"config.json: {key} is {value!r}", need=f"an integer from 1 to {_MOST}")
    # transformers may write these keys for any model, including generation defaults.
    model_keys = PreTrainedConfig().to_dict()
    standard = {**model_keys, **GenerationConfig().to_dict()}  # type: ignore[no-untyped-call]
    known = (_COMMON | family.keys | set(standard)) - {"quantization_config"}
    for key in raw:
        if key not in known and not key.startswith("_"):
            problem = f"config.json: {key!r} is not understood for model_type {raw['model_type']!r}"
            raise UnsupportedModelError(problem)


def _native(config: Any) -> NativeDecoder:
    """Build a decoder without family-specific biases, head norms and windows."""
    dtype_name = None if config.dtype is None else str(config.dtype).removeprefix("torch.")
    eps = config.rms_norm_eps
    n_heads = config.num_attention_heads
    n_kv_heads = config.num_key_value_heads
    for name, value, holds, need in (
        ("dtype", dtype_name, dtype_name in _DTYPES, ", ".join(filter(None, _DTYPES))),
        ("num_key_value_heads", n_kv_heads, n_heads % n_kv_heads == 0, f"a divisor of {n_heads} heads"),
        ("hidden_act", config.hidden_act, config.hidden_act == "silu", "silu"),
        ("rms_norm_eps", eps, isinstance(eps, float | int) and 0 <= eps < math.inf, "a number >= 0"),
    ):
        if not holds:
            raise UnsupportedModelError(f"config.json: {name} {value!r} is not supported", need=need)
    return NativeDecoder(
        family=config.model_type,
        dtype_name=dtype_name,
        n_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=config.head_dim,
        max_positions=config.max_position_embeddings,
        eps=eps,
        tied=config.tie_word_embeddings,
        windows=(None,) * config.num_hidden_layers,
        rope=Rope(config),
        n_mtp=getattr(config, "num_nextn_predict_layers", None) or 0,
        tp_plan=config.base_model_tp_plan,
    )


def _windows(config: Any) -> tuple[int | None, ...]:
    """Return the window per layer from `layer_types` (Qwen families)."""
    known = {"full_attention": None, "sliding_attention": config.sliding_window}
    for kind in config.layer_types:
        if kind not in known:
            raise UnsupportedModelError(f"config.json: layer type {kind!r} is not understood", have=", ".join(known))
    return tuple(known[kind] for kind in config.layer_types)


def _llama(config: LlamaConfig) -> NativeDecoder:
    # Published Llamas have no biases; the config can enable them.
    bias = config.attention_bias
    return replace(_native(config), qkv_bias=bias, o_bias=bias, mlp_bias=config.mlp_bias)


def _mistral(config: MistralConfig) -> NativeDecoder:
    return replace(_native(config), windows=(config.sliding_window,) * config.num_hidden_layers)


def _qwen2(config: Qwen2Config) -> NativeDecoder:
    # head_dim is not a key of this family; it follows from the sizes.
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return replace(_native(config), windows=_windows(config), qkv_bias=True)


def _mimo(config: Qwen2Config) -> NativeDecoder:
    # Qwen2 with a multi-token prediction layer; the config can disable the biases.
    return replace(_qwen2(config), qkv_bias=getattr(config, "attention_bias", True))


def _qwen3(config: Qwen3Config) -> NativeDecoder:
    bias = config.attention_bias
    return replace(_native(config), windows=_windows(config), qkv_bias=bias, o_bias=bias, qk_norm=True)


_KV = ("num_key_value_heads",)
_QWEN_KEYS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
FAMILIES = {
    "llama": Family("LlamaForCausalLM", LlamaConfig, _llama, frozenset({"attention_bias", "mlp_bias"})),
    "mistral": Family("MistralForCausalLM", MistralConfig, _mistral, frozenset({"sliding_window"}), _KV),
    "qwen2": Family("Qwen2ForCausalLM", Qwen2Config, _qwen2, _QWEN_KEYS | {"use_mrope"}, _KV),
    "mimo": Family("MiMoForCausalLM", Qwen2Config, _mimo, _QWEN_KEYS | {"use_mrope", "attention_bias"}, _KV),
    "qwen3": Family("Qwen3ForCausalLM", Qwen3Config, _qwen3, _QWEN_KEYS | {"attention_bias"}, (*_KV, "head_dim")),
}
