"""Draft distributions, sampling of child tokens, and their packed copy to the host."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor

from offload_rt import ops
from offload_rt.errors import NumericsError

# Replaces log(0). Smaller than the logarithm of any float32, so zero-probability tokens rank last.
_LOG_ZERO = -200.0


@dataclass(frozen=True)
class MostProbable:
    """Select the k most probable tokens per row.

    Maps logits (rows, draft vocabulary) to the layout of `packed`.
    vocab_size   vocabulary of the target, see `fitted`
    temperature  temperature of the returned probabilities; None to return logits
    """

    k: int
    vocab_size: int
    temperature: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Select by a single top-k on the device, without a copy to the host."""
        k = min(self.k, self.vocab_size)
        if logits.shape[-1] < k:
            logits = fitted(logits, self.vocab_size)
        values, tokens = ops.top(logits[:, : self.vocab_size], k, self.temperature)
        return packed(tokens, values)


def fitted(logits: Tensor, vocab_size: int) -> Tensor:
    """Convert draft logits (rows, vocabulary) to float32; cut or pad to the target's vocabulary."""
    missing = vocab_size - logits.shape[-1]
    whole = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
    return whole.float()


def packed(tokens: Tensor, values: Tensor) -> Tensor:
    """Concatenate tokens (rows, k) and float32 values (rows, m) to int32 (rows, k + m).

    The first value of each row reveals NaN or Inf logits.
    """
    return torch.cat((tokens.int(), values.view(torch.int32)), dim=-1)


def unpacked(both: Tensor, n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Split the output of `packed` into int64 tokens (rows, k) and float32 values (rows, m).

    Expects a host tensor. Raises NumericsError if a first value is NaN or Inf.
    """
    tokens = both[:, :n_tokens].long().numpy()
    values = both[:, n_tokens:].view(torch.float32).numpy()
    if not np.isfinite(values[:, 0]).all():
        problem = "the draft model's logits contain NaN or Inf"
        raise NumericsError(problem, change="check the draft checkpoint")
    return tokens, values


def without_replacement(
    probs: Tensor, n: int, generator: Generator, excluded: Tensor | None = None
) -> Tensor:
    """Draw n distinct tokens per distribution by an exponential race (Vieira 2014).

    Used for tree drafting by Chen et al. 2024.
    probs     (rows, vocabulary) float32
    excluded  (rows, vocabulary) bool, tokens never drawn
    Returns (rows, n). Once a distribution is exhausted, remaining tokens are drawn uniformly.
    """
    # float32 exponential noise can be 0; its logarithm would win every race.
    noise = torch.empty_like(probs).exponential_(generator=generator)
    noise.clamp_min_(torch.finfo(probs.dtype).tiny)
    keys = probs.log().clamp_min_(_LOG_ZERO).sub_(noise.log_())
    if excluded is not None:
        keys.masked_fill_(excluded, -torch.inf)
    return keys.topk(n, dim=-1).indices


def independent(probs: Tensor, n: int, generator: Generator) -> Tensor:
    """Draw n tokens per distribution with replacement, (rows, n); any tokens for NaN rows."""
    return torch.multinomial(probs.nan_to_num(1.0), n, replacement=True, generator=generator)
