"""The one generation loop: draft, one pass over the weights, verify, commit. Plain decoding is a tree of one node."""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload_rt.engine.runner import Runner, Step
from offload_rt.engine.sequence import Sequence
from offload_rt.kv.cache import KVCache
from offload_rt.sampling import probs
from offload_rt.trace import Trace
from offload_rt.tree.topology import DraftTree, Verdict


class Drafter(Protocol):
    """A function of the tokens: right for any sequence it is handed.

    max_nodes  nodes its trees have at most, root included
    """

    max_nodes: int

    def propose(self, sequences: Several[Sequence]) -> list[DraftTree]:
        """One tree for each sequence; the root is its last token."""


class Rule(Protocol):
    """How a tree is verified."""

    def verify(self, tree: DraftTree, target: Tensor, generator: torch.Generator) -> Verdict:
        """What to accept, given the target's law (n, vocabulary) after each node."""


@dataclass
class Live:
    """A sequence under way, the target's cache of it, and the passes it has taken part in."""

    sequence: Sequence
    cache: KVCache
    n_passes: int = 0


@dataclass
class Clock:
    """Where the time of a run went, in seconds; the first pass is the prefill."""

    n_passes: int = 0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0


class Loop:
    """Runs sequences to their ends."""

    def __init__(self, runner: Runner, drafter: Drafter, rule: Rule, trace: Trace) -> None:
        self._runner, self._drafter, self._rule, self._trace = runner, drafter, rule, trace

    def run(self, batch: Several[Live], clock: Clock) -> Iterator[None]:
        """Step until all sequences have ended; yields after each step."""
        while live := [one for one in batch if one.sequence.finish_reason is None]:
            self.step(live, clock)
            yield

    def step(self, live: Several[Live], clock: Clock) -> None:
        """One pass over the weights: every sequence grows by at least one token."""
        started = time.perf_counter()
        with self._trace.span("draft", "tree"):
            trees = self._drafter.propose([one.sequence for one in live])
        drafted = time.perf_counter()
        try:
            logits = self._runner.forward([_ask(one, tree) for one, tree in zip(live, trees, strict=True)])
        except BaseException:
            for one in live:
                one.cache.discard()
            raise
        passed = time.perf_counter()
        with self._trace.span("verify", "tree"):
            for one, tree, rows in zip(live, trees, logits, strict=True):
                self._accept(one, tree, rows)
        clock.prefill_s += passed - started if clock.n_passes == 0 else 0.0
        clock.n_passes += 1
        clock.draft_s += drafted - started
        clock.verify_s += time.perf_counter() - passed

    def _accept(self, one: Live, tree: DraftTree, logits: Tensor) -> None:
        sequence, cache = one.sequence, one.cache
        one.n_passes += 1
        laws = probs(logits, sequence.sampling, _contexts(sequence, tree))
        verdict = self._rule.verify(tree, laws, sequence.generator)
        n_lacking = len(sequence.tokens) - 1 - cache.n_committed
        cache.commit([*range(n_lacking + 1), *(n_lacking + node for node in verdict.path)])
        sequence.extend([*(int(tree.tokens[node]) for node in verdict.path), verdict.bonus])


def _ask(one: Live, tree: DraftTree) -> Step:
    """The step that feeds a cache what it lacks of its sequence, and the tree."""
    tokens = one.sequence.tokens
    lacking = tokens[one.cache.rewind_to(tokens[:-1]) : -1]
    return Step(
        cache=one.cache,
        tokens=torch.cat((torch.tensor(lacking, dtype=torch.int64), tree.tokens)),
        topology=tree.topology.after_chain(len(lacking)),
        n_wanted=len(tree.topology),
        n_prompt=one.sequence.n_prompt,
    )


def _contexts(sequence: Sequence, tree: DraftTree) -> list[list[int]]:
    """Per node the tokens a penalty looks back on: the sequence and the node's own path."""
    if sequence.sampling.repetition_penalty == 1.0:
        return []
    return [sequence.tokens + tree.path_to(node) for node in range(len(tree.topology))]
