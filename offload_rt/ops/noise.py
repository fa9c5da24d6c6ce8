"""Stateless noise as a function of seed, position and token, with equal bits on every device."""

import math

import torch
from torch import Tensor

from offload_rt.ops.transfer import to_device

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_N_ROUNDS = 10
# Values per batch, because temporary tensors need twelve times their size. Rows computed ahead for
# small vocabularies, where eight rows take as long as a single row.
_N_VALUES = 1 << 18
_N_AHEAD = 16
# Bits of sqrt(1/2) in float64, the smallest mantissa of `_minus_log`; number of series terms.
_ROOT_HALF = 0x3FE6A09E667F3BCD
_MANTISSA_BITS = 52
_N_TERMS = 8


def philox(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """Compute Philox4x32-10 (Salmon et al. 2011), four 32-bit words per counter.

    counter  (4, ...) int64, each word below 2**32
    key      two words
    Returns (4, ...) int64, each word below 2**32.
    """
    evens = counter[0::2]
    odds = counter[1::2]
    shape = (2, *[1] * (counter.ndim - 1))
    pairs = [*zip(key, _WEYL, strict=True)]
    keys = [(word + n * step) & _MASK for n in range(_N_ROUNDS) for word, step in pairs]
    constants = [torch.tensor(_MULTIPLIERS), torch.tensor(keys)]
    multipliers, mixers = (x.view(-1, *shape) for x in to_device(constants, counter.device))
    for mixed in mixers:
        # int64 keeps all 64 bits of the product, possibly as a negative number.
        products = evens * multipliers[0]
        evens = (products >> 32).flip(0).bitwise_xor_(odds).bitwise_xor_(mixed).bitwise_and_(_MASK)
        odds = products.bitwise_and_(_MASK).flip(0)
    return torch.stack((evens, odds), 1).flatten(0, 1)


def exponentials(seed: int, first: int, n: int, n_tokens: int, device: torch.device) -> Tensor:
    """Return positive exponential noise (n, n_tokens) float32 at n positions from `first`.

    seed  below 2**64
    The token with the maximum of probability / noise is a sample of the distribution.
    The negative logarithm of the noise is Gumbel noise.
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
    """Compute -log(x) of float64 in (0, 1) with relative error 1e-10.

    Uses correctly rounded operations only, for equal bits with every library.
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
    """Noise of a sequence. Rows are cached, because trees of consecutive passes overlap."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._first = 0
        self._rows = torch.empty(0, 0)

    def at(self, first: int, n: int, n_tokens: int, device: torch.device) -> Tensor:
        """Return `exponentials` at n positions from `first`; drop earlier rows."""
        known = self._rows[max(first - self._first, 0) :]
        if first < self._first or known.shape[1] != n_tokens or known.device != device:
            known = torch.empty(0, n_tokens, device=device)
        n_known = len(known)
        if n_known < n:
            n_more = max(n - n_known, min(_N_VALUES // n_tokens, _N_AHEAD))
            more = exponentials(self._seed, first + n_known, n_more, n_tokens, device)
            known = torch.cat((known, more))
        self._first = first
        self._rows = known
        return known[:n]
