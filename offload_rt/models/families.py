"""Families of the native decoder, and the keys of their config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offload_rt.errors import check_integer, config_error
from offload_rt.models.architecture import Architecture
from offload_rt.models.native import NativeDecoder
from offload_rt.models.native_config import MOST, native_decoder, window_of, windows_of

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
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")


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
        from offload_rt.models import transformers  # import takes a second

        return transformers.parse_architecture(raw)
    named = raw.get("architectures")
    if named not in (None, [family.architecture]):
        raise config_error(f"architecture {named!r} is not supported", need=family.architecture)
    _check_keys(raw, family)
    return family.build(raw)


def _check_keys(raw: dict[str, Any], family: Family) -> None:
    for key in (*_REQUIRED, *family.required):
        if raw.get(key) is None:
            raise config_error(f"key {key!r} is missing")
    for key in _SIZES:
        value = raw.get(key)
        if value is not None:
            check_integer(key, value, 1, MOST)
    for key in _SWITCHES:
        if type(raw.get(key, False)) is not bool:
            raise config_error(f"{key} is {raw[key]!r}", need="true or false")
    unknown = [key for key in raw if key not in _COMMON | family.keys and not key.startswith("_")]
    if unknown and (unknown := sorted({*unknown} - _keys_of_any_model())):
        raise config_error(f"{unknown[0]!r} is not understood for model_type {raw['model_type']!r}")


def _keys_of_any_model() -> set[str]:
    """Keys that transformers writes for any model, generation defaults included."""
    # takes seconds, for configs with rare keys
    from transformers import GenerationConfig, PreTrainedConfig

    generation: Any = GenerationConfig  # untyped
    return {*PreTrainedConfig().to_dict(), *generation().to_dict()}


def _llama(raw: dict[str, Any]) -> NativeDecoder:
    # Published Llamas have no biases; the config can enable them.
    bias = raw.get("attention_bias", False)
    return native_decoder(raw, qkv_bias=bias, o_bias=bias, mlp_bias=raw.get("mlp_bias", False))


def _mistral(raw: dict[str, Any]) -> NativeDecoder:
    return native_decoder(raw, windows=(window_of(raw),) * raw["num_hidden_layers"])


def _qwen2(raw: dict[str, Any]) -> NativeDecoder:
    return native_decoder(raw, windows=windows_of(raw), qkv_bias=True)


def _mimo(raw: dict[str, Any]) -> NativeDecoder:
    # Qwen2 with a multi-token prediction layer; the config can disable the biases.
    return native_decoder(raw, windows=windows_of(raw), qkv_bias=raw.get("attention_bias", True))


def _qwen3(raw: dict[str, Any]) -> NativeDecoder:
    bias = raw.get("attention_bias", False)
    return native_decoder(raw, windows=windows_of(raw), qkv_bias=bias, o_bias=bias, qk_norm=True)


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
