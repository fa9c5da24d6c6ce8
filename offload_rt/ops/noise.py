"""Noise that is a function of a seed, a position and a token alone: the same bits on every device,
and no state.
"""

import math

import torch
from torch import Tensor

from offload_rt.ops.transfer import to_device

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_N_ROUNDS = 10
# Values made together: what they take on the way is a dozen times their size. And rows made ahead
# of their use, where so many values allow it: one row of a small vocabulary takes as long as eight.
_N_VALUES = 1 << 18
_N_AHEAD = 16
# sqrt(1/2) as the bits of a float64, where the mantissas of `_minus_log` begin; and the terms of
# its series.
_ROOT_HALF = 0x3FE6A09E667F3BCD
_MANTISSA_BITS = 52
_N_TERMS = 8


def philox(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """Philox4x32-10 (Salmon et al. 2011), four words of 32 bits from each counter.

    counter  (4, ...) int64, each word below 2**32
    key      two words
    Returns (4, ...) int64, each word below 2**32.
    """
    evens = counter[0::2]
    odds = counter[1::2]
    shape = (2, *[1] * (counter.ndim - 1))
    keys = [
        (word + n * step) & _MASK
        for n in range(_N_ROUNDS)
        for word, step in zip(key, _WEYL, strict=True)
    ]
    multipliers, mixers = to_device(
        [torch.tensor(_MULTIPLIERS), torch.tensor(keys)], counter.device
    )
    multipliers = multipliers.view(shape)
    for mixed in mixers.view(_N_ROUNDS, *shape):
        # A product of 64 bits, of which int64 keeps all, if as a negative number.
        products = evens * multipliers
        evens = (products >> 32).flip(0).bitwise_xor_(odds).bitwise_xor_(mixed).bitwise_and_(_MASK)
        odds = products.bitwise_and_(_MASK).flip(0)
    return torch.stack((evens, odds), 1).flatten(0, 1)


def exponentials(seed: int, first: int, n: int, n_tokens: int, device: torch.device) -> Tensor:
    """Noise of the exponential distribution at n positions from `first` on, (n, n_tokens) float32,
    all of it above 0.

    seed   below 2**64 The token with the largest probability / noise is a draw from a distribution;
           minus the logarithm is Gumbel noise.
    """
    n_blocks = -(-n_tokens // 4)
    key = (seed & _MASK, seed >> 32)
    n_rows = max(_N_VALUES // n_tokens, 1)
    blocks = torch.arange(n_blocks, device=device)
    rows = torch.empty(n, n_tokens, device=device)
    for start in range(0, n, n_rows):
        positions = torch.arange(first + start, first + min(start + n_rows, n), device=device)
        counter = torch.zeros(4, len(positions), n_blocks, dtype=torch.int64, device=device)
        counter[0], counter[1] = blocks, positions[:, None]
        words = philox(counter, key).permute(1, 2, 0).flatten(1)[:, :n_tokens]
        rows[start : start + n_rows] = _minus_log(words.double().add_(0.5).mul_(2.0**-32))
    return rows


def _minus_log(x: Tensor) -> Tensor:
    """-log(x) of float64 in (0, 1), to 1e-10 of itself, by correctly rounded operations alone: no
    library decides a bit.
    """
    bits = x.view(torch.int64)
    exponent = (bits - _ROOT_HALF) >> _MANTISSA_BITS
    # from sqrt(1/2) to sqrt(2)
    mantissa = (bits - (exponent << _MANTISSA_BITS)).view(torch.float64)
    t = (mantissa - 1).div_(mantissa + 1)
    squared = t * t
    series = torch.full_like(t, 1 / (2 * _N_TERMS - 1))
    for n in reversed(range(_N_TERMS - 1)):
        series.mul_(squared).add_(1 / (2 * n + 1))
    return series.mul_(t).mul_(-2).sub_(exponent.double().mul_(math.log(2)))


class NoiseRows:
    """The noise of one sequence. Rows are kept from one call to the next, for the trees of two
    passes overlap.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._first, self._rows = seed, 0, torch.empty(0, 0)

    def at(self, first: int, n: int, n_tokens: int, device: torch.device) -> Tensor:
        """`exponentials` at n positions from `first` on; rows before them are forgotten."""
        known = self._rows[max(first - self._first, 0) :]
        if first < self._first or known.shape[1] != n_tokens or known.device != device:
            known = torch.empty(0, n_tokens, device=device)
        n_known = len(known)
        if n_known < n:
            n_more = max(n - n_known, min(_N_VALUES // n_tokens, _N_AHEAD))
            known = torch.cat(
                (known, exponentials(self._seed, first + n_known, n_more, n_tokens, device))
            )
        self._first = first
        self._rows = known
        return known[:n]
