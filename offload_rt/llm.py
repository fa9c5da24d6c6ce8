"""The public Python surface: `LLM`."""

import asyncio
import sys
import time
import weakref
from collections import abc
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from contextlib import aclosing, closing
from dataclasses import fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn
from torch import Tensor

from offload_rt.config import EngineConfig
from offload_rt.engine.builder import load
from offload_rt.engine.engine import Engine
from offload_rt.engine.engine_spec import EngineSpec, plan_engine
from offload_rt.engine.engine_thread import EngineThread, IndexedPiece, closed
from offload_rt.engine.loader import Progress
from offload_rt.engine.outputs import Output, Piece, Request, Stats
from offload_rt.engine.request_builder import Prompt, RequestBuilder
from offload_rt.errors import CapacityError, SettingsError
from offload_rt.executor.sequence import Pooling, Sequence
from offload_rt.executor.step import Step
from offload_rt.models.image_prompt import EncodedPrompt
from offload_rt.offload.placement import Plan
from offload_rt.sampling_params import SamplingParams
from offload_rt.speculate.select import Drafting, find_draft, pick_drafter
from offload_rt.system.progress import loading_bar, progress_bar
from offload_rt.system.ranks import is_first, joined
from offload_rt.system.trace import Trace
from offload_rt.text.detokenize import Message, load_tokenizer, set_chat_template
from offload_rt.text.images import Fetch
from offload_rt.tree.topology import Topology
from offload_rt.weights.checkpoint import open_checkpoint
from offload_rt.weights.locate import locate

__all__ = ["LLM", "Output", "Piece", "Stats"]

_SETTINGS = {item.name for item in fields(EngineConfig)}


class LLM:
    """A model larger than its memory budget, ready to generate.

    A context manager. `close()`, the loss of the last reference and the end of the program release
    everything. Under torchrun, only rank 0 returns from loading. Further ranks compute with rank 0
    until the model is closed, and then exit.
    """

    spec: EngineSpec
    requests: RequestBuilder
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
        draft_quantize: str = "auto",
        draft_predictions: str | None = None,
        learn_draft: str = "off",
        torch_products: bool = False,
        activations: str = "exact",
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
        settings = {name: value for name, value in locals().items() if name in _SETTINGS}
        self._prepare(EngineConfig(**settings))
        is_shown = use_tqdm_on_load and sys.stderr.isatty() and is_first()
        with loading_bar(Console(stderr=True, quiet=not is_shown)) as bar:
            self.load(progress=bar)

    @classmethod
    def from_config(
        cls, config: EngineConfig, trace: Trace | None = None, progress: Progress | None = None
    ) -> "LLM":
        """Call `open` and `load`. Raises an OffloadError if the model cannot be served."""
        llm = cls.open(config)
        llm.load(trace, progress)
        return llm

    @classmethod
    def open(cls, config: EngineConfig, drafting: Drafting | None = None) -> "LLM":
        """Check settings and checkpoint and plan the placement; `load` must follow.

        drafting  drafter and rule that replace the settings
        Raises an OffloadError if the model cannot be served.
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
        self.tokenizer = load_tokenizer(directory)
        if config.chat_template is not None:
            set_chat_template(self.tokenizer, Path(config.chat_template))
        selected = find_draft(config, drafting, checkpoint, self.tokenizer)
        try:
            self.spec = plan_engine(config, checkpoint, selected)
        except CapacityError:
            if drafting or config.draft_model or config.drafter != "auto" or selected.draft is None:
                raise
            # The optional draft layer does not fit.
            self.spec = plan_engine(config, checkpoint, pick_drafter(config))
        self._closes = weakref.finalize(self, self.spec.files.close)
        max_model_len = self.spec.memory.max_model_len
        self.requests = RequestBuilder(directory, self.spec.target, self.tokenizer, max_model_len)

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
        return self.requests.images is not None

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of prompt and answer together."""
        return self.requests.max_model_len

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all transfers, join the threads, release the memory. Further calls do nothing."""
        self._thread = None
        self._closes()
        self.requests.close()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the defaults for None fields, from the model's generation_config.json."""
        return self.requests.defaults

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
        requests = self.requests.build_all(prompts, sampling_params)
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
        is_single = isinstance(next(iter(messages), None), Mapping)
        conversations: abc.Sequence[Any] = [messages] if is_single else messages
        prompts = [self.encode_messages(turns, options) for turns in conversations]
        return self.generate(prompts, sampling_params)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[Piece]:
        """Continue a prompt and yield the piece of each pass; see `generate`."""
        with closing(self._pieces([self.requests.build(prompt, sampling_params)])) as pieces:
            for _, piece in pieces:
                yield piece

    def stream_all(
        self,
        prompts: Prompt | abc.Sequence[Prompt],
        sampling_params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
    ) -> Generator[IndexedPiece, None, None]:
        """`stream` for multiple prompts: yield a prompt's index and a piece of its answers.

        Checks the prompts and settings at once, also before `load`.
        """
        return self._pieces(self.requests.build_all(prompts, sampling_params))

    def _pieces(self, requests: list[Request]) -> Generator[IndexedPiece, None, None]:
        yield from self._open_thread.pieces(requests)

    async def astream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[Piece, None]:
        """`stream` for asyncio.

        Concurrent streams share passes. A cancelled stream leaves before the next pass.
        """
        request = await asyncio.to_thread(self.requests.build, prompt, sampling_params)
        async with aclosing(self._open_thread.apieces([request])) as pieces:
            async for _, piece in pieces:
                yield piece

    def embed(self, prompts: Prompt | abc.Sequence[Prompt], pooling: str = "mean") -> Tensor:
        """Return an embedding per prompt: (n, hidden_size) float32, each of length 1.

        pooling  of the hidden states behind the final norm: "mean" or "last" token
        Raises as `generate` does, and SettingsError for other settings and models.
        """
        self.check_embeddings(pooling)
        requests = self.requests.build_all(prompts, SamplingParams(max_tokens=1, temperature=0))
        pools = [Pooling(pooling == "mean") for _ in requests]
        for request, pool in zip(requests, pools, strict=True):
            request.sequences[0].pooling = pool
        for _ in self._open_thread.pieces(requests):
            pass
        return torch.stack([pool.vector() for pool in pools])

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
        # In a worker thread: tokenization of long prompts would block other tasks.
        build = partial(self.requests.build, params=sampling_params, allows_equal=True)
        requests = await asyncio.to_thread(lambda: [build(prompt) for prompt in prompts])
        async with aclosing(self._open_thread.apieces(requests)) as pieces:
            async for piece in pieces:
                yield piece

    def time_plain(self, context: int, n_passes: int = 3) -> list[float]:
        """Return the seconds of passes of plain greedy decoding after `context` tokens.

        A pass includes sampling and verification. `max_model_len` limits the context.
        """
        n_prompt = max(min(context, self.max_model_len - n_passes - 1), 1)
        params = SamplingParams(max_tokens=n_passes + 1, ignore_eos=True)
        sequence = Sequence([0] * n_prompt, params, self.max_model_len)
        self.engine.decode_plainly(sequence)
        # The first pass computes the prompt.
        return [times.ended - times.started for times, _, _ in sequence.stats.passes][-n_passes:]

    def time_passes(self, topology: Topology, context: int, n_passes: int = 3) -> list[float]:
        """Return the seconds of passes over a tree after `context` tokens, with all logits."""
        self.engine.reset_prefix_cache()
        runner = self.engine.runner
        n = len(topology)
        n_rows = context + n + 1
        split = self.plan.split
        share = None if split is None else split.share(n_rows, n, is_alone=True)
        cache = runner.new_cache(n_rows, True, share)
        runner.assume_context(cache, context)
        step = Step(cache, torch.zeros(n, dtype=torch.int64), topology, n, context)
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
        """Return the token ids of a text; see `RequestBuilder.encode`."""
        return self.requests.encode(text, add_special_tokens)

    def encode_messages(
        self, messages: abc.Sequence[Message], options: Mapping[str, Any],
        fetch: Fetch | None = None, reads_files: bool = True,
    ) -> EncodedPrompt:  # fmt: skip
        """Encode a conversation; see `RequestBuilder.encode_messages`."""
        return self.requests.encode_messages(messages, options, fetch, reads_files)
