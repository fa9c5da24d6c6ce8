"""From logits to the distribution of the next token. Temperature 0 gives a one-hot one, so no caller has a greedy branch."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from offload_rt.config import SamplingParams
from offload_rt.errors import NumericsError

# Places whose distributions are computed together.
_PLACES = 64


def probs(logits: Tensor, params: SamplingParams, contexts: Sequence[Sequence[int]]) -> Tensor:
    """The distribution of the next token at each of n places, rows summing to one.

    logits    (n, vocabulary), any float dtype
    contexts  per place the tokens before it, which a penalty looks back on
    Returns (n, vocabulary) float32, or float64 if the logits are.
    Raises NumericsError if a logit is not a number or plus infinity, or if all of a place are minus infinity.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    result, best = torch.empty_like(logits, dtype=wide), torch.empty_like(logits[:, :1], dtype=wide)
    # What it takes on the way, many times a distribution where it is sorted, is taken for a few places only.
    for first in range(0, len(logits), _PLACES):
        places = slice(first, first + _PLACES)
        some = logits[places].to(wide)
        if params.repetition_penalty != 1.0:
            some = _penalise(some, params.repetition_penalty, contexts[places])
        best[places] = some.amax(-1, keepdim=True)
        result[places] = _probs_of(some, best[places], params)
    if not bool(best.isfinite().all()):
        raise NumericsError(
            "the model's logits are not all numbers", change="check the checkpoint, or try --dtype float32"
        )
    return result


def generator_on(device: torch.device, other: torch.Generator) -> torch.Generator:
    """A generator of a device, seeded by the next number of another one of the host; that one itself on the host."""
    if device.type == "cpu":
        return other
    seed = int(torch.randint(2**62, (), generator=other))
    return torch.Generator(device).manual_seed(seed)


def draw(probs: Tensor, generator: torch.Generator) -> int:
    """One token from a distribution, (vocabulary,), by inverting its distribution function in float64."""
    cumulative = probs.double().cumsum(0)
    at = torch.rand((), dtype=torch.float64, generator=generator) * cumulative[-1]
    # A draw of exactly the total, possible through rounding, must not fall behind the last token of positive probability.
    token = int(torch.searchsorted(cumulative, at, right=True))
    return min(token, int(probs.nonzero()[-1]))


def _probs_of(logits: Tensor, best: Tensor, params: SamplingParams) -> Tensor:
    """The distributions (n, vocabulary) of logits whose largest are `best` (n, 1); anything where those are not numbers."""
    if params.temperature == 0.0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # The best logit becomes 0 first: then a temperature close to 0 can overflow only downwards, to probability 0.
    probs = torch.softmax((logits - best) / max(params.temperature, torch.finfo(logits.dtype).tiny), -1)
    return _filter(probs, params)


def _penalise(logits: Tensor, penalty: float, contexts: Sequence[Sequence[int]]) -> Tensor:
    seen = [set(context) for context in contexts]
    places = np.repeat(np.arange(len(seen)), [len(one) for one in seen])
    tokens = np.fromiter(chain.from_iterable(seen), dtype=np.int64)
    index = torch.from_numpy(np.stack((places, tokens))).to(logits.device)
    old = logits[index[0], index[1]]
    return logits.index_put((index[0], index[1]), torch.where(old > 0, old / penalty, old * penalty))


def _filter(probs: Tensor, params: SamplingParams) -> Tensor:
    keep = torch.ones_like(probs, dtype=torch.bool)
    if params.top_k:
        kth = probs.topk(min(params.top_k, probs.shape[-1])).values[:, -1:]
        keep &= probs >= kth
    if params.top_p < 1.0:
        ordered, order = (probs * keep).sort(-1, descending=True)
        ordered = ordered / ordered.sum(-1, keepdim=True)
        # A token stays while what stands before it has not reached top_p: the first always does.
        stays = ordered.cumsum(-1) - ordered < params.top_p
        keep &= torch.zeros_like(keep).scatter(-1, order, stays)
    if params.min_p:
        keep &= probs >= params.min_p * probs.max(-1, keepdim=True).values
    probs = probs * keep
    return probs / probs.sum(-1, keepdim=True)
