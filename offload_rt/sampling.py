"""From logits to the distribution of the next token. Temperature 0 gives a one-hot one, so no caller has a greedy branch."""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
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


def no_numbers() -> NumericsError:
    """The error of a model whose logits are not all numbers."""
    change = "check the checkpoint, or try --dtype float32"
    return NumericsError("the model's logits are not all numbers", change=change)


class Context(NamedTuple):
    """What stands before the nodes of a tree.

    tokens    of prompt and answer
    n_prompt  of them are the prompt's
    end_ids   tokens that end the answer
    """

    tokens: Sequence[int] = ()
    n_prompt: int = 0
    end_ids: AbstractSet[int] = frozenset()


def probs(
    logits: Tensor, params: SamplingParams, context: Context, paths: Sequence[Sequence[int]], out: Tensor | None = None
) -> Tensor:
    """The distribution of the next token at each of n nodes, rows summing to one.

    logits  (n, vocabulary), any float dtype
    paths   per node the tokens that come after the context; read only where `params.looks_back`
    out     where to write the result; None: to new memory
    Returns (n, vocabulary) float32, or float64 if the logits are.
    Raises NumericsError if a logit is not a number or plus infinity, or if all of a row are minus infinity; not on a card,
    which nobody waits for here: see `Runner.finish`.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    result = torch.empty_like(logits, dtype=wide) if out is None else out
    best = torch.empty_like(logits[:, 0], dtype=wide)
    is_whole = torch.ones_like(best, dtype=torch.bool)
    change = _Change(params, context, logits.device) if params.changes_logits else None

    def compute(rows: slice | Tensor, own: Sequence[Sequence[int]], n_first: int) -> None:
        some = logits[rows].to(wide)
        if change is not None:
            some = change(some, own)
        best[rows] = some.amax(-1)
        result[rows], is_whole[rows] = _probs_of(some, best[rows, None], params, n_first)

    for part in _parts(len(logits)):
        compute(part, paths[part], _N_FIRST)
    if logits.device.type == "cpu" and not bool(best.isfinite().all()):
        raise no_numbers()
    if params.temperature and (params.top_p or 1.0) < 1.0:  # the host waits only for top-p
        left = is_whole.logical_not().nonzero()[:, 0]
        for part in _parts(len(left)):
            own = [paths[row] for row in left[part].cpu().tolist()] if params.looks_back else []
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


class Logprob(NamedTuple):
    """The logarithm of a token's probability by the model alone, its place among all tokens, and its text if there is one."""

    logprob: float
    rank: int
    decoded_token: str | None = None


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], k: int, decode: Callable[[int], str] | None = None
) -> list[dict[int, Logprob]]:
    """Of each of n tokens, and of the k most probable ones at its place, best first; k = -1: of all.

    logits  (n, vocabulary), by which the tokens were predicted
    """
    (chosen,) = to_device([torch.tensor(tokens)], logits.device)
    found = []
    for part in _parts(len(logits)):
        logprobs = logits[part].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        own = logprobs.gather(-1, chosen[part, None])
        best = logprobs.topk(logits.shape[-1] if k < 0 else min(k, logits.shape[-1]))
        rank = (logprobs > own).sum(-1, keepdim=True) + 1
        ids, values = torch.cat((chosen[part, None], best.indices), -1), torch.cat((own, best.values), -1)
        for one, *row in zip(*(there.tolist() for there in to_host([rank, ids, values])), strict=True):
            ranks = (*one, *range(1, len(row[0])))
            # The token itself comes first, also where it is one of the most probable.
            found.append({id: Logprob(x, n, decode and decode(id)) for id, x, n in zip(*row, ranks, strict=True)})
    return found


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
    if not params.temperature:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0), True
    # The best logit becomes 0 first: then a temperature close to 0 can overflow only downwards, to probability 0.
    probs = torch.softmax((logits - best) / max(params.temperature, torch.finfo(logits.dtype).tiny), -1)
    return _filter(probs, params, n_first)


class _Change:
    """What `params` make of logits before the temperature, in vLLM's order; where transformers has the same, it is its own."""

    def __init__(self, params: SamplingParams, context: Context, device: torch.device) -> None:
        self._params, self._penalty, bias = params, params.repetition_penalty or 1.0, params.logit_bias or {}
        self._counts = bool(params.presence_penalty or params.frequency_penalty)
        answer = context.tokens[context.n_prompt :]
        self._n_early = params.min_tokens - len(answer)  # nodes less deep than this are no ends
        seen = set(context.tokens) if self._penalty != 1.0 else ()
        ends = context.end_ids if self._n_early > 0 else ()
        bad_tokens = [word[0] for word in params.bad_words_ids if len(word) == 1]
        self._bad_phrases = [word for word in params.bad_words_ids if len(word) > 1]
        self._recent = answer[-max(map(len, self._bad_phrases), default=1) :]
        ids = (seen, answer if self._counts else (), ends, bias, bad_tokens, params.allowed_token_ids)
        there = [torch.tensor([*one], dtype=torch.int64) for one in ids]
        there.append(torch.tensor([*bias.values()], dtype=torch.float64))
        placed = to_device(there, device)
        self._seen, self._answer, self._ends, self._biased, self._bad, self._allowed, self._bias = placed

    def __call__(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Other logits (n, vocabulary), for nodes with these paths."""
        own = torch.tensor([(row, token) for row, path in enumerate(paths) for token in path], dtype=torch.int64)
        early = torch.tensor([len(path) < self._n_early for path in paths], dtype=torch.bool)
        own, early = to_device([own.view(-1, 2), early], logits.device)
        if len(self._biased):
            logits = logits.index_add(1, self._biased, self._bias.to(logits.dtype).expand(len(logits), -1))
        if self._penalty != 1.0:
            penalised = torch.where(logits > 0, logits / self._penalty, logits * self._penalty)
            logits = torch.where(_occurrences(logits, self._seen, own) > 0, penalised, logits)
        if self._counts:
            n = _occurrences(logits, self._answer, own)
            logits = logits - self._params.frequency_penalty * n - self._params.presence_penalty * (n > 0)
        if len(self._ends):
            logits = torch.where(early[:, None], logits.index_fill(1, self._ends, -torch.inf), logits)
        return self._mask(logits, paths)

    def _mask(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Exclude tokens outside `allowed_token_ids` and last tokens of bad words."""
        if len(self._allowed):
            allowed = logits.index_select(1, self._allowed)
            logits = torch.full_like(logits, -torch.inf).index_copy_(1, self._allowed, allowed)
        if len(self._bad):
            logits = logits.index_fill(1, self._bad, -torch.inf)
        completed = [
            (row, phrase[-1])
            for row, path in enumerate(paths)
            for phrase in self._bad_phrases
            if _ends_with(self._recent, path, phrase[:-1])
        ]
        if completed:
            (cells,) = to_device([torch.tensor(completed, dtype=torch.int64)], logits.device)
            minus_inf = logits.new_full((), -torch.inf)
            logits = logits.index_put((cells[:, 0], cells[:, 1]), minus_inf)
        return logits


def _ends_with(answer: Sequence[int], path: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether the answer and a path behind it end with these tokens."""
    tail = [*answer, *path][-len(tokens) :]
    return tail == [*tokens]


def _occurrences(logits: Tensor, tokens: Tensor, own: Tensor) -> Tensor:
    """How often each token occurs for each row of the logits: in `tokens`, and in `own` (m, 2), pairs of row and token."""
    one = torch.ones_like(logits[0, 0])
    counts = torch.zeros_like(logits[0]).index_put_((tokens,), one, accumulate=True).repeat(len(logits), 1)
    return counts.index_put_((own[:, 0], own[:, 1]), one, accumulate=True)


def _filter(probs: Tensor, params: SamplingParams, n_first: int) -> tuple[Tensor, Tensor | bool]:
    keep = torch.ones_like(probs, dtype=torch.bool)
    is_whole: Tensor | bool = True
    if params.top_k is not None and params.top_k > 0:
        kth = probs.topk(min(params.top_k, probs.shape[-1])).values[:, -1:]
        keep &= probs >= kth
    if params.top_p is not None and params.top_p < 1.0:
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
