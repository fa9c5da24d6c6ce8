"""Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053) by transformers' plan.

Each rank owns some attention heads and some rows of the MLP. Partial results are summed, or
gathered, where a complete tensor is needed. Every rank computes norms and elementwise operations on
complete hidden states. Matrices unknown to the plan are sharded by outputs and gathered. Sharded
tensors used outside of products are gathered before use. Each rank owns complete experts of a
mixture.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from offload_rt.errors import UnsupportedModelError
from offload_rt.models.architecture import Architecture
from offload_rt.models.layers import (
    ExpertShare,
    KVShape,
    LayerWeights,
    Mixture,
    PassContext,
    TensorShape,
)
from offload_rt.ops.few_rows import Stack
from offload_rt.parallel.model_part import ModelPart, of_whole
from offload_rt.system.ranks import Ranks

_LAYERS = "layers.*."


class Style(NamedTuple):
    """Sharding of a matrix.

    dim          0: by outputs, 1: by inputs
    takes_part   the input is already sharded
    gives_part   the output remains sharded
    is_table     table outside the layers; its last shard may be shorter
    """

    dim: int
    takes_part: bool = False
    gives_part: bool = False
    is_table: bool = False


_STYLES = {
    "colwise": Style(0, gives_part=True),
    "colwise_gather_output": Style(0),
    "rowwise": Style(1, takes_part=True),
    "rowwise_split_input": Style(1),
}
_TABLE = Style(0, is_table=True)
_GATHERED = _STYLES["colwise_gather_output"]
# Matrices with a smaller share of a layer's weights stay replicated; the second limit applies to
# matrices with rows that cannot be split evenly.
_LEAST_SHARE = 1 / 1024
_UNEVEN_SHARE = 1 / 64


class Cut(NamedTuple):
    """Indices [first, first + n) of dimension `dim`."""

    dim: int
    first: int
    n: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the shard."""
        return (*whole[: self.dim], self.n, *whole[self.dim + 1 :])


@dataclass(frozen=True)
class TensorParallelModel(ModelPart):
    """A rank's shard of a model. Raises UnsupportedModelError if sharding is impossible.

    is_exact  shard all matrices by outputs, so that sums have the summation order of a single rank
    styles    sharding by module name, without the layer prefix, with * for numbers
    """

    size: int
    is_exact: bool
    ranks: Ranks = field(compare=False, repr=False)
    styles: dict[str, Style] = field(default_factory=dict, compare=False, repr=False)
    experts: range = field(default=range(0), compare=False, repr=False)
    _owners: dict[str, int | None] = field(default_factory=dict, compare=False, repr=False)
    _heights: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    _gathered_tensors: set[str] = field(default_factory=set, compare=False, repr=False)

    @classmethod
    def for_rank(cls, whole: Architecture, ranks: Ranks, is_exact: bool) -> "TensorParallelModel":
        """Create the shard of `ranks.rank`."""
        sizes = {item.name: getattr(whole, item.name) for item in fields(Architecture)}
        n_experts = whole.mixture.n_experts if whole.mixture else 0
        rank = ranks.rank
        size = ranks.size
        experts = range(n_experts * rank // size, n_experts * (rank + 1) // size)
        model = cls(
            **sizes,
            whole=whole,
            rank=rank,
            size=size,
            is_exact=is_exact,
            ranks=ranks,
            experts=experts,
        )
        if 0 < n_experts < size:
            raise model._refusal(f"its mixtures have {n_experts} experts")
        model._read_plan()
        for i in range(whole.n_layers):
            model.layer_tensors(i)
        return replace(model, n_kv_heads=model.kv_shapes[0].n_heads)

    def _read_plan(self) -> None:
        plan = {
            name.removeprefix(_LAYERS): style
            for name, style in self.whole.tp_plan.items()
            if _LAYERS in name
        }
        layers = [self.whole.layer_tensors(i) for i in range(self.n_layers)]
        mixture = self.whole.mixture
        for i in mixture.layers if mixture else ():
            self._owners.update(self.whole.expert_names(i))
        n_heads = self._n_heads(layers, plan)
        n_weights = max(sum(math.prod(shape) for _, shape in layer) for layer in layers)
        for name, shape in sorted({tensor for layer in layers for tensor in layer}):
            if name in self._owners or name.rpartition(".")[0] in self._owners:
                continue
            style = self._style(name, shape, plan, n_heads)
            if style is None and len(shape) > 1 and not (mixture and shape[0] == mixture.n_experts):
                # A row per expert identifies the router, which also predicts the next layer's
                # experts: replicate it.
                least = _LEAST_SHARE if shape[0] % self.size == 0 else _UNEVEN_SHARE
                if math.prod(shape) > least * n_weights:
                    style = _GATHERED
                    self._gathered_tensors.update({_module(name)} - plan.keys())
            if style is not None:
                self.styles[_module(name)] = style
        for name, shape in self.whole.non_layer_tensors():
            is_large = math.prod(shape) > _LEAST_SHARE * n_weights
            if is_large and len(shape) == 2 and shape[0] >= self.size**2:
                self.styles[_module(name)] = _TABLE
                self._heights[_module(name)] = shape[0]

    def _style(
        self, name: str, shape: tuple[int, ...], plan: Mapping[str, str], n_heads: set[int]
    ) -> Style | None:
        """Return the plan's sharding; None if not in the plan or not possible."""
        module = _module(name)
        style = _STYLES.get(plan.get(module, ""))
        if style not in (None, _GATHERED) and (n_heads or not _is_attention(name)):
            return style._replace(dim=0) if self.is_exact else style
        owner = module if len(shape) == 1 else module.rpartition(".")[0]
        is_of_heads = shape[:1] != () and shape[0] in n_heads  # sinks and per-head norms
        return (
            _STYLES["colwise"] if is_of_heads and plan.get(f"{owner}.q_proj") == "colwise" else None
        )

    def _n_heads(
        self, layers: Sequence[Sequence[TensorShape]], plan: Mapping[str, str]
    ) -> set[int]:
        """Return the head counts of sharded attention; empty if ranks would differ in size."""
        counts = {shape.n_heads for shape in self.whole.kv_shapes}
        v_dim = self.whole.kv_shapes[0].v_dim
        n_heads_found = {
            shape[1] // v_dim
            for layer in layers
            for name, shape in layer
            if len(shape) == 2 and _is_attention(name)
            if plan.get(_module(name), "").startswith("rowwise")
        }
        is_shared = len(counts) == 1 and all(self.size % n == 0 for n in counts)
        is_even = is_shared or not any(n % self.size for n in counts)
        if any(n % self.size for n in n_heads_found) or not is_even:
            return set()
        return n_heads_found | counts

    def _refusal(self, why: str) -> UnsupportedModelError:
        problem = f"a model of type {self.family} cannot be divided among {self.size} ranks: {why}"
        return UnsupportedModelError(problem, change="run it without torchrun")

    def cut(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        """Return this rank's shard of a tensor; None for a replicated tensor."""
        style = self.styles.get(_module(name))
        if self._owners.get(name, 0) is None:
            return Cut(0, self.experts.start, len(self.experts))
        if style is None or (style.dim == 1 and len(shape) == 1):
            return None
        n = shape[style.dim]
        at = style.dim
        if style.is_table:
            n_part = -(-n // self.size)
            return Cut(0, n_part * self.rank, min(n_part, n - n_part * self.rank))
        heads = self.whole.kv_shapes[0]
        sizes = (heads.n_heads * heads.k_dim, heads.n_heads * heads.v_dim)
        is_shared = style.gives_part and heads.n_heads % self.size and n in sizes
        if _is_attention(name) and is_shared:  # several ranks own the same KV head
            n_part = n // heads.n_heads
            return Cut(0, heads.n_heads * self.rank // self.size * n_part, n_part)
        if n % self.size:
            raise self._refusal(f"{name!r} has {n} {'inputs' if at else 'outputs'}")
        return Cut(at, n // self.size * self.rank, n // self.size)

    def cut_by_outputs(self, name: str) -> None:
        """Shard a matrix by outputs and gather them, regardless of the plan."""
        self.styles[_module(name)] = self.styles[_module(name)]._replace(dim=0)

    def _of_rank(self, tensors: Sequence[TensorShape]) -> tuple[TensorShape, ...]:
        cuts = [(tensor, self.cut(*tensor)) for tensor in tensors if self.has(tensor.name)]
        return tuple(
            tensor if cut is None else TensorShape(tensor.name, cut.shape(tensor.shape))
            for tensor, cut in cuts
        )

    def has(self, name: str) -> bool:
        """Return whether this rank owns a tensor; the first rank owns biases of summed outputs."""
        style = self.styles.get(_module(name))
        owner = self._owners.get(name.rpartition(".")[0])
        if owner is not None:
            return owner in self.experts
        return self.rank == 0 or not name.endswith(".bias") or style is None or style.dim == 0

    def of_rank(self, weights: LayerWeights) -> "DividedWeights":
        """Wrap this rank's weights of a block, to compute complete results."""
        return DividedWeights(weights, self)

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate x (..., width) of all ranks along the last dimension."""
        return self.ranks.all_gather(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    supports_graphs = property(of_whole("supports_graphs"))
    state_shapes = property(of_whole("state_shapes"))
    layer_prefix = of_whole("layer_prefix")
    window = of_whole("window")
    kv_layers = of_whole("kv_layers")

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """KV heads of this rank; ranks share KV heads if there are fewer heads than ranks."""
        if not any(_is_attention(name) and style.gives_part for name, style in self.styles.items()):
            return self.whole.kv_shapes
        return tuple(
            shape._replace(n_heads=max(shape.n_heads // self.size, 1))
            for shape in self.whole.kv_shapes
        )

    @property
    def mixture(self) -> Mixture | None:
        """Experts of this rank; `n_used` is the average per row, rounded up."""
        whole = self.whole.mixture
        if whole is None:
            return None
        n_used = min(-(-whole.n_used // self.size), len(self.experts))
        return Mixture(whole.layers, len(self.experts), n_used)

    def expert_names(self, i: int) -> Mapping[str, int | None]:
        """Return module names of this rank's experts, numbered from 0."""
        numbers = {expert: n for n, expert in enumerate(self.experts)} | {None: None}
        return {
            name: numbers[expert]
            for name, expert in self.whole.expert_names(i).items()
            if expert in numbers
        }

    def layer_tensors(self, i: int) -> tuple[TensorShape, ...]:
        return self._of_rank(self.whole.layer_tensors(i))

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        return self._of_rank(self.whole.non_layer_tensors())

    def exchanges(self, i: int) -> list[tuple[bool, int]]:
        """Return the exchanges of layer i as (is a sum rather than a gather, width per rank)."""
        mixture = self.whole.mixture
        exchanged = list[tuple[bool, int]]()
        if mixture is not None and i in mixture.layers:
            exchanged.append((True, self.hidden_size * (mixture.n_used if self.is_exact else 1)))
        for name, shape in self.whole.layer_tensors(i):
            style = self.styles.get(_module(name))
            if style is None or len(shape) == 1 or _module(name) in self._gathered_tensors:
                continue
            if style.dim:
                exchanged.append((True, shape[0]))
                continue
            gathered = (shape[1], style.takes_part), (shape[0], not style.gives_part)
            exchanged += [(False, n // self.size) for n, is_gathered in gathered if is_gathered]
        return exchanged

    def embed(
        self, weights: LayerWeights, ids: Tensor, row_inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Compute the complete embedding on all ranks together."""
        return self.whole.embed(self.of_rank(weights), ids, row_inputs)

    def layer(self, i: int, weights: LayerWeights, x: Tensor, context: PassContext) -> Tensor:
        """Apply the complete layer on all ranks together."""
        return self.whole.layer(i, self.of_rank(weights), x, context)

    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Compute complete logits on all ranks together."""
        return self.whole.head(self.of_rank(weights), x)

    def flops(self, i: int, n_rows: int, context: int) -> float:
        return self.whole.flops(i, n_rows, context) / self.size

    def scratch_nbytes(self, n_rows: int, n_logits: int, itemsize: int) -> int:
        """Return the complete model's activation bytes, plus gathered tensors."""
        names = self._gathered_tensors
        gathered = max(
            sum(math.prod(shape) for name, shape in layer if _module(name) in names)
            for layer in {self.whole.layer_tensors(i) for i in range(self.n_layers)}
        )
        return self.whole.scratch_nbytes(n_rows, n_logits, itemsize) + gathered * itemsize


class DividedWeights(LayerWeights):
    """Weights of a rank; results are computed together with all ranks."""

    def __init__(self, weights: LayerWeights, model: TensorParallelModel) -> None:
        self._own = weights
        self._model = model
        self.experts = weights.experts
        if model.experts:
            self.expert_share = ExpertShare(model.experts, model.is_exact, model.ranks.all_reduce)

    @property
    def dtype(self) -> torch.dtype:
        return self._own.dtype

    def fused(self, names: Sequence[str]) -> Tensor | None:
        return self._own.fused(names)

    def stacked(self, names: Sequence[str]) -> Stack | None:
        return self._own.stacked(names)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """See `LayerWeights`; gathers a sharded tensor."""
        all_experts, _, expert = name.rpartition(".")
        if self._model._owners.get(all_experts, 0) is None:
            return self._own.tensor(all_experts, dtype)[int(expert)]
        part = self._own.tensor(name, dtype)
        style = self._model.styles.get(_module(name))
        if style is None or style.gives_part:
            return part
        rows = part.flatten(1) if part.dim() > 1 else part[:, None]
        padded = F.pad(rows, (0, 0, 0, self._missing(name, len(part)))).reshape(1, -1)
        gathered = self._model.ranks.all_gather(padded).view(-1, *part.shape[1:])
        return gathered[: self._height(name)]

    def _height(self, name: str) -> int | None:
        """Return the number of rows of a sharded table."""
        return self._model._heights.get(_module(name))

    def _missing(self, name: str, n: int) -> int:
        """Return the padding of this rank's n rows to the largest shard."""
        height = self._height(name)
        return 0 if height is None else -(-height // self._model.size) - n

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `LayerWeights`; x and the result are complete or sharded, depending on the style."""
        model = self._model
        style = model.styles.get(_module(f"{name}.weight"))
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
        if all(self._model.styles.get(name) == _STYLES["colwise"] for name in names):
            return self._own.linears(x, names)
        return super().linears(x, names)

    def rows(self, ids: Tensor, name: str) -> Tensor:
        """See `LayerWeights`; sums over ranks, with zeros for rows of further shards."""
        height = self._height(f"{name}.weight")
        if height is None:
            return self._own.rows(ids, name)
        cut = self._model.cut(f"{name}.weight", (height, 0))
        assert cut is not None, "tables are sharded"
        local_ids = ids - cut.first
        is_local = (local_ids >= 0) & (local_ids < cut.n)
        rows = self._own.rows(local_ids.clamp(0, cut.n - 1), name)
        return self._model.ranks.all_reduce(rows.masked_fill(~is_local[:, None], 0.0))


class SharedWeights(DividedWeights):
    """Target weights outside the layers, for a draft head on rank 0 that all ranks serve.

    send  sends (method, args, kwargs) to the same weights on further ranks
    """

    def __init__(
        self, weights: LayerWeights, model: TensorParallelModel, device: torch.device
    ) -> None:
        super().__init__(weights, model)
        self._device = device
        self.send: Callable[..., AbstractContextManager[None]] = lambda *_: nullcontext()

    def linear(self, x: Tensor, name: str) -> Tensor:
        return self._together("linear", x, name)

    def rows(self, ids: Tensor, name: str) -> Tensor:
        return self._together("rows", ids, name)

    def _together(self, method: str, x: Tensor, name: str) -> Tensor:
        with self.send("take_part", (method, name, tuple(x.shape), x.dtype), {}):
            compute = getattr(DividedWeights, method)
            result: Tensor = compute(self, self._model.ranks.broadcast(x), name)
        return result

    @torch.inference_mode()
    def take_part(self, method: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Compute this rank's part of an operation requested by rank 0."""
        x = self._model.ranks.broadcast(torch.empty(shape, dtype=dtype, device=self._device))
        getattr(DividedWeights, method)(self, x, name)


def _is_attention(name: str) -> bool:
    return "attn" in name or "attention" in name


@cache
def _module(name: str) -> str:
    """Return a tensor's module name in the notation of plans."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name.rpartition(".")[0])
