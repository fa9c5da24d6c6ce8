"""Embeddings: hidden states of a prompt, pooled and normalised."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(eq=False)
class Pooling:
    """Mean or last of the normed hidden states of a prompt.

    is_mean  mean of all tokens; otherwise the last token
    """

    is_mean: bool
    _sum: Tensor | None = field(default=None, init=False)

    def restart(self) -> None:
        """Forget all rows."""
        self._sum = None

    def add(self, hidden: Tensor) -> None:
        """Add the next rows, (n, hidden_size)."""
        rows = hidden.float()
        if self._sum is None or not self.is_mean:
            self._sum = torch.zeros_like(rows[0])
        self._sum += rows.sum(0) if self.is_mean else rows[-1]

    def vector(self) -> Tensor:
        """Return the embedding: (hidden_size,) float32 of length 1, on the host."""
        assert self._sum is not None, "the prompt was computed"
        # The length of a sum is that of its mean.
        return F.normalize(self._sum.cpu(), dim=0)
