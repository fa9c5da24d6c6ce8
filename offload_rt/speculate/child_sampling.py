"""The draft's distributions, and how the tokens of sampled children are drawn from them."""

import torch
from torch import Generator, Tensor

# Stands for the logarithm of 0. It is below that of every float32, so tokens of probability 0 come last, in random order.
_LOG_ZERO = -200.0


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
