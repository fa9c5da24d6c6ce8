"""The public Python surface: `LLM`, what it returns, and how a run is measured."""

import time
import weakref
from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from itertools import pairwise
from types import TracebackType

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from offload_rt.config import EngineConfig, SamplingParams
from offload_rt.engine.builder import Engine, Progress, load, plan_engine
from offload_rt.engine.loop import Loop, RunningSequence, RunStats
from offload_rt.errors import CapacityError, PromptError, SettingsError
from offload_rt.executor.runner import Step
from offload_rt.executor.sequence import Sequence
from offload_rt.offload.disk import DiskTier
from offload_rt.offload.placement import Plan
from offload_rt.speculate.select import Drafting, check_pair, pick_drafter
from offload_rt.system.trace import Trace
from offload_rt.text.detokenize import TextStream, encode, load_tokenizer
from offload_rt.tree.topology import Topology
from offload_rt.weights.checkpoint import end_ids, locate, open_checkpoint

Prompt = str | Several[int]


@dataclass(frozen=True)
class Stats:
    """How a run went. Sequences of a batch share their passes, so seconds and bytes are those of the whole batch.

    draft_seconds                and so verify_seconds; wait_seconds are those in which no layer was there to compute
    link_busy                    share of the seconds in which the link moved bytes
    nodes_per_tree               mean size of the verified trees, roots included; and so levels_per_tree
    acceptance_by_rank           how often the k-th child was taken, of the times it was there and its parent reached
    predicted_seconds_per_token  of all passes but the first, as predicted before each of them; None for a single pass
    measured_seconds_per_token   of the same passes; and so predicted_tokens_per_pass and measured_tokens_per_pass
    tree_widths                  nodes on each level of the largest tree
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


@dataclass(frozen=True)
class Output:
    """What became of one prompt; `text` is empty where there is no tokenizer.

    topology  of the largest tree that was verified
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stats: Stats
    topology: Topology


@dataclass(frozen=True)
class Piece:
    """What one pass added; `output` is there with the last piece."""

    text: str
    token_ids: list[int]
    output: Output | None = None


class LLM:
    """A model larger than its memory budget, ready to generate.

    A context manager; `close()` releases everything, and so does losing the last reference, or the end of the program.
    """

    def __init__(
        self,
        model: str,
        draft_model: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        max_model_len: int | None = None,
        drafter: str = "auto",
        rule: str = "auto",
        tree_size: int | None = None,
        tree_depth: int | None = None,
        revision: str | None = None,
        offline: bool = False,
    ) -> None:
        """The arguments are the fields of `EngineConfig`. Raises an OffloadError if the model cannot be served."""
        config = EngineConfig(
            model,
            draft_model,
            device,
            dtype,
            device_memory,
            host_memory,
            max_model_len,
            drafter,
            rule,
            tree_size,
            tree_depth,
            revision,
            offline,
        )
        self._prepare(config)
        self.load()

    @classmethod
    def from_config(cls, config: EngineConfig, trace: Trace | None = None, progress: Progress | None = None) -> "LLM":
        """Open and load; see `open` and `load`."""
        llm = cls.open(config)
        llm.load(trace, progress)
        return llm

    @classmethod
    def open(cls, config: EngineConfig, drafting: Drafting | None = None) -> "LLM":
        """Check settings and checkpoint and decide what lies where, before a weight moves; `load` has to follow.

        drafting  a drafter and rule instead of those of the settings
        """
        llm = cls.__new__(cls)
        llm._prepare(config, drafting)
        return llm

    def load(self, trace: Trace | None = None, progress: Progress | None = None) -> None:
        """Load what the plan keeps in memory and start the streamer.

        trace     collects the timeline
        progress  is told (bytes so far, bytes in all)
        """
        trace = trace or Trace(on=False)
        try:
            self._engine = engine = load(self.engine_plan, trace, progress)
        except BaseException:
            self._releases()
            raise
        # At the latest when the program ends: threads that are still reading would be torn down with the interpreter.
        self._releases.detach()
        self._releases = weakref.finalize(self, _release, engine, self.engine_plan.disk)
        self._trace = trace

    def _prepare(self, config: EngineConfig, drafting: Drafting | None = None) -> None:
        self._engine: Engine | None = None
        drafting = drafting or pick_drafter(config)
        directory = locate(config.model, config.revision, config.offline)
        checkpoint = open_checkpoint(directory)
        self._end_ids = end_ids(directory)
        self.tokenizer: PreTrainedTokenizerBase | None = load_tokenizer(directory)
        if config.draft_model is not None:
            place = locate(config.draft_model, None, config.offline)
            draft = open_checkpoint(place)
            check_pair(checkpoint.spec, draft.spec, (self.tokenizer, load_tokenizer(place)))
            drafting = replace(drafting, draft=draft)
        self.engine_plan = plan_engine(config, checkpoint, drafting)
        self._releases = weakref.finalize(self, self.engine_plan.disk.close)

    @property
    def plan(self) -> Plan:
        """What lies where."""
        return self.engine_plan.plan

    @property
    def engine(self) -> Engine:
        """The loaded parts. Raises SettingsError once closed."""
        if self._engine is None:
            raise SettingsError("this LLM is closed", change="make a new one")
        return self._engine

    @property
    def _loop(self) -> Loop:
        # Made for each run, so that nothing but the engine holds the weights.
        engine = self.engine
        return Loop(engine.runner, engine.drafter, self.engine_plan.drafting.rule, engine.cost, self._trace)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.engine_plan.max_model_len

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all transfers, join the threads, release the memory; may be called again."""
        self._engine = None
        self._releases()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # to whom else uses the card

    def generate(
        self, prompts: Prompt | Several[Prompt], params: SamplingParams | Several[SamplingParams] | None = None
    ) -> list[Output]:
        """Continue one prompt or several; texts, or lists of token ids.

        params  for all prompts, or one for each
        Raises PromptError or CapacityError for a prompt that cannot be continued, SettingsError where there are not as many
        params as prompts, before anything runs.
        """
        several = _several(prompts)
        wanted = list(params) if isinstance(params, list | tuple) else [params or SamplingParams()] * len(several)
        if len(wanted) != len(several):
            raise SettingsError("generate", need=f"one SamplingParams or {len(several)}", have=str(len(wanted)))
        sequences = [self._sequence(prompt, one) for prompt, one in zip(several, wanted, strict=True)]
        return [output for wave in self._waves(sequences) for output in self._run(wave)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Continue one prompt and yield what each pass adds; see `generate`."""
        sequence = self._sequence(prompt, params or SamplingParams())
        run = _Run(self.engine, [sequence])
        n_taken = sequence.n_prompt
        for _ in run.steps(self._loop):
            ended = sequence.finish_reason is not None
            text = sequence.text.take(final=ended) if sequence.text else ""
            new, n_taken = sequence.tokens[n_taken:], len(sequence.tokens)
            yield Piece(text, new, run.output(run.batch[0]) if ended else None)

    def time_plain(self, context: int, n_passes: int = 3) -> list[float]:
        """Seconds of each of some passes of one token after `context` others: what plain decoding takes for a token.

        context  of which no more is taken than `max_model_len` has room for
        """
        return self.time_passes(Topology.chain(1), min(context, self.max_model_len - 1), n_passes)

    def time_passes(self, topology: Topology, context: int, n_passes: int = 3) -> list[float]:
        """Seconds of each of some passes over a tree after `context` tokens, with logits for all of its nodes."""
        runner, n = self.engine.runner, len(topology)
        cache = runner.new_cache(context + n + 1, is_alone=True)
        cache.committed = [0] * context
        step = Step(cache, torch.zeros(n, dtype=torch.int64), topology, n_wanted=n, n_prompt=context)
        moments = []
        # The first begins with layers that have come in already, in time that nobody counted; the last ends the one before.
        for _ in range(n_passes + 2):
            moments.append(time.perf_counter())
            runner.forward([step])
            runner.finish()
            cache.discard()
        return [after - before for before, after in pairwise(moments[1:])]

    def encode(self, text: str, chat: bool = False) -> list[int]:
        """Token ids of a text, as it is or as the user's turn of a chat. Raises PromptError without a tokenizer."""
        if self.tokenizer is None:
            raise PromptError("the checkpoint has no tokenizer", change="give the prompt as a list of token ids")
        return encode(self.tokenizer, text, chat)

    def check_prompt(self, ids: Several[int]) -> None:
        """Raises PromptError or CapacityError for token ids that cannot be continued."""
        _check_prompt(list(ids), self.engine_plan.checkpoint.spec.vocab_size, self.max_model_len)

    def _run(self, wave: list[Sequence]) -> list[Output]:
        # What a run holds ends with this call: the next one finds the memory of its caches free.
        run = _Run(self.engine, wave)
        for _ in run.steps(self._loop):
            pass
        return [run.output(one) for one in run.batch]

    def _sequence(self, prompt: Prompt, params: SamplingParams) -> Sequence:
        ids = self.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        self.check_prompt(ids)
        if params.stop and self.tokenizer is None:
            raise PromptError("stop strings", need="a tokenizer", have="a checkpoint without one")
        text = TextStream(self.tokenizer, ids, params.stop) if self.tokenizer is not None else None
        return Sequence(ids, params, self.max_model_len, self._end_ids, text)

    def _waves(self, sequences: list[Sequence]) -> Iterator[list[Sequence]]:
        """Cut a batch into runs whose caches fit into the plan together."""
        wave: list[Sequence] = []
        for sequence in sequences:
            if wave and _cache_rows([*wave, sequence], self.engine_plan.limits.n_nodes) > self.engine_plan.cache_rows:
                yield wave
                wave = []
            wave.append(sequence)
        if wave:
            yield wave


class _Run:
    """A batch under way, and what it costs."""

    def __init__(self, engine: Engine, sequences: list[Sequence]) -> None:
        self._engine, self._run_stats = engine, RunStats()
        n_nodes = _tree_share(engine.drafter.limits.n_nodes, len(sequences))
        is_alone = len(sequences) == 1
        caches = [engine.runner.new_cache(one.longest - 1 + n_nodes, is_alone) for one in sequences]
        self.batch = [RunningSequence(one, cache, n_nodes) for one, cache in zip(sequences, caches, strict=True)]
        self._started = time.perf_counter()
        self._nbytes, self._busy_s = engine.streamer.meter.read()
        self._waited_s = engine.streamer.meter.waited_s

    def steps(self, loop: Loop) -> Iterator[None]:
        """Run the batch to its end; yields after each pass."""
        return loop.run(self.batch, self._run_stats)

    def output(self, one: RunningSequence) -> Output:
        """The result of a sequence that has ended."""
        sequence = one.sequence
        text = sequence.text.text if sequence.text else ""
        ids, n = sequence.tokens, sequence.n_prompt
        return Output(ids[:n], ids[n:], text, sequence.finish_reason or "", self._stats(one), self._run_stats.topology)

    def _stats(self, one: RunningSequence) -> Stats:
        n_new, n_passes, run_stats = one.sequence.n_new, one.n_passes, self._run_stats
        n_trees = max(sum(live.n_passes for live in self.batch), 1)
        measured = run_stats.measured_tokens > 0
        seconds = time.perf_counter() - self._started
        nbytes, busy_s = self._engine.streamer.meter.read()
        nbytes, busy_s = nbytes - self._nbytes, busy_s - self._busy_s
        return Stats(
            n_tokens=n_new,
            n_passes=n_passes,
            tokens_per_pass=n_new / n_passes,
            seconds=seconds,
            seconds_per_token=seconds / n_new,
            prefill_seconds=run_stats.prefill_s,
            draft_seconds=run_stats.draft_s,
            verify_seconds=run_stats.verify_s,
            wait_seconds=self._engine.streamer.meter.waited_s - self._waited_s,
            link_bytes=nbytes,
            link_gbps=nbytes / busy_s / 1e9 if busy_s else 0.0,
            link_busy=busy_s / seconds,
            nodes_per_tree=run_stats.n_nodes / n_trees,
            levels_per_tree=run_stats.n_levels / n_trees,
            acceptance_by_rank=[n / of for n, of in zip(run_stats.taken, run_stats.tried, strict=True) if of],
            predicted_seconds_per_token=run_stats.predicted_s / run_stats.predicted_tokens if measured else None,
            measured_seconds_per_token=run_stats.measured_s / run_stats.measured_tokens if measured else None,
            predicted_tokens_per_pass=run_stats.predicted_tokens / (run_stats.n_passes - 1) if measured else None,
            measured_tokens_per_pass=run_stats.measured_tokens / (run_stats.n_passes - 1) if measured else None,
            tree_widths=np.bincount(run_stats.topology.depths).tolist(),
        )


def _release(engine: Engine, disk: DiskTier) -> None:
    """End all transfers, and keep what was learned of a pair of models."""
    engine.close()
    disk.close()
    engine.drafter.save()


def _several(prompts: Prompt | Several[Prompt]) -> list[Prompt]:
    """A list of prompts, whether one was given or several."""
    one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if one else list(prompts)


def _check_prompt(ids: list[int], vocab_size: int, max_model_len: int) -> None:
    if not ids:
        raise PromptError("the prompt is empty", need="at least one token", change="give it some text")
    wrong = [token for token in ids if not 0 <= token < vocab_size]
    if wrong:
        raise PromptError(
            f"token id {wrong[0]} in the prompt",
            need=f"ids from 0 to {vocab_size - 1}",
            change="use this model's tokenizer",
        )
    if len(ids) >= max_model_len:
        raise CapacityError(
            "the prompt is too long",
            need=f"at most {max_model_len - 1} tokens, one fewer than --max-model-len",
            have=str(len(ids)),
            change="shorten it, or raise --max-model-len and --device-memory",
        )


def _tree_share(n_nodes: int, n_sequences: int) -> int:
    """Nodes that each tree of a batch may have."""
    return max(n_nodes // n_sequences, 1)


def _cache_rows(sequences: list[Sequence], n_nodes: int) -> int:
    """Rows the caches of a batch need: every token but the last, and the nodes of the trees."""
    return sum(one.longest - 1 + _tree_share(n_nodes, len(sequences)) for one in sequences)
