"""A model whose weights are divided among ranks (Shoeybi et al. 2019, arXiv 1909.08053), by transformers' own plan for it.

Each rank has some heads and some rows of the MLP. What the ranks compute of a hidden state is added up or put side by side
where the whole is needed; norms, and all that is done with hidden states, each rank computes for itself.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from offload_rt.errors import UnsupportedModelError
from offload_rt.models.architecture import Architecture, KVShape, LayerWeights, PassContext, TensorShape
from offload_rt.system.ranks import Ranks

_LAYERS = "layers.*."


class Style(NamedTuple):
    """How a matrix is divided.

    dim          0: by its outputs, 1: by its inputs
    takes_part   a rank has its part of the input alone
    gives_part   it needs its part of the output alone
    is_table     of the vocabulary, whose last part may be shorter
    """

    dim: int
    takes_part: bool = False
    gives_part: bool = False
    is_table: bool = False


_STYLES = {
    "colwise": Style(0, gives_part=True), "colwise_gather_output": Style(0),
    "rowwise": Style(1, takes_part=True), "rowwise_split_input": Style(1),
}  # fmt: skip
_TABLE = Style(0, is_table=True)
# Of norms of single heads.
_REPLICATED = "replicated_with_grad_allreduce"


class Cut(NamedTuple):
    """Numbers [first, first + n) of dimension `dim`."""

    dim: int
    first: int
    n: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of the part."""
        return (*whole[: self.dim], self.n, *whole[self.dim + 1 :])


@dataclass(frozen=True)
class TensorParallelModel(Architecture):
    """The part of a model that one rank has. Raises UnsupportedModelError where it cannot be divided.

    is_exact  all matrices are divided by their outputs, so that every sum has its terms in the order of one rank
    styles    by module, without the prefix of its layer and with * for numbers
    """

    whole: Architecture
    rank: int
    size: int
    is_exact: bool
    ranks: Ranks = field(compare=False, repr=False)
    styles: dict[str, Style] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, whole: Architecture, ranks: Ranks, is_exact: bool) -> "TensorParallelModel":
        """The part of `ranks.rank`."""
        names = (
            "family",
            "dtype_name",
            "n_layers",
            "vocab_size",
            "hidden_size",
            "n_kv_heads",
            "head_dim",
            "max_positions",
        )
        sizes = {name: getattr(whole, name) for name in names}
        found = cls(**sizes, whole=whole, rank=ranks.rank, size=ranks.size, is_exact=is_exact, ranks=ranks)
        found._read_plan()
        for i in range(whole.n_layers):
            found.layer_tensors(i)
        return replace(found, n_kv_heads=found.kv_shapes[0].n_heads)

    def _read_plan(self) -> None:
        if self.whole.tp_plan is None:
            raise self._refusal("transformers has no plan for it")
        if self.whole.state_shapes:
            raise self._refusal("its layers keep a state")
        plan = {name.removeprefix(_LAYERS): style for name, style in self.whole.tp_plan.items() if _LAYERS in name}
        tensors = {one for i in range(self.n_layers) for one in self.whole.layer_tensors(i)}
        for name, shape in sorted(tensors):
            module = _module(name)
            style = plan.get(module)
            if style in _STYLES:
                self.styles[module] = _STYLES[style]._replace(dim=0) if self.is_exact else _STYLES[style]
            elif style not in (None, _REPLICATED) or len(shape) > 1:
                raise self._refusal(f"of its layers {name!r} is {'not in the plan' if style is None else style}")
        for name, shape in self.whole.non_layer_tensors():
            if len(shape) == 2 and shape[0] == self.vocab_size:
                self.styles[_module(name)] = _TABLE

    def _refusal(self, why: str) -> UnsupportedModelError:
        problem = f"a model of type {self.family} cannot be divided among {self.size} ranks: {why}"
        return UnsupportedModelError(problem, change="run it without torchrun")

    def cut(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        """This rank's part of a tensor; None: all of it."""
        style = self.styles.get(_module(name))
        if style is None or (style.dim == 1 and len(shape) == 1):
            return None
        n, at = shape[style.dim], style.dim
        if style.is_table:
            first = self._table_part * self.rank
            return Cut(0, first, min(self._table_part, n - first))
        heads = self.whole.kv_shapes[0]
        if "attn" in name and style.gives_part and heads.n_heads % self.size and n in (
            heads.n_heads * heads.k_dim, heads.n_heads * heads.v_dim
        ):  # fmt: skip
            n_part = n // heads.n_heads
            return Cut(0, heads.n_heads * self.rank // self.size * n_part, n_part)
        n_heads = shape[-1] // heads.v_dim if "attn" in name and style.takes_part and len(shape) == 2 else self.size
        if n % self.size or n_heads % self.size:
            raise self._refusal(f"{name!r} has {n} {'inputs' if at else 'outputs'} in {n_heads} heads or parts")
        return Cut(at, n // self.size * self.rank, n // self.size)

    @property
    def _table_part(self) -> int:
        return -(-self.vocab_size // self.size)

    def _of_rank(self, tensors: Sequence[TensorShape]) -> tuple[TensorShape, ...]:
        cuts = [(one, self.cut(*one)) for one in tensors if self.has(one.name)]
        return tuple(one if cut is None else TensorShape(one.name, cut.shape(one.shape)) for one, cut in cuts)

    def has(self, name: str) -> bool:
        """Whether a tensor is one of this rank; a bias that is added to a sum over ranks is of the first alone."""
        style = self.styles.get(_module(name))
        return self.rank == 0 or not name.endswith(".bias") or style is None or style.dim == 0

    def of_rank(self, weights: LayerWeights) -> "DividedWeights":
        """The weights of a block of this rank, to compute the whole with."""
        return DividedWeights(weights, self)

    def all_gather(self, x: Tensor) -> Tensor:
        """x (..., width) of all ranks side by side."""
        return self.ranks.all_gather(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    @property
    def is_native(self) -> bool:  # type: ignore[override]  # it is read alone
        """As the whole model."""
        return self.whole.is_native

    @property
    def notice(self) -> str:  # type: ignore[override]  # it is read alone
        """As the whole model."""
        return self.whole.notice

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """Of the heads of this rank; where there are fewer than ranks, several have the same."""
        if not any("attn" in name and style.gives_part for name, style in self.styles.items()):
            return self.whole.kv_shapes
        counts = {one.n_heads for one in self.whole.kv_shapes}
        if any(n % self.size for n in counts) and (len(counts) > 1 or any(self.size % n for n in counts)):
            raise self._refusal(f"it has {min(counts)} heads of keys and values")
        return tuple(one._replace(n_heads=max(one.n_heads // self.size, 1)) for one in self.whole.kv_shapes)

    def layer_prefix(self, i: int) -> str:
        """As of the whole model."""
        return self.whole.layer_prefix(i)

    def layer_tensors(self, i: int) -> tuple[TensorShape, ...]:
        """This rank's parts."""
        return self._of_rank(self.whole.layer_tensors(i))

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        """This rank's parts."""
        return self._of_rank(self.whole.non_layer_tensors())

    def is_unused(self, name: str) -> bool:
        """As of the whole model."""
        return self.whole.is_unused(name)

    def row_inputs(self, positions: Tensor, lengths: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """As of the whole model."""
        return self.whole.row_inputs(positions, lengths, dtype)

    def embed(
        self, weights: LayerWeights, ids: Tensor, row_inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """As of the whole model, by all ranks together."""
        return self.whole.embed(self.of_rank(weights), ids, row_inputs)

    def layer(self, i: int, weights: LayerWeights, x: Tensor, context: PassContext) -> Tensor:
        """As of the whole model, by all ranks together."""
        return self.whole.layer(i, self.of_rank(weights), x, context)

    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """As of the whole model, by all ranks together; each has all logits."""
        return self.whole.head(self.of_rank(weights), x)

    def flops(self, i: int, n_rows: int, context: int) -> float:
        """A rank's share."""
        return self.whole.flops(i, n_rows, context) / self.size

    def window(self, i: int) -> int | None:
        """As of the whole model."""
        return self.whole.window(i)

    def scratch_nbytes(self, n_rows: int, n_logits: int, itemsize: int) -> int:
        """As of the whole model, whose activations are there wherever they are gathered."""
        return self.whole.scratch_nbytes(n_rows, n_logits, itemsize)


class DividedWeights(LayerWeights):
    """The weights of one rank, which computes with the others what the whole ones give."""

    def __init__(self, own: LayerWeights, model: TensorParallelModel) -> None:
        self._own, self._model = own, model

    @property
    def dtype(self) -> torch.dtype:
        """See `LayerWeights`."""
        return self._own.dtype

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """See `LayerWeights`; of one that every rank has."""
        return self._own.tensor(name, dtype)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `LayerWeights`; x and what is given are whole or this rank's, as the style says."""
        model, style = self._model, self._model.styles.get(_module(f"{name}.weight"))
        if style is None:
            return self._own.linear(x, name)
        if style.dim == 1:
            part = x if style.takes_part else x.chunk(model.size, -1)[model.rank]
            return model.ranks.all_reduce(self._own.linear(part, name))
        y = self._own.linear(model.all_gather(x) if style.takes_part else x, name)
        if style.is_table:
            y = F.pad(y, (0, model._table_part - y.shape[-1]))
            return model.all_gather(y)[..., : model.vocab_size]
        return y if style.gives_part else model.all_gather(y)

    def linears(self, x: Tensor, names: Sequence[str]) -> tuple[Tensor, ...]:
        """See `LayerWeights`."""
        if all(self._model.styles.get(name) == _STYLES["colwise"] for name in names):
            return self._own.linears(x, names)
        return super().linears(x, names)

    def rows(self, ids: Tensor, name: str) -> Tensor:
        """See `LayerWeights`; each rank has those of its part of the table, and zeros for the others."""
        if name not in self._model.styles:
            return self._own.rows(ids, name)
        cut = self._model.cut(f"{name}.weight", (self._model.vocab_size, 0))
        assert cut is not None, "a table is divided"
        own = ids - cut.first
        is_own = (own >= 0) & (own < cut.n)
        rows = self._own.rows(own.clamp(0, cut.n - 1), name)
        return self._model.ranks.all_reduce(rows.masked_fill(~is_own[:, None], 0.0))


class SharedWeights(LayerWeights):
    """A target's weights outside the layers, for a head that only rank 0 has: the others take part in what it computes.

    tell  takes (method, args, kwargs) that those of other ranks are to do, while these do
    """

    def __init__(self, own: LayerWeights, model: TensorParallelModel, device: torch.device) -> None:
        self._weights, self._ranks, self._device = model.of_rank(own), model.ranks, device
        self.tell: Callable[..., AbstractContextManager[None]] = lambda *_: nullcontext()

    @property
    def dtype(self) -> torch.dtype:
        """See `LayerWeights`."""
        return self._weights.dtype

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """See `LayerWeights`."""
        return self._weights.tensor(name, dtype)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `LayerWeights`."""
        return self._together("linear", x, name)

    def rows(self, ids: Tensor, name: str) -> Tensor:
        """See `LayerWeights`."""
        return self._together("rows", ids, name)

    def _together(self, method: str, x: Tensor, name: str) -> Tensor:
        with self.tell("take_part", (method, name, tuple(x.shape), x.dtype), {}):
            found: Tensor = getattr(self._weights, method)(self._ranks.broadcast(x), name)
        return found

    @torch.inference_mode()
    def take_part(self, method: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Compute what rank 0 asks for, with what it sends."""
        x = self._ranks.broadcast(torch.empty(shape, dtype=dtype, device=self._device))
        getattr(self._weights, method)(x, name)


def _module(name: str) -> str:
    """The module of a tensor, as plans name it."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name.rpartition(".")[0])
