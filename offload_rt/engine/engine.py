"""The generation loop: draft (one node in plain decoding), one pass, verify, commit."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from traceback import format_exc

import numpy as np
import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.cost.estimator import CostEstimator
from offload_rt.engine.pass_meter import PassMeter
from offload_rt.engine.sequence_pool import RunningSequence, SequencePool
from offload_rt.errors import DeviceError
from offload_rt.executor.runner import Runner
from offload_rt.executor.sequence import Sequence
from offload_rt.executor.step import Step
from offload_rt.sampling import Context, NodeProbs, TopTokens, no_numbers, top_tokens
from offload_rt.speculate.draft.none import PlainDecoding
from offload_rt.speculate.forced_chains import append_forced
from offload_rt.speculate.pauses import Pauses
from offload_rt.speculate.protocols import VerificationRule
from offload_rt.speculate.verify.match import walk
from offload_rt.system.trace import Trace
from offload_rt.tree.topology import DraftTree, Topology, Verdict

# Candidate numbers of prompt rows per pass; the largest within the time limit is used.
_PROMPT_ROWS = 2 ** np.arange(5, 15)
_PLAIN = PlainDecoding()


@contextmanager
def _failing_alone(sequence: Sequence) -> Iterator[None]:
    """Finish a single sequence with the error of its own work; memory errors concern all."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        error.add_note(format_exc())
        sequence.fail(error.with_traceback(None))  # frames would keep the logits in memory


@dataclass(eq=False, repr=False, kw_only=True)
class Engine(SequencePool):
    """Generate all running sequences together. Sequences join and leave between steps.

    rule      accepts drafted tokens
    cost      predicts the time of a pass
    trace     receives the spans of passes
    closes    ends transfers and releases weights
    draft     computes the draft model; None without one
    notice    sentences for the user about the selected settings
    n_passes  completed passes
    """

    rule: VerificationRule
    cost: CostEstimator
    trace: Trace
    closes: ExitStack = field(default_factory=ExitStack)
    draft: Runner | None = None
    notice: str = ""
    n_passes: int = field(default=0, init=False)
    _has_shrunk: bool = field(default=False, init=False)
    _probs: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._pauses = Pauses(self.cost)
        self._predicted: dict[Sequence, list[TopTokens]] = {}  # at prompts of the current pass

    def step(self) -> bool:
        """Run a pass: every running sequence grows by at least one token.

        Returns whether sequences run or wait afterwards.
        If device memory runs out, trees and chunks shrink, then the newest sequence is preempted,
        and the pass is repeated. A sequence that does not fit alone, or whose logits, text or
        sampling fail, finishes with that error. Raises errors that concern all sequences.
        """
        self._admit()
        while batch := [running for running in self._running if not running.sequence.finish_reason]:
            try:
                self._pass(batch)
                break
            except torch.OutOfMemoryError:
                # Shrink outside of this block: the error's frames keep the memory allocated.
                pass
            finally:
                for running in batch:
                    self.runner.discard(running.cache)
            self._shrink(batch)
        for running in [running for running in self._running if running.sequence.finish_reason]:
            self._finish(running)
        return bool(self._running or self._waiting)

    def decode_plainly(self, sequence: Sequence) -> None:
        """Generate a sequence without drafting, while no other sequence runs."""
        drafter = self.drafter
        self.drafter = _PLAIN
        try:
            self.add(sequence)
            while self.step():
                pass
        finally:
            self.reset_prefix_cache()
            self.drafter = drafter

    def close(self) -> None:
        """Save learned statistics, end all transfers and release the weights."""
        self.drafter.save()
        self.closes.close()

    def _pass(self, batch: list[RunningSequence]) -> None:
        """Draft a tree per sequence, verify all trees in one pass, commit the accepted paths."""
        meter = PassMeter(self.runner, self.cost, self.trace)
        self._predicted.clear()
        prompts = self._prompt_parts(batch)
        decoding = [running for running in batch if running not in prompts]
        trees = self._draft(decoding)
        meter.drafted()
        steps = list(map(self._tree_step, decoding, trees))
        for running, n in prompts.items():
            first = self.runner.n_committed(running.cache)
            tokens = running.sequence.cache_ids[first : first + n]
            steps.append(self._step(running, torch.tensor(tokens), Topology.chain(n), n))
        meter.predict(steps, len(decoding), any(running.sequence.n_new == 0 for running in batch))
        logits = self.runner.forward(steps)
        are_finite = self.runner.finish(logits)
        meter.computed()
        states = self.runner.tapped
        n_new = list(map(self._verify, decoding, trees, logits, states, are_finite))
        prompt_states = states[len(decoding) :]
        for (running, n), prompt_state in zip(prompts.items(), prompt_states, strict=True):
            first = self.runner.n_committed(running.cache)
            self.drafter.observe(running.sequence, first, [prompt_state])
            self.runner.commit(running.cache, range(n))
        self.n_passes += 1
        times = meter.finish(sum(n_new), sum(len(tree.topology) for tree in trees))
        if decoding and times.predicted_s is not None and self.drafter.may_pause:
            self._pauses.passed(times, sum(n_new))
        for running, tree, n in zip(decoding, trees, n_new, strict=True):
            running.sequence.stats.passes.append((times, tree.expected, n))
        for running in prompts:
            running.sequence.stats.passes.append((times, 0.0, 0))

    def _draft(self, decoding: list[RunningSequence]) -> list[DraftTree]:
        sizes = [running.n_nodes for running in decoding]
        n_nodes = min(self.scheduler.share(len(decoding)), *sizes)
        sequences = [running.sequence for running in decoding]
        has_drafts = not self.drafter.may_pause or self._pauses.drafts(sequences)
        trees = (self.drafter if has_drafts else _PLAIN).propose(sequences, n_nodes)
        cost = None if self.drafter.limits.fixed_size else self.cost
        return append_forced(trees, sequences, n_nodes, cost)

    def _prompt_parts(self, batch: list[RunningSequence]) -> dict[RunningSequence, int]:
        """Select prompts that exceed the time limit; return their number of rows in this pass."""
        if self.prompt_seconds is None or all(running.sequence.n_new == 0 for running in batch):
            return {}
        sizes = sum(running.n_nodes for running in batch) + np.array([0, *_PROMPT_ROWS])
        context = max(len(running.sequence.tokens) for running in batch)
        seconds = self.cost.seconds(sizes, context, 0.0, len(batch))
        n_within = (seconds[1:] - seconds[0] <= self.prompt_seconds).sum()
        n_left = int(_PROMPT_ROWS[max(n_within - 1, 0)])
        parts = {}
        for running in (running for running in batch if running.sequence.n_new == 0):
            n_missing = len(self._missing_tokens(running))
            if n_missing > n_left:
                parts[running] = n_left
                if (images := running.sequence.images) is not None:
                    first = self.runner.n_committed(running.cache)
                    parts[running] = images.whole_blocks(first, n_left)
            n_left = max(n_left - n_missing, int(_PROMPT_ROWS[0]))
        return parts

    def _missing_tokens(self, running: RunningSequence) -> list[int]:
        """Rewind the cache to the sequence; return the tokens to compute before the tree's root."""
        tokens = running.sequence.cache_ids
        return tokens[self.runner.rewind(running.cache, tokens[:-1]) : -1]

    def _tree_step(self, running: RunningSequence, tree: DraftTree) -> Step:
        if running.sequence.grammar is not None:
            running.sequence.grammar.start_masks(tree.candidates().paths())
        missing = self._missing_tokens(running)
        tokens = torch.tensor([*missing, running.sequence.cache_ids[-1], *tree.tokens[1:].tolist()])
        step = self._step(running, tokens, tree.topology.after_chain(len(missing)), len(missing))
        if not (missing and self.drafter.reads_prompt and step.read is None):
            return step
        parts = self._predicted[running.sequence] = list[TopTokens]()

        def record(logits: Tensor) -> None:
            if (top := top_tokens(logits, self.drafter.n_predicted)) is not None:
                parts.append(top)

        return replace(step, read=record, n_read=min(len(missing), self._cheap_rows()))

    def _step(
        self, running: RunningSequence, tokens: Tensor, topology: Topology, n_chain: int
    ) -> Step:
        n_wanted = len(tokens) - n_chain
        return Step(
            cache=running.cache,
            tokens=tokens,
            topology=topology,
            n_wanted=n_wanted,
            n_prompt=running.sequence.n_prompt,
            n_chain=n_chain,
            read=self._prompt_reader(running),
            n_read=n_chain,
            read_hidden=self._hidden_reader(running, n_chain + min(n_wanted, 1)),
            images=running.sequence.images,
        )

    def _cheap_rows(self) -> int:
        """Return how many rows a pass may have that takes at most twice as long as a plain pass."""
        seconds = self.cost.seconds(2 ** np.arange(10), 0)
        return int(2 ** np.flatnonzero(seconds <= 2 * seconds[0]).max())

    def _prompt_reader(self, running: RunningSequence) -> Callable[[Tensor], None] | None:
        sequence = running.sequence
        if (k := sequence.sampling.prompt_logprobs) is None or sequence.n_new > 0:
            return None
        if self.runner.n_committed(running.cache) == 0:
            sequence.logprobs = [None]

        def record(logits: Tensor) -> None:
            with _failing_alone(sequence):
                sequence.read(logits, k)

        return record

    def _hidden_reader(self, running: RunningSequence, n: int) -> Callable[[Tensor], None] | None:
        pooling = running.sequence.pooling
        if pooling is None or running.sequence.n_new > 0:
            return None
        is_first = self.runner.n_committed(running.cache) == 0
        return lambda hidden: pooling.add(hidden[:n], is_first)

    def _verify(
        self,
        running: RunningSequence,
        tree: DraftTree,
        logits: Tensor,
        states: Tensor,
        is_finite: bool,
    ) -> int:
        """Verify a tree, commit the accepted path, extend the sequence; return its new tokens.

        logits  (n_nodes, vocabulary)
        states  (n_rows, taps, hidden_size) hidden states of all rows of the step
        """
        sequence = running.sequence
        n_before = sequence.n_new
        with _failing_alone(sequence):
            if not is_finite:
                raise no_numbers()
            candidates = tree.candidates()
            target = self._node_probs(sequence, candidates, logits)
            if parts := self._predicted.pop(sequence, None):
                self.drafter.read(sequence, TopTokens(*map(torch.cat, zip(*parts, strict=True))))
            if sequence.temperature:
                verdict = self.rule.verify(candidates, target, sequence)
            else:  # every rule accepts the greedy choices alone
                verdict = walk(candidates, target, target.best)
            drafted, its_verdict = tree.drafted(verdict)
            if self._pauses.is_drafting:
                predicted = top_tokens(logits[: len(drafted.topology)], self.drafter.n_predicted)
                self.drafter.learn(sequence, drafted, its_verdict, predicted)
            else:
                self.drafter.skip(sequence)
            sequence.stats.add_tree(candidates, verdict)
            self._commit(running, verdict, states)
            last = verdict.path[-1] if verdict.path else 0
            sequence.extend([*tree.path_to(last), verdict.bonus])
            if not self.runner.taps:  # drafters of hidden states need those of every token
                sequence.extend_forced()
            if (k := sequence.sampling.logprobs) is not None:
                rows = ops.to_device([torch.tensor([0, *verdict.path])], logits.device)
                sequence.read(logits.index_select(0, *rows), k)
        return sequence.n_new - n_before

    def _node_probs(self, sequence: Sequence, tree: DraftTree, logits: Tensor) -> NodeProbs:
        """Return the distributions after a tree's nodes, valid until the next call."""
        n = len(tree.topology)
        paths = tree.paths() if sequence.sampling.looks_back else []
        context = Context(sequence.tokens, sequence.n_prompt, sequence.end_ids, sequence.bad_words)
        out = self._probs_buffer(logits, n) if sequence.temperature else None
        masks = None
        if sequence.grammar is not None:
            (masks,) = ops.to_device([sequence.grammar.masks()], logits.device)
            sequence.grammar.check()
        return NodeProbs(logits[:n], sequence.sampling, context, paths, out, masks)

    def _commit(self, running: RunningSequence, verdict: Verdict, states: Tensor) -> None:
        first = self.runner.n_committed(running.cache)
        n_missing = len(running.sequence.tokens) - 1 - first
        accepted = [n_missing + node for node in verdict.path]
        if self.runner.taps:
            committed = [states[: n_missing + 1]]
            if accepted:
                rows = ops.to_device([torch.tensor(accepted)], states.device)
                committed.append(states.index_select(0, *rows))
            self.drafter.observe(running.sequence, first, committed)
        self.runner.commit(running.cache, [*range(n_missing + 1), *accepted])

    def _probs_buffer(self, logits: Tensor, n: int) -> Tensor:
        """Return a buffer for n distributions, reused: varying sizes would fragment memory."""
        if self._probs is None or len(self._probs) < n:
            n_rows = max(n, *(running.n_nodes for running in self._running))
            wide = torch.promote_types(logits.dtype, torch.float32)
            self._probs = logits.new_empty(n_rows, logits.shape[1], dtype=wide)
        return self._probs[:n]

    def _shrink(self, batch: list[RunningSequence]) -> None:
        """Reduce the memory of the next attempt, in order: prefixes, trees, chunks, sequences."""
        self.reset_prefix_cache()
        n_nodes = max(running.n_nodes for running in batch)
        is_minimal = n_nodes == 1 and not self.runner.shrink_chunks()
        if is_minimal and len(batch) > 1:
            self._preempt(batch[-1])
        elif is_minimal:
            problem = "device memory is used up"
            need = "memory for a pass of a few tokens"
            change = "lower --device-memory, which leaves more to others, or --max-model-len"
            batch[0].sequence.fail(DeviceError(problem, need=need, change=change))
        self._probs = None
        for running in batch:
            running.n_nodes = max(running.n_nodes // 2, 1)
        if n_nodes > 1 and not self._has_shrunk:
            self._has_shrunk = True
            notice = f"device memory ran out: trees shrink to {n_nodes // 2} nodes"
            print(f"{notice}; lower --tree-size", file=sys.stderr)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # untyped in torch
            torch.cuda.empty_cache()
