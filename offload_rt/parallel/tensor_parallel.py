"""Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053) by transformers' plan.

Each rank owns some attention heads and some rows of the MLP. Partial results are summed, or
gathered, where a complete tensor is needed. Every rank computes norms and elementwise operations on
complete hidden states. Matrices unknown to the plan are sharded by outputs and gathered. Sharded
tensors used outside of products are gathered before use. Each rank owns complete experts of a
mixture.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
from offload_rt.parallel.division import STYLES, Division, is_attention, module_of
from offload_rt.parallel.model_part import ModelPart, of_whole
from offload_rt.system.ranks import Ranks


@dataclass(frozen=True)
class TensorParallelModel(ModelPart):
    """A rank's shard of a model. Raises UnsupportedModelError if sharding is impossible.

    is_exact  shard all matrices by outputs, so that sums have the summation order of a single rank
    """

    size: int
    is_exact: bool
    ranks: Ranks = field(compare=False, repr=False)
    division: Division = field(compare=False, repr=False)

    @classmethod
    def for_rank(cls, whole: Architecture, ranks: Ranks, is_exact: bool) -> "TensorParallelModel":
        """Create the shard of `ranks.rank`."""
        sizes = {item.name: getattr(whole, item.name) for item in fields(Architecture)}
        division = Division.of_rank(whole, ranks.rank, ranks.size, is_exact)
        sizes |= {"whole": whole, "rank": ranks.rank, "size": ranks.size, "ranks": ranks}
        model = cls(**sizes, is_exact=is_exact, division=division)
        return replace(model, n_kv_heads=model.kv_shapes[0].n_heads)

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
        styles = self.division.styles.items()
        shapes = self.whole.kv_shapes
        if not any(is_attention(name) and style.gives_part for name, style in styles):
            return shapes
        return tuple(each._replace(n_heads=max(each.n_heads // self.size, 1)) for each in shapes)

    @property
    def mixture(self) -> Mixture | None:
        """Experts of this rank; `n_used` is the average per row, rounded up."""
        whole = self.whole.mixture
        if whole is None:
            return None
        n_used = min(-(-whole.n_used // self.size), len(self.division.experts))
        return Mixture(whole.layers, len(self.division.experts), n_used)

    def expert_names(self, i: int) -> Mapping[str, int | None]:
        """Return module names of this rank's experts, numbered from 0."""
        numbers = {expert: n for n, expert in enumerate(self.division.experts)} | {None: None}
        names = self.whole.expert_names(i).items()
        return {name: numbers[expert] for name, expert in names if expert in numbers}

    def layer_tensors(self, i: int) -> tuple[TensorShape, ...]:
        return self.division.shapes(self.whole.layer_tensors(i))

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        return self.division.shapes(self.whole.non_layer_tensors())

    def exchanges(self, i: int) -> list[tuple[bool, int]]:
        """Return the exchanges of layer i as (is a sum rather than a gather, width per rank)."""
        mixture = self.whole.mixture
        exchanged = list[tuple[bool, int]]()
        if mixture is not None and i in mixture.layers:
            exchanged.append((True, self.hidden_size * (mixture.n_used if self.is_exact else 1)))
        for name, shape in self.whole.layer_tensors(i):
            style = self.division.styles.get(module_of(name))
            if style is None or len(shape) == 1 or module_of(name) in self.division.gathered:
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
        return self.whole.embed(self.of_rank(weights), ids, row_inputs)

    def layer(self, i: int, weights: LayerWeights, x: Tensor, context: PassContext) -> Tensor:
        return self.whole.layer(i, self.of_rank(weights), x, context)

    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        return self.whole.head(self.of_rank(weights), x)

    def flops(self, i: int, n_rows: int, context: int) -> float:
        return self.whole.flops(i, n_rows, context) / self.size

    def scratch_nbytes(self, n_rows: int, n_logits: int, itemsize: int) -> int:
        """Return the complete model's activation bytes, plus gathered tensors."""
        names = self.division.gathered
        gathered = max(
            sum(math.prod(shape) for name, shape in layer if module_of(name) in names)
            for layer in {self.whole.layer_tensors(i) for i in range(self.n_layers)}
        )
        return self.whole.scratch_nbytes(n_rows, n_logits, itemsize) + gathered * itemsize


class DividedWeights(LayerWeights):
    """Weights of a rank; results are computed together with all ranks."""

    def __init__(self, weights: LayerWeights, model: TensorParallelModel) -> None:
        self._own = weights
        self._model = model
        self._division = model.division
        self.experts = weights.experts
        if owned := model.division.experts:
            self.expert_share = ExpertShare(owned, model.is_exact, model.ranks.all_reduce)

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
        if self._division.owners.get(all_experts, 0) is None:
            return self._own.tensor(all_experts, dtype)[int(expert)]
        part = self._own.tensor(name, dtype)
        style = self._division.styles.get(module_of(name))
        if style is None or style.gives_part:
            return part
        rows = part.flatten(1) if part.dim() > 1 else part[:, None]
        padded = F.pad(rows, (0, 0, 0, self._missing(name, len(part)))).reshape(1, -1)
        gathered = self._model.ranks.all_gather(padded).view(-1, *part.shape[1:])
        return gathered[: self._height(name)]

    def _height(self, name: str) -> int | None:
        return self._division.heights.get(module_of(name))

    def _missing(self, name: str, n: int) -> int:
        """Return the padding of this rank's n rows to the largest shard."""
        height = self._height(name)
        return 0 if height is None else -(-height // self._division.size) - n

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `LayerWeights`; x and the result are complete or sharded, depending on the style."""
        model = self._model
        style = self._division.styles.get(module_of(f"{name}.weight"))
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
        if all(self._division.styles.get(name) == STYLES["colwise"] for name in names):
            return self._own.linears(x, names)
        return super().linears(x, names)

    def rows(self, ids: Tensor, name: str) -> Tensor:
        """See `LayerWeights`; sums over ranks, with zeros for rows of further shards."""
        height = self._height(f"{name}.weight")
        if height is None:
            return self._own.rows(ids, name)
        cut = self._division.cut(f"{name}.weight", (height, 0))
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
