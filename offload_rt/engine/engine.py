"""The generation loop: draft, one pass over the weights, verify, commit. Plain decoding is a tree
of one node.
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from traceback import format_exc

import numpy as np
import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.cost.estimator import CostEstimator
from offload_rt.engine.scheduler import RunningSequence, Scheduler
from offload_rt.errors import DeviceError
from offload_rt.executor.runner import Runner
from offload_rt.executor.sequence import Sequence
from offload_rt.executor.stats import PassTimes
from offload_rt.executor.step import Step
from offload_rt.kv.cache import n_shared
from offload_rt.sampling import Context, no_numbers, probs, top_tokens
from offload_rt.speculate.protocols import Drafter, VerificationRule
from offload_rt.system.trace import DRAFT, VERIFY, Trace
from offload_rt.tree.topology import DraftTree, Topology

# Rows of prompts that a pass may have, of which the most that its time allows are taken.
_PROMPT_ROWS = 2 ** np.arange(5, 15)


@dataclass(frozen=True)
class Event:
    """What a step brought to a sequence: new tokens, and why it ended; None while it goes on."""

    id: int
    token_ids: list[int]
    finish_reason: str | None


def _alone(sequence: Sequence, act: Callable[[], None]) -> None:
    """Let an error of what is done for one sequence end that one alone."""
    try:
        act()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        error.add_note(format_exc())
        sequence.fail(error.with_traceback(None))  # it would hold frames, and they the logits


@dataclass(eq=False, repr=False)
class Engine:
    """Runs sequences together. They join (`add`) and leave (`abort`, or their end) between steps.

    Caches of sequences that have left are kept while there is room, for those that begin alike.

    closes  releases what was opened for the engine
    draft   the runner of the draft model, where there is one
    notice  what its user should know of how it runs; empty if nothing
    n_passes  that were made
    prompt_seconds  by which a pass may take longer for prompts while others are answered; None: any
    is_short  a sequence had to make room for others, of which none has left since
    """

    runner: Runner
    drafter: Drafter
    rule: VerificationRule
    cost: CostEstimator
    trace: Trace
    scheduler: Scheduler
    closes: ExitStack = field(default_factory=ExitStack)
    draft: Runner | None = None
    notice: str = ""
    n_passes: int = field(default=0, init=False)
    prompt_seconds: float | None = None
    is_short: bool = field(default=False, init=False)
    _has_shrunk: bool = field(default=False, init=False)
    _n_added: int = field(default=0, init=False)
    _waiting: deque[tuple[int, Sequence]] = field(default_factory=deque, init=False)
    _running: list[RunningSequence] = field(default_factory=list, init=False)
    _kept: list[RunningSequence] = field(default_factory=list, init=False)  # oldest first
    _probs: Tensor | None = field(default=None, init=False)

    @property
    def n_running(self) -> int:
        """Sequences that take part in the next pass."""
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        """Sequences that wait for room."""
        return len(self._waiting)

    def add(self, sequence: Sequence) -> int:
        """Let a sequence join at the next step, or as soon as there is room; returns the id of its
        events.
        """
        self._n_added += 1
        self._waiting.append((self._n_added, sequence))
        return self._n_added

    def abort(self, id: int) -> None:
        """Drop a sequence, whether it waits or runs; one that has ended is left as it is."""
        self._waiting = deque(one for one in self._waiting if one[0] != id)
        for one in [one for one in self._running if one.id == id]:
            one.sequence.finish_reason = "abort"
            self._release(one)

    def step(self) -> list[Event]:
        """One pass over the weights: every running sequence grows by at least one token.

        Where the device's memory runs out, trees and chunks shrink, then the newest sequence waits
        for others to end, and the pass is made again. A sequence that is too much by itself, or
        whose own logits, text or sampling fail, ends with that error; others go on. Raises what
        keeps all of them from going on.
        """
        self._admit()
        n_before = {one.id: len(one.sequence.tokens) for one in self._running}
        while going := [one for one in self._running if one.sequence.finish_reason is None]:
            try:
                self._pass(going)
                break
            except torch.OutOfMemoryError:
                # shrink outside of this block: the error holds the frames that hold the memory
                pass
            finally:
                for one in going:
                    self.runner.discard(one.cache)
            self._shrink(going)
        events = [
            Event(one.id, one.sequence.tokens[n_before[one.id] :], one.sequence.finish_reason)
            for one in self._running
        ]
        for one in [one for one in self._running if one.sequence.finish_reason is not None]:
            self._release(one)
        return events

    def close(self) -> None:
        """Keep what was learned, end all transfers and release the weights."""
        self.drafter.save()
        self.closes.close()

    def reset_prefix_cache(self) -> None:
        """Release what is kept of sequences that have left."""
        while self._kept:
            self._drop(self._kept[0])

    def _drop(self, one: RunningSequence) -> None:
        self._kept.remove(one)
        self.runner.free_cache(one.cache)
        self.drafter.end(one.sequence)

    def _admit(self) -> None:
        if self.is_short:
            return
        joining = self.scheduler.admit(self._running, self._waiting)
        split = self.scheduler.split
        is_alone = len(joining) == 1 and not self._running
        n_nodes = self.scheduler.share(max(len(self._running) + len(joining), 1))
        for i, (id, sequence) in enumerate(joining):
            n_rows = sequence.longest - 1 + n_nodes
            share = None if split is None else split.share(n_rows, n_nodes, is_alone)
            one = RunningSequence(id, sequence, -1, n_rows, n_nodes, share)
            self._begin(one, [later for _, later in joining[i + 1 :]], is_alone)
            self._running.append(one)
            self.drafter.begin(sequence, one.cache, n_nodes)

    def _begin(self, one: RunningSequence, later: list[Sequence], is_alone: bool) -> None:
        """Give a sequence a cache, with the rows that another has of its prompt; `later` are to fit
        beside it.
        """
        source, n = self._find_prefix(one.sequence)
        n_rows = one.n_rows
        tokens = one.sequence.tokens
        is_taken = (
            source is not None and source in self._kept and self._takes(one, source, n, later)
        )
        self._kept.sort(key=lambda other: other is source)  # the last to go
        if is_taken:
            one.n_rows = max(n_rows, self._kept.pop().n_rows)
        while self._kept and (self.runner.has_graphs or not self._fits([*self._kept, one], later)):
            self._drop(self._kept[0])
        if source is None or not is_taken:
            one.cache = self.runner.new_cache(n_rows, is_alone, one.share)
            # nobody has the states
            if source and source in (*self._running, *self._kept) and not self.runner.taps:
                self.runner.copy_prefix(one.cache, source.cache, tokens[: min(n, len(tokens) - 2)])
            return
        self.runner.rewind(source.cache, tokens[:n])
        # Rows that move are there twice for a moment; those of a card go through memory of the
        # host.
        may_move = self.runner.device.type != "cpu" or 2 * n <= self.scheduler.cache_rows
        one.cache = self.runner.renew_cache(
            source.cache, n_rows, one.n_nodes, is_alone, one.share, may_move
        )
        if one.cache == source.cache:
            one.share = source.share and replace(source.share, n_rows=one.n_rows)
        n = self.drafter.transfer(source.sequence, one.sequence, self.runner.n_committed(one.cache))
        self.drafter.end(source.sequence)
        self.runner.rewind(one.cache, tokens[:n])

    def _find_prefix(self, sequence: Sequence) -> tuple[RunningSequence | None, int]:
        """Who has most of the tokens that a sequence begins with, or will have them in the next
        pass, and how many.
        """
        found: list[tuple[RunningSequence | None, int]] = [(None, 0)]
        # of the prompt, so that every row is computed
        is_all_wanted = sequence.sampling.prompt_logprobs is not None
        for one in () if is_all_wanted else (*self._running, *self._kept):
            is_whole = one in self._running and self.prompt_seconds is None
            n_theirs = (
                len(one.sequence.tokens) - 1 if is_whole else self.runner.n_committed(one.cache)
            )
            found.append((one, n_shared(one.sequence.tokens[:n_theirs], sequence.tokens[:-1])))
        return max(found, key=itemgetter(1))

    def _takes(
        self, one: RunningSequence, source: RunningSequence, n: int, later: list[Sequence]
    ) -> bool:
        """Whether a sequence is to take over a kept cache of which it shares n rows, rather than
        leave it for another.
        """
        is_most = 2 * n >= self.runner.n_committed(source.cache)
        is_better = is_most or self.runner.has_graphs or not self._fits([source, one], later)
        return is_better and self._fits(
            [replace(one, n_rows=max(one.n_rows, source.n_rows))], later
        )

    def _fits(self, more: list[RunningSequence], later: list[Sequence]) -> bool:
        return self.scheduler.fits([*self._running, *more], later, more[-1].n_nodes)

    def _release(self, one: RunningSequence) -> None:
        self._running.remove(one)
        self._kept.append(one)
        self.is_short = False
        self.drafter.leave(one.sequence)
        if one.sequence.error is not None:  # its rows may be no numbers
            self._drop(one)

    def _put_back(self, one: RunningSequence) -> None:
        """Let a sequence wait until another has left; its rows are computed anew then."""
        self._running.remove(one)
        self._waiting.appendleft((one.id, one.sequence))
        self.runner.free_cache(one.cache)
        self.drafter.end(one.sequence)
        self.is_short = True

    def _shrink(self, going: list[RunningSequence]) -> None:
        self.reset_prefix_cache()
        is_least = all(one.n_nodes == 1 for one in going) and not self.runner.shrink_chunks()
        if is_least and len(going) > 1:
            self._put_back(going[-1])
        elif is_least:
            problem = "the device's memory is used up"
            need = "room for a pass of a few tokens"
            change = "lower --device-memory, which leaves more to others, or --max-model-len"
            going[0].sequence.fail(DeviceError(problem, need=need, change=change))
        self._probs = None
        n_most = max(one.n_nodes for one in going)
        for one in going:
            one.n_nodes = max(one.n_nodes // 2, 1)
        if n_most > 1 and not self._has_shrunk:
            self._has_shrunk = True
            print(
                f"device memory ran out: trees shrink to {n_most // 2} nodes; lower --tree-size",
                file=sys.stderr,
            )
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch gives it no types
            torch.cuda.empty_cache()

    def _pass(self, going: list[RunningSequence]) -> None:
        meter = self.runner.streamer.meter
        experts = self.runner.experts
        started = time.perf_counter()
        nbytes, busy_s = meter.read()
        waited_s = meter.waited_s
        n_brought = experts.n_brought if experts else 0
        parts = self._parts(going)
        going = [one for one in going if one not in parts]
        n_nodes = min(self.scheduler.share(len(going)), *(one.n_nodes for one in going))
        trees = self.drafter.propose([one.sequence for one in going], n_nodes)
        drafted = time.perf_counter()
        self.trace.add(DRAFT, "tree", started, drafted)
        steps = [self._step_of(one, tree) for one, tree in zip(going, trees, strict=True)]
        steps += [self._step_of_prompt(one, n) for one, n in parts.items()]
        n_rows = sum(step.n_rows for step in steps)
        context = max(self.runner.n_committed(step.cache) for step in steps)
        is_prefill = any(one.sequence.n_new == 0 for one in (*going, *parts))
        predicted = self.cost.seconds(np.array([n_rows]), context, drafted - started, len(going))[0]
        logits = self.runner.forward(steps)
        are_numbers = self.runner.finish(logits)
        n_before = [one.sequence.n_new for one in going]
        computed = time.perf_counter()
        computed_of = zip(going, trees, logits, self.runner.tapped, are_numbers, strict=False)
        for one, tree, rows, states, is_right in computed_of:
            _alone(one.sequence, partial(self._accept, one, tree, rows, states, is_right))
        n_new = [one.sequence.n_new - n for one, n in zip(going, n_before, strict=True)]
        for (one, n), states in zip(parts.items(), self.runner.tapped[len(going) :], strict=True):
            self.drafter.observe(one.sequence, self.runner.n_committed(one.cache), [states])
            self.runner.commit(one.cache, range(n))
        ended = time.perf_counter()
        self.n_passes += 1
        n_drafted = sum(len(tree.topology) for tree in trees)
        self.trace.add(VERIFY, f"{sum(n_new)} tokens of {n_drafted} nodes", computed, ended)
        now_nbytes, now_busy_s = meter.read()
        moved = now_nbytes - nbytes, now_busy_s - busy_s, meter.waited_s - waited_s
        times = PassTimes(
            started, drafted, computed, ended, *moved, None if is_prefill else float(predicted)
        )
        for one, tree, n in zip(going, trees, n_new, strict=True):
            one.sequence.stats.passes.append((times, tree.expected, n))
        for one in parts:
            one.sequence.stats.passes.append((times, 0.0, 0))
        if not is_prefill:
            gbps = times.link_nbytes / times.link_busy_s / 1e9 if times.link_busy_s > 0 else 0.0
            n_brought = experts.n_brought - n_brought if experts else 0
            self.cost.passed(
                n_rows, context, drafted - started, ended - started, gbps, len(going), n_brought
            )

    def _parts(self, going: list[RunningSequence]) -> dict[RunningSequence, int]:
        """Sequences whose prompts are too long for this pass, while others are answered, and the
        rows they compute in it.
        """
        if self.prompt_seconds is None or all(one.sequence.n_new == 0 for one in going):
            return {}
        n_rows = sum(one.n_nodes for one in going)
        sizes = n_rows + _PROMPT_ROWS
        context = max(len(one.sequence.tokens) for one in going)
        seconds = self.cost.seconds(np.array([n_rows, *sizes]), context, 0.0, len(going))
        n_left = int(
            _PROMPT_ROWS[max(int((seconds[1:] - seconds[0] <= self.prompt_seconds).sum()) - 1, 0)]
        )
        found = {}
        for one in (one for one in going if one.sequence.n_new == 0):
            tokens = one.sequence.tokens
            n_lacking = len(tokens) - 1 - self.runner.rewind(one.cache, tokens[:-1])
            if n_lacking > n_left:
                found[one] = n_left
            n_left = max(n_left - n_lacking, int(_PROMPT_ROWS[0]))
        return found

    def _step_of_prompt(self, one: RunningSequence, n: int) -> Step:
        """The step that feeds a cache the next n tokens of a prompt."""
        tokens = one.sequence.tokens
        first = self.runner.n_committed(one.cache)
        part = torch.tensor(tokens[first : first + n], dtype=torch.int64)
        return Step(
            one.cache,
            part,
            Topology.chain(n),
            0,
            one.sequence.n_prompt,
            n_chain=n,
            read=self._reader(one),
        )

    def _reader(self, one: RunningSequence) -> Callable[[Tensor], None] | None:
        """What reads the log-probabilities of a prompt, if they are asked for, from its first row
        on.
        """
        sequence = one.sequence
        if (k := sequence.sampling.prompt_logprobs) is None or sequence.n_new > 0:
            return None
        if self.runner.n_committed(one.cache) == 0:
            sequence.logprobs = [None]
        return lambda logits: _alone(sequence, partial(sequence.read, logits, k))

    def _step_of(self, one: RunningSequence, tree: DraftTree) -> Step:
        """The step that feeds a cache what it lacks of its sequence, and the tree."""
        if one.sequence.grammar is not None:
            one.sequence.grammar.start_masks(tree.candidates())
        tokens = one.sequence.tokens
        lacking = tokens[self.runner.rewind(one.cache, tokens[:-1]) : -1]
        n_read = (
            min(len(lacking), one.n_nodes - len(tree.topology)) if self.drafter.reads_prompt else 0
        )
        read = self._reader(one)
        if read is not None:  # the drafter sees nothing of the prompt then
            n_read = 0
        return Step(
            cache=one.cache,
            tokens=torch.cat((torch.tensor(lacking, dtype=torch.int64), tree.tokens)),
            topology=tree.topology.after_chain(len(lacking)),
            n_wanted=n_read + len(tree.topology),
            n_prompt=one.sequence.n_prompt,
            n_chain=len(lacking),
            read=read,
        )

    def _accept(
        self,
        one: RunningSequence,
        tree: DraftTree,
        logits: Tensor,
        states: Tensor,
        are_numbers: bool,
    ) -> None:
        """Verify a tree by the logits (n, vocabulary) of its nodes, behind those of rows that the
        drafter reads.

        states  (rows, taps, hidden_size) of all rows of the step
        Raises NumericsError unless the logits are all numbers.
        """
        if not are_numbers:
            raise no_numbers()
        sequence = one.sequence
        n_read = len(logits) - len(tree.topology)
        of_prompt = logits[:n_read]
        logits = logits[n_read:]
        n_lacking = len(sequence.tokens) - 1 - self.runner.n_committed(one.cache)
        candidates = tree.candidates()
        paths = []
        n_candidates = len(candidates.topology)
        if sequence.sampling.looks_back:  # on each node's own path, too
            paths = [candidates.path_to(node) for node in range(n_candidates)]
        context = Context(sequence.tokens, sequence.n_prompt, sequence.end_ids)
        room = self._room(logits, n_candidates)
        masks = None
        if sequence.grammar is not None:
            (masks,) = ops.to_device([sequence.grammar.masks()], logits.device)
        target = probs(logits[:n_candidates], sequence.sampling, context, paths, room, masks)
        if n_read and (predicted := top_tokens(of_prompt, self.drafter.n_predicted)):
            self.drafter.read(sequence, predicted)
        verdict = self.rule.verify(candidates, target, sequence)
        self.drafter.learn(sequence, tree, verdict, top_tokens(logits, self.drafter.n_predicted))
        sequence.stats.add_tree(candidates, verdict)
        if self.runner.taps:
            kept = [states[: n_lacking + 1]]
            if verdict.path:
                nodes = ops.to_device([torch.tensor(verdict.path) + n_lacking], states.device)
                kept.append(states.index_select(0, *nodes))
            self.drafter.observe(sequence, self.runner.n_committed(one.cache), kept)
        self.runner.commit(
            one.cache, [*range(n_lacking + 1), *(n_lacking + node for node in verdict.path)]
        )
        sequence.extend([*tree.path_to(verdict.path[-1] if verdict.path else 0), verdict.bonus])
        if (k := sequence.sampling.logprobs) is not None:
            rows = ops.to_device([torch.tensor([0, *verdict.path])], logits.device)
            sequence.read(logits.index_select(0, *rows), k)

    def _room(self, logits: Tensor, n: int) -> Tensor:
        """Where n distributions are written: memory that is taken once, for pieces of all sizes
        would cut up a tight budget.
        """
        if self._probs is None or len(self._probs) < n:
            n_most = max(one.n_nodes for one in self._running)
            wide = torch.promote_types(logits.dtype, torch.float32)
            self._probs = torch.empty(
                max(n, n_most), logits.shape[1], dtype=wide, device=logits.device
            )
        return self._probs[:n]
