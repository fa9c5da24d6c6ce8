"""Weights as they are in the checkpoint: a matrix is its own bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from offload_rt.models.architecture import LayerWeights
from offload_rt.weights.formats import WeightFormat
from offload_rt.weights.layout import Layout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from offload_rt.ops.dequantize import BlockMatrix, CodedMatrix


def matches(quantization_config: object) -> bool:
    """Only where the config names none."""
    return quantization_config is None


class Format(WeightFormat):
    """Each tensor is stored as it is, in any dtype that a computation can be done in."""

    name = "dense"

    def view(self, layout: Layout, block: Tensor, dtype: torch.dtype) -> View:
        """Weights of another dtype are converted at each use."""
        return View(layout, block, dtype, self.is_batch_invariant)


class _Views(dict[str, "Tensor"]):
    """The tensors of a block, each from when it is first asked for: a mixture has hundreds."""

    def __init__(self, layout: Layout, block: Tensor) -> None:
        super().__init__()
        self._entries = layout.by_name
        self._block = block

    def __missing__(self, name: str) -> Tensor:
        self[name] = made = self._entries[name].view(self._block)
        return made

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self._entries else default


class View(LayerWeights):
    """The weights of one layer, read in place, see `WeightFormat.view`."""

    def __init__(
        self, layout: Layout, block: Tensor, dtype: torch.dtype, is_batch_invariant: bool = False
    ) -> None:
        self._tensors = _Views(layout, block)
        self.layout = layout
        self.block = block
        self._dtype = dtype
        self._is_batch_invariant = is_batch_invariant

    @property
    def dtype(self) -> torch.dtype:
        """See `LayerWeights.dtype`."""
        return self._dtype

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """See `LayerWeights.tensor`."""
        return self._tensors[name].to(dtype or self._dtype)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Multiply x (n, n_in) by `<name>.weight` (n_out, n_in) and add `<name>.bias` if it exists:
        (n, n_out).
        """
        from offload_rt.ops.linear import linear  # not at the top: a plan computes nothing

        return linear(x, self._weight(name), self._bias(name), self._is_batch_invariant)

    def _bias(self, name: str) -> Tensor | None:
        bias = self._tensors.get(f"{name}.bias")
        return None if bias is None else bias.to(self._dtype)

    def _weight(self, name: str) -> Tensor | CodedMatrix | BlockMatrix:
        """The matrix of a product (n_out, n_in), as `ops.linear` multiplies it."""
        return self._tensors[f"{name}.weight"]

    def linears(self, x: Tensor, names: Sequence[str]) -> tuple[Tensor, ...]:
        """See `LayerWeights.linears`; one product on a card, where each takes a launch, if the
        matrices lie back to back.
        """
        import torch
        from torch.nn.functional import linear

        weight = self.fused(names) if x.is_cuda else None
        bias = self.fused(names, "bias") if weight is not None else None
        if weight is None or (
            bias is None and any(f"{name}.bias" in self.layout.by_name for name in names)
        ):
            return tuple(self.linear(x, name) for name in names)
        widths = [len(self._tensors[f"{name}.weight"]) for name in names]
        return tuple(torch.split(linear(x, weight, bias), widths, dim=1))

    def fused(self, names: Sequence[str], part: str = "weight") -> Tensor | None:
        """See `LayerWeights.fused`, of the tensors `<name>.<part>`. What is converted is planned
        one by one.
        """
        entry = self.layout.fused([f"{name}.{part}" for name in names])
        return (
            entry.view(self.block)
            if entry is not None and entry.dtype.torch == self._dtype
            else None
        )

    def rows(self, ids: Tensor, name: str) -> Tensor:
        """Rows `ids` (n,) of the table `<name>.weight`, in the dtype of the computation: (n,
        width).
        """
        from torch.nn.functional import embedding

        return embedding(ids, self._tensors[f"{name}.weight"]).to(self._dtype)
