"""Requests from prompts and sampling parameters."""

from collections import abc
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from numbers import Integral
from operator import index
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from offload_rt.bad_words import BadWords
from offload_rt.engine.outputs import Request
from offload_rt.engine.target_spec import TargetSpec
from offload_rt.errors import CapacityError, PromptError, SettingsError, UserError
from offload_rt.executor.grammar import Grammar, GrammarCompiler
from offload_rt.executor.sequence import Sequence
from offload_rt.models.image_prompt import EncodedPrompt, ImagePrompt, token_ids
from offload_rt.models.processors import ImageProcessor, load_processor
from offload_rt.sampling_params import SamplingParams, StructuredOutputs
from offload_rt.text.detokenize import Message, TextStream, encode, encode_chat
from offload_rt.text.images import Fetch, ImageReader, has_images
from offload_rt.weights.files import end_ids, sampling_defaults

if TYPE_CHECKING:  # importing transformers costs a second
    from transformers import PreTrainedTokenizerBase

# A text, token ids, a prompt with images, or a mapping with "prompt" or "prompt_token_ids".
Prompt = str | abc.Sequence[int] | np.ndarray | Tensor | ImagePrompt | Mapping[str, Any]
_KEYS = ("prompt_token_ids", "prompt")


class RequestBuilder:
    """Converts prompts and sampling parameters to requests of a model, and checks them.

    defaults       values for None fields of sampling parameters
    images         processor of images; None if prompts cannot contain images
    """

    images: ImageProcessor | None = None
    _compiler: GrammarCompiler | None = None

    def __init__(
        self,
        directory: Path,
        target: TargetSpec,
        tokenizer: "PreTrainedTokenizerBase | None",
        max_model_len: int,
    ) -> None:
        checkpoint = target.checkpoint
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.defaults = sampling_defaults(directory)
        self._model = checkpoint.spec
        self._end_ids = end_ids(directory, checkpoint.config)
        self._compiler_lock = Lock()
        tower = checkpoint.spec.images
        if checkpoint.images and tower is not None and tokenizer is not None:
            processor = load_processor(directory, tokenizer, tower.family)
            self.images = ImageProcessor(processor, tower, target.image_pixels)

    def close(self) -> None:
        """End the threads of grammars."""
        if self._compiler is not None:
            self._compiler.close()

    @property
    def has_more_positions(self) -> bool:
        """Whether the model allows a longer context than `max_model_len`."""
        return self.max_model_len < self._model.max_positions

    def build_all(
        self,
        prompts: Prompt | abc.Sequence[Prompt],
        params: SamplingParams | abc.Sequence[SamplingParams] | None,
    ) -> list[Request]:
        """Build a request per prompt.

        params  for all prompts, or an entry per prompt; None: defaults
        Raises as `build` does, with the index of the prompt, and SettingsError if the numbers of
        params and prompts differ.
        """
        items = _as_list(prompts)
        n = len(items)
        all_params = params if isinstance(params, abc.Sequence) else [params] * n
        if len(all_params) != n:
            need = f"one SamplingParams or {n}"
            raise SettingsError("generate", need=need, have=str(len(all_params)))
        requests = []
        for i, pair in enumerate(zip(items, all_params, strict=True)):
            try:
                requests.append(self.build(*pair))
            except UserError as error:
                if n == 1:
                    raise
                raise error.prefixed(f"prompts[{i}]") from error
        return requests

    def build(
        self, prompt: Prompt, params: SamplingParams | None = None, allows_equal: bool = False
    ) -> Request:
        """Build a prompt's sequences, with consecutive seeds; greedy ones if `allows_equal`.

        Raises PromptError, CapacityError or SettingsError.
        """
        params = self._completed(SamplingParams() if params is None else params)
        if params.n > 1 and not params.temperature and not allows_equal:
            have = "greedy decoding, which has one answer"
            raise SettingsError(f"n is {params.n}", need="a temperature above 0", have=have)
        if params.stop and self.tokenizer is None:
            raise PromptError("stop strings", need="a tokenizer", have="a checkpoint without one")
        content = self._content(prompt)
        text = content if isinstance(content, str) else None
        encoded = _encoded(content) if text is None else self.encode(text)
        self.check_prompt(encoded)
        return Request(self._sequences(encoded, params), text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return token ids. Raises PromptError without a tokenizer, CapacityError if too long."""
        return encode(self._needed_tokenizer, text, self._n_characters, add_special_tokens)

    def encode_messages(
        self, messages: abc.Sequence[Message], options: Mapping[str, Any],
        fetch: Fetch | None = None, reads_files: bool = True,
    ) -> EncodedPrompt:  # fmt: skip
        """Encode a conversation, possibly with images.

        options      of transformers' `apply_chat_template`, and variables of the template
        fetch        reads images behind http URLs; None refuses them
        reads_files  whether {"type": "image", "image": ...} may contain a path or Pillow's image
        Raises PromptError for a failing template and unusable images, CapacityError if too long.
        """
        if not has_images(messages):
            return encode_chat(self._needed_tokenizer, messages, options, self._n_characters)
        processor = self._needed_images
        turns, images = ImageReader(processor.scaled, fetch, reads_files=reads_files).read(messages)
        return processor.encode_chat(turns, images, options)

    def check_prompt(self, prompt: EncodedPrompt | abc.Sequence[int]) -> None:
        """Raise PromptError or CapacityError for a prompt that cannot be continued."""
        ids = prompt.ids if isinstance(prompt, ImagePrompt) else prompt
        if not (n := len(ids)):
            raise PromptError("the prompt is empty", need="at least one token", change="add text")
        if n >= self.max_model_len:
            limit = "the model's positions"
            change = "shorten it"
            if self.has_more_positions:
                limit = "--max-model-len"
                change += ", or raise --max-model-len and --device-memory"
            need = f"at most {self.max_model_len - 1} tokens, one fewer than {limit}"
            raise CapacityError("the prompt is too long", need=need, have=str(n), change=change)
        if (wrong := self._unknown_id(ids)) is not None:
            need = f"ids from 0 to {self._model.vocab_size - 1}"
            change = "use this model's tokenizer"
            raise PromptError(f"token id {wrong} in the prompt", need=need, change=change)

    @property
    def _needed_tokenizer(self) -> "PreTrainedTokenizerBase":
        if self.tokenizer is None:
            change = "add its tokenizer.json, or pass token ids in Python"
            raise PromptError("the checkpoint has no tokenizer", change=change)
        return self.tokenizer

    @property
    def _needed_images(self) -> ImageProcessor:
        if self.images is not None:
            return self.images
        change = "leave the images out"
        have = f"type {self._model.family}, of which only the text model is supported"
        if self._model.images is not None:
            change = "raise --max-image-pixels or --device-memory, and use one process"
            have = "a tower that is not loaded"
        raise PromptError("images", need="a model with a vision tower", have=have, change=change)

    @cached_property
    def _n_characters(self) -> int:
        """Upper bound of a prompt's characters; longer texts only slow down the tokenizer."""
        longest = max(map(len, self._needed_tokenizer.get_vocab()))
        return max(self.max_model_len * longest, 1 << 16)

    def _completed(self, params: SamplingParams) -> SamplingParams:
        if not isinstance(params, SamplingParams):
            have = type(params).__name__
            raise SettingsError("sampling_params", need="SamplingParams", have=have)
        words = chain(params.bad_words_ids, *map(self._bad_word_ids, params.bad_words))
        values = params.left_to(self.defaults)
        params = replace(params, **values, bad_words=(), bad_words_ids=tuple(words))
        self._check_token_ids(params)
        return params

    def _bad_word_ids(self, word: str) -> Iterator[tuple[int, ...]]:
        """Encode a bad word at the start of a text, and after a space if that differs."""
        encode_word = partial(self._needed_tokenizer.encode, add_special_tokens=False)
        plain = encode_word(word.lstrip())
        spaced = encode_word(" " + word.lstrip())
        if not plain:
            raise SettingsError(f"bad word {word!r}", need="a token", have="none")
        yield tuple(plain)
        # vLLM's rule: a separate space token would exclude the word only after that token.
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            yield tuple(spaced)

    def _check_token_ids(self, params: SamplingParams) -> None:
        """Refuse ids outside the vocabulary, and params that exclude all tokens."""
        vocab_size = self._model.vocab_size
        ids_by_name: dict[str, Iterable[int]] = {
            "logit_bias": params.logit_bias or (),
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids,
            "bad_words": chain.from_iterable(params.bad_words_ids),
        }
        for name, ids in ids_by_name.items():
            wrong = self._unknown_id(ids)
            if wrong is not None:
                raise SettingsError(f"token id {wrong} in {name}", need=f"ids below {vocab_size}")
        # A token that ends no bad word and no text stays possible on every path of a tree.
        excluded = {word[-1] for word in params.bad_words_ids}
        if params.min_tokens:
            excluded |= {*params.stop_token_ids, *self._end_ids}
        if all(token in excluded for token in params.allowed_token_ids or range(vocab_size)):
            need = "a token that neither ends a bad word nor, with min_tokens, the text"
            raise SettingsError("allowed_token_ids", need=need, change="allow more tokens")

    def _unknown_id(self, ids: Iterable[int]) -> int | None:
        return next((token for token in ids if not 0 <= token < self._model.vocab_size), None)

    def _content(self, prompt: Prompt) -> Any:
        if not isinstance(prompt, Mapping):
            return prompt
        fields = dict(prompt)
        media = fields.pop("multi_modal_data", {})
        names = [name for name in _KEYS if fields.get(name) is not None]
        unknown = sorted(fields.keys() - {*_KEYS})
        if not names or unknown:
            need = '"prompt" or "prompt_token_ids"'
            have = ", ".join(map(repr, unknown)) or "neither"
            raise PromptError("the prompt", need=need, have=have, change="use one of these keys")
        content = fields[names[0]]
        return self._with_images(content, media) if media else content

    def _with_images(self, text: Any, media: Mapping[str, Any]) -> str | ImagePrompt:
        if not isinstance(text, str) or media.keys() - {"image"}:
            have = ", ".join(sorted(media)) if isinstance(text, str) else "token ids"
            raise PromptError("multi_modal_data", need="a text with images", have=have)
        images = media["image"]
        if not images:
            return text
        parts = images if isinstance(images, list | tuple) else [images]
        message = {"content": [{"type": "image", "image": image} for image in parts]}
        processor = self._needed_images
        _, decoded = ImageReader(processor.scaled, reads_files=True).read([message])
        return processor.encode(text, decoded)

    def _compile(self, outputs: StructuredOutputs) -> Grammar:
        with self._compiler_lock:
            if self._compiler is None:
                vocab_size = self._model.vocab_size
                self._compiler = GrammarCompiler(self._needed_tokenizer, vocab_size, self._end_ids)
        return self._compiler.compile(outputs)

    def _sequences(self, prompt: EncodedPrompt, params: SamplingParams) -> list[Sequence]:
        ids = token_ids(prompt)
        images = prompt if isinstance(prompt, ImagePrompt) else None
        outputs = params.structured_outputs
        grammar = None if outputs is None else self._compile(outputs)
        bad_words = BadWords(params.bad_words_ids)
        sequences = []
        for i in range(params.n):
            seed = None if params.seed is None else (params.seed + i) % 2**63
            text = None
            if self.tokenizer is not None:
                text = TextStream(self.tokenizer, ids, params.stop, params.skip_special_tokens)
            sequences.append(Sequence(
                [*ids], replace(params, n=1, seed=seed), self.max_model_len, self._end_ids, text,
                grammar and grammar.copy(), copy(bad_words), images=images,
            ))  # fmt: skip
        return sequences


def _as_list(prompts: Prompt | abc.Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, list | tuple):
        is_single = bool(prompts) and isinstance(prompts[0], Integral)
    else:
        is_single = isinstance(prompts, Mapping) or getattr(prompts, "ndim", 1) < 2
    items: Any = prompts
    return [items] if is_single else list(items)


def _encoded(prompt: Any) -> EncodedPrompt:
    if isinstance(prompt, ImagePrompt):
        return prompt
    try:
        if isinstance(prompt, bytes):
            raise TypeError("a text is a str")
        return list(map(index, prompt.tolist() if hasattr(prompt, "tolist") else prompt))
    except TypeError as error:
        need = "a text, or whole numbers as a list, an array or a tensor"
        have = f"{type(prompt).__name__} ({error})"
        raise PromptError("the prompt", need=need, have=have, change="pass token ids") from error
