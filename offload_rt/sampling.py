"""From logits to the law a token is drawn from. Temperature 0 is a one-hot law, so no caller has a greedy branch."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from offload_rt.config import SamplingParams
from offload_rt.errors import NumericsError

# Places whose laws are computed together.
_PLACES = 64


def probs(logits: Tensor, params: SamplingParams, contexts: Sequence[Sequence[int]]) -> Tensor:
    """The law of the next token at each of n places, rows summing to one.

    logits    (n, vocabulary), any float dtype
    contexts  per place the tokens before it, which a penalty looks back on
    Returns (n, vocabulary) float32, or float64 if the logits are.
    Raises NumericsError if a logit is not a number or plus infinity, or if all of a place are minus infinity.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    laws, best = torch.empty_like(logits, dtype=wide), torch.empty_like(logits[:, :1], dtype=wide)
    # What it takes on the way, many times a law where it is sorted, is taken for a few places only.
    for first in range(0, len(logits), _PLACES):
        places = slice(first, first + _PLACES)
        some = logits[places].to(wide)
        if params.repetition_penalty != 1.0:
            some = _penalise(some, params.repetition_penalty, contexts[places])
        best[places] = some.amax(-1, keepdim=True)
        laws[places] = _law(some, best[places], params)
    if not bool(best.isfinite().all()):
        raise NumericsError(
            "the model's logits are not all numbers", change="check the checkpoint, or try --dtype float32"
        )
    return laws


def generator_on(device: torch.device, other: torch.Generator) -> torch.Generator:
    """A generator of a device, seeded by the next number of another one of the host; that one itself on the host."""
    if device.type == "cpu":
        return other
    seed = int(torch.randint(2**62, (), generator=other))
    return torch.Generator(device).manual_seed(seed)


def draw(law: Tensor, generator: torch.Generator) -> int:
    """One token from a law, (vocabulary,), by inverting its distribution function in float64."""
    cumulative = law.double().cumsum(0)
    at = torch.rand((), dtype=torch.float64, generator=generator) * cumulative[-1]
    # A draw of exactly the total, possible through rounding, must not fall behind the last token of positive probability.
    token = int(torch.searchsorted(cumulative, at, right=True))
    return min(token, int(law.nonzero()[-1]))


def _law(logits: Tensor, best: Tensor, params: SamplingParams) -> Tensor:
    """The law (n, vocabulary) of logits, of which `best` (n, 1) are the largest; anything where those are no numbers."""
    if params.temperature == 0.0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # The best logit becomes 0 first: then a temperature close to 0 can overflow only downwards, to probability 0.
    law = torch.softmax((logits - best) / max(params.temperature, torch.finfo(logits.dtype).tiny), -1)
    return _filter(law, params)


def _penalise(logits: Tensor, penalty: float, contexts: Sequence[Sequence[int]]) -> Tensor:
    seen = [set(context) for context in contexts]
    places = np.repeat(np.arange(len(seen)), [len(one) for one in seen])
    tokens = np.fromiter(chain.from_iterable(seen), dtype=np.int64)
    index = torch.from_numpy(np.stack((places, tokens))).to(logits.device)
    old = logits[index[0], index[1]]
    return logits.index_put((index[0], index[1]), torch.where(old > 0, old / penalty, old * penalty))


def _filter(law: Tensor, params: SamplingParams) -> Tensor:
    keep = torch.ones_like(law, dtype=torch.bool)
    if params.top_k:
        kth = law.topk(min(params.top_k, law.shape[-1])).values[:, -1:]
        keep &= law >= kth
    if params.top_p < 1.0:
        ordered, order = (law * keep).sort(-1, descending=True)
        ordered = ordered / ordered.sum(-1, keepdim=True)
        # A token stays while what stands before it has not reached top_p: the first always does.
        stays = ordered.cumsum(-1) - ordered < params.top_p
        keep &= torch.zeros_like(keep).scatter(-1, order, stays)
    if params.min_p:
        keep &= law >= params.min_p * law.max(-1, keepdim=True).values
    law = law * keep
    return law / law.sum(-1, keepdim=True)
