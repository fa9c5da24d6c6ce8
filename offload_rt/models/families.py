"""Native decoders by their config.json: families, known keys, windows of layers."""

from typing import Any, NamedTuple

from offload_rt.errors import check_integer, config_error
from offload_rt.models.architecture import Architecture
from offload_rt.models.native import MOST, native_decoder

_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
# Keys of every family; most describe training or saving.
_COMMON = {
    *_REQUIRED, "num_key_value_heads", "head_dim", "hidden_act", "tie_word_embeddings",
    "rope_theta", "rope_scaling", "rope_parameters", "torch_dtype", "initializer_range",
    "attention_dropout", "pretraining_tp", "auto_map", "unk_token_id", "sep_token_id",
    "cls_token_id", "max_sequence_length", "rope_interleaved", "unsloth_fixed", "unsloth_version",
    "num_parameters", "num_nextn_predict_layers", "architectures", "model_type", "dtype",
    "transformers_version", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
}  # fmt: skip


class Family(NamedTuple):
    """A model_type of the native decoder.

    architecture    class name in config.json
    keys, required  optional and required keys of config.json besides the common keys
    """

    architecture: str
    keys: frozenset[str]
    required: tuple[str, ...] = ("num_key_value_heads",)


_QWEN_KEYS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
FAMILIES = {
    "llama": Family("LlamaForCausalLM", frozenset({"attention_bias", "mlp_bias"}), ()),
    "mistral": Family("MistralForCausalLM", frozenset({"sliding_window"})),
    "qwen2": Family("Qwen2ForCausalLM", _QWEN_KEYS | {"use_mrope"}),
    "mimo": Family("MiMoForCausalLM", _QWEN_KEYS | {"use_mrope", "attention_bias"}),
    "qwen3": Family(
        "Qwen3ForCausalLM", _QWEN_KEYS | {"attention_bias"}, ("num_key_value_heads", "head_dim")
    ),
}


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
    return native_decoder(raw, **_changes(raw))


def _check_keys(raw: dict[str, Any], family: Family) -> None:
    for key in (*_REQUIRED, *family.required):
        if raw.get(key) is None:
            raise config_error(f"key {key!r} is missing")
    for key in (*_REQUIRED[:-1], "num_key_value_heads", "head_dim"):
        value = raw.get(key)
        if value is not None:
            check_integer(key, value, 1, MOST)
    for key in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"):
        if type(raw.get(key, False)) is not bool:
            raise config_error(f"{key} is {raw[key]!r}", need="true or false")
    unknown = {key for key in raw.keys() - _COMMON - family.keys if not key.startswith("_")}
    if unknown:  # except keys that transformers writes for any model; the import takes seconds
        from transformers import GenerationConfig, PreTrainedConfig

        generation: Any = GenerationConfig  # untyped
        unknown -= {*PreTrainedConfig().to_dict(), *generation().to_dict()}
    if unknown:
        name = min(unknown)
        raise config_error(f"{name!r} is not understood for model_type {raw['model_type']!r}")


def _changes(raw: dict[str, Any]) -> dict[str, Any]:
    # Published Llamas have no biases; the config can enable them.
    bias = raw.get("attention_bias", False)
    match raw["model_type"]:
        case "llama":
            return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": raw.get("mlp_bias", False)}
        case "mistral":
            return {"windows": (_window_of(raw),) * raw["num_hidden_layers"]}
        case "qwen3":
            changes = {"qkv_bias": bias, "o_bias": bias, "qk_norm": True}
        case _:  # Qwen2, or MiMo, whose config can disable the biases
            changes = {"qkv_bias": raw.get("attention_bias", True)}
    return changes | {"windows": _windows_of(raw)}


def _window_of(raw: dict[str, Any]) -> int | None:
    window: int | None = raw.get("sliding_window", 4096)  # transformers' default
    if window is not None:
        check_integer("sliding_window", window, 1, MOST)
    return window


def _windows_of(raw: dict[str, Any]) -> tuple[int | None, ...]:
    """Return the window per layer from `layer_types` (Qwen families)."""
    window = _window_of(raw) if raw.get("use_sliding_window") else None
    n = raw["num_hidden_layers"]
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw.get("max_window_layers", 28)  # transformers' default
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
