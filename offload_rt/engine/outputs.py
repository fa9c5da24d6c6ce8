"""Outputs, statistics and streamed pieces of requests."""

from collections import Counter
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from offload_rt.executor.sequence import PassTimes, Sequence
from offload_rt.sampling import Logprob
from offload_rt.tree.topology import Topology


@dataclass(frozen=True)
class Stats:
    """Statistics of a sequence. Seconds and bytes are those of complete passes, shared or not.

    seconds                  from the start of the first pass to the end of the last pass
    wait_seconds             waiting for layers
    link_busy                share of the seconds with link transfers
    nodes_, levels_per_tree  means of verified trees, including roots
    acceptance_by_rank       acceptance rate of the k-th child of reached nodes
    predicted_*, measured_*  passes without prompt rows, predicted before each; None without any
    tree_widths              nodes per level of the largest tree
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
    def from_sequence(cls, sequence: Sequence) -> "Stats":
        """Summarize a finished sequence."""
        sums = sequence.stats
        n_new = sequence.n_new
        times = [pass_times for pass_times, _, _ in sums.passes]
        n_passes = len(times)
        seconds = times[-1].ended - times[0].started
        link_nbytes = sum(pass_times.link_nbytes for pass_times in times)
        link_s = sum(pass_times.link_busy_s for pass_times in times)
        decoding = [entry for entry in sums.passes if entry[0].predicted_s is not None]
        n_decoding = len(decoding)
        expected = sum(n for _, n, _ in decoding)
        produced = sum(n for _, _, n in decoding)
        predicted_s = sum(pass_times.predicted_s or 0.0 for pass_times in times)
        measured_s = sum(pass_times.ended - pass_times.started for pass_times, _, _ in decoding)
        return cls(
            n_tokens=n_new,
            n_passes=n_passes,
            tokens_per_pass=n_new / n_passes,
            seconds=seconds,
            seconds_per_token=seconds / n_new,
            prefill_seconds=times[0].computed - times[0].started,
            draft_seconds=sum(pass_times.drafted - pass_times.started for pass_times in times),
            verify_seconds=sum(pass_times.ended - pass_times.computed for pass_times in times),
            wait_seconds=sum(pass_times.waited_s for pass_times in times),
            link_bytes=link_nbytes,
            link_gbps=link_nbytes / link_s / 1e9 if link_s else 0.0,
            link_busy=link_s / seconds,
            nodes_per_tree=sums.n_nodes / n_passes,
            levels_per_tree=sums.n_levels / n_passes,
            acceptance_by_rank=[
                taken / tried for taken, tried in zip(sums.taken, sums.tried, strict=True) if tried
            ],
            predicted_seconds_per_token=predicted_s / expected if decoding else None,
            measured_seconds_per_token=measured_s / produced if decoding else None,
            predicted_tokens_per_pass=expected / n_decoding if decoding else None,
            measured_tokens_per_pass=produced / n_decoding if decoding else None,
            tree_widths=np.bincount(sums.topology.depths).tolist(),
        )


@dataclass(frozen=True)
class Output:
    """Answer to a prompt.

    prompt           text of the prompt; None for token ids
    text             text of the answer; empty without a tokenizer
    stop_reason      stop string or token of `stop_token_ids` at the end; None for other ends
    topology         largest verified tree
    logprobs         per token, log-probabilities of the token and of the top tokens, by token id;
                     None if not requested
    prompt_logprobs  likewise for the prompt; the first entry is None
    index            position among all answers to the prompt
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
    stop_reason: str | int | None = None

    @property
    def outputs(self) -> "list[Output]":
        """All answers to the prompt."""
        return [self, *self.others]

    @classmethod
    def from_sequence(cls, sequence: Sequence, index: int, prompt: str | None) -> "Output":
        """Create the output of a finished sequence."""
        n = sequence.n_prompt
        sampling = sequence.sampling
        logprobs = list(filter(None, sequence.logprobs[n:]))
        return cls(
            prompt_token_ids=sequence.tokens[:n],
            token_ids=sequence.tokens[n:],
            text=sequence.text.text if sequence.text else "",
            finish_reason=sequence.finish_reason or "",
            stats=Stats.from_sequence(sequence),
            topology=sequence.stats.topology,
            logprobs=None if sampling.logprobs is None else logprobs,
            prompt_logprobs=None if sampling.prompt_logprobs is None else sequence.logprobs[:n],
            index=index,
            prompt=prompt,
            stop_reason=sequence.stop_reason,
        )


class Pass(NamedTuple):
    """Verified tree, its accepted nodes without the root, and times of the pass."""

    topology: Topology
    path: Tokens[int]
    times: PassTimes


@dataclass(frozen=True)
class Piece:
    """Part of an answer, produced by a pass.

    output           answers to the prompt, only in the last piece
    logprobs         see `Output`; empty if not requested
    prompt_logprobs  see `Output`; only in the first piece
    verified_in      pass that verified the piece
    *_reason         see `Output`; only in the last piece of an answer
    """

    text: str
    token_ids: list[int]
    output: Output | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    index: int = 0
    verified_in: Pass | None = field(default=None, repr=False)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(eq=False)
class Request:
    """Sequences that answer a prompt, and the number of tokens already returned of each."""

    sequences: list[Sequence]
    prompt: str | None = None
    _n_returned: Counter[int] = field(default_factory=Counter, init=False)

    @property
    def output(self) -> Output:
        """All answers, after the end."""
        first, *others = (
            Output.from_sequence(sequence, i, self.prompt)
            for i, sequence in enumerate(self.sequences)
        )
        return replace(first, others=tuple(others))

    def pieces(self) -> list[Piece]:
        """Return the new tokens since the last call. Raises the error of a failed sequence."""
        if errors := [sequence.error for sequence in self.sequences if sequence.error is not None]:
            raise errors[0]
        pieces = []
        for i, sequence in enumerate(self.sequences):
            if sequence.n_new > self._n_returned[i]:
                pieces.append(_new_piece(sequence, self._n_returned[i], i))
                self._n_returned[i] = sequence.n_new
        if pieces and all(sequence.finish_reason for sequence in self.sequences):
            pieces[-1] = replace(pieces[-1], output=self.output)
        return pieces


def _new_piece(sequence: Sequence, n_returned: int, index: int) -> Piece:
    stream = sequence.text
    first = sequence.n_prompt + n_returned
    has_prompt = n_returned == 0 and sequence.sampling.prompt_logprobs is not None
    return Piece(
        stream.take(final=sequence.finish_reason is not None) if stream else "",
        sequence.tokens[first:],
        logprobs=list(filter(None, sequence.logprobs[first:])),
        prompt_logprobs=sequence.logprobs[:first] if has_prompt else [],
        index=index,
        verified_in=Pass(*sequence.stats.last, sequence.stats.passes[-1][0]),
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
    )
