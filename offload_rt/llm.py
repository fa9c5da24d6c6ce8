"""The public Python surface: `LLM`."""

import asyncio
import sys
import time
import weakref
from collections.abc import AsyncGenerator, Iterator, Mapping
from collections.abc import Sequence as Several
from contextlib import aclosing, closing
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from numbers import Integral
from operator import index
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn
from torch import Tensor

from offload_rt.config import EngineConfig, SamplingParams, StructuredOutputs
from offload_rt.engine.builder import load
from offload_rt.engine.engine import Engine
from offload_rt.engine.engine_spec import EngineSpec, plan_engine
from offload_rt.engine.engine_thread import EngineThread, IndexedPiece, closed
from offload_rt.engine.loader import Progress
from offload_rt.engine.outputs import Output, Piece, Request, Stats
from offload_rt.errors import CapacityError, PromptError, SettingsError
from offload_rt.executor.grammar import Grammar, GrammarCompiler
from offload_rt.executor.sequence import Sequence
from offload_rt.executor.step import Step
from offload_rt.offload.placement import Plan
from offload_rt.speculate.select import Drafting, find_draft, pick_drafter
from offload_rt.system.progress import loading_bar, progress_bar
from offload_rt.system.ranks import is_first, joined
from offload_rt.system.trace import Trace
from offload_rt.text.detokenize import (
    Message,
    TextStream,
    encode,
    encode_chat,
    load_tokenizer,
    set_chat_template,
)
from offload_rt.tree.topology import Topology
from offload_rt.weights.checkpoint import open_checkpoint
from offload_rt.weights.files import end_ids, sampling_defaults
from offload_rt.weights.locate import locate

if TYPE_CHECKING:  # it takes a second to load, together with a tokenizer
    from transformers import PreTrainedTokenizerBase

__all__ = ["LLM", "Output", "Piece", "Stats"]

# A text, token ids, or a mapping with "prompt" or "prompt_token_ids".
Prompt = str | Several[int] | np.ndarray | Tensor | Mapping[str, Any]


class LLM:
    """A model larger than its memory budget, ready to generate.

    A context manager; `close()` releases everything, and so does losing the last reference, or the
    end of the program. Where torchrun has started several processes, rank 0 goes on with its
    program; the others compute with it from when they load the model until it is closed, and end.
    """

    spec: EngineSpec
    tokenizer: "PreTrainedTokenizerBase | None"
    _thread: EngineThread | None = None
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
        max_num_seqs: int = 1,
        link_format: str = "auto",
        sidecar: str | None = None,
        drafter: str = "auto",
        rule: str = "auto",
        tree_size: int | None = None,
        tree_depth: int | None = None,
        draft_context: int | None = None,
        learn_draft: str = "off",
        batch_invariant: bool = False,
        exact_parallel: bool = False,
        split_draft: str = "auto",
        revision: str | None = None,
        offline: bool = False,
        chat_template: str | None = None,
        pipeline: int = 1,
        use_tqdm_on_load: bool = True,
    ) -> None:
        """The arguments are the fields of `EngineConfig`. Raises an OffloadError if the model
        cannot be served.

        use_tqdm_on_load  show a progress bar, if stderr is a terminal; it is rich's, the name is
                          vLLM's
        """
        self._prepare(
            EngineConfig(
                model, draft_model, device, dtype, device_memory, host_memory, kv_memory, kv_dtype,
                max_model_len,
                max_num_seqs, link_format, sidecar, drafter, rule, tree_size, tree_depth,
                draft_context, learn_draft,
                batch_invariant, exact_parallel, split_draft, revision, offline,
                chat_template, pipeline,
            )
        )  # fmt: skip
        is_shown = use_tqdm_on_load and sys.stderr.isatty() and is_first()
        with loading_bar(Console(stderr=True, quiet=not is_shown)) as bar:
            self.load(progress=bar)

    @classmethod
    def from_config(
        cls, config: EngineConfig, trace: Trace | None = None, progress: Progress | None = None
    ) -> "LLM":
        """`open` and `load`."""
        llm = cls.open(config)
        llm.load(trace, progress)
        return llm

    @classmethod
    def open(cls, config: EngineConfig, drafting: Drafting | None = None) -> "LLM":
        """Check settings and checkpoint and decide what lies where, before a weight moves; `load`
        has to follow.

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
        self._thread = EngineThread(load(self.spec, trace or Trace(on=False), progress))
        # At the latest when the program ends: threads that still read would be torn down with the
        # interpreter.
        self._closes = weakref.finalize(self, self._thread.close)

    def _prepare(self, config: EngineConfig, drafting: Drafting | None = None) -> None:
        if (ranks := joined()) is not None:
            ranks.refuse_second()
        if drafting is None:
            pick_drafter(config)  # what cannot be is refused before anything is fetched
        if config.draft_model is not None:  # before the weights of the target are fetched
            locate(config.draft_model, None, config.offline, has_weights=False)
        directory = locate(config.model, config.revision, config.offline)
        checkpoint = open_checkpoint(directory)
        self._end_ids = end_ids(directory, checkpoint.config)
        self._defaults, self.tokenizer = sampling_defaults(directory), load_tokenizer(directory)
        if config.chat_template is not None:
            set_chat_template(self.tokenizer, Path(config.chat_template))
        found = find_draft(config, drafting, checkpoint, self.tokenizer)
        try:
            self.spec = plan_engine(config, checkpoint, found)
        except CapacityError:
            is_asked = (
                drafting is not None or config.drafter != "auto" or config.draft_model is not None
            )
            if is_asked or found.draft is None:
                raise
            # There is no room for the layer that would draft, which nobody has asked for.
            self.spec = plan_engine(config, checkpoint, pick_drafter(config))
        self._compiler_lock = Lock()
        self._closes = weakref.finalize(self, self.spec.close)

    @property
    def plan(self) -> Plan:
        """What lies where."""
        return self.spec.plan

    @property
    def engine(self) -> Engine:
        """The loaded parts. Raises SettingsError once closed."""
        return self._of_engine.engine

    @property
    def _of_engine(self) -> EngineThread:
        if self._thread is None:
            raise closed()
        return self._thread

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.spec.memory.max_model_len

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all transfers, join the threads, release the memory; may be called again."""
        self._thread = None
        self._closes()

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json says, for what is left None."""
        return self._defaults

    def generate(
        self,
        prompts: Prompt | Several[Prompt],
        sampling_params: SamplingParams | Several[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[Output]:
        """Continue one prompt or several: texts, or token ids as a list, an array or a tensor.

        sampling_params  for all prompts, or one for each
        use_tqdm         show a progress bar for several prompts, if stderr is a terminal; it is
                         rich's, the name is vLLM's
        Raises PromptError or CapacityError for a prompt that cannot be continued, SettingsError
        where there are not as many params as prompts, before anything runs.
        """
        several = _several(prompts)
        params = sampling_params
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(several)
        if len(params) != len(several):
            raise SettingsError(
                "generate", need=f"one SamplingParams or {len(several)}", have=str(len(params))
            )
        requests = [self._request(prompt, one) for prompt, one in zip(several, params, strict=True)]
        thread = self._of_engine
        console = Console(stderr=True, quiet=not use_tqdm or len(requests) == 1)
        n_done = 0
        with progress_bar(console, "prompts", MofNCompleteColumn()) as bar:
            for _, piece in thread.pieces(requests):
                n_done += piece.output is not None
                bar(n_done, len(requests))
        return [request.output for request in requests]

    def chat(
        self,
        messages: Several[Message] | Several[Several[Message]],
        sampling_params: SamplingParams | Several[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Several[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Output]:
        """Answer a conversation or several, each a list of {"role": ..., "content": ...}; see
        `generate`.

        chat_template           instead of the model's
        add_generation_prompt   end with what begins an answer
        continue_final_message  go on with the last message instead
        tools                   JSON schemas of functions that the template tells the model of
        chat_template_kwargs    variables of the template, such as {"enable_thinking": False}
        Raises PromptError where the model has no template, or it fails.
        """
        options = {
            "chat_template": chat_template, "tools": tools,
            "continue_final_message": continue_final_message,
            "add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {}),
        }  # fmt: skip
        one = [message for message in messages if isinstance(message, Mapping)]
        several = [one] if one else [turns for turns in messages if not isinstance(turns, Mapping)]
        return self.generate(
            [self.encode_chat(turns, options) for turns in several], sampling_params
        )

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[Piece]:
        """Continue one prompt and give what each pass adds; see `generate`."""
        with closing(self._of_engine.pieces([self._request(prompt, sampling_params)])) as pieces:
            for _, piece in pieces:
                yield piece

    async def astream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[Piece, None]:
        """`stream` for asyncio. Concurrent streams share passes; a cancelled stream leaves before
        the next pass.
        """
        request = await asyncio.to_thread(self._request, prompt, sampling_params)
        async with aclosing(self._of_engine.apieces([request])) as pieces:
            async for _, piece in pieces:
                yield piece

    async def astream_all(
        self, prompts: Several[Prompt], sampling_params: SamplingParams
    ) -> AsyncGenerator[IndexedPiece, None]:
        """`astream` for several prompts: yield the index of a prompt and a piece of its answers.

        Several greedy answers to a prompt are allowed, and equal.
        """

        def requests() -> list[Request]:
            return [self._answers(prompt, sampling_params) for prompt in prompts]

        # In a worker thread: tokenization of long prompts would block other tasks.
        checked = await asyncio.to_thread(requests)
        async with aclosing(self._of_engine.apieces(checked)) as pieces:
            async for piece in pieces:
                yield piece

    def time_plain(self, context: int, n_passes: int = 3) -> list[float]:
        """Seconds of each of some passes of one token after `context` others, or as many as there
        is room for.
        """
        return self.time_passes(Topology.chain(1), min(context, self.max_model_len - 1), n_passes)

    def time_passes(self, topology: Topology, context: int, n_passes: int = 3) -> list[float]:
        """Seconds of each of some passes over a tree after `context` tokens, with logits for all of
        its nodes.
        """
        self.engine.reset_prefix_cache()
        runner = self.engine.runner
        n = len(topology)
        share = (
            None
            if self.plan.split is None
            else self.plan.split.share(context + n + 1, n, is_alone=True)
        )
        cache = runner.new_cache(context + n + 1, True, share)
        runner.assume_context(cache, context)
        step = Step(
            cache, torch.zeros(n, dtype=torch.int64), topology, n_wanted=n, n_prompt=context
        )
        moments = []
        # The first begins with layers that have come in already, in time that nobody counted; the
        # last ends the one before.
        for _ in range(n_passes + 2):
            moments.append(time.perf_counter())
            runner.forward([step])
            runner.finish()
            runner.discard(cache)
        runner.free_cache(cache)
        return [after - before for before, after in pairwise(moments[1:])]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises PromptError without a tokenizer, CapacityError for a text
        that cannot fit.
        """
        return encode(self._tokenizer(), text, self._n_characters, add_special_tokens)

    def encode_chat(self, messages: Several[Message], options: Mapping[str, Any]) -> list[int]:
        """Token ids of a conversation, with options of transformers' `apply_chat_template` and
        variables of the template.
        """
        return encode_chat(self._tokenizer(), messages, options, self._n_characters)

    @cached_property
    def _n_characters(self) -> int:
        """More than any prompt has that fits: tokenizers take long over endless ones."""
        return max(self.max_model_len * max(map(len, self._tokenizer().get_vocab())), 1 << 16)

    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        if self.tokenizer is None:
            raise PromptError(
                "the checkpoint has no tokenizer", change="give the prompt as a list of token ids"
            )
        return self.tokenizer

    def check_prompt(self, ids: Several[int]) -> None:
        """Raises PromptError or CapacityError for token ids that cannot be continued."""
        if not ids:
            raise PromptError(
                "the prompt is empty", need="at least one token", change="give it some text"
            )
        if len(ids) >= self.max_model_len:
            can_grow = self.max_model_len < self.spec.target.checkpoint.spec.max_positions
            limit = "--max-model-len" if can_grow else "the model's positions"
            raise CapacityError(
                "the prompt is too long", have=str(len(ids)),
                need=f"at most {self.max_model_len - 1} tokens, one fewer than {limit}",
                change="shorten it, or raise --max-model-len and "
                       "--device-memory" if can_grow else "shorten it",
            )  # fmt: skip
        vocab_size = self.spec.target.checkpoint.spec.vocab_size
        wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            need = f"ids from 0 to {vocab_size - 1}"
            change = "use this model's tokenizer"
            raise PromptError(f"token id {wrong} in the prompt", need=need, change=change)

    def _request(self, prompt: Prompt, params: SamplingParams | None) -> Request:
        """Build the request of a prompt. Raises SettingsError for several greedy answers."""
        params = self._completed(params or SamplingParams())
        if params.n > 1 and not params.temperature:
            need = "a temperature above 0"
            have = "greedy decoding, of one answer"
            raise SettingsError(f"n is {params.n}", need=need, have=have)
        return self._answers(prompt, params)

    def _completed(self, params: SamplingParams) -> SamplingParams:
        return replace(params, **params.left_to(self._defaults))

    def _answers(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Build the sequences of a prompt. Each has a seed one above that of the previous one."""
        params = self._completed(params)
        bad_words_ids = (*params.bad_words_ids, *self._bad_words_ids(params.bad_words))
        params = replace(params, bad_words=(), bad_words_ids=bad_words_ids)
        self._check_token_ids(params)
        seed = params.seed
        several = (
            replace(params, n=1, seed=None if seed is None else (seed + i) % 2**63)
            for i in range(params.n)
        )
        content = _content(prompt)
        text = content if isinstance(content, str) else None
        return Request([self._sequence(content, one) for one in several], text)

    def _sequence(self, prompt: Prompt, params: SamplingParams) -> Sequence:
        ids = self.encode(prompt) if isinstance(prompt, str) else _ids(prompt)
        self.check_prompt(ids)
        if params.stop and self.tokenizer is None:
            raise PromptError("stop strings", need="a tokenizer", have="a checkpoint without one")
        text = TextStream(self.tokenizer, ids, params.stop) if self.tokenizer is not None else None
        grammar = None
        if params.structured_outputs is not None:
            grammar = self._compile(params.structured_outputs)
        return Sequence(ids, params, self.max_model_len, self._end_ids, text, grammar)

    def _compile(self, outputs: StructuredOutputs) -> Grammar:
        """Compile a grammar. Raises SettingsError if that fails."""
        with self._compiler_lock:
            compiler = self._compiler
        start_after = None
        if outputs.after is not None:
            start_after = self._tokenizer().get_vocab().get(outputs.after)
            if start_after is None:
                raise SettingsError(f"after {outputs.after!r}", need="a token of the vocabulary")
        return compiler.compile(outputs, start_after)

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        vocab_size = self.spec.target.checkpoint.spec.vocab_size
        compiler = GrammarCompiler(self._tokenizer(), vocab_size, self._end_ids)
        self.engine.closes.callback(compiler.close)
        return compiler

    def _bad_words_ids(self, bad_words: Several[str]) -> Iterator[tuple[int, ...]]:
        """Encode each bad word as the start of a text, and behind a space where that differs."""
        for word in bad_words:
            tokenizer = self._tokenizer()
            plain = tokenizer.encode(word.lstrip(), add_special_tokens=False)
            spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            if not plain:
                raise SettingsError(f"bad word {word!r}", need="a token", have="none")
            yield tuple(plain)
            # vLLM's rule: a space token of its own would exclude the word only after that token.
            if spaced[0] != plain[0] and len(spaced) == len(plain):
                yield tuple(spaced)

    def _check_token_ids(self, params: SamplingParams) -> None:
        """Raises SettingsError for ids outside the vocabulary, and if no token could be
        produced.
        """
        vocab_size = self.spec.target.checkpoint.spec.vocab_size
        ids_by_name = {
            "logit_bias": params.logit_bias or (),
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids,
            "bad_words": [token for word in params.bad_words_ids for token in word],
        }
        for name, ids in ids_by_name.items():
            wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
            if wrong is not None:
                raise SettingsError(f"token id {wrong} in {name}", need=f"ids below {vocab_size}")
        # A token that ends no bad word and no text stays possible on every path of a tree.
        excluded = {word[-1] for word in params.bad_words_ids}
        if params.min_tokens:
            excluded |= {*params.stop_token_ids, *self._end_ids}
        if all(token in excluded for token in params.allowed_token_ids or range(vocab_size)):
            need = "a token that neither ends a bad word nor, with min_tokens, the text"
            raise SettingsError("allowed_token_ids", need=need, change="allow more tokens")


def _several(prompts: Prompt | Several[Prompt]) -> list[Prompt]:
    """A list of prompts, whether one was given or several."""
    if isinstance(prompts, Mapping):
        return [prompts]
    if isinstance(prompts, list | tuple):
        is_one = bool(prompts) and isinstance(prompts[0], Integral)
    else:
        is_one = getattr(prompts, "ndim", 1) < 2
    return [prompts] if is_one else list(prompts)  # type: ignore[list-item, arg-type]  # as it has just been seen


def _content(prompt: Prompt) -> Any:
    """Text or token ids of a prompt, also of vLLM's dictionaries."""
    if not isinstance(prompt, Mapping):
        return prompt
    names = [name for name in ("prompt_token_ids", "prompt") if prompt.get(name) is not None]
    unknown = sorted(set(prompt) - {"prompt_token_ids", "prompt"})
    if not names or unknown:
        raise PromptError(
            "the prompt", need='"prompt" or "prompt_token_ids"',
            have=", ".join(map(repr, unknown)) or "neither", change="give one of these keys",
        )  # fmt: skip
    return prompt[names[0]]


def _ids(prompt: Any) -> list[int]:
    """Token ids from a list, array or tensor. Raises PromptError for anything else."""
    try:
        return [
            index(token) for token in (prompt.tolist() if hasattr(prompt, "tolist") else prompt)
        ]
    except TypeError as error:
        need = "a text, or whole numbers as a list, an array or a tensor"
        have = f"{type(prompt).__name__} ({error})"
        raise PromptError("the prompt", need=need, have=have, change="give token ids") from error
