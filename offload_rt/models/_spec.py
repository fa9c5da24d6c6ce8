"""ModelSpec: everything the one decoder layer needs to know of a model."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from offload_rt import plugins
from offload_rt.errors import UnsupportedModelError
from offload_rt.models._rope import Rope

EMBED, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
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
class ModelSpec:
    """Sizes and habits of a decoder-only model, and the one list of its tensors and shapes.

    windows  per layer: how many positions back a token sees, itself included; None: all of them
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    eps: float
    max_positions: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    dtype_name: str | None
    rope: Rope = field(compare=False, repr=False)

    def layer_tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(name below `model.layers.<i>.`, shape) of each tensor of a layer, in the order of their use."""
        d, m = self.hidden_size, self.intermediate_size
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        norms = (("self_attn.q_norm.weight", (self.head_dim,)), ("self_attn.k_norm.weight", (self.head_dim,)))
        return (
            ("input_layernorm.weight", (d,)),
            *_linear("self_attn.q_proj", q, d, self.qkv_bias),
            *_linear("self_attn.k_proj", kv, d, self.qkv_bias),
            *_linear("self_attn.v_proj", kv, d, self.qkv_bias),
            *(norms if self.qk_norm else ()),
            *_linear("self_attn.o_proj", d, q, self.o_bias),
            ("post_attention_layernorm.weight", (d,)),
            *_linear("mlp.gate_proj", m, d, self.mlp_bias),
            *_linear("mlp.up_proj", m, d, self.mlp_bias),
            *_linear("mlp.down_proj", d, m, self.mlp_bias),
        )

    def outer_tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(name, shape) of the tensors outside the layers; a tied head is the embedding and not listed."""
        table = (self.vocab_size, self.hidden_size)
        head = () if self.tied else ((f"{HEAD}.weight", table),)
        return ((f"{EMBED}.weight", table), (f"{NORM}.weight", (self.hidden_size,)), *head)

    def layer_prefix(self, i: int) -> str:
        """What stands before a layer tensor's name in the checkpoint."""
        return f"model.layers.{i}."

    def kv_nbytes(self, itemsize: int) -> int:
        """Bytes of one cached token over all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * itemsize

    def scratch_nbytes(self, n_rows: int, n_logits: int, itemsize: int) -> int:
        """Bytes of activations while `n_rows` tokens go through a layer together, and of `n_logits` rows of logits."""
        attention = (2 * self.n_heads + 2 * self.n_kv_heads) * self.head_dim
        widest = max(attention, 3 * self.intermediate_size) + 4 * self.hidden_size
        return n_rows * widest * itemsize + n_logits * self.vocab_size * (itemsize + 8)


def spec_of(raw: dict[str, Any]) -> ModelSpec:
    """Understand the content of a config.json.

    Raises UnsupportedModelError for an architecture, key or value that is not understood; nothing is guessed.
    """
    family = _family(raw)
    _check_keys(raw, family)
    return family.spec(_parse(raw, family.CONFIG))


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


def _linear(name: str, n_out: int, n_in: int, bias: bool) -> tuple[tuple[str, tuple[int, ...]], ...]:
    weight = (f"{name}.weight", (n_out, n_in))
    return (weight, (f"{name}.bias", (n_out,))) if bias else (weight,)


def _family(raw: dict[str, Any]) -> ModuleType:
    kind, architectures = raw.get("model_type"), raw.get("architectures")
    known = list(plugins.names("models"))
    if kind not in known:
        raise UnsupportedModelError(f"config.json: model_type {kind!r} is not supported", have=", ".join(known))
    family = plugins.find("models", kind)
    if architectures not in (None, [family.ARCHITECTURE]):
        raise UnsupportedModelError(
            f"config.json: architecture {architectures!r} is not supported", need=family.ARCHITECTURE
        )
    return family


def _check_keys(raw: dict[str, Any], family: ModuleType) -> None:
    for key in (*_REQUIRED, *family.REQUIRED):
        if raw.get(key) is None:
            raise UnsupportedModelError(f"config.json: key {key!r} is missing")
    for key in _SIZES:
        if type(raw.get(key)) is int and raw[key] > _MOST:
            raise UnsupportedModelError(f"config.json: {key} is {raw[key]}", need=f"at most {_MOST}")
    # Every config.json may carry what transformers writes for any model, generation defaults included.
    harmless = set(PreTrainedConfig().to_dict()) | set(GenerationConfig().to_dict())
    known = (_COMMON | harmless | family.KEYS) - _REFUSED
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
