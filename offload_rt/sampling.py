"""Distributions of the next token and greedy choices, from the logits of a tree."""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.bad_words import BadWords
from offload_rt.errors import NumericsError
from offload_rt.ops import cpu, layer_cpu
from offload_rt.ops.transfer import to_device, to_host
from offload_rt.sampling_params import SamplingParams

# Rows computed together; intermediate results need a multiple of the memory of a distribution.
_N_ROWS = 64
# Tokens per row that top-p sorts first. If their mass is too small, the complete row is sorted.
_N_FIRST = 512


def no_numbers() -> NumericsError:
    """Return the error for logits with NaN or Inf."""
    change = "check the checkpoint, or try --dtype=float32"
    return NumericsError("the model's logits contain NaN or Inf", change=change)


class Context(NamedTuple):
    """Text before the nodes of a tree: prompt and answer.

    bad_words  `bad_words_ids` of the parameters, and the position of the answer in them
    """

    tokens: Sequence[int] = ()
    n_prompt: int = 0
    end_ids: AbstractSet[int] = frozenset()
    bad_words: BadWords = BadWords()


@dataclass(eq=False, repr=False)
class NodeProbs:
    """Distributions of the next token after the nodes of a tree, computed for the nodes read.

    logits  (n, vocabulary), any float dtype; `Runner.finish` has found neither NaN nor Inf
    paths   tokens after the context for each node; only read if `params.looks_back`
    masks   (n, words) int32 allowed tokens of a grammar, see `Grammar.masks_after`; None for all
    out     (n, vocabulary) memory of the distributions; None to allocate
    """

    logits: Tensor
    params: SamplingParams
    context: Context
    paths: Sequence[Sequence[int]]
    out: Tensor | None = None
    masks: Tensor | None = None

    def __post_init__(self) -> None:
        self.device = self.logits.device
        self._wide = torch.promote_types(self.logits.dtype, torch.float32)
        is_changed = self.params.changes_logits
        self._change = _Change(self.params, self.context, self.device) if is_changed else None

    @property
    def shape(self) -> torch.Size:
        """Number of nodes, and size of the vocabulary."""
        return self.logits.shape

    def best(self, nodes: slice) -> list[int]:
        """Return the most probable token after each node: the choice at temperature 0.

        Raises NumericsError if a node on a CPU has no possible token.
        """
        is_changed = self._change is not None or self.masks is not None
        best = []
        for part in _parts(*nodes.indices(len(self.logits))[:2]):
            values, tokens = largest(self._changed(part) if is_changed else self.logits[part])
            self._check(values)
            best.append(tokens)
        return [int(token) for token in to_host([torch.cat(best)])[0]]

    def __getitem__(self, nodes: slice) -> Tensor:
        """Return distributions (m, vocabulary) float32, or float64 for float64 logits.

        Rows sum to 1. The temperature is positive.
        Raises NumericsError if a node on a CPU has no possible token.
        """
        start, stop, _ = nodes.indices(len(self.logits))
        if self.out is None:
            result = torch.empty_like(self.logits[start:stop], dtype=self._wide)
        else:
            result = self.out[start:stop]
        is_whole = result.new_ones(stop - start, dtype=torch.bool)

        def compute(rows: slice | Tensor, nodes: slice | Tensor, n_first: int) -> None:
            part = self._changed(nodes)
            best = part.amax(-1, keepdim=True)
            self._check(best)
            result[rows], is_whole[rows] = _probs_of(part, best, self.params, n_first)

        for part in _parts(start, stop):
            compute(slice(part.start - start, part.stop - start), part, _N_FIRST)
        if self.device.type != "cpu" and (self.params.top_p or 1.0) < 1.0:
            left = is_whole.logical_not().nonzero()[:, 0]  # synchronizes
            for part in _parts(0, len(left)):
                compute(left[part], left[part] + start, self.logits.shape[-1])
        return result

    def _changed(self, nodes: slice | Tensor) -> Tensor:
        part = self.logits[nodes].to(self._wide)
        if self._change is not None:
            n = len(self.paths)
            numbers = range(n)[nodes] if isinstance(nodes, slice) else nodes.cpu().tolist()
            paths = [self.paths[node] for node in numbers] if self.params.looks_back else ()
            part = self._change(part, paths)
        if self.masks is not None:
            part = part.masked_fill(rejected(self.masks[nodes], part.shape[1]), -torch.inf)
        return part

    def _check(self, best: Tensor) -> None:
        """Raise NumericsError if a largest logit on a CPU is not finite: no token is possible."""
        if self.device.type == "cpu" and not bool(best.isfinite().all()):
            raise no_numbers()


def largest(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first largest entry of each row (n, m), and its place, (n,) each."""
    if cpu.serves(rows):
        values, places = layer_cpu.top(rows, 1)
        return values[:, 0], places[:, 0]
    if rows.device.type != "cpu":
        best = rows.max(-1)
        return best.values, best.indices
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    places = torch.as_tensor(wide.numpy().argmax(-1))  # 15 times as fast as torch
    return wide.gather(-1, places[:, None])[:, 0], places


def rejected(masks: Tensor, n: int) -> Tensor:
    """Convert masks (rows, words) int32 to (rows, n) bool, True for tokens outside the grammar."""
    if masks.device.type == "cpu":  # 40 times as fast as the shifts below
        bits = np.unpackbits((~masks).numpy().view(np.uint8), axis=1, count=n, bitorder="little")
        return torch.from_numpy(bits).view(torch.bool)
    places = torch.arange(32, dtype=torch.int32, device=masks.device)
    return (~masks[:, :, None] >> places).bitwise_and_(1).flatten(1)[:, :n].bool()


class TopTokens(NamedTuple):
    """Most probable tokens after each of n nodes, in descending order, on the CPU.

    tokens  (n, k) int64
    probs   (n, k) float32, without temperature, filters or penalties
    """

    tokens: Tensor
    probs: Tensor


def top_tokens(logits: Tensor, k: int) -> TopTokens | None:
    """Return the k most probable tokens from logits (n, vocabulary); None for k = 0."""
    if k == 0:
        return None
    k = min(k, logits.shape[-1])
    parts = [ops.top(logits[rows], k, 1.0) for rows in _parts(0, len(logits))]
    probs, tokens = map(torch.cat, zip(*parts, strict=True))
    return TopTokens(*to_host([tokens, probs]))


class Logprob(NamedTuple):
    """Log-probability of a token without sampling parameters, rank in the vocabulary, and text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], k: int, decode: Callable[[int], str] | None = None
) -> list[dict[int, Logprob]]:
    """Return log-probabilities of n tokens and of the top k at each position; k = -1 for all.

    logits  (n, vocabulary), which predicted the tokens
    """
    (chosen,) = to_device([torch.tensor(tokens)], logits.device)
    vocab_size = logits.shape[-1]
    k = vocab_size if k < 0 else min(k, vocab_size)
    entries = []
    for part in _parts(0, len(logits)):
        logprobs = logits[part].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        own = chosen[part, None]
        rank = (logprobs > logprobs.gather(-1, own)).sum(-1, keepdim=True) + 1
        # The token itself precedes the top tokens, possibly as a duplicate.
        ids = torch.cat((own, logprobs.topk(k).indices), -1)
        host = (tensor.tolist() for tensor in to_host([rank, ids, logprobs.gather(-1, ids)]))
        for own_rank, row_ids, row_values in zip(*host, strict=True):
            columns = zip(row_ids, row_values, (*own_rank, *range(1, k + 1)), strict=True)
            entries.append({id: Logprob(x, n, decode and decode(id)) for id, x, n in columns})
    return entries


def generator_on(device: torch.device, generator: torch.Generator) -> torch.Generator:
    """Return a generator for a device, seeded from the host generator; on CPU, the generator."""
    if device.type == "cpu":
        return generator
    return torch.Generator(device).manual_seed(int(torch.randint(2**62, (), generator=generator)))


def draw(probs: Tensor, generator: torch.Generator) -> list[int]:
    """Draw a token per distribution (n, vocabulary) by inversion in float64; synchronizes once."""
    uniforms = torch.rand(len(probs), dtype=torch.float64, generator=generator)
    (uniforms,) = to_device([uniforms], probs.device)
    tokens = []
    for rows in _parts(0, len(probs)):
        cumulative = probs[rows].cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1:].contiguous()
        at = torch.searchsorted(cumulative, uniforms[rows, None] * total, right=True)
        # Rounding may draw exactly the total; its first place has positive probability.
        tokens.append(at.minimum(torch.searchsorted(cumulative, total))[:, 0])
    return [int(token) for token in to_host([torch.cat(tokens)])[0]]


def _parts(start: int, stop: int) -> Iterator[slice]:
    return (slice(row, min(row + _N_ROWS, stop)) for row in range(start, stop, _N_ROWS))


def _probs_of(
    logits: Tensor, best: Tensor, params: SamplingParams, n_first: int
) -> tuple[Tensor, Tensor | bool]:
    """Compute distributions (n, vocabulary) from logits with row maxima `best` (n, 1).

    Returns the distributions, and whether the `n_first` most probable tokens suffice for top-p on
    a GPU, as (n,) bool or True.
    """
    # Shift the largest logit to 0: tiny temperatures then underflow to probability 0 only.
    temperature = max(params.temperature or 0.0, torch.finfo(logits.dtype).tiny)
    probs = torch.softmax((logits - best) / temperature, -1)
    kept = probs
    is_whole: Tensor | bool = True
    if params.top_k is not None and params.top_k > 0:
        kth = probs.topk(min(params.top_k, probs.shape[-1])).values[:, -1:]
        kept = kept * (probs >= kth)
    if params.top_p is not None and params.top_p < 1.0:
        mass = params.top_p * kept.sum(-1, keepdim=True, dtype=torch.float64)
        if probs.device.type == "cpu":
            rows = zip(kept, mass, strict=True)
            kept = torch.stack([_nucleus_of(*row, params.top_p) for row in rows])
        else:
            nucleus, is_whole = _nucleus(kept, mass, n_first)
            kept = kept * nucleus
    if params.min_p:
        kept = kept * (probs >= params.min_p * probs.amax(-1, keepdim=True))
    return kept / kept.sum(-1, keepdim=True), is_whole


class _Change:
    """Logit changes of `params` before the temperature, in vLLM's order, as in transformers."""

    def __init__(self, params: SamplingParams, context: Context, device: torch.device) -> None:
        self._params = params
        self._penalty = params.repetition_penalty or 1.0
        bias = params.logit_bias or {}
        self._counts = bool(params.presence_penalty or params.frequency_penalty)
        answer = context.tokens[context.n_prompt :]
        self._n_early = params.min_tokens - len(answer)  # end tokens are masked above this depth
        seen = set(context.tokens) if self._penalty != 1.0 else ()
        ends = context.end_ids if self._n_early > 0 else ()
        self._bad_words = context.bad_words
        counted = answer if self._counts else ()
        ids = seen, counted, ends, bias, self._bad_words.singles, params.allowed_token_ids
        host = [torch.tensor([*part], dtype=torch.int64) for part in ids]
        host.append(torch.tensor([*bias.values()], dtype=torch.float64))
        placed = to_device(host, device)
        self._seen, self._answer, self._ends, self._biased = placed[:4]
        self._bad, self._allowed, self._bias = placed[4:]

    def __call__(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        pairs = [(row, token) for row, path in enumerate(paths) for token in path]
        on_path = torch.tensor(pairs, dtype=torch.int64)
        early = torch.tensor([len(path) < self._n_early for path in paths], dtype=torch.bool)
        on_path, early = to_device([on_path.view(-1, 2), early], logits.device)
        if len(self._biased):
            bias = self._bias.to(logits.dtype).expand(len(logits), -1)
            logits = logits.index_add(1, self._biased, bias)
        if self._penalty != 1.0:
            penalised = torch.where(logits > 0, logits / self._penalty, logits * self._penalty)
            logits = torch.where(_occurrences(logits, self._seen, on_path) > 0, penalised, logits)
        if self._counts:
            n = _occurrences(logits, self._answer, on_path)
            logits = logits - self._params.frequency_penalty * n
            logits = logits - self._params.presence_penalty * (n > 0)
        if len(self._ends):
            without = logits.index_fill(1, self._ends, -torch.inf)
            logits = torch.where(early[:, None], without, logits)
        return self._mask(logits, paths)

    def _mask(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        if len(self._allowed):
            allowed = logits.index_select(1, self._allowed)
            logits = torch.full_like(logits, -torch.inf).index_copy_(1, self._allowed, allowed)
        if len(self._bad):
            logits = logits.index_fill(1, self._bad, -torch.inf)
        if completed := self._bad_words.ends(paths):
            (cells,) = to_device([torch.tensor(completed, dtype=torch.int64)], logits.device)
            logits = logits.index_put((cells[:, 0], cells[:, 1]), logits.new_full((), -torch.inf))
        return logits


def _occurrences(logits: Tensor, tokens: Tensor, on_path: Tensor) -> Tensor:
    """Count tokens per row: occurrences in `tokens`, and in `on_path` (m, 2) pairs (row, token)."""
    increment = torch.ones_like(logits[0, 0])
    counts = torch.zeros_like(logits[0]).index_put_((tokens,), increment, accumulate=True)
    counts = counts.repeat(len(logits), 1)
    return counts.index_put_((on_path[:, 0], on_path[:, 1]), increment, accumulate=True)


def _nucleus_of(probs: Tensor, mass: Tensor, top_p: float) -> Tensor:
    """Select the most probable tokens of (vocabulary,) on a CPU up to a mass (1,).

    Sorts only tokens that can be among them. Returns probabilities, 0 for further tokens.
    """
    # Tokens below this share have less than 1 - top_p together, with a margin for rounding.
    least = max((1.0 - top_p) / 2 - 1e-9, 0.0) / len(probs)
    places = torch.from_numpy(np.flatnonzero(probs.numpy() >= least * mass.item()))
    first = probs.index_select(0, places)[None]
    is_kept, _ = _nucleus(first, mass[None], len(places))
    return torch.zeros_like(probs).scatter_(0, places, (first * is_kept)[0])


def _descending(rows: Tensor) -> Tensor:
    """Sort each row (n, m); numpy is several times as fast on a CPU."""
    if rows.device.type != "cpu":
        return rows.sort(-1, descending=True).values
    return torch.from_numpy(np.sort(rows.numpy(), axis=-1)[:, ::-1].copy())


def _nucleus(probs: Tensor, mass: Tensor, n_first: int) -> tuple[Tensor, Tensor | bool]:
    """Select the most probable tokens per row up to a mass (n, 1) float64: (n, vocabulary) bool.

    Ties are resolved by token id, as in a stable sort. Sums are float64, so the result does not
    depend on the number of sorted tokens.
    Returns the mask, and whether the `n_first` most probable tokens suffice, as (n,) bool or True.
    """
    has_all = n_first >= probs.shape[-1]
    ordered = (_descending(probs) if has_all else probs.topk(n_first).values).double()
    # A token is kept while the mass before it is below the limit; the first token always is.
    stays = ordered.cumsum(-1) - ordered < mass
    n_kept = stays.sum(-1, keepdim=True).clamp(min=1)
    least = ordered.gather(-1, n_kept - 1).to(probs.dtype)
    above = probs > least
    tied = probs == least
    n_tied = n_kept - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= n_tied)), has_all or ~stays[:, -1]
