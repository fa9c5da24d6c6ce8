"""Interfaces between models, their weights, and passes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from offload_rt.models.image_tower import ImageTower
    from offload_rt.ops.few_rows import Stack


class TensorShape(NamedTuple):
    """Name and logical shape of a matrix or vector, independent of the weight format."""

    name: str
    shape: tuple[int, ...]


class Part(NamedTuple):
    """A checkpoint tensor, or `n_rows` of its rows starting at `first`; n_rows = 0 for all rows."""

    name: str
    first: int = 0
    n_rows: int = 0


class KVShape(NamedTuple):
    """KV heads of a layer, and the head dimensions of keys and values."""

    n_heads: int
    k_dim: int
    v_dim: int

    @property
    def n_numbers(self) -> int:
        """Number of elements per token."""
        return self.n_heads * (self.k_dim + self.v_dim)


class Mixture(NamedTuple):
    """Layers with `n_experts` experts each; every row is routed to `n_used` experts."""

    layers: tuple[int, ...]
    n_experts: int
    n_used: int


@dataclass(frozen=True)
class LayerExperts:
    """Experts of a layer that are loaded on demand.

    arrive     yields (expert, weights) for the experts with rows, given row counts per expert.
               Experts already on the device come first; weights expire at the next step. Experts
               computed by `HostWork` come last, with outputs instead of weights
    following  returns the next expert layer's weights without experts, or None if not on the device
    expect     receives the experts predicted for the next expert layer, most likely first; empty
               without a prediction
    has_host   the host computes some experts and needs their rows
    """

    arrive: Callable[
        [Mapping[int, int], HostWork | None], Iterator[tuple[int, LayerWeights | Tensor]]
    ]
    following: Callable[[], LayerWeights | None]
    expect: Callable[[Sequence[int]], None]
    has_host: bool = False


class HostWork(NamedTuple):
    """Inputs for computing experts of a layer on the host.

    compute  maps host rows (n, width), an expert's index and its weights to outputs
    rows     returns the rows of an expert
    """

    compute: Callable[[Tensor, int, LayerWeights], Tensor]
    rows: Callable[[int], Tensor]


@dataclass(frozen=True)
class ExpertShare:
    """Experts of a layer owned by this rank, and the reduction over all ranks.

    owned       indices of the owned experts
    is_exact    add outputs in expert order, as a single rank does
    all_reduce  sums a tensor over all ranks
    """

    owned: range
    is_exact: bool
    all_reduce: Callable[[Tensor], Tensor]


class StateShape(NamedTuple):
    """Recurrent state of a gated delta net layer.

    The state is a float32 matrix (k_dim, v_dim) per value head, and the last inputs of a
    convolution over `kernel` rows.
    """

    n_k_heads: int
    n_v_heads: int
    k_dim: int
    v_dim: int
    kernel: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values."""
        return self.n_k_heads * self.k_dim, self.n_k_heads * self.k_dim, self.n_v_heads * self.v_dim

    def nbytes(self, itemsize: int) -> int:
        """Return the bytes of a layer's state."""
        return 4 * self.k_dim * self.widths[2] + (self.kernel - 1) * sum(self.widths) * itemsize

    def row_nbytes(self, itemsize: int) -> int:
        """Return the bytes of a pending row's update."""
        return sum(self.widths) * itemsize + 4 * (sum(self.widths[1:]) + 2 * self.n_v_heads)


class LayerWeights(Protocol):
    """Weights of a layer, or the weights outside the layers, in any format.

    experts       experts loaded on demand, or None if part of these weights
    expert_share  experts of this rank, or None without expert sharding
    """

    experts: LayerExperts | None = None
    expert_share: ExpertShare | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return the unquantized tensor `name` in `dtype`, by default the compute dtype."""

    def vector(self, name: str) -> Tensor:
        """Return the 1-D tensor `<name>.weight`, e.g. of a norm, in the compute dtype."""
        return self.tensor(f"{name}.weight")

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Multiply x (n, n_in) by the matrix `<name>.weight` and add its bias: (n, n_out)."""

    def linears(self, x: Tensor, names: Sequence[str]) -> tuple[Tensor, ...]:
        """Apply `linear` for each name; a format may compute a single concatenated product."""
        return tuple(map(self.linear, repeat(x), names))

    def linear_experts(
        self, x: Tensor, ends: Sequence[int], names: Sequence[Sequence[str]], experts: Sequence[int]
    ) -> Tensor:
        """Multiply groups of rows, each by the matrices of an expert: (n, n_out).

        x        (n, n_in), or a single row that all groups share
        ends     end of each group's rows
        names    matrices of every expert of the layer, whose outputs are concatenated
        experts  expert of each group
        """
        import torch  # not at the top: a plan computes nothing

        rows = x.expand(ends[-1], -1) if len(x) == 1 else x
        groups = zip((0, *ends), ends, experts, strict=False)
        outputs = [self.linears(rows[first:end], names[expert]) for first, end, expert in groups]
        return torch.cat([torch.cat(parts, dim=-1) for parts in outputs])

    def fused(self, names: Sequence[str]) -> Tensor | None:
        """Return the matrices concatenated by rows without a copy; None if not stored so."""
        return None

    def stacked(self, names: Sequence[str]) -> Stack | None:
        """Return equal matrices as a stack without a copy; None if not stored so."""
        return None

    def rows(self, ids: Tensor, name: str) -> Tensor:
        """Return rows `ids` (n,) of the table `<name>.weight` in the compute dtype: (n, width)."""


@dataclass(frozen=True, eq=False)
class Attention:
    """Request of a layer: store k and v of the rows in the cache, and attend with q.

    layer    cache layer, an index of `Architecture.kv_shapes`
    q        (n, n_heads, head_dim)
    k, v     (n, n_kv_heads, head_dim); None if stored by an earlier request with the same `layer`
    window   number of visible positions, including the row's position; None for all
    rotary   cosines and sines (n, head_dim) each, to rotate q and k first; None for no rotation
    softcap  replaces scores s by softcap * tanh(s / softcap)
    sinks    (n_heads,) additional score per head in the softmax, without a value
    """

    layer: int
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    scale: float
    window: int | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def of_rows(self, rows: slice) -> Attention:
        """Return the request of some rows."""
        k = None if self.k is None else self.k[rows]
        v = None if self.v is None else self.v[rows]
        rotary = None if self.rotary is None else (self.rotary[0][rows], self.rotary[1][rows])
        return replace(self, q=self.q[rows], k=k, v=v, rotary=rotary)


class PassContext(Protocol):
    """The current pass as seen by a layer."""

    @property
    def row_inputs(self) -> tuple[Any, ...]:
        """Second result of `Architecture.embed`."""

    def attend(self, asked: Attention) -> Tensor:
        """Store keys and values; return the attention output (n, n_heads, head_dim of v)."""


class StateContext(PassContext, Protocol):
    """The current pass as seen by a layer with recurrent state."""

    def recur(
        self,
        layer: int,
        shape: StateShape,
        x: Tensor,
        weight: Tensor,
        log_decays: Tensor,
        beta: Tensor,
    ) -> Tensor:
        """Apply the gated delta rule, each row after its visible rows (`ops.delta_rule`).

        layer       index among the layers with a state
        x           (n, channels) queries, keys and values of all heads, before the convolution
        weight      (channels, kernel) convolution, followed by SiLU and a norm of queries and keys
        log_decays, beta  (n, n_v_heads)
        Returns (n, n_v_heads, v_dim).
        """


@dataclass(frozen=True)
class Architecture(ABC):
    """A decoder-only model: sizes, tensors, computation.

    n_kv_heads, head_dim  KV heads and key dimension of the first layer
    dtype_name            dtype of the config, or None
    taps                  layer counts after which a draft head reads the target's hidden states;
                          empty for complete models
    tp_plan               transformers' tensor parallel plan, extended by further linear modules
    """

    # Notice for the user about limitations, printed at startup.
    notice: ClassVar[str] = ""
    # Capabilities. Callers query these, never the class.
    # Passes of equal shape launch equal kernels, so CUDA graphs apply.
    supports_graphs: ClassVar[bool] = True
    # The model can draft for itself, with views of its caches or 4-bit copies of its layers.
    supports_self_draft: ClassVar[bool] = True
    # Attention reads cache rows on the host or the disk.
    supports_offloaded_kv: ClassVar[bool] = True
    # `speculate.learner` can train the model.
    supports_training: ClassVar[bool] = True
    # `final_states` is implemented.
    supports_embeddings: ClassVar[bool] = False
    # `embed` computes layer inputs from token ids, so every pipeline stage runs it.
    embeds_on_all_stages: ClassVar[bool] = False

    family: str
    dtype_name: str | None
    n_layers: int
    vocab_size: int
    hidden_size: int
    n_kv_heads: int
    head_dim: int
    max_positions: int
    taps: tuple[int, ...] = field(default=(), kw_only=True)
    tp_plan: Mapping[str, str] = field(
        default_factory=dict, kw_only=True, compare=False, repr=False
    )

    def of_checkpoint(
        self, shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[Self, Mapping[str, Part]]:
        """Adapt to a checkpoint with tensors of these shapes; map tensor names to stored parts.

        Raises UnsupportedModelError if tensors would need conversion.
        """
        return self, {name: Part(name) for name in shapes}

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """KV shapes of the cache layers, indexed by the `layer` argument of `attend`."""
        return (KVShape(self.n_kv_heads, self.head_dim, self.head_dim),) * self.n_layers

    def kv_layers(self, i: int) -> Sequence[int]:
        """Return the cache layers that layer i writes."""
        return (i,)

    def kv_read(self, i: int) -> Collection[int]:
        """Return the cache layers that layer i reads, possibly written by earlier layers."""
        return self.kv_layers(i)

    @property
    def mixture(self) -> Mixture | None:
        """Layers with experts that can be loaded on demand, or None."""
        return None

    def expert_names(self, i: int) -> Mapping[str, int | None]:
        """Map module names of layer i to experts; None for tensors with a row per expert."""
        return {}

    @property
    def images(self) -> ImageTower | None:
        """Vision tower, or None for models of text."""
        return None

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """State shapes, indexed by the `layer` argument of `recur`; all are equal."""
        return ()

    @property
    def state_layers(self) -> Collection[int]:
        """Layers with a recurrent state, in the order of `state_shapes`."""
        return ()

    @property
    def shared_modules(self) -> tuple[str, str] | None:
        """Return the embedding and the output matrix, which draft heads share, or None."""
        return None

    @property
    def supports_mtp(self) -> bool:
        """Whether the checkpoint's multi-token prediction layer can draft for the model."""
        return True

    @abstractmethod
    def layer_prefix(self, i: int) -> str:
        """Return the checkpoint prefix of layer i's tensors."""

    @abstractmethod
    def layer_tensors(self, i: int) -> tuple[TensorShape, ...]:
        """Return the tensors of layer i, without the prefix, in order of use."""

    @abstractmethod
    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        """Return the tensors outside the layers."""

    @abstractmethod
    def is_unused(self, name: str) -> bool:
        """Return whether a checkpoint tensor is not needed for computation."""

    @abstractmethod
    def row_inputs(
        self, positions: Tensor, lengths: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Return additional layer inputs per row, e.g. cosines and sines, shape (n, ...) each.

        positions  (n,) int64, on the host
        lengths    (n,) int64 sequence length at which plain decoding computes each row
        """

    @abstractmethod
    def embed(
        self, weights: LayerWeights, ids: Tensor, row_inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Embed tokens (n,); return hidden states (n, hidden_size) and layer inputs.

        row_inputs  result of the method `row_inputs`, on the device
        """

    @abstractmethod
    def layer(self, i: int, weights: LayerWeights, x: Tensor, context: PassContext) -> Tensor:
        """Apply layer i to hidden states x (n, hidden_size), which may be overwritten."""

    @abstractmethod
    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Map final hidden states (n, hidden_size) to logits (n, vocab_size)."""

    def final_states(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Apply the norm behind the last layer to (n, hidden_size)."""
        raise NotImplementedError

    @abstractmethod
    def flops(self, i: int, n_rows: int, context: int) -> float:
        """Return the FLOPs of layer i on `n_rows` rows after `context` cached tokens."""

    def window(self, i: int) -> int | None:
        """Return the number of visible positions in layer i, including the row's; None for all."""
        return None

    def kv_nbytes(self, itemsize: int) -> int:
        """Return the cache bytes of a token over all layers."""
        return sum(shape.n_numbers for shape in self.kv_shapes) * itemsize

    @abstractmethod
    def scratch_nbytes(self, n_rows: int, n_logits: int, itemsize: int) -> int:
        """Return activation bytes for `n_rows` rows per layer call and `n_logits` logit rows."""
