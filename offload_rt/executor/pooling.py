"""Embeddings: hidden states of a prompt, pooled and normalised."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(eq=False)
class Pooling:
    """Mean or last of the normed hidden states of a prompt.

    is_mean  mean of all tokens; otherwise the last token
    """

    is_mean: bool
    _sum: Tensor | None = field(default=None, init=False)
    _n: int = field(default=0, init=False)

    def restart(self) -> None:
        """Forget all rows."""
        self._sum = None
        self._n = 0

    def add(self, hidden: Tensor) -> None:
        """Add the next rows, (n, hidden_size)."""
        rows = hidden.float()
        if self.is_mean:
            self._sum = rows.sum(0) if self._sum is None else self._sum + rows.sum(0)
            self._n += len(rows)
        else:
            self._sum = rows[-1].clone()
            self._n = 1

    def vector(self) -> Tensor:
        """Return the embedding: (hidden_size,) float32 of length 1, on the host."""
        assert self._sum is not None, "the prompt was computed"
        mean = (self._sum / self._n).cpu()
        vector: Tensor = mean / mean.norm().clamp_min(1e-12)
        return vector
