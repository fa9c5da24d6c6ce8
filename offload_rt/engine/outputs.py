"""What an engine has made of a prompt, as its user sees it, and what it has of it so far."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from offload_rt.executor.sequence import Sequence
from offload_rt.executor.stats import PassTimes
from offload_rt.sampling import Logprob
from offload_rt.tree.topology import Topology


@dataclass(frozen=True)
class Stats:
    """How a sequence was generated. It may have shared passes with others; seconds and bytes are
    those of whole passes.

    seconds                  from the start of its first pass to the end of its last
    wait_seconds             in which no layer was there to compute
    link_busy                share of the seconds in which the link moved bytes
    nodes_per_tree           mean size of the verified trees, roots included; and so levels_per_tree
    acceptance_by_rank       how often the k-th child was accepted, of the times it was there and
                             its parent reached
    predicted_*, measured_*  of the passes that computed no prompt, predicted before each; None
                             where there was none
    tree_widths              nodes on each level of the largest tree
    """

    n_tokens: int
    n_passes: int
    tokens_per_pass: float
    seconds: float
    seconds_per_token: float
    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float
    wait_seconds: float
    link_bytes: int
    link_gbps: float
    link_busy: float
    nodes_per_tree: float
    levels_per_tree: float
    acceptance_by_rank: list[float]
    predicted_seconds_per_token: float | None
    measured_seconds_per_token: float | None
    predicted_tokens_per_pass: float | None
    measured_tokens_per_pass: float | None
    tree_widths: list[int]

    @classmethod
    def of(cls, sequence: Sequence) -> "Stats":
        """Of a sequence that has ended."""
        sums = sequence.stats
        n_new = sequence.n_new
        times = [one for one, _, _ in sums.passes]
        n_passes = sums.n_passes
        seconds = times[-1].ended - times[0].started
        link_nbytes = sum(one.link_nbytes for one in times)
        link_s = sum(one.link_busy_s for one in times)
        measured = [one for one in sums.passes if one[0].predicted_s is not None]
        n_measured = len(measured)
        expected = sum(one[1] for one in measured)
        produced = sum(one[2] for one in measured)
        predicted_s = sum(one.predicted_s or 0.0 for one, _, _ in measured)
        return cls(
            n_tokens=n_new,
            n_passes=n_passes,
            tokens_per_pass=n_new / n_passes,
            seconds=seconds,
            seconds_per_token=seconds / n_new,
            prefill_seconds=times[0].computed - times[0].started,
            draft_seconds=sum(one.drafted - one.started for one in times),
            verify_seconds=sum(one.ended - one.computed for one in times),
            wait_seconds=sum(one.waited_s for one in times),
            link_bytes=link_nbytes,
            link_gbps=link_nbytes / link_s / 1e9 if link_s else 0.0,
            link_busy=link_s / seconds,
            nodes_per_tree=sums.n_nodes / n_passes,
            levels_per_tree=sums.n_levels / n_passes,
            acceptance_by_rank=[
                taken / tried for taken, tried in zip(sums.taken, sums.tried, strict=True) if tried
            ],
            predicted_seconds_per_token=predicted_s / expected if measured else None,
            measured_seconds_per_token=sum(one.ended - one.started for one, _, _ in measured)
            / produced
            if measured
            else None,
            predicted_tokens_per_pass=expected / n_measured if measured else None,
            measured_tokens_per_pass=produced / n_measured if measured else None,
            tree_widths=np.bincount(sums.topology.depths).tolist(),
        )


@dataclass(frozen=True)
class Output:
    """Result of one prompt.

    prompt           text of the prompt; None for token ids
    text             text of the answer; empty without a tokenizer
    topology         largest verified tree
    logprobs         for each token its own log-probability and those of the most probable ones, by
                     token id; None: not asked
    prompt_logprobs  the same for the prompt, whose first token has none
    index, others    of several answers to the prompt, those after the first
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stats: Stats = field(repr=False)
    topology: Topology = field(repr=False)
    logprobs: list[dict[int, Logprob]] | None = field(default=None, repr=False)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = field(default=None, repr=False)
    index: int = 0
    others: "tuple[Output, ...]" = ()
    prompt: str | None = None

    @property
    def outputs(self) -> "list[Output]":
        """All answers to the prompt."""
        return [self, *self.others]

    @classmethod
    def of(cls, sequence: Sequence, index: int = 0) -> "Output":
        """Of a sequence that has ended."""
        ids = sequence.tokens
        n = sequence.n_prompt
        text = sequence.text.text if sequence.text else ""
        stats = Stats.of(sequence)
        topology = sequence.stats.topology
        of_answer = (
            None
            if sequence.sampling.logprobs is None
            else [one for one in sequence.logprobs[n:] if one]
        )
        of_prompt = None if sequence.sampling.prompt_logprobs is None else sequence.logprobs[:n]
        return cls(
            ids[:n],
            ids[n:],
            text,
            sequence.finish_reason or "",
            stats,
            topology,
            of_answer,
            of_prompt,
            index,
        )


class Pass(NamedTuple):
    """The tree of a pass, the nodes of it that were accepted, without the root, and what the pass
    took.
    """

    topology: Topology
    path: Tokens[int]
    times: PassTimes


@dataclass(frozen=True)
class Piece:
    """What one pass added to an answer; `output` is there with the last piece of all answers to the
    prompt.

    logprobs, prompt_logprobs, index  see `Output`; empty where not asked; those of the prompt come
                                      with the first piece
    made_by  the pass that did
    finish_reason  with the last piece of an answer
    """

    text: str
    token_ids: list[int]
    output: Output | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    index: int = 0
    made_by: Pass | None = None
    finish_reason: str | None = None


@dataclass(eq=False)
class Request:
    """The sequences that answer one prompt, and how much of each has been shown."""

    sequences: list[Sequence]
    prompt: str | None = None
    _n_shown: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._n_shown = [0] * len(self.sequences)

    @property
    def is_done(self) -> bool:
        """Whether all have ended. Raises the error that ended one of them."""
        for error in [one.error for one in self.sequences if one.error is not None]:
            raise error
        return all(one.finish_reason is not None for one in self.sequences)

    @property
    def output(self) -> Output:
        """What became of the prompt, at the end."""
        first, *others = (
            replace(Output.of(one, i), prompt=self.prompt) for i, one in enumerate(self.sequences)
        )
        return replace(first, others=tuple(others))

    def pieces(self) -> list[Piece]:
        """What there is now and was not shown before. Raises as `is_done` does."""
        found = []
        is_done = self.is_done
        for i, (one, n) in enumerate(zip(self.sequences, self._n_shown, strict=True)):
            if one.n_new > n:
                text = one.text.take(final=one.finish_reason is not None) if one.text else ""
                first = one.n_prompt + n
                logprobs = [of_token for of_token in one.logprobs[first:] if of_token]
                of_prompt = (
                    one.logprobs[:first]
                    if n == 0 and one.sampling.prompt_logprobs is not None
                    else []
                )
                made_by = Pass(*one.stats.last, one.stats.passes[-1][0])
                tokens = one.tokens[first:]
                end = one.finish_reason
                found.append(Piece(text, tokens, None, logprobs, of_prompt, i, made_by, end))
                self._n_shown[i] = one.n_new
        if found and is_done:
            found[-1] = replace(found[-1], output=self.output)
        return found
