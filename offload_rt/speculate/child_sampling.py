"""The draft's distributions, how the tokens of children are taken from them, and what the host reads of it, in one piece."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor

from offload_rt.errors import NumericsError

# Stands for the logarithm of 0. It is below that of every float32, so tokens of probability 0 come last, in random order.
_LOG_ZERO = -200.0


@dataclass(frozen=True)
class MostProbable:
    """The k most probable tokens of each row, and their probabilities at a temperature; their logits where it is None.

    Called with logits (rows, vocabulary of the draft), gives what `packed` gives.
    vocab_size  of the target, see `fitted`
    """

    k: int
    vocab_size: int
    temperature: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """By one sort; nothing is copied to the host."""
        values = fitted(logits, self.vocab_size)
        if self.temperature is not None:
            values = probs_of(values, self.temperature)
        best = values.topk(min(self.k, values.shape[-1]), dim=-1)
        return packed(best.indices, best.values)


def fitted(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits (rows, vocabulary) of the draft as float32, cut or filled up to the target's vocabulary."""
    missing = vocab_size - logits.shape[-1]
    whole = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
    return whole.float()


def packed(tokens: Tensor, values: Tensor) -> Tensor:
    """(rows, k) tokens and (rows, m) float32 values as (rows, k + m) int32; the first values are to tell of wrong logits."""
    return torch.cat((tokens.int(), values.view(torch.int32)), dim=-1)


def unpacked(both: Tensor, n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens (rows, k) int64 and values (rows, m) float32 of what `packed` gave, on the host.

    Raises NumericsError if a first value is not a number.
    """
    tokens, values = both[:, :n_tokens].long().numpy(), both[:, n_tokens:].view(torch.float32).numpy()
    if not np.isfinite(values[:, 0]).all():
        problem = "the draft model's logits are not all numbers"
        raise NumericsError(problem, change="check its checkpoint")
    return tokens, values


def probs_of(logits: Tensor, temperature: float) -> Tensor:
    """The draft's distributions (rows, vocabulary) float32, without the denormal numbers that a rule cannot divide by."""
    # The best logit becomes 0 first: then a temperature close to 0 can overflow only downwards, to probability 0.
    logits = logits - logits.amax(-1, keepdim=True)
    probs = torch.softmax(logits / max(temperature, torch.finfo(logits.dtype).tiny), -1)
    return probs.masked_fill_(probs < torch.finfo(probs.dtype).tiny, 0.0)


def without_replacement(probs: Tensor, n: int, generator: Generator, excluded: Tensor | None = None) -> Tensor:
    """Draw n different tokens from each distribution, by an exponential race (Vieira 2014; Chen et al. 2024).

    probs     (rows, vocabulary) float32
    excluded  (rows, vocabulary) bool: tokens that are not drawn
    Returns (rows, n); where a distribution is used up, the rest is drawn uniformly from the other tokens.
    """
    # Exponential noise of float32 can be 0, whose logarithm would win every race.
    noise = torch.empty_like(probs).exponential_(generator=generator).clamp_min_(torch.finfo(probs.dtype).tiny)
    keys = probs.log().clamp_min_(_LOG_ZERO).sub_(noise.log_())
    if excluded is not None:
        keys.masked_fill_(excluded, -torch.inf)
    return keys.topk(n, dim=-1).indices


def independent(probs: Tensor, n: int, generator: Generator) -> Tensor:
    """Draw n tokens from each distribution, (rows, n), with replacement; any tokens from one of no numbers."""
    return torch.multinomial(probs.nan_to_num(1.0), n, replacement=True, generator=generator)
