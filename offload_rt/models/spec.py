"""ModelSpec: everything the native decoder layer needs to know of a model."""

from dataclasses import dataclass, field

from offload_rt.models.rope import Rope

EMBED, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


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

    def non_layer_tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
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


def _linear(name: str, n_out: int, n_in: int, bias: bool) -> tuple[tuple[str, tuple[int, ...]], ...]:
    weight = (f"{name}.weight", (n_out, n_in))
    return (weight, (f"{name}.bias", (n_out,))) if bias else (weight,)
