"""The one generation loop: draft, one pass over the weights, verify, commit. Plain decoding is a tree of one node."""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from offload_rt.errors import DeviceError
from offload_rt.executor.cost import CostEstimator
from offload_rt.executor.runner import Runner, Step
from offload_rt.executor.sequence import Sequence
from offload_rt.kv.cache import KVCache
from offload_rt.sampling import probs, top_tokens
from offload_rt.speculate.protocols import Drafter, VerificationRule
from offload_rt.system.trace import DRAFT, VERIFY, Trace
from offload_rt.tree.choose import N_RANKS
from offload_rt.tree.topology import DraftTree, Topology, Verdict


@dataclass
class RunningSequence:
    """A sequence under way, the target's cache of it, the nodes its trees may have, and the passes it has taken part in."""

    sequence: Sequence
    cache: KVCache
    n_nodes: int = 1
    n_passes: int = 0


@dataclass
class RunStats:
    """Where the time of a run went, in seconds, and what became of its trees; the first pass is the prefill.

    predicted_s, predicted_tokens  of all passes but the first, as predicted before each
    measured_s, measured_tokens  of the same passes
    topology                     the last of the largest trees
    tried, taken                 per rank among siblings: at nodes that were reached, children there were, and taken ones
    """

    n_passes: int = 0
    n_nodes: int = 0
    n_levels: int = 0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    predicted_s: float = 0.0
    predicted_tokens: float = 0.0
    measured_s: float = 0.0
    measured_tokens: int = 0
    topology: Topology = field(default_factory=lambda: Topology.chain(1))
    tried: list[int] = field(default_factory=lambda: [0] * N_RANKS)
    taken: list[int] = field(default_factory=lambda: [0] * N_RANKS)

    def count(self, tree: DraftTree, verdict: Verdict) -> None:
        """Add what was accepted of a tree."""
        topology = tree.topology
        self.n_nodes += len(topology)
        self.n_levels += int(topology.depths.max()) + 1
        self.topology = max(topology, self.topology, key=len)
        for node, taken in zip((0, *verdict.path), (*verdict.path, None), strict=True):
            for rank in range(min(len(topology.children[node]), N_RANKS)):
                self.tried[rank] += 1
            if taken is not None and topology.ranks[taken] < N_RANKS:
                self.taken[topology.ranks[taken]] += 1


class Loop:
    """Runs sequences to their ends."""

    def __init__(
        self, runner: Runner, drafter: Drafter, rule: VerificationRule, cost: CostEstimator, trace: Trace
    ) -> None:
        self._runner, self._drafter, self._rule = runner, drafter, rule
        self._cost, self._trace = cost, trace

    def run(self, batch: Several[RunningSequence], run_stats: RunStats) -> Iterator[None]:
        """Step until all sequences have ended; yields after each step."""
        try:
            while live := [one for one in batch if one.sequence.finish_reason is None]:
                self.step(live, run_stats)
                yield
        finally:
            for one in batch:
                self._drafter.end(one.sequence)

    def step(self, live: Several[RunningSequence], run_stats: RunStats) -> None:
        """One pass over the weights: every sequence grows by at least one token.

        Where the device's memory runs out, trees and chunks shrink and the step is made again. Raises DeviceError when they
        cannot shrink any more; what was produced is kept.
        """
        while (going := [one for one in live if one.sequence.finish_reason is None]) and not self._step(
            going, run_stats
        ):
            self._shrink(going)

    def _step(self, live: Several[RunningSequence], run_stats: RunStats) -> bool:
        try:
            self._pass(live, run_stats)
        except torch.OutOfMemoryError:
            # Not in here: the error holds on to the frames that hold the memory.
            return False
        finally:
            for one in live:
                one.cache.discard()
        return True

    def _shrink(self, live: Several[RunningSequence]) -> None:
        if all(one.n_nodes == 1 for one in live) and not self._runner.shrink_chunks():
            raise DeviceError(
                "the device's memory is used up", need="room for a pass of a few tokens",
                change="lower --device-memory, which leaves more to others, or --max-model-len",
            )  # fmt: skip
        for one in live:
            one.n_nodes = max(one.n_nodes // 2, 1)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _pass(self, live: Several[RunningSequence], run_stats: RunStats) -> None:
        started, is_prefill = time.perf_counter(), run_stats.n_passes == 0
        n_before = sum(len(one.sequence.tokens) for one in live)
        trees = self._drafter.propose([one.sequence for one in live], min(one.n_nodes for one in live))
        drafted = time.perf_counter()
        self._trace.add(DRAFT, "tree", started, drafted)
        steps = [_ask(one, tree) for one, tree in zip(live, trees, strict=True)]
        n_rows, context = sum(step.n_rows for step in steps), max(step.cache.n_committed for step in steps)
        link = self._runner.streamer.meter.read()
        logits = self._runner.forward(steps)
        self._runner.finish()
        passed = time.perf_counter()
        for one, tree, rows in zip(live, trees, logits, strict=True):
            self._accept(one, tree, rows, run_stats)
        ended = time.perf_counter()
        n_new = sum(len(one.sequence.tokens) for one in live) - n_before
        self._trace.add(VERIFY, f"{n_new} tokens of {sum(len(tree.topology) for tree in trees)} nodes", passed, ended)
        run_stats.n_passes += 1
        run_stats.draft_s += drafted - started
        run_stats.verify_s += ended - passed
        if is_prefill:
            run_stats.prefill_s = passed - started
            return
        draft_s = drafted - started
        run_stats.predicted_s += float(self._cost.seconds(np.array([n_rows]), context, draft_s)[0])
        run_stats.predicted_tokens += sum(tree.expected for tree in trees)
        run_stats.measured_s += ended - started
        run_stats.measured_tokens += n_new
        nbytes, busy_s = (new - old for new, old in zip(self._runner.streamer.meter.read(), link, strict=True))
        self._cost.passed(n_rows, context, draft_s, ended - started, nbytes / busy_s / 1e9 if busy_s > 0 else 0.0)

    def _accept(self, one: RunningSequence, tree: DraftTree, logits: Tensor, run_stats: RunStats) -> None:
        sequence, cache = one.sequence, one.cache
        one.n_passes += 1
        candidates = tree.candidates()
        paths = _paths(sequence, candidates)
        target_probs = probs(logits[: tree.n_candidates], sequence.sampling, sequence.tokens, paths)
        verdict = self._rule.verify(candidates, target_probs, sequence.generator)
        self._drafter.learn(sequence, tree, verdict, top_tokens(logits, self._drafter.n_predicted))
        run_stats.count(candidates, verdict)
        n_lacking = len(sequence.tokens) - 1 - cache.n_committed
        cache.commit([*range(n_lacking + 1), *(n_lacking + node for node in verdict.path)])
        sequence.extend([*(int(tree.tokens[node]) for node in verdict.path), verdict.bonus])
        if sequence.finish_reason is not None:
            self._drafter.end(sequence)


def _ask(one: RunningSequence, tree: DraftTree) -> Step:
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


def _paths(sequence: Sequence, tree: DraftTree) -> list[list[int]]:
    """Per node the tokens a penalty looks back on beyond the sequence's: the node's own path."""
    if sequence.sampling.repetition_penalty == 1.0:
        return []
    return [tree.path_to(node) for node in range(len(tree.topology))]
