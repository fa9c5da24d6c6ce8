"""Division of a model's tensors among ranks, by transformers' tensor-parallel plan.

Matrices unknown to the plan are sharded by outputs and gathered.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, Self

from offload_rt.errors import UnsupportedModelError
from offload_rt.models.architecture import Architecture
from offload_rt.models.layers import TensorShape

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


STYLES = {
    "colwise": Style(0, gives_part=True),
    "colwise_gather_output": Style(0),
    "rowwise": Style(1, takes_part=True),
    "rowwise_split_input": Style(1),
}
_TABLE = Style(0, is_table=True)
_GATHERED = STYLES["colwise_gather_output"]
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
class Division:
    """A rank's shard of every tensor of a model.

    is_exact  shard all matrices by outputs, so that sums have the summation order of a single rank
    experts   experts of the rank
    styles    sharding by module name, without the layer prefix, with * for numbers
    owners    expert of each module with an expert's tensors; None for tensors of all experts
    heights   rows of sharded tables
    gathered  modules whose outputs are gathered although the plan does not name them
    """

    whole: Architecture
    rank: int
    size: int
    is_exact: bool
    experts: range
    styles: dict[str, Style] = field(default_factory=dict)
    owners: dict[str, int | None] = field(default_factory=dict)
    heights: dict[str, int] = field(default_factory=dict)
    gathered: set[str] = field(default_factory=set)

    @classmethod
    def of_rank(cls, whole: Architecture, rank: int, size: int, is_exact: bool) -> Self:
        """Divide a model. Raises UnsupportedModelError if that is impossible."""
        n_experts = whole.mixture.n_experts if whole.mixture else 0
        experts = range(n_experts * rank // size, n_experts * (rank + 1) // size)
        division = cls(whole, rank, size, is_exact, experts)
        if 0 < n_experts < size:
            raise division._refusal(f"its mixtures have {n_experts} experts")
        division._read_plan()
        for i in range(whole.n_layers):
            division.shapes(whole.layer_tensors(i))
        return division

    def _read_plan(self) -> None:
        names = self.whole.tp_plan.items()
        plan = {name.removeprefix(_LAYERS): style for name, style in names if _LAYERS in name}
        layers = [self.whole.layer_tensors(i) for i in range(self.whole.n_layers)]
        mixture = self.whole.mixture
        for i in mixture.layers if mixture else ():
            self.owners.update(self.whole.expert_names(i))
        n_heads = self._n_heads(layers, plan)
        n_weights = max(sum(math.prod(shape) for _, shape in layer) for layer in layers)
        for name, shape in sorted({tensor for layer in layers for tensor in layer}):
            if name in self.owners or name.rpartition(".")[0] in self.owners:
                continue
            style = self._style(name, shape, plan, n_heads)
            if style is None and len(shape) > 1 and not (mixture and shape[0] == mixture.n_experts):
                # A row per expert identifies the router, which also predicts the next layer's
                # experts: replicate it.
                least = _LEAST_SHARE if shape[0] % self.size == 0 else _UNEVEN_SHARE
                if math.prod(shape) > least * n_weights:
                    style = _GATHERED
                    self.gathered.update({module_of(name)} - plan.keys())
            if style is not None:
                self.styles[module_of(name)] = style
        for name, shape in self.whole.non_layer_tensors():
            is_large = math.prod(shape) > _LEAST_SHARE * n_weights
            if is_large and len(shape) == 2 and shape[0] >= self.size**2:
                self.styles[module_of(name)] = _TABLE
                self.heights[module_of(name)] = shape[0]

    def _style(
        self, name: str, shape: tuple[int, ...], plan: Mapping[str, str], n_heads: set[int]
    ) -> Style | None:
        module = module_of(name)
        style = STYLES.get(plan.get(module, ""))
        if style not in (None, _GATHERED) and (n_heads or not is_attention(name)):
            return style._replace(dim=0) if self.is_exact else style
        owner = module if len(shape) == 1 else module.rpartition(".")[0]
        is_of_heads = shape[:1] != () and shape[0] in n_heads  # sinks and per-head norms
        is_cut = is_of_heads and plan.get(f"{owner}.q_proj") == "colwise"
        return STYLES["colwise"] if is_cut else None

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
            if len(shape) == 2 and is_attention(name)
            if plan.get(module_of(name), "").startswith("rowwise")
        }
        is_shared = len(counts) == 1 and all(self.size % n == 0 for n in counts)
        is_even = is_shared or not any(n % self.size for n in counts)
        if any(n % self.size for n in n_heads_found) or not is_even:
            return set()
        return n_heads_found | counts

    def _refusal(self, why: str) -> UnsupportedModelError:
        problem = f"a model of type {self.whole.family} cannot be divided among {self.size} ranks"
        return UnsupportedModelError(f"{problem}: {why}", change="run it without torchrun")

    def cut(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        """Return this rank's shard of a tensor; None for a replicated tensor."""
        if self.owners.get(name, 0) is None:
            return Cut(0, self.experts.start, len(self.experts))
        style = self.styles.get(module_of(name))
        if style is None or (style.dim == 1 and len(shape) == 1):
            return None
        at = style.dim
        n = shape[at]
        if style.is_table:
            n_part = -(-n // self.size)
            return Cut(0, n_part * self.rank, min(n_part, n - n_part * self.rank))
        heads = self.whole.kv_shapes[0]
        sizes = (heads.n_heads * heads.k_dim, heads.n_heads * heads.v_dim)
        is_shared = style.gives_part and heads.n_heads % self.size and n in sizes
        if is_attention(name) and is_shared:  # several ranks own the same KV head
            n_part = n // heads.n_heads
            return Cut(0, heads.n_heads * self.rank // self.size * n_part, n_part)
        if n % self.size:
            raise self._refusal(f"{name!r} has {n} {'inputs' if at else 'outputs'}")
        return Cut(at, n // self.size * self.rank, n // self.size)

    def cut_by_outputs(self, name: str) -> None:
        """Shard a matrix by outputs and gather them, regardless of the plan."""
        self.styles[module_of(name)] = self.styles[module_of(name)]._replace(dim=0)

    def shapes(self, tensors: Sequence[TensorShape]) -> tuple[TensorShape, ...]:
        """Return the shapes of this rank's shards, without tensors of further ranks."""
        owned = (tensor for tensor in tensors if self.has(tensor.name))
        cuts = ((tensor, self.cut(*tensor)) for tensor in owned)
        return tuple(
            each._replace(shape=cut.shape(each.shape)) if cut else each for each, cut in cuts
        )

    def has(self, name: str) -> bool:
        """Return whether this rank owns a tensor; the first rank owns biases of summed outputs."""
        style = self.styles.get(module_of(name))
        owner = self.owners.get(name.rpartition(".")[0])
        if owner is not None:
            return owner in self.experts
        return self.rank == 0 or not name.endswith(".bias") or style is None or style.dim == 0


def is_attention(name: str) -> bool:
    """Return whether a tensor belongs to attention."""
    return "attn" in name or "attention" in name


@cache
def module_of(name: str) -> str:
    """Return a tensor's module name in the notation of plans."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name.rpartition(".")[0])
