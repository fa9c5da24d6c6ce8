"""The families of the native decoder, and what their config.json says."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from offload_rt.errors import UnsupportedModelError
from offload_rt.models.rope import Rope
from offload_rt.models.spec import ModelSpec

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
)
_COMMON = {
    *_REQUIRED,
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "initializer_range",
    "attention_dropout",
    "use_cache",
    "pretraining_tp",
    "model_type",
    "architectures",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "sep_token_id",
    "cls_token_id",
    "decoder_start_token_id",
    "max_sequence_length",
    "rope_interleaved",
    "unsloth_fixed",
    "unsloth_version",
    "num_parameters",
}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# No size of any model comes near; lists and tables are made of these lengths before the weights are looked at.
_MOST = 2**24
_DTYPES = ("bfloat16", "float16", "float32", "float64")
# Keys that say how weights are coded or which code runs: never to be taken for harmless.
_REFUSED = {"quantization_config", "compression_config", "per_layer_config"}


@dataclass(frozen=True)
class Family:
    """A model_type of the native decoder.

    required, keys  of its config.json, beyond those of every family
    """

    architecture: str
    config: type[PreTrainedConfig]
    spec: Callable[[Any], ModelSpec]
    keys: frozenset[str]
    required: tuple[str, ...] = ()


def spec_of(raw: dict[str, Any]) -> ModelSpec:
    """Understand the content of a config.json.

    Raises UnsupportedModelError for an architecture, key or value that is not understood; nothing is guessed.
    """
    family = _family(raw)
    _check_keys(raw, family)
    return family.spec(_parse(raw, family.config))


def common_spec(
    config: PreTrainedConfig, *, windows: tuple[int | None, ...] | None = None, **habits: bool
) -> ModelSpec:
    """The spec of a family's parsed config; `habits` are the biases and norms its layers have."""
    _check_sizes(config)
    return ModelSpec(
        family=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
        tied=config.tie_word_embeddings,
        windows=windows or (None,) * config.num_hidden_layers,
        dtype_name=_dtype_name(config),
        rope=Rope(config),
        **{"qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": False, **habits},
    )


def layer_windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """Windows from `layer_types`, as the qwen families state them.

    Raises UnsupportedModelError for a layer type other than full and sliding attention.
    """
    known = {"full_attention": None, "sliding_attention": config.sliding_window}
    for kind in config.layer_types:
        if kind not in known:
            raise UnsupportedModelError(f"config.json: layer type {kind!r} is not understood", have=", ".join(known))
    return tuple(known[kind] for kind in config.layer_types)


def _family(raw: dict[str, Any]) -> Family:
    kind, architectures = raw.get("model_type"), raw.get("architectures")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise UnsupportedModelError(f"config.json: model_type {kind!r} is not supported", have=", ".join(FAMILIES))
    if architectures not in (None, [family.architecture]):
        raise UnsupportedModelError(
            f"config.json: architecture {architectures!r} is not supported", need=family.architecture
        )
    return family


def _check_keys(raw: dict[str, Any], family: Family) -> None:
    for key in (*_REQUIRED, *family.required):
        if raw.get(key) is None:
            raise UnsupportedModelError(f"config.json: key {key!r} is missing")
    for key in _SIZES:
        if type(raw.get(key)) is int and raw[key] > _MOST:
            raise UnsupportedModelError(f"config.json: {key} is {raw[key]}", need=f"at most {_MOST}")
    # Every config.json may carry what transformers writes for any model, generation defaults included.
    harmless = set(PreTrainedConfig().to_dict()) | set(GenerationConfig().to_dict())
    known = (_COMMON | harmless | family.keys) - _REFUSED
    for key in raw:
        if key not in known and not key.startswith("_"):
            raise UnsupportedModelError(
                f"config.json: key {key!r} is not understood for model_type {raw['model_type']!r}"
            )


def _parse(raw: dict[str, Any], config_class: Callable[..., PreTrainedConfig]) -> PreTrainedConfig:
    try:
        return config_class(**{key: value for key, value in raw.items() if key not in ("auto_map", "model_type")})
    except Exception as error:  # transformers' strict configs raise a dozen unrelated classes for bad values
        raise UnsupportedModelError(f"config.json is not understood: {' '.join(str(error).split())}") from error


def _dtype_name(config: PreTrainedConfig) -> str | None:
    name = None if config.dtype is None else str(config.dtype).removeprefix("torch.")
    if name not in (None, *_DTYPES):
        raise UnsupportedModelError(
            f"config.json: dtype {name!r} is not supported", need="one of " + ", ".join(_DTYPES)
        )
    return name


def _check_sizes(config: PreTrainedConfig) -> None:
    for name in _SIZES:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedModelError(f"config.json: {name} is {value!r}", need="a whole number of at least 1")
    if config.num_attention_heads % config.num_key_value_heads:
        raise UnsupportedModelError(
            "config.json: num_attention_heads is not a multiple of num_key_value_heads",
            have=f"{config.num_attention_heads} and {config.num_key_value_heads}",
        )
    if config.hidden_act != "silu":
        raise UnsupportedModelError(f"config.json: hidden_act {config.hidden_act!r} is not supported", need="silu")
    if not (isinstance(config.rms_norm_eps, float | int) and 0 <= config.rms_norm_eps < math.inf):
        raise UnsupportedModelError(f"config.json: rms_norm_eps is {config.rms_norm_eps!r}")


def _llama(config: LlamaConfig) -> ModelSpec:
    # Both biases are off in every published Llama and on where the config says so.
    return common_spec(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias, mlp_bias=config.mlp_bias)


def _mistral(config: MistralConfig) -> ModelSpec:
    return common_spec(config, windows=(config.sliding_window,) * config.num_hidden_layers)


def _qwen2(config: Qwen2Config) -> ModelSpec:
    # head_dim is not a key of this family and follows from the sizes.
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return common_spec(config, windows=layer_windows(config), qkv_bias=True)


def _qwen3(config: Qwen3Config) -> ModelSpec:
    bias = config.attention_bias
    return common_spec(config, windows=layer_windows(config), qkv_bias=bias, o_bias=bias, qk_norm=True)


_QWEN_KEYS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
FAMILIES = {
    "llama": Family("LlamaForCausalLM", LlamaConfig, _llama, frozenset({"attention_bias", "mlp_bias"})),
    "mistral": Family(
        "MistralForCausalLM", MistralConfig, _mistral, frozenset({"sliding_window"}), ("num_key_value_heads",)
    ),
    "qwen2": Family("Qwen2ForCausalLM", Qwen2Config, _qwen2, _QWEN_KEYS | {"use_mrope"}, ("num_key_value_heads",)),
    "qwen3": Family(
        "Qwen3ForCausalLM", Qwen3Config, _qwen3, _QWEN_KEYS | {"attention_bias"}, ("num_key_value_heads", "head_dim")
    ),
}
