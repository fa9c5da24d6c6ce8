"""Values and protocols of a layer: tensors, weights, experts, attention, states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from offload_rt.ops.decoder_cpu import CachedRows
    from offload_rt.ops.decoder_cpu import Layer as DecoderLayer
    from offload_rt.ops.dequantize import Weight
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


class LayerExperts(NamedTuple):
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


class ExpertShare(NamedTuple):
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
    has_pairs     rows of q and k are stored with the partners of a rotation side by side
    kernel        description of a native decoder layer for the CPU library, once made
    """

    experts: LayerExperts | None = None
    expert_share: ExpertShare | None = None
    has_pairs: bool = False
    kernel: DecoderLayer | None = None

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

    def stored(self, name: str) -> tuple[Weight, Tensor | None] | None:
        """Return the matrix as stored and its bias; None if `linear` does more than a product."""
        return None

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
        k, v = (None if part is None else part[rows] for part in (self.k, self.v))
        rotary = None if self.rotary is None else (self.rotary[0][rows], self.rotary[1][rows])
        return replace(self, q=self.q[rows], k=k, v=v, rotary=rotary)


class PassContext(Protocol):
    """The current pass as seen by a layer."""

    @property
    def row_inputs(self) -> tuple[Any, ...]:
        """Second result of `Architecture.embed`."""

    def attend(self, asked: Attention) -> Tensor:
        """Store keys and values; return the attention output (n, n_heads, head_dim of v)."""


class CachedContext(PassContext, Protocol):
    """The current pass as seen by several layers."""

    def in_place(self) -> Sequence[CachedRows] | None:
        """Return the rows by sequence; None if `attend` does more than write and read a cache."""


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


def keep_tapped(taps: Sequence[int], tapped: Tensor, hidden: Tensor, n_layers: int) -> None:
    """Copy hidden states (n, hidden_size) after `n_layers` layers to tapped, if a tap matches.

    tapped  (n, len(taps), hidden_size)
    """
    for place, tap in enumerate(taps):
        if tap == n_layers:
            tapped[:, place] = hidden
