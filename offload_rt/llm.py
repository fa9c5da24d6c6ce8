"""The public Python surface: `LLM`."""

import asyncio
import sys
import time
import weakref
from collections import abc
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from contextlib import aclosing, closing
from copy import copy
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

from offload_rt.bad_words import BadWords
from offload_rt.config import EngineConfig
from offload_rt.engine.builder import load
from offload_rt.engine.engine import Engine
from offload_rt.engine.engine_spec import EngineSpec, plan_engine
from offload_rt.engine.engine_thread import EngineThread, IndexedPiece, closed
from offload_rt.engine.loader import Progress
from offload_rt.engine.outputs import Output, Piece, Request, Stats
from offload_rt.errors import CapacityError, PromptError, SettingsError, UserError
from offload_rt.executor.grammar import Grammar, GrammarCompiler
from offload_rt.executor.pooling import Pooling
from offload_rt.executor.sequence import Sequence
from offload_rt.executor.step import Step
from offload_rt.models.image_prompt import ImagePrompt
from offload_rt.models.processors import ImageProcessor
from offload_rt.offload.placement import Plan
from offload_rt.sampling_params import SamplingParams, StructuredOutputs
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
from offload_rt.text.images import Fetch, extract_images, has_images
from offload_rt.tree.topology import Topology
from offload_rt.weights.checkpoint import open_checkpoint
from offload_rt.weights.files import end_ids, sampling_defaults
from offload_rt.weights.locate import locate

if TYPE_CHECKING:  # importing transformers costs a second
    from transformers import PreTrainedTokenizerBase

__all__ = ["LLM", "Output", "Piece", "Stats"]

# A text, token ids, a prompt with images, or a mapping with "prompt" or "prompt_token_ids".
Prompt = str | abc.Sequence[int] | np.ndarray | Tensor | ImagePrompt | Mapping[str, Any]


class LLM:
    """A model larger than its memory budget, ready to generate.

    A context manager. `close()`, the loss of the last reference and the end of the program release
    everything. Under torchrun, only rank 0 returns from loading. Further ranks compute with rank 0
    until the model is closed, and then exit.
    """

    spec: EngineSpec
    tokenizer: "PreTrainedTokenizerBase | None"
    _thread: EngineThread | None = None
    images: ImageProcessor | None
    _compiler: GrammarCompiler | None = None
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
        draft_quantize: str = "auto",
        learn_draft: str = "off",
        torch_products: bool = False,
        exact_parallel: bool = False,
        split_draft: str = "auto",
        revision: str | None = None,
        offline: bool = False,
        chat_template: str | None = None,
        pipeline: int = 1,
        mirror: str | None = None,
        max_image_pixels: int = 1_605_632,
        use_tqdm_on_load: bool = True,
    ) -> None:
        """Load a model; the arguments are the fields of `EngineConfig`.

        use_tqdm_on_load  show a progress bar of rich if stderr is a terminal; vLLM's name
        Raises an OffloadError if the model cannot be served.
        """
        self._prepare(
            EngineConfig(
                model, draft_model, device, dtype, device_memory, host_memory, kv_memory, kv_dtype,
                max_model_len,
                max_num_seqs, link_format, sidecar, drafter, rule, tree_size, tree_depth,
                draft_context, draft_quantize, learn_draft,
                torch_products, exact_parallel, split_draft, revision, offline,
                chat_template, pipeline, mirror, max_image_pixels,
            )
        )  # fmt: skip
        is_shown = use_tqdm_on_load and sys.stderr.isatty() and is_first()
        with loading_bar(Console(stderr=True, quiet=not is_shown)) as bar:
            self.load(progress=bar)

    @classmethod
    def from_config(
        cls, config: EngineConfig, trace: Trace | None = None, progress: Progress | None = None
    ) -> "LLM":
        """Call `open` and `load`."""
        llm = cls.open(config)
        llm.load(trace, progress)
        return llm

    @classmethod
    def open(cls, config: EngineConfig, drafting: Drafting | None = None) -> "LLM":
        """Check settings and checkpoint and plan the placement; `load` must follow.

        drafting  drafter and rule that replace the settings
        """
        llm = cls.__new__(cls)
        llm._prepare(config, drafting)
        return llm

    def load(self, trace: Trace | None = None, progress: Progress | None = None) -> None:
        """Load resident layers and start the streamer.

        trace     collects the timeline
        progress  called with (bytes so far, total bytes)
        """
        self._closes.detach()  # `load` closes the files of the plan
        self._thread = EngineThread(load(self.spec, trace or Trace(on=False), progress))
        # Close before the interpreter shuts down: it would tear down threads while they read.
        self._closes = weakref.finalize(self, self._thread.close)

    def _prepare(self, config: EngineConfig, drafting: Drafting | None = None) -> None:
        if (ranks := joined()) is not None:
            ranks.refuse_second()
        if drafting is None:
            pick_drafter(config)  # refuse invalid settings before the download
        if config.draft_model is not None:  # before the download of the target
            locate(config.draft_model, None, config.offline, has_weights=False)
        directory = locate(config.model, config.revision, config.offline)
        checkpoint = open_checkpoint(directory)
        self._end_ids = end_ids(directory, checkpoint.config)
        self._defaults, self.tokenizer = sampling_defaults(directory), load_tokenizer(directory)
        if config.chat_template is not None:
            set_chat_template(self.tokenizer, Path(config.chat_template))
        selected = find_draft(config, drafting, checkpoint, self.tokenizer)
        try:
            self.spec = plan_engine(config, checkpoint, selected)
        except CapacityError:
            is_asked = (
                drafting is not None or config.drafter != "auto" or config.draft_model is not None
            )
            if is_asked or selected.draft is None:
                raise
            # The optional draft layer does not fit.
            self.spec = plan_engine(config, checkpoint, pick_drafter(config))
        target = self.spec.target
        self.images = None
        if target.checkpoint.images and self.tokenizer is not None:
            tower = target.checkpoint.spec.images
            assert tower is not None, "see Checkpoint.image_blocks"
            self.images = ImageProcessor.load(
                directory, self.tokenizer, tower, config.max_image_pixels
            )
        self._compiler_lock = Lock()
        self._closes = weakref.finalize(self, self.spec.close)

    @property
    def plan(self) -> Plan:
        """Placement of the layers."""
        return self.spec.plan

    @property
    def engine(self) -> Engine:
        """The loaded engine. Raises SettingsError after `close`."""
        return self._open_thread.engine

    @property
    def _open_thread(self) -> EngineThread:
        if self._thread is None:
            raise closed()
        return self._thread

    @property
    def supports_images(self) -> bool:
        """Whether prompts may contain images."""
        return self.images is not None

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of prompt and answer together."""
        return self.spec.memory.max_model_len

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all transfers, join the threads, release the memory. Further calls do nothing."""
        self._thread = None
        self._closes()
        if self._compiler is not None:
            self._compiler.close()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the defaults for None fields, from the model's generation_config.json."""
        return self._defaults

    def generate(
        self,
        prompts: Prompt | abc.Sequence[Prompt],
        sampling_params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[Output]:
        """Continue prompts: texts, or token ids as a list, an array or a tensor.

        Images: {"prompt": text with placeholders, "multi_modal_data": {"image": images or paths}}.

        sampling_params  for all prompts, or a list with an entry per prompt
        use_tqdm         show a progress bar of rich for multiple prompts if stderr is a terminal;
                         vLLM's name
        Raises PromptError or CapacityError for a prompt that cannot be continued. Raises
        SettingsError if the numbers of params and prompts differ. Checks precede all passes.
        """
        requests = self._requests(_as_list(prompts), sampling_params)
        console = Console(stderr=True, quiet=not use_tqdm or len(requests) == 1)
        n_done = 0
        with progress_bar(console, "prompts", MofNCompleteColumn) as bar:
            for _, piece in self._pieces(requests):
                n_done += piece.output is not None
                bar(n_done, len(requests))
        return [request.output for request in requests]

    def chat(
        self,
        messages: abc.Sequence[Message] | abc.Sequence[abc.Sequence[Message]],
        sampling_params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: abc.Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Output]:
        """Answer conversations, each a list of {"role": ..., "content": ...}; see `generate`.

        Contents are texts or lists of parts: {"type": "text", "text": ...}, OpenAI's "image_url"
        with a data URL, or {"type": "image", "image": ...} with a path or Pillow's image.
        chat_template           replaces the model's template
        add_generation_prompt   append the start of an answer
        continue_final_message  continue the last message instead
        tools                   JSON schemas of functions, for the template
        chat_template_kwargs    variables of the template, e.g. {"enable_thinking": False}
        Raises PromptError if the template is missing or fails.
        """
        options = {
            "chat_template": chat_template, "tools": tools,
            "continue_final_message": continue_final_message,
            "add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {}),
        }  # fmt: skip
        single = [message for message in messages if isinstance(message, Mapping)]
        conversations = (
            [single] if single else [turns for turns in messages if not isinstance(turns, Mapping)]
        )
        return self.generate(
            [self.encode_messages(turns, options) for turns in conversations], sampling_params
        )

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[Piece]:
        """Continue a prompt and yield the piece of each pass; see `generate`."""
        with closing(self._pieces([self._request(prompt, sampling_params)])) as pieces:
            for _, piece in pieces:
                yield piece

    def stream_all(
        self,
        prompts: abc.Sequence[Prompt],
        sampling_params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
    ) -> Generator[IndexedPiece, None, None]:
        """`stream` for multiple prompts: yield a prompt's index and a piece of its answers.

        Checks the prompts and settings at once, also before `load`.
        """
        return self._pieces(self._requests(prompts, sampling_params))

    def _pieces(self, requests: list[Request]) -> Generator[IndexedPiece, None, None]:
        with closing(self._open_thread.pieces(requests)) as pieces:
            yield from pieces

    async def astream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[Piece, None]:
        """`stream` for asyncio.

        Concurrent streams share passes. A cancelled stream leaves before the next pass.
        """
        request = await asyncio.to_thread(self._request, prompt, sampling_params)
        async with aclosing(self._open_thread.apieces([request])) as pieces:
            async for _, piece in pieces:
                yield piece

    def embed(self, prompts: Prompt | abc.Sequence[Prompt], pooling: str = "mean") -> Tensor:
        """Return an embedding per prompt: (n, hidden_size) float32, each of length 1.

        pooling  of the hidden states behind the final norm: "mean" or "last" token
        Raises as `generate` does, and SettingsError for other settings and models.
        """
        self.check_embeddings(pooling)
        params = SamplingParams(max_tokens=1, temperature=0)
        requests = self._requests(_as_list(prompts), params)
        for request in requests:
            request.sequences[0].pooling = Pooling(pooling == "mean")
        for _ in self._open_thread.pieces(requests):
            pass
        vectors = [request.sequences[0].pooling for request in requests]
        return torch.stack([vector.vector() for vector in vectors if vector is not None])

    def check_embeddings(self, pooling: str) -> None:
        """Raise SettingsError for an unknown pooling or a model without embeddings."""
        if pooling not in ("mean", "last"):
            raise SettingsError(f"pooling {pooling!r}", need='"mean" or "last"')
        if self.spec.ranks.ranks is not None:
            raise SettingsError("embeddings with several ranks", need="a single process")
        model = self.spec.target.checkpoint.spec
        if not model.supports_embeddings:
            need = "a native model (Llama, Mistral, Qwen2, Qwen3)"
            raise SettingsError("embeddings", need=need, have=model.family)

    async def astream_all(
        self, prompts: abc.Sequence[Prompt], sampling_params: SamplingParams
    ) -> AsyncGenerator[IndexedPiece, None]:
        """`astream` for multiple prompts: yield a prompt's index and a piece of its answers.

        Multiple greedy answers to a prompt are allowed, and equal.
        """

        def requests() -> list[Request]:
            return [self._answers(prompt, sampling_params) for prompt in prompts]

        # In a worker thread: tokenization of long prompts would block other tasks.
        checked = await asyncio.to_thread(requests)
        async with aclosing(self._open_thread.apieces(checked)) as pieces:
            async for piece in pieces:
                yield piece

    def time_plain(self, context: int, n_passes: int = 3) -> list[float]:
        """Return the seconds of passes of one token after `context` tokens.

        `max_model_len` limits the context.
        """
        return self.time_passes(Topology.chain(1), min(context, self.max_model_len - 1), n_passes)

    def time_passes(self, topology: Topology, context: int, n_passes: int = 3) -> list[float]:
        """Return the seconds of passes over a tree after `context` tokens.

        Logits are computed for all nodes.
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
        # The first pass uses layers prefetched before the clock started, so it does not count.
        # The last pass only ends its predecessor.
        for _ in range(n_passes + 2):
            moments.append(time.perf_counter())
            runner.forward([step])
            runner.finish()
            runner.discard(cache)
        runner.free_cache(cache)
        return [after - before for before, after in pairwise(moments[1:])]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Raises PromptError without a tokenizer, CapacityError for a text that cannot fit.
        """
        return encode(self._tokenizer(), text, self._n_characters, add_special_tokens)

    def encode_chat(self, messages: abc.Sequence[Message], options: Mapping[str, Any]) -> list[int]:
        """Return the token ids of a conversation.

        options  of transformers' `apply_chat_template`, and variables of the template
        """
        return encode_chat(self._tokenizer(), messages, options, self._n_characters)

    def encode_messages(
        self,
        messages: abc.Sequence[Message],
        options: Mapping[str, Any],
        fetch: Fetch | None = None,
        reads_files: bool = True,
    ) -> list[int] | ImagePrompt:
        """`encode_chat` for conversations that may contain images.

        fetch        reads images behind http URLs; None refuses them
        reads_files  whether {"type": "image", "image": ...} may contain a path or Pillow's image
        Raises PromptError for unusable images, and for a model without a vision tower.
        """
        if not has_images(messages):
            return self.encode_chat(messages, options)
        processor = self._image_processor
        turns, images = extract_images(messages, processor.scaled, fetch, reads_files=reads_files)
        return processor.encode_chat(turns, images, options)

    @property
    def _image_processor(self) -> ImageProcessor:
        if self.images is None:
            spec = self.spec.target.checkpoint.spec
            change = "leave the images out"
            have = f"type {spec.family}, of which only the text model is supported"
            if spec.images is not None:
                change = "raise --max-image-pixels or --device-memory, and use one process"
                have = "a tower that is not loaded"
            need = "a model with a vision tower"
            raise PromptError("images", need=need, have=have, change=change)
        return self.images

    @cached_property
    def _n_characters(self) -> int:
        """Upper bound of a prompt's characters; longer texts only slow down the tokenizer."""
        return max(self.max_model_len * max(map(len, self._tokenizer().get_vocab())), 1 << 16)

    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        if self.tokenizer is None:
            raise PromptError(
                "the checkpoint has no tokenizer",
                change="add its tokenizer.json, or pass token ids in Python",
            )
        return self.tokenizer

    def check_prompt(self, ids: abc.Sequence[int]) -> None:
        """Raise PromptError or CapacityError for token ids that cannot be continued."""
        if not ids:
            raise PromptError("the prompt is empty", need="at least one token", change="add text")
        if len(ids) >= self.max_model_len:
            can_grow = self.spec.has_more_positions
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

    def _requests(
        self,
        prompts: abc.Sequence[Prompt],
        params: SamplingParams | abc.Sequence[SamplingParams] | None,
    ) -> list[Request]:
        if not isinstance(params, abc.Sequence):
            params = [SamplingParams() if params is None else params] * len(prompts)
        if len(params) != len(prompts):
            need = f"one SamplingParams or {len(prompts)}"
            raise SettingsError("generate", need=need, have=str(len(params)))
        requests = []
        for i, (prompt, prompt_params) in enumerate(zip(prompts, params, strict=True)):
            try:
                requests.append(self._request(prompt, prompt_params))
            except UserError as error:
                if len(prompts) == 1:
                    raise
                raise error.prefixed(f"prompts[{i}]") from error
        return requests

    def _request(self, prompt: Prompt, params: SamplingParams | None) -> Request:
        """Build the request of a prompt. Raises SettingsError for multiple greedy answers."""
        params = self._completed(SamplingParams() if params is None else params)
        if params.n > 1 and not params.temperature:
            need = "a temperature above 0"
            have = "greedy decoding, which has one answer"
            raise SettingsError(f"n is {params.n}", need=need, have=have)
        return self._answers(prompt, params)

    def _completed(self, params: SamplingParams) -> SamplingParams:
        if not isinstance(params, SamplingParams):
            have = type(params).__name__
            raise SettingsError("sampling_params", need="SamplingParams", have=have)
        return replace(params, **params.left_to(self._defaults))

    def _answers(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Build the sequences of a prompt, with consecutive seeds."""
        params = self._completed(params)
        bad_words_ids = (*params.bad_words_ids, *self._bad_words_ids(params.bad_words))
        params = replace(params, bad_words=(), bad_words_ids=bad_words_ids)
        self._check_token_ids(params)
        seed = params.seed
        answer_params = (
            replace(params, n=1, seed=None if seed is None else (seed + i) % 2**63)
            for i in range(params.n)
        )
        content = self._content(prompt)
        text = content if isinstance(content, str) else None
        outputs = params.structured_outputs
        grammar = None if outputs is None else self._compile(outputs)
        bad_words = BadWords(bad_words_ids)
        sequences = [
            self._sequence(content, answer, grammar and grammar.copy(), copy(bad_words))
            for answer in answer_params
        ]
        return Request(sequences, text)

    def _content(self, prompt: Prompt) -> Any:
        """Return the text, the token ids or the prompt with images."""
        if not isinstance(prompt, Mapping) or "multi_modal_data" not in prompt:
            return _content(prompt)
        more = dict(prompt)
        parts = more.pop("multi_modal_data")
        text = _content(more)
        if not isinstance(text, str) or set(parts) - {"image"}:
            have = ", ".join(sorted(parts)) if isinstance(text, str) else "token ids"
            raise PromptError("multi_modal_data", need="a text with images", have=have)
        images = parts.get("image") or []
        if not images:
            return text
        processor = self._image_processor
        given = images if isinstance(images, list | tuple) else [images]
        message = {"content": [{"type": "image", "image": image} for image in given]}
        return processor.encode(
            text, extract_images([message], processor.scaled, reads_files=True)[1]
        )

    def _sequence(
        self, prompt: Prompt, params: SamplingParams, grammar: Grammar | None, bad_words: BadWords
    ) -> Sequence:
        images = prompt if isinstance(prompt, ImagePrompt) else None
        if images is not None:
            ids = list(images.ids)
        else:
            ids = self.encode(prompt) if isinstance(prompt, str) else _ids(prompt)
        self.check_prompt(ids)
        if params.stop and self.tokenizer is None:
            raise PromptError("stop strings", need="a tokenizer", have="a checkpoint without one")
        text = None
        if self.tokenizer is not None:
            text = TextStream(self.tokenizer, ids, params.stop, params.skip_special_tokens)
        return Sequence(
            ids, params, self.max_model_len, self._end_ids, text, grammar, bad_words, images=images
        )

    def _compile(self, outputs: StructuredOutputs) -> Grammar:
        """Compile a grammar. Raises SettingsError if that fails."""
        with self._compiler_lock:
            if self._compiler is None:
                vocab_size = self.spec.target.checkpoint.spec.vocab_size
                self._compiler = GrammarCompiler(self._tokenizer(), vocab_size, self._end_ids)
            compiler = self._compiler
        return compiler.compile(outputs)

    def _bad_words_ids(self, bad_words: abc.Sequence[str]) -> Iterator[tuple[int, ...]]:
        """Encode each bad word at the start of a text, and after a space if that differs."""
        for word in bad_words:
            tokenizer = self._tokenizer()
            plain = tokenizer.encode(word.lstrip(), add_special_tokens=False)
            spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            if not plain:
                raise SettingsError(f"bad word {word!r}", need="a token", have="none")
            yield tuple(plain)
            # vLLM's rule: a separate space token would exclude the word only after that token.
            if spaced[0] != plain[0] and len(spaced) == len(plain):
                yield tuple(spaced)

    def _check_token_ids(self, params: SamplingParams) -> None:
        """Raise SettingsError for ids outside the vocabulary, and if no token is possible."""
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


def token_ids(prompt: list[int] | ImagePrompt) -> list[int]:
    """Return the token ids of an encoded conversation."""
    return prompt.ids if isinstance(prompt, ImagePrompt) else prompt


def _as_list(prompts: Prompt | abc.Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts from a single prompt or a sequence."""
    if isinstance(prompts, Mapping):
        return [prompts]
    if isinstance(prompts, list | tuple):
        is_single = bool(prompts) and isinstance(prompts[0], Integral)
    else:
        is_single = getattr(prompts, "ndim", 1) < 2
    given: Any = prompts
    return [given] if is_single else list(given)


def _content(prompt: Prompt) -> Any:
    """Return the text or token ids of a prompt or of vLLM's dictionary."""
    if not isinstance(prompt, Mapping):
        return prompt
    names = [name for name in ("prompt_token_ids", "prompt") if prompt.get(name) is not None]
    unknown = sorted(set(prompt) - {"prompt_token_ids", "prompt"})
    if not names or unknown:
        raise PromptError(
            "the prompt", need='"prompt" or "prompt_token_ids"',
            have=", ".join(map(repr, unknown)) or "neither", change="use one of these keys",
        )  # fmt: skip
    return prompt[names[0]]


def _ids(prompt: Any) -> list[int]:
    """Return the token ids of a list, array or tensor. Raises PromptError for other types."""
    try:
        if isinstance(prompt, bytes):
            raise TypeError("a text is a str")
        return [
            index(token) for token in (prompt.tolist() if hasattr(prompt, "tolist") else prompt)
        ]
    except TypeError as error:
        need = "a text, or whole numbers as a list, an array or a tensor"
        have = f"{type(prompt).__name__} ({error})"
        raise PromptError("the prompt", need=need, have=have, change="pass token ids") from error
