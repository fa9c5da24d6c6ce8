"""From logits to the distribution of the next token. Temperature 0 gives a one-hot one, so no caller has a greedy branch."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offload_rt.config import SamplingParams
from offload_rt.errors import NumericsError
from offload_rt.ops.transfer import to_device, to_host

# Rows whose distributions are computed together: what it takes on the way is many times a distribution.
_N_ROWS = 64


def probs(logits: Tensor, params: SamplingParams, tokens: Sequence[int], paths: Sequence[Sequence[int]]) -> Tensor:
    """The distribution of the next token at each of n nodes, rows summing to one.

    logits  (n, vocabulary), any float dtype
    tokens  that a penalty looks back on at every node
    paths   per node the tokens that come after these; read only where there is a penalty
    Returns (n, vocabulary) float32, or float64 if the logits are.
    Raises NumericsError if a logit is not a number or plus infinity, or if all of a row are minus infinity; not on a card,
    which nobody waits for here: see `Runner.finish`.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    result, best = torch.empty_like(logits, dtype=wide), torch.empty_like(logits[:, :1], dtype=wide)
    has_penalty = params.repetition_penalty != 1.0
    looked_back_on = torch.tensor(sorted(set(tokens)) if has_penalty else [], dtype=torch.int64)
    (seen,) = to_device([looked_back_on], logits.device)
    for rows in _parts(logits):
        some = logits[rows].to(wide)
        if has_penalty:
            some = _penalise(some, params.repetition_penalty, seen, paths[rows])
        best[rows] = some.amax(-1, keepdim=True)
        result[rows] = _probs_of(some, best[rows], params)
    if logits.device.type == "cpu" and not bool(best.isfinite().all()):
        change = "check the checkpoint, or try --dtype float32"
        raise NumericsError("the model's logits are not all numbers", change=change)
    return result


class TopTokens(NamedTuple):
    """The most probable tokens after each of n nodes, the best first, on the CPU.

    tokens  (n, k) int64
    probs   (n, k) float32, by the model alone: no temperature, filter or penalty is applied
    """

    tokens: Tensor
    probs: Tensor


def top_tokens(logits: Tensor, k: int) -> TopTokens | None:
    """The k most probable tokens after each node, from logits (n, vocabulary); None for k = 0."""
    if k == 0:
        return None
    best = logits.topk(min(k, logits.shape[-1]), dim=-1)
    totals = torch.cat([logits[rows].float().logsumexp(-1, keepdim=True) for rows in _parts(logits)])
    return TopTokens(*to_host([best.indices, (best.values.float() - totals).exp()]))


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


def _parts(logits: Tensor) -> Iterator[slice]:
    return (slice(first, first + _N_ROWS) for first in range(0, len(logits), _N_ROWS))


def _probs_of(logits: Tensor, best: Tensor, params: SamplingParams) -> Tensor:
    """The distributions (n, vocabulary) of logits whose largest are `best` (n, 1); anything where those are not numbers."""
    if params.temperature == 0.0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # The best logit becomes 0 first: then a temperature close to 0 can overflow only downwards, to probability 0.
    probs = torch.softmax((logits - best) / max(params.temperature, torch.finfo(logits.dtype).tiny), -1)
    return _filter(probs, params)


def _penalise(logits: Tensor, penalty: float, seen: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
    """Penalise in every row the tokens `seen`, and those of the row's own path."""
    is_seen = torch.zeros_like(logits, dtype=torch.bool)
    is_seen[:, seen] = True
    own = [(row, token) for row, path in enumerate(paths) for token in path]
    rows, tokens = to_device([torch.tensor(own, dtype=torch.int64).view(-1, 2)], logits.device)[0].T
    is_seen[rows, tokens] = True
    return torch.where(is_seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


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
