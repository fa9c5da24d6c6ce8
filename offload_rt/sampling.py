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
# Top-p orders so many of a row's tokens first. Where they do not reach its share, it orders the whole row.
_N_FIRST = 512


def probs(
    logits: Tensor,
    params: SamplingParams,
    tokens: Sequence[int],
    paths: Sequence[Sequence[int]],
    out: Tensor | None = None,
) -> Tensor:
    """The distribution of the next token at each of n nodes, rows summing to one.

    logits  (n, vocabulary), any float dtype
    tokens  that a penalty looks back on at every node
    paths   per node the tokens that come after these; read only where there is a penalty
    out     where to write the result; None: to new memory
    Returns (n, vocabulary) float32, or float64 if the logits are.
    Raises NumericsError if a logit is not a number or plus infinity, or if all of a row are minus infinity; not on a card,
    which nobody waits for here: see `Runner.finish`.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    result = torch.empty_like(logits, dtype=wide) if out is None else out
    best = torch.empty_like(logits[:, 0], dtype=wide)
    is_whole = torch.ones_like(best, dtype=torch.bool)
    has_penalty = params.repetition_penalty != 1.0
    looked_back_on = torch.tensor(sorted(set(tokens)) if has_penalty else [], dtype=torch.int64)
    (seen,) = to_device([looked_back_on], logits.device)

    def compute(rows: slice | Tensor, own: Sequence[Sequence[int]], n_first: int) -> None:
        some = logits[rows].to(wide)
        if has_penalty:
            some = _penalise(some, params.repetition_penalty, seen, own)
        best[rows] = some.amax(-1)
        result[rows], is_whole[rows] = _probs_of(some, best[rows, None], params, n_first)

    for part in _parts(len(logits)):
        compute(part, paths[part], _N_FIRST)
    if logits.device.type == "cpu" and not bool(best.isfinite().all()):
        change = "check the checkpoint, or try --dtype float32"
        raise NumericsError("the model's logits are not all numbers", change=change)
    left = is_whole.logical_not().nonzero()[:, 0] if params.top_p < 1.0 else seen[:0]  # the host waits only for top-p
    for part in _parts(len(left)):
        own = [paths[row] for row in left[part].cpu().tolist()] if has_penalty else []
        compute(left[part], own, logits.shape[-1])
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
    totals = torch.cat([logits[rows].float().logsumexp(-1, keepdim=True) for rows in _parts(len(logits))])
    return TopTokens(*to_host([best.indices, (best.values.float() - totals).exp()]))


def generator_on(device: torch.device, other: torch.Generator) -> torch.Generator:
    """A generator of a device, seeded by the next number of another one of the host; that one itself on the host."""
    if device.type == "cpu":
        return other
    seed = int(torch.randint(2**62, (), generator=other))
    return torch.Generator(device).manual_seed(seed)


def draw(probs: Tensor, generator: torch.Generator) -> list[int]:
    """A token from each distribution (n, vocabulary), by inverting its distribution function in float64; after one wait."""
    (uniforms,) = to_device([torch.rand(len(probs), dtype=torch.float64, generator=generator)], probs.device)
    tokens = []
    for rows in _parts(len(probs)):
        cumulative = probs[rows].double().cumsum(-1)
        at = torch.searchsorted(cumulative, uniforms[rows, None] * cumulative[:, -1:], right=True)[:, 0]
        # A draw of exactly the total, possible through rounding, must not fall behind the last token of positive probability.
        n_behind = (probs[rows] > 0).flip(-1).byte().argmax(-1)
        tokens.append(at.clamp_max_(probs.shape[-1] - 1 - n_behind))
    return [int(token) for token in to_host([torch.cat(tokens)])[0]]


def _parts(n: int) -> Iterator[slice]:
    return (slice(first, first + _N_ROWS) for first in range(0, n, _N_ROWS))


def _probs_of(logits: Tensor, best: Tensor, params: SamplingParams, n_first: int) -> tuple[Tensor, Tensor | bool]:
    """The distributions (n, vocabulary) of logits whose largest are `best` (n, 1); anything where those are not numbers.

    Returns with them where they are right: where top-p needs no more than a row's `n_first` most probable tokens; (n,) bool.
    """
    if params.temperature == 0.0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0), True
    # The best logit becomes 0 first: then a temperature close to 0 can overflow only downwards, to probability 0.
    probs = torch.softmax((logits - best) / max(params.temperature, torch.finfo(logits.dtype).tiny), -1)
    return _filter(probs, params, n_first)


def _penalise(logits: Tensor, penalty: float, seen: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
    """Penalise in every row the tokens `seen`, and those of the row's own path."""
    is_seen = torch.zeros_like(logits, dtype=torch.bool)
    is_seen[:, seen] = True
    own = [(row, token) for row, path in enumerate(paths) for token in path]
    rows, tokens = to_device([torch.tensor(own, dtype=torch.int64).view(-1, 2)], logits.device)[0].T
    is_seen[rows, tokens] = True
    return torch.where(is_seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _filter(probs: Tensor, params: SamplingParams, n_first: int) -> tuple[Tensor, Tensor | bool]:
    keep = torch.ones_like(probs, dtype=torch.bool)
    is_whole: Tensor | bool = True
    if params.top_k:
        kth = probs.topk(min(params.top_k, probs.shape[-1])).values[:, -1:]
        keep &= probs >= kth
    if params.top_p < 1.0:
        nucleus, is_whole = _nucleus(probs * keep, params.top_p, n_first)
        keep &= nucleus
    if params.min_p:
        keep &= probs >= params.min_p * probs.max(-1, keepdim=True).values
    probs = probs * keep
    return probs / probs.sum(-1, keepdim=True), is_whole


def _nucleus(probs: Tensor, top_p: float, n_first: int) -> tuple[Tensor, Tensor | bool]:
    """The most probable tokens of each row, (n, vocabulary) bool, until they have reached `top_p` of its sum.

    Of equally probable ones the first come first, as in a stable sort. The sums are of float64, so that they do not hang on how
    many tokens are ordered.

    Returns with them where the `n_first` most probable tokens reach it; (n,) bool.
    """
    has_all = n_first >= probs.shape[-1]
    ordered = (probs.sort(-1, descending=True) if has_all else probs.topk(n_first)).values.double()
    # A token stays while what stands before it has not reached top_p: the first always does.
    stays = ordered.cumsum(-1) - ordered < top_p * probs.sum(-1, keepdim=True, dtype=torch.float64)
    n_kept = stays.sum(-1, keepdim=True).clamp(min=1)
    least = ordered.gather(-1, n_kept - 1).to(probs.dtype)
    above, tied = probs > least, probs == least
    n_tied = n_kept - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= n_tied)), has_all or ~stays[:, -1]
