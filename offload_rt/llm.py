"""The public Python surface: `LLM`, what it returns, and how a run is measured."""

import time
import weakref
from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from offload_rt.config import EngineConfig, SamplingParams
from offload_rt.engine.builder import load
from offload_rt.engine.engine import Engine
from offload_rt.engine.engine_plan import EnginePlan, plan_engine
from offload_rt.engine.loader import Progress
from offload_rt.errors import CapacityError, PromptError, SettingsError
from offload_rt.executor.runner import Step
from offload_rt.executor.sequence import Sequence
from offload_rt.offload.placement import Plan
from offload_rt.speculate.select import Drafting, find_draft, pick_drafter
from offload_rt.system.trace import Trace
from offload_rt.text.detokenize import TextStream, encode, load_tokenizer
from offload_rt.tree.topology import Topology
from offload_rt.weights.checkpoint import end_ids, locate, open_checkpoint

Prompt = str | Several[int]


@dataclass(frozen=True)
class Stats:
    """How a sequence was generated. It may have shared passes with others; seconds and bytes are those of whole passes.

    seconds                  from the start of its first pass to the end of its last
    wait_seconds             in which no layer was there to compute
    link_busy                share of the seconds in which the link moved bytes
    nodes_per_tree           mean size of the verified trees, roots included; and so levels_per_tree
    acceptance_by_rank       how often the k-th child was accepted, of the times it was there and its parent reached
    predicted_*, measured_*  of the passes that computed no prompt, predicted before each; None where there was none
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
        sums, n_new = sequence.stats, sequence.n_new
        n_passes, n_measured, seconds = sums.n_passes, sums.n_measured, sums.ended - sums.started
        return cls(
            n_tokens=n_new,
            n_passes=n_passes,
            tokens_per_pass=n_new / n_passes,
            seconds=seconds,
            seconds_per_token=seconds / n_new,
            prefill_seconds=sums.prefill_s,
            draft_seconds=sums.draft_s,
            verify_seconds=sums.verify_s,
            wait_seconds=sums.waited_s,
            link_bytes=sums.link_nbytes,
            link_gbps=sums.link_nbytes / sums.link_busy_s / 1e9 if sums.link_busy_s else 0.0,
            link_busy=sums.link_busy_s / seconds,
            nodes_per_tree=sums.n_nodes / n_passes,
            levels_per_tree=sums.n_levels / n_passes,
            acceptance_by_rank=[taken / tried for taken, tried in zip(sums.taken, sums.tried, strict=True) if tried],
            predicted_seconds_per_token=sums.predicted_s / sums.predicted_tokens if n_measured else None,
            measured_seconds_per_token=sums.measured_s / sums.measured_tokens if n_measured else None,
            predicted_tokens_per_pass=sums.predicted_tokens / n_measured if n_measured else None,
            measured_tokens_per_pass=sums.measured_tokens / n_measured if n_measured else None,
            tree_widths=np.bincount(sums.topology.depths).tolist(),
        )


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

    @classmethod
    def of(cls, sequence: Sequence) -> "Output":
        """Of a sequence that has ended."""
        ids, n, text = sequence.tokens, sequence.n_prompt, sequence.text.text if sequence.text else ""
        return cls(ids[:n], ids[n:], text, sequence.finish_reason or "", Stats.of(sequence), sequence.stats.topology)


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

    engine_plan: EnginePlan
    tokenizer: PreTrainedTokenizerBase | None
    _engine: Engine | None = None
    _closes: "weakref.finalize[..., LLM]"

    def __init__(
        self,
        model: str,
        draft_model: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        kv_memory: str | int | None = None,
        kv_dtype: str = "auto",
        max_model_len: int | None = None,
        link_format: str = "auto",
        sidecar: str | None = None,
        drafter: str = "auto",
        rule: str = "auto",
        tree_size: int | None = None,
        tree_depth: int | None = None,
        draft_context: int | None = None,
        revision: str | None = None,
        offline: bool = False,
    ) -> None:
        """The arguments are the fields of `EngineConfig`. Raises an OffloadError if the model cannot be served."""
        self._prepare(
            EngineConfig(
                model, draft_model, device, dtype, device_memory, host_memory, kv_memory, kv_dtype, max_model_len,
                link_format, sidecar, drafter, rule, tree_size, tree_depth, draft_context, revision, offline,
            )
        )  # fmt: skip
        self.load()

    @classmethod
    def from_config(cls, config: EngineConfig, trace: Trace | None = None, progress: Progress | None = None) -> "LLM":
        """`open` and `load`."""
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
        self._closes.detach()  # `load` closes what the plan has opened
        self._engine = load(self.engine_plan, trace or Trace(on=False), progress)
        # At the latest when the program ends: threads that still read would be torn down with the interpreter.
        self._closes = weakref.finalize(self, self._engine.close)

    def _prepare(self, config: EngineConfig, drafting: Drafting | None = None) -> None:
        if drafting is None:
            pick_drafter(config)  # what cannot be is refused before anything is fetched
        directory = locate(config.model, config.revision, config.offline)
        checkpoint, self._end_ids = open_checkpoint(directory), end_ids(directory)
        self.tokenizer = load_tokenizer(directory)
        self.engine_plan = plan_engine(config, checkpoint, find_draft(config, drafting, checkpoint, self.tokenizer))
        self._closes = weakref.finalize(self, self.engine_plan.disk.close)

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
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.engine_plan.max_model_len

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all transfers, join the threads, release the memory; may be called again."""
        self._engine = None
        self._closes()

    def generate(
        self, prompts: Prompt | Several[Prompt], params: SamplingParams | Several[SamplingParams] | None = None
    ) -> list[Output]:
        """Continue one prompt or several; texts, or lists of token ids.

        params  for all prompts, or one for each
        Raises PromptError or CapacityError for a prompt that cannot be continued, SettingsError where there are not as many
        params as prompts, before anything runs.
        """
        several = _several(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(several)
        if len(params) != len(several):
            raise SettingsError("generate", need=f"one SamplingParams or {len(several)}", have=str(len(params)))
        sequences = [self._sequence(prompt, one) for prompt, one in zip(several, params, strict=True)]
        engine = self.engine
        ids = [engine.add(sequence) for sequence in sequences]
        try:
            while any(sequence.finish_reason is None for sequence in sequences):
                engine.step()
        finally:
            for id in ids:
                engine.abort(id)
        return [Output.of(sequence) for sequence in sequences]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Continue one prompt and give what each pass adds; see `generate`."""
        sequence, engine = self._sequence(prompt, params or SamplingParams()), self.engine
        id, n_taken = engine.add(sequence), sequence.n_prompt
        try:
            while sequence.finish_reason is None:
                engine.step()
                ended = sequence.finish_reason is not None
                text = sequence.text.take(final=ended) if sequence.text else ""
                new, n_taken = sequence.tokens[n_taken:], len(sequence.tokens)
                yield Piece(text, new, Output.of(sequence) if ended else None)
        finally:
            engine.abort(id)

    def time_plain(self, context: int, n_passes: int = 3) -> list[float]:
        """Seconds of each of some passes of one token after `context` others, or as many as there is room for."""
        return self.time_passes(Topology.chain(1), min(context, self.max_model_len - 1), n_passes)

    def time_passes(self, topology: Topology, context: int, n_passes: int = 3) -> list[float]:
        """Seconds of each of some passes over a tree after `context` tokens, with logits for all of its nodes."""
        runner, n = self.engine.runner, len(topology)
        share = None if self.plan.split is None else self.plan.split.share(context + n + 1, n, is_alone=True)
        cache = runner.new_cache(context + n + 1, True, share)
        runner.assume_context(cache, context)
        step = Step(cache, torch.zeros(n, dtype=torch.int64), topology, n_wanted=n, n_prompt=context)
        moments = []
        # The first begins with layers that have come in already, in time that nobody counted; the last ends the one before.
        for _ in range(n_passes + 2):
            moments.append(time.perf_counter())
            runner.forward([step])
            runner.finish()
            runner.discard(cache)
        runner.free_cache(cache)
        return [after - before for before, after in pairwise(moments[1:])]

    def encode(self, text: str, chat: bool = False) -> list[int]:
        """Token ids of a text, as it is or as the user's turn of a chat. Raises PromptError without a tokenizer."""
        if self.tokenizer is None:
            raise PromptError("the checkpoint has no tokenizer", change="give the prompt as a list of token ids")
        return encode(self.tokenizer, text, chat)

    def check_prompt(self, ids: Several[int]) -> None:
        """Raises PromptError or CapacityError for token ids that cannot be continued."""
        if not ids:
            raise PromptError("the prompt is empty", need="at least one token", change="give it some text")
        vocab_size = self.engine_plan.checkpoint.spec.vocab_size
        wrong = [token for token in ids if not 0 <= token < vocab_size]
        if wrong:
            need, change = f"ids from 0 to {vocab_size - 1}", "use this model's tokenizer"
            raise PromptError(f"token id {wrong[0]} in the prompt", need=need, change=change)
        if len(ids) >= self.max_model_len:
            raise CapacityError(
                "the prompt is too long", need=f"at most {self.max_model_len - 1} tokens, one fewer than --max-model-len",
                have=str(len(ids)), change="shorten it, or raise --max-model-len and --device-memory",
            )  # fmt: skip

    def _sequence(self, prompt: Prompt, params: SamplingParams) -> Sequence:
        ids = self.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        self.check_prompt(ids)
        if params.stop and self.tokenizer is None:
            raise PromptError("stop strings", need="a tokenizer", have="a checkpoint without one")
        text = TextStream(self.tokenizer, ids, params.stop) if self.tokenizer is not None else None
        return Sequence(ids, params, self.max_model_len, self._end_ids, text)


def _several(prompts: Prompt | Several[Prompt]) -> list[Prompt]:
    """A list of prompts, whether one was given or several."""
    if isinstance(prompts, str):
        return [prompts]
    ids = [one for one in prompts if isinstance(one, int)]
    return [ids] if ids else [one for one in prompts if not isinstance(one, int)]
