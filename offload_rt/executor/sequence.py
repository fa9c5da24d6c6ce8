"""One sequence: its tokens, how they are sampled, and when it ends."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offload_rt.config import SamplingParams
from offload_rt.executor.stats import SequenceStats
from offload_rt.ops.noise import NoiseRows
from offload_rt.sampling import Logprob, token_logprobs
from offload_rt.text.detokenize import TextStream


@dataclass(eq=False)
class Sequence:
    """A prompt and what has been produced from it.

    tokens         prompt and answer
    n_prompt       tokens of the prompt
    max_tokens     prompt and answer together may have no more
    end_ids        tokens that end the text: those of the model, unless the sampling ignores them, and of the sampling
    text           turns tokens into text and looks for stop strings; None without a tokenizer
    finish_reason  None while it goes on; "stop" for an end id or a stop string, "length" for a limit, "error"
    error          that ended it
    generator      random numbers, seeded by the sampling's seed or else by chance
    noise          by the same seed, for each position
    logprobs       of each token and of the most probable ones in its place, where they are asked for; None for others
    """

    tokens: list[int]
    sampling: SamplingParams
    max_tokens: int
    end_ids: frozenset[int] = frozenset()
    text: TextStream | None = None
    finish_reason: str | None = None
    error: Exception | None = None
    generator: torch.Generator = field(default_factory=torch.Generator)
    stats: SequenceStats = field(default_factory=SequenceStats)
    logprobs: list[dict[int, Logprob] | None] = field(init=False)

    def __post_init__(self) -> None:
        self.n_prompt = len(self.tokens)
        self.logprobs = [None] * self.n_prompt
        self.end_ids = frozenset(self.sampling.stop_token_ids) | (set() if self.sampling.ignore_eos else self.end_ids)
        if self.sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(self.sampling.seed)
        self.noise = NoiseRows(self.generator.initial_seed())

    @property
    def n_new(self) -> int:
        """Tokens produced so far."""
        return len(self.tokens) - self.n_prompt

    @property
    def longest(self) -> int:
        """Tokens it can have at its end."""
        n = self.sampling.max_tokens
        return self.max_tokens if n is None else min(self.n_prompt + n, self.max_tokens)

    @property
    def temperature(self) -> float:
        """Of the sampling; 0 where that leaves it open."""
        return self.sampling.temperature or 0.0

    @property
    def n_left(self) -> int:
        """Tokens that may still be produced."""
        return self.longest - len(self.tokens)

    def fail(self, error: Exception) -> None:
        """End with an error; the first one counts."""
        self.error, self.finish_reason = self.error or error, "error"

    def extend(self, tokens: Tokens[int]) -> list[int]:
        """Take tokens until one ends the sequence; returns those taken."""
        for n, token in enumerate(tokens, 1):
            self.tokens.append(token)
            may_stop = self.n_new > self.sampling.min_tokens
            if token in self.end_ids or (self.text is not None and self.text.add(token, may_stop)):
                self.finish_reason = "stop"
            elif self.n_left <= 0:
                self.finish_reason = "length"
            if self.finish_reason:
                return list(tokens[:n])
        return list(tokens)

    def read(self, logits: Tensor, k: int) -> None:
        """Keep log-probabilities of the next tokens and of k others, by logits (n, vocabulary) at the places before them."""
        first = len(self.logprobs)
        tokens, decode = self.tokens[first : first + len(logits)], None if self.text is None else self.text.decode
        self.logprobs += token_logprobs(logits[: len(tokens)], tokens, k, decode)
