"""What the rest of the package asks of a model, whatever its layers look like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class TensorShape(NamedTuple):
    """A matrix or vector of a model as its computation sees it, however a weight format stores it."""

    name: str
    shape: tuple[int, ...]


class Part(NamedTuple):
    """A tensor of a checkpoint, or `n_rows` of its rows from `first` on; 0: all."""

    name: str
    first: int = 0
    n_rows: int = 0


class KVShape(NamedTuple):
    """Heads of the keys and values of a layer, and the numbers of each head."""

    n_heads: int
    k_dim: int
    v_dim: int

    @property
    def n_numbers(self) -> int:
        """Numbers of one token."""
        return self.n_heads * (self.k_dim + self.v_dim)


class Mixture(NamedTuple):
    """Layers that have experts: `n_experts` each, of which a row takes `n_used`."""

    layers: tuple[int, ...]
    n_experts: int
    n_used: int


@dataclass(frozen=True)
class LayerExperts:
    """The experts of one layer where they are no part of it but come as rows need them.

    arrive     each of the experts that so many rows take, first what is there: its weights, which are gone at the next step,
               or last, where `HostWork` has computed it, its outputs
    following  the weights of the next layer that has experts, without these; None where they are not there
    expect     is told which experts rows are likely to take there, the likeliest first; empty: nobody knows
    has_host   whether the host computes some, for which it needs the rows
    """

    arrive: Callable[[Mapping[int, int], HostWork | None], Iterator[tuple[int, LayerWeights | Tensor]]]
    following: Callable[[], LayerWeights | None]
    expect: Callable[[Sequence[int]], None]
    has_host: bool = False


class HostWork(NamedTuple):
    """What the host needs to compute experts of a layer.

    compute  outputs of rows (n, width), all on the host, by the number of an expert and its weights
    rows     those of an expert
    """

    compute: Callable[[Tensor, int, LayerWeights], Tensor]
    rows: Callable[[int], Tensor]


@dataclass(frozen=True)
class ExpertShare:
    """The experts of a layer that this rank has, and what makes the outputs of all of those of each rank's.

    is_exact  outputs are added in the order of the experts, as one rank adds them
    """

    own: range
    is_exact: bool
    all_reduce: Callable[[Tensor], Tensor]


class StateShape(NamedTuple):
    """What a gated delta net keeps besides keys and values: a matrix k_dim x v_dim for each head of values, in float32, and
    the inputs of its convolution over `kernel` rows.
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
        """Of a state."""
        return 4 * self.k_dim * self.widths[2] + (self.kernel - 1) * sum(self.widths) * itemsize

    def row_nbytes(self, itemsize: int) -> int:
        """Of what is kept of a row that may yet be rejected."""
        return sum(self.widths) * itemsize + 4 * (sum(self.widths[1:]) + 2 * self.n_v_heads)


class LayerWeights(Protocol):
    """The weights of one layer, or those outside the layers, however they are stored.

    experts  where they are no part of these weights
    expert_share  of its experts, where other ranks have the others
    """

    experts: LayerExperts | None = None
    expert_share: ExpertShare | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the computation."""

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name`, which is not quantised, in `dtype`; None: that of the computation."""

    def vector(self, name: str) -> Tensor:
        """The one-dimensional `<name>.weight`, of a norm, in the dtype of the computation."""
        return self.tensor(f"{name}.weight")

    def linear(self, x: Tensor, name: str) -> Tensor:
        """x (n, n_in) through the matrix `<name>.weight`, bias included: (n, n_out)."""

    def linears(self, x: Tensor, names: Sequence[str]) -> tuple[Tensor, ...]:
        """`linear` for each of these; a format may compute them together and return parts of one product."""
        return tuple(map(self.linear, repeat(x), names))

    def joined(self, names: Sequence[str]) -> Tensor | None:
        """The matrices `<name>.weight` as one along their first dimension; None unless they lie so and are used as stored."""
        return None

    def rows(self, ids: Tensor, name: str) -> Tensor:
        """Rows `ids` (n,) of the table `<name>.weight`, in the dtype of the computation: (n, width)."""


class PassContext(Protocol):
    """What a layer sees of the pass under way."""

    @property
    def row_inputs(self) -> tuple[Any, ...]:
        """What `Architecture.embed` gave beside x."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, *,
        scale: float, window: int | None = None, rotary: tuple[Tensor, Tensor] | None = None,
        softcap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Keep k and v (n, n_kv_heads, head_dim) of these rows in the cache and return the output of attention.

        q       (n, n_heads, head_dim)
        k, v    None: those of the rows are there, of an earlier call with this `layer`
        window  how many positions back a row sees, itself included; None: all of them
        rotary  cosines and sines (n, head_dim) each, by which q and k are rotated first; None: they are as they should be
        softcap scores s become softcap * tanh(s / softcap)
        sinks   (n_heads,) a score of each head that takes part in the softmax and stands for no value
        Returns (n, n_heads, head_dim of v).
        """


class StateContext(PassContext, Protocol):
    """What layers with a state see of it."""

    def recur(
        self, layer: int, shape: StateShape, x: Tensor, weight: Tensor, log_decays: Tensor, beta: Tensor
    ) -> Tensor:
        """The gated delta rule for these rows, each behind those that it sees (`ops.delta_rule`).

        layer       among those with a state
        x           (n, channels) queries, keys and values of all heads, before the convolution
        weight      (channels, kernel) of the convolution, behind which stand a SiLU and a norm of queries and keys
        log_decays, beta  (n, n_v_heads)
        Returns (n, n_v_heads, v_dim).
        """


@dataclass(frozen=True)
class Architecture(ABC):
    """A decoder-only model: its sizes, its tensors, and what it computes.

    n_kv_heads, head_dim  of the keys and values that `attend` keeps, in its first layer
    dtype_name            the config's dtype; None where it names none
    taps                  of a head that drafts by the hidden states of its target: after how many layers it takes them;
                          empty for a model of its own
    tp_plan               how transformers divides the modules of its layers among ranks, and what other matrices of products
                          they have
    """

    # What the user should know of how it is run.
    notice: ClassVar[str] = ""
    # Whether a layer does the same for the same shapes, so that a pass can be captured, and its attention is plain.
    is_native: ClassVar[bool] = True

    family: str
    dtype_name: str | None
    n_layers: int
    vocab_size: int
    hidden_size: int
    n_kv_heads: int
    head_dim: int
    max_positions: int
    taps: tuple[int, ...] = field(default=(), kw_only=True)
    tp_plan: Mapping[str, str] = field(default_factory=dict, kw_only=True, compare=False, repr=False)

    def of_checkpoint(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Self, Mapping[str, Part]]:
        """This model as a checkpoint stores it whose tensors have these shapes, and where the tensors it names lie in there.

        Raises UnsupportedModelError where tensors would have to be converted.
        """
        return self, {name: Part(name) for name in shapes}

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """Of each layer of the cache, by the numbers that `attend` is called with."""
        return (KVShape(self.n_kv_heads, self.head_dim, self.head_dim),) * self.n_layers

    def kv_layers(self, i: int) -> Sequence[int]:
        """Numbers of the layers of the cache that layer i writes to."""
        return (i,)

    def kv_read(self, i: int) -> Collection[int]:
        """Those that it attends to, which others may have written."""
        return self.kv_layers(i)

    @property
    def mixture(self) -> Mixture | None:
        """Of layers whose experts may come one by one; None where there are none."""
        return None

    def expert_names(self, i: int) -> Mapping[str, int | None]:
        """The expert that a module of layer i belongs to, by its name; None: the tensor of that name has a row for each."""
        return {}

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """Of each layer with a state, by the numbers that `recur` is called with; all are the same."""
        return ()

    @property
    def state_layers(self) -> Collection[int]:
        """These layers, in the same order."""
        return ()

    @abstractmethod
    def layer_prefix(self, i: int) -> str:
        """What stands before the name of a tensor of layer i in a checkpoint."""

    @abstractmethod
    def layer_tensors(self, i: int) -> tuple[TensorShape, ...]:
        """The tensors of layer i, named without the prefix, in order of use."""

    @abstractmethod
    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        """The tensors outside the layers."""

    @abstractmethod
    def is_unused(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although the model computes without it."""

    @abstractmethod
    def row_inputs(self, positions: Tensor, lengths: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """What layers need to know of each row besides its hidden state, such as cosines and sines; (n, ...) each.

        positions  (n,) int64, on the host
        lengths    (n,) int64, tokens in the sequence when plain decoding computes each row
        """

    @abstractmethod
    def embed(
        self, weights: LayerWeights, ids: Tensor, row_inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Tokens (n,) to hidden states (n, hidden_size), and what the layers need to know of these rows besides.

        row_inputs  what the method of this name gave, on the device
        """

    @abstractmethod
    def layer(self, i: int, weights: LayerWeights, x: Tensor, context: PassContext) -> Tensor:
        """Layer i on the hidden states x (n, hidden_size) of n rows, which it may overwrite. Returns (n, hidden_size)."""

    @abstractmethod
    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Hidden states x (n, hidden_size) behind the last layer to logits (n, vocab_size)."""

    @abstractmethod
    def flops(self, i: int, n_rows: int, context: int) -> float:
        """Operations of layer i on `n_rows` rows that follow `context` cached tokens."""

    def window(self, i: int) -> int | None:
        """How many positions back a row of layer i sees, itself included; None: all of them."""
        return None

    def kv_nbytes(self, itemsize: int) -> int:
        """Bytes of one cached token over all layers."""
        return sum(one.n_numbers for one in self.kv_shapes) * itemsize

    @abstractmethod
    def scratch_nbytes(self, n_rows: int, n_logits: int, itemsize: int) -> int:
        """Bytes of activations while `n_rows` rows go through a layer together, and of `n_logits` rows of logits."""


def of_whole(name: str) -> Any:
    """A method of the model that another one is a part of, its `whole`; to `property`, what gives an attribute."""

    def ask(self: Any, *args: Any) -> Any:
        found = getattr(self.whole, name)
        return found(*args) if callable(found) else found

    return ask
