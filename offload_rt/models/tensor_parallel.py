"""A model whose weights are divided among ranks (Shoeybi et al. 2019, arXiv 1909.08053), by transformers' own plan for it.

Each rank has some heads and some rows of the MLP. What the ranks compute of a hidden state is added up or put side by side
where the whole is needed; norms, and all that is done with hidden states, each rank computes for itself. What the plan does not
know is divided by outputs, which are put side by side; what is no matrix of a product is put together where it is used. Of a
mixture each rank has some experts as a whole.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from offload_rt.errors import UnsupportedModelError
from offload_rt.models.architecture import (
    Architecture,
    ExpertShare,
    KVShape,
    LayerWeights,
    Mixture,
    PassContext,
    TensorShape,
    of_whole,
)
from offload_rt.system.ranks import Ranks

_LAYERS = "layers.*."


class Style(NamedTuple):
    """How a matrix is divided.

    dim          0: by its outputs, 1: by its inputs
    takes_part   a rank has its part of the input alone
    gives_part   it needs its part of the output alone
    is_table     outside the layers, where the last part may be shorter
    """

    dim: int
    takes_part: bool = False
    gives_part: bool = False
    is_table: bool = False


_STYLES = {
    "colwise": Style(0, gives_part=True), "colwise_gather_output": Style(0),
    "rowwise": Style(1, takes_part=True), "rowwise_split_input": Style(1),
}  # fmt: skip
_TABLE, _GATHERED = Style(0, is_table=True), _STYLES["colwise_gather_output"]
# Matrices of a smaller part of a layer are whole on every rank, also of those whose rows cannot be divided evenly.
_LEAST_SHARE, _UNEVEN_SHARE = 1 / 1024, 1 / 64


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
    experts   of each mixture that this rank has
    """

    whole: Architecture
    rank: int
    size: int
    is_exact: bool
    ranks: Ranks = field(compare=False, repr=False)
    styles: dict[str, Style] = field(default_factory=dict, compare=False, repr=False)
    experts: range = field(default=range(0), compare=False, repr=False)
    _owners: dict[str, int | None] = field(default_factory=dict, compare=False, repr=False)
    _heights: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    _joined: set[str] = field(default_factory=set, compare=False, repr=False)

    @classmethod
    def of(cls, whole: Architecture, ranks: Ranks, is_exact: bool) -> "TensorParallelModel":
        """The part of `ranks.rank`."""
        sizes = {one.name: getattr(whole, one.name) for one in fields(Architecture)}
        n_experts, rank, size = whole.mixture.n_experts if whole.mixture else 0, ranks.rank, ranks.size
        experts = range(n_experts * rank // size, n_experts * (rank + 1) // size)
        found = cls(**sizes, whole=whole, rank=rank, size=size, is_exact=is_exact, ranks=ranks, experts=experts)
        if 0 < n_experts < size:
            raise found._refusal(f"its mixtures have {n_experts} experts")
        found._read_plan()
        for i in range(whole.n_layers):
            found.layer_tensors(i)
        return replace(found, n_kv_heads=found.kv_shapes[0].n_heads)

    def _read_plan(self) -> None:
        plan = {name.removeprefix(_LAYERS): style for name, style in self.whole.tp_plan.items() if _LAYERS in name}
        layers, mixture = [self.whole.layer_tensors(i) for i in range(self.n_layers)], self.whole.mixture
        for i in mixture.layers if mixture else ():
            self._owners.update(self.whole.expert_names(i))
        n_heads = self._n_heads(layers, plan)
        n_weights = max(sum(math.prod(shape) for _, shape in layer) for layer in layers)
        for name, shape in sorted({one for layer in layers for one in layer if not self._is_of_experts(one.name)}):
            style = self._style(name, shape, plan, n_heads)
            if style is None and len(shape) > 1 and not (mixture and shape[0] == mixture.n_experts):
                # What has a row for each expert is the router's, which also says what the next layer is likely to need.
                least = _LEAST_SHARE if shape[0] % self.size == 0 else _UNEVEN_SHARE
                if math.prod(shape) > least * n_weights:
                    style = _GATHERED
                    self._joined.update({_module(name)} - plan.keys())
            if style is not None:
                self.styles[_module(name)] = style
        for name, shape in self.whole.non_layer_tensors():
            if len(shape) == 2 and shape[0] >= self.size**2 and math.prod(shape) > _LEAST_SHARE * n_weights:
                self.styles[_module(name)], self._heights[_module(name)] = _TABLE, shape[0]

    def _style(self, name: str, shape: tuple[int, ...], plan: Mapping[str, str], n_heads: set[int]) -> Style | None:
        """As the plan says; None where it does not, or cannot be followed."""
        module = _module(name)
        style = _STYLES.get(plan.get(module, ""))
        if style not in (None, _GATHERED) and (n_heads or not _is_attention(name)):
            return style._replace(dim=0) if self.is_exact else style
        owner = module if len(shape) == 1 else module.rpartition(".")[0]
        is_of_heads = shape[:1] != () and shape[0] in n_heads  # sinks, and norms of each head
        return _STYLES["colwise"] if is_of_heads and plan.get(f"{owner}.q_proj") == "colwise" else None

    def _n_heads(self, layers: Sequence[Sequence[TensorShape]], plan: Mapping[str, str]) -> set[int]:
        """Heads of attention that is divided by the plan, also of keys; none where ranks cannot have as many as each other."""
        counts, v_dim = {one.n_heads for one in self.whole.kv_shapes}, self.whole.kv_shapes[0].v_dim
        matrices = {one for layer in layers for one in layer if _is_attention(one.name) and len(one.shape) == 2}
        found = {shape[1] // v_dim for name, shape in matrices if plan.get(_module(name), "").startswith("rowwise")}
        is_shared = len(counts) == 1 and all(self.size % n == 0 for n in counts)
        is_even = is_shared or not any(n % self.size for n in counts)
        return set() if any(n % self.size for n in found) or not is_even else found | counts

    def _refusal(self, why: str) -> UnsupportedModelError:
        problem = f"a model of type {self.family} cannot be divided among {self.size} ranks: {why}"
        return UnsupportedModelError(problem, change="run it without torchrun")

    def cut(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        """This rank's part of a tensor; None: all of it."""
        style = self.styles.get(_module(name))
        if self._owners.get(name, 0) is None:
            return Cut(0, self.experts.start, len(self.experts))
        if style is None or (style.dim == 1 and len(shape) == 1):
            return None
        n, at = shape[style.dim], style.dim
        if style.is_table:
            n_part = -(-n // self.size)
            return Cut(0, n_part * self.rank, min(n_part, n - n_part * self.rank))
        heads = self.whole.kv_shapes[0]
        if _is_attention(name) and style.gives_part and heads.n_heads % self.size and n in (
            heads.n_heads * heads.k_dim, heads.n_heads * heads.v_dim
        ):  # fmt: skip
            n_part = n // heads.n_heads
            return Cut(0, heads.n_heads * self.rank // self.size * n_part, n_part)
        if n % self.size:
            raise self._refusal(f"{name!r} has {n} {'inputs' if at else 'outputs'}")
        return Cut(at, n // self.size * self.rank, n // self.size)

    def cut_by_outputs(self, name: str) -> None:
        """Divide a matrix by its outputs, which are gathered, whatever the plan says."""
        self.styles[_module(name)] = self.styles[_module(name)]._replace(dim=0)

    def _of_rank(self, tensors: Sequence[TensorShape]) -> tuple[TensorShape, ...]:
        cuts = [(one, self.cut(*one)) for one in tensors if self.has(one.name)]
        return tuple(one if cut is None else TensorShape(one.name, cut.shape(one.shape)) for one, cut in cuts)

    def has(self, name: str) -> bool:
        """Whether a tensor is one of this rank; a bias that is added to a sum over ranks is of the first alone."""
        style, owner = self.styles.get(_module(name)), self._owners.get(name.rpartition(".")[0])
        if owner is not None:
            return owner in self.experts
        return self.rank == 0 or not name.endswith(".bias") or style is None or style.dim == 0

    def _is_of_experts(self, name: str) -> bool:
        return name in self._owners or name.rpartition(".")[0] in self._owners

    def of_rank(self, weights: LayerWeights) -> "DividedWeights":
        """The weights of a block of this rank, to compute the whole with."""
        return DividedWeights(weights, self)

    def all_gather(self, x: Tensor) -> Tensor:
        """x (..., width) of all ranks side by side."""
        return self.ranks.all_gather(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    is_native, notice, state_shapes = (property(of_whole(name)) for name in ("is_native", "notice", "state_shapes"))
    layer_prefix, is_unused, row_inputs = map(of_whole, ("layer_prefix", "is_unused", "row_inputs"))
    window, kv_layers = map(of_whole, ("window", "kv_layers"))

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """Of the heads of this rank; where there are fewer than ranks, several have the same."""
        if not any(_is_attention(name) and style.gives_part for name, style in self.styles.items()):
            return self.whole.kv_shapes
        return tuple(one._replace(n_heads=max(one.n_heads // self.size, 1)) for one in self.whole.kv_shapes)

    @property
    def mixture(self) -> Mixture | None:
        """Of this rank's experts, of which a row takes its share; another number of them in each pass."""
        whole = self.whole.mixture
        if whole is None:
            return None
        return Mixture(whole.layers, len(self.experts), min(-(-whole.n_used // self.size), len(self.experts)))

    def expert_names(self, i: int) -> Mapping[str, int | None]:
        """Those of this rank, by their number among these."""
        numbers = {one: n for n, one in enumerate(self.experts)} | {None: None}
        return {name: numbers[one] for name, one in self.whole.expert_names(i).items() if one in numbers}

    def layer_tensors(self, i: int) -> tuple[TensorShape, ...]:
        """This rank's parts."""
        return self._of_rank(self.whole.layer_tensors(i))

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        """This rank's parts."""
        return self._of_rank(self.whole.non_layer_tensors())

    def exchanges(self, i: int) -> list[tuple[bool, int]]:
        """What ranks exchange of each row in layer i: whether it is added up, else gathered, and how wide each rank's is."""
        mixture, found = self.whole.mixture, list[tuple[bool, int]]()
        if mixture is not None and i in mixture.layers:
            found.append((True, self.hidden_size * (mixture.n_used if self.is_exact else 1)))
        for name, shape in self.whole.layer_tensors(i):
            style = self.styles.get(_module(name))
            if style is None or len(shape) == 1 or _module(name) in self._joined:
                continue
            gathered = (shape[1], style.takes_part), (shape[0], not style.gives_part)
            found += [(True, shape[0])] if style.dim else [(False, n // self.size) for n, is_so in gathered if is_so]
        return found

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

    def scratch_nbytes(self, n_rows: int, n_logits: int, itemsize: int) -> int:
        """The whole model's, whose activations are there wherever they are gathered, and tensors that are put together."""
        layers = (self.whole.layer_tensors(i) for i in range(self.n_layers))
        joined = max(
            sum(math.prod(shape) for name, shape in layer if _module(name) in self._joined) for layer in layers
        )
        return self.whole.scratch_nbytes(n_rows, n_logits, itemsize) + joined * itemsize


class DividedWeights(LayerWeights):
    """The weights of one rank, which computes with the others what the whole ones give."""

    def __init__(self, own: LayerWeights, model: TensorParallelModel) -> None:
        self._own, self._model, self.experts = own, model, own.experts
        if model.experts:
            self.expert_share = ExpertShare(model.experts, model.is_exact, model.ranks.all_reduce)

    @property
    def dtype(self) -> torch.dtype:
        """See `LayerWeights`."""
        return self._own.dtype

    def joined(self, names: Sequence[str]) -> Tensor | None:
        """See `LayerWeights`; of experts."""
        return self._own.joined(names)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """See `LayerWeights`; one of which each rank has some rows is put together."""
        all_experts, _, expert = name.rpartition(".")
        if self._model._owners.get(all_experts, 0) is None:
            return self._own.tensor(all_experts, dtype)[int(expert)]
        own, style = self._own.tensor(name, dtype), self._model.styles.get(_module(name))
        if style is None or style.gives_part:
            return own
        padded = F.pad(own.flatten(1) if own.dim() > 1 else own[:, None], (0, 0, 0, self._missing(name, len(own))))
        return self._model.ranks.all_gather(padded.reshape(1, -1)).view(-1, *own.shape[1:])[: self._height(name)]

    def _height(self, name: str) -> int | None:
        """Rows of a table that is divided."""
        return self._model._heights.get(_module(name))

    def _missing(self, name: str, n: int) -> int:
        """Rows that this rank's part of n rows lacks to those of others."""
        height = self._height(name)
        return 0 if height is None else -(-height // self._model.size) - n

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
            y = F.pad(y, (0, self._missing(f"{name}.weight", y.shape[-1])))
        return y if style.gives_part else model.all_gather(y)[..., : self._height(f"{name}.weight")]

    def linears(self, x: Tensor, names: Sequence[str]) -> tuple[Tensor, ...]:
        """See `LayerWeights`."""
        if all(self._model.styles.get(name) == _STYLES["colwise"] for name in names):
            return self._own.linears(x, names)
        return super().linears(x, names)

    def rows(self, ids: Tensor, name: str) -> Tensor:
        """See `LayerWeights`; each rank has those of its part of the table, and zeros for the others."""
        height = self._height(f"{name}.weight")
        if height is None:
            return self._own.rows(ids, name)
        cut = self._model.cut(f"{name}.weight", (height, 0))
        assert cut is not None, "a table is divided"
        own = ids - cut.first
        is_own = (own >= 0) & (own < cut.n)
        rows = self._own.rows(own.clamp(0, cut.n - 1), name)
        return self._model.ranks.all_reduce(rows.masked_fill(~is_own[:, None], 0.0))


class SharedWeights(DividedWeights):
    """A target's weights outside the layers, for a head that only rank 0 has: the others take part in what it computes.

    tell  takes (method, args, kwargs) that those of other ranks are to do, while these do
    """

    def __init__(self, own: LayerWeights, model: TensorParallelModel, device: torch.device) -> None:
        super().__init__(own, model)
        self._device = device
        self.tell: Callable[..., AbstractContextManager[None]] = lambda *_: nullcontext()

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `LayerWeights`."""
        return self._together("linear", x, name)

    def rows(self, ids: Tensor, name: str) -> Tensor:
        """See `LayerWeights`."""
        return self._together("rows", ids, name)

    def _together(self, method: str, x: Tensor, name: str) -> Tensor:
        with self.tell("take_part", (method, name, tuple(x.shape), x.dtype), {}):
            found: Tensor = getattr(DividedWeights, method)(self, self._model.ranks.broadcast(x), name)
        return found

    @torch.inference_mode()
    def take_part(self, method: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Compute what rank 0 asks for, with what it sends."""
        x = self._model.ranks.broadcast(torch.empty(shape, dtype=dtype, device=self._device))
        getattr(DividedWeights, method)(self, x, name)


def _is_attention(name: str) -> bool:
    return "attn" in name or "attention" in name


def _module(name: str) -> str:
    """The module of a tensor, as plans name it."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name.rpartition(".")[0])
