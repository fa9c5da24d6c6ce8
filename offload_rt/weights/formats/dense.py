"""Weights as they are in the checkpoint: a matrix is its own bytes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from offload_rt.weights.layout import Layout


class View:
    """The weights of one layer, used where they lie.

    block  (>= layout.nbytes,) uint8, alive and unchanged while the view is used
    dtype  of the computation; weights of another dtype are converted at each use
    """

    def __init__(self, layout: Layout, block: Tensor, dtype: torch.dtype) -> None:
        self._tensors = layout.views(block)
        self._dtype = dtype

    def vector(self, name: str) -> Tensor:
        """The tensor `<name>.weight`, in the dtype of the computation."""
        return self._tensors[f"{name}.weight"].to(self._dtype)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """x (n, n_in) times `<name>.weight` (n_out, n_in) transposed, plus `<name>.bias` where there is one: (n, n_out)."""
        bias = self._tensors.get(f"{name}.bias")
        weight = self._tensors[f"{name}.weight"].to(self._dtype)
        return F.linear(x, weight, None if bias is None else bias.to(self._dtype))

    def rows(self, ids: Tensor, name: str) -> Tensor:
        """Rows `ids` (n,) of the table `<name>.weight`, in the dtype of the computation: (n, width)."""
        return F.embedding(ids, self._tensors[f"{name}.weight"]).to(self._dtype)
