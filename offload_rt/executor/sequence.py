"""Sequence state: tokens, sampling parameters, finish reason, statistics."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from offload_rt.bad_words import BadWords
from offload_rt.cost.tree_size import N_RANKS
from offload_rt.executor.grammar import Grammar
from offload_rt.models.image_prompt import ImagePrompt
from offload_rt.ops.noise import NoiseRows
from offload_rt.sampling import Logprob, token_logprobs
from offload_rt.sampling_params import SamplingParams
from offload_rt.text.detokenize import TextStream
from offload_rt.tree.topology import DraftTree, Topology, Verdict


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Times of a pass by `time.perf_counter`, link traffic, and the predicted time.

    waited_s     seconds the device waited for layers
    predicted_s  predicted seconds of drafting, pass and verification; None for prompt passes
    """

    started: float
    drafted: float
    computed: float
    ended: float
    link_nbytes: int
    link_busy_s: float
    waited_s: float
    predicted_s: float | None
    n_rows: int


@dataclass
class SequenceStats:
    """Statistics of a sequence; its passes may be shared with further sequences.

    passes             (times, expected tokens, actual tokens) per pass; the first is the prefill
    n_nodes, n_levels  sums over all trees
    topology           largest tree, the latest among equals
    last               last tree, and its accepted nodes without the root
    tried, taken       per sibling rank: existing and accepted children of reached nodes
    """

    passes: list[tuple[PassTimes, float, int]] = field(default_factory=list)
    n_nodes: int = 0
    n_levels: int = 0
    topology: Topology = field(default_factory=lambda: Topology.chain(1))
    last: tuple[Topology, Tokens[int]] = field(default_factory=lambda: (Topology.chain(1), ()))
    tried: list[int] = field(default_factory=lambda: [0] * N_RANKS)
    taken: list[int] = field(default_factory=lambda: [0] * N_RANKS)

    def add_tree(self, tree: DraftTree, verdict: Verdict) -> None:
        """Record the verdict on a tree."""
        topology = tree.topology
        self.last = topology, verdict.path
        self.n_nodes += len(topology)
        self.n_levels += topology.n_levels
        self.topology = max(topology, self.topology, key=len)
        for node in (0, *verdict.path):
            for rank in range(min(len(topology.children[node]), N_RANKS)):
                self.tried[rank] += 1
            if node and topology.ranks[node] < N_RANKS:
                self.taken[topology.ranks[node]] += 1


@dataclass(eq=False)
class Pooling:
    """Embedding: mean or last of the normed hidden states of a prompt."""

    is_mean: bool
    _sum: Tensor = field(init=False)

    def add(self, hidden: Tensor, is_first: bool) -> None:
        """Add the next rows, (n, hidden_size); is_first: forget earlier rows."""
        rows = hidden.float()
        if is_first or not self.is_mean:
            self._sum = torch.zeros_like(rows[0])
        self._sum += rows.sum(0) if self.is_mean else rows[-1]

    def vector(self) -> Tensor:
        """Return the embedding: (hidden_size,) float32 of length 1, on the host."""
        return F.normalize(self._sum.cpu(), dim=0)  # the mean has the same direction


@dataclass(eq=False)
class Sequence:
    """Prompt and generated tokens of a request.

    max_length     limit of prompt plus generated tokens
    end_ids        end tokens of the sampling parameters, and of the model unless ignored
    text           detokenizer with stop strings; None without a tokenizer
    grammar        position in the grammar of structured outputs; None without a grammar
    bad_words      position in the excluded token sequences
    finish_reason  None while running; "stop" (end token or string), "length", "abort" or "error"
    pooling        embedding of the prompt; None if not requested
    images         prompt with images; None for texts
    generator      random numbers from the sampling seed, or from a random seed
    noise          noise per position, from the same seed
    logprobs       per token, log-probabilities of the token and the top tokens, or None
    """

    tokens: list[int]
    sampling: SamplingParams
    max_length: int
    end_ids: frozenset[int] = frozenset()
    text: TextStream | None = None
    grammar: Grammar | None = None
    bad_words: BadWords = field(default_factory=BadWords)
    finish_reason: str | None = None
    error: Exception | None = None
    pooling: Pooling | None = None
    images: ImagePrompt | None = None
    generator: torch.Generator = field(default_factory=torch.Generator)
    stats: SequenceStats = field(default_factory=SequenceStats)
    logprobs: list[dict[int, Logprob] | None] = field(init=False)

    def __post_init__(self) -> None:
        self.n_prompt = len(self.tokens)
        self.logprobs = [None] * self.n_prompt
        model_ends = frozenset() if self.sampling.ignore_eos else self.end_ids
        self.end_ids = model_ends | frozenset(self.sampling.stop_token_ids)
        if self.sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(self.sampling.seed)
        self.noise = NoiseRows(self.generator.initial_seed())

    @property
    def cache_ids(self) -> list[int]:
        """Tokens as caches know them: image tokens have the key of their image."""
        if self.images is None:
            return self.tokens
        return self.images.keyed_ids + self.tokens[self.n_prompt :]

    @property
    def n_new(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - self.n_prompt

    @property
    def stop_reason(self) -> str | int | None:
        """Stop string or token of `stop_token_ids` that ended the answer; None for other ends."""
        if self.finish_reason != "stop":
            return None
        if self.tokens[-1] in self.sampling.stop_token_ids:
            return self.tokens[-1]
        return None if self.text is None else self.text.stop_string

    @property
    def longest(self) -> int:
        """Maximum final length in tokens."""
        n = self.sampling.max_tokens
        return self.max_length if n is None else min(self.n_prompt + n, self.max_length)

    @property
    def temperature(self) -> float:
        """Sampling temperature; 0 if unset."""
        return self.sampling.temperature or 0.0

    @property
    def n_left(self) -> int:
        """Number of tokens left to generate."""
        return self.longest - len(self.tokens)

    def fail(self, error: Exception) -> None:
        """Finish with an error; keep the first error."""
        self.error = self.error or error
        self.finish_reason = "error"

    def extend(self, tokens: Tokens[int]) -> None:
        """Append tokens until the sequence ends."""
        for token in tokens:
            self.tokens.append(token)
            self.bad_words.advance(token)
            may_stop = self.n_new > self.sampling.min_tokens
            if token in self.end_ids or (self.text is not None and self.text.add(token, may_stop)):
                self.finish_reason = "stop"
            elif self.n_left <= 0:
                self.finish_reason = "length"
            elif self.grammar is not None:
                self.grammar.advance(token)
            if self.finish_reason:
                break

    def extend_forced(self) -> None:
        """Append the tokens that the grammar forces, unless log-probabilities are requested.

        The target's distribution is one-hot there, so that a forward pass decides nothing.
        """
        if self.grammar is not None and self.sampling.logprobs is None:
            while not self.finish_reason and (tokens := self.grammar.forced()):
                self.extend(tokens)

    def n_allowed(self, tokens: Tokens[int]) -> int:
        """Return the number of first tokens that the grammar allows behind the sequence."""
        return len(tokens) if self.grammar is None else self.grammar.n_allowed(tokens)

    def read(self, logits: Tensor, k: int) -> None:
        """Record log-probabilities of the next tokens and the top k from logits (n, vocabulary)."""
        first = len(self.logprobs)
        tokens = self.tokens[first : first + len(logits)]
        decode = None if self.text is None else self.text.decode
        self.logprobs += token_logprobs(logits[: len(tokens)], tokens, k, decode)
