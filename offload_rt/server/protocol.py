"""Request bodies: size checks, parsing, and conversion to SamplingParams.

Unknown fields are ignored. Known fields without an implementation are refused.
"""

import json
import reprlib
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, Field, PlainValidator, ValidationError

from offload_rt.config import SamplingParams, StructuredOutputs
from offload_rt.errors import PromptError, SettingsError
from offload_rt.server.tools import call_grammar

Json = dict[str, Any]
Body = TypeVar("Body", bound=BaseModel)
_Item = TypeVar("_Item")
# Without fail_fast, a million wrong items produce a million errors.
FailFastList = Annotated[list[_Item], Field(fail_fast=True)]

_MAX_LOGPROBS = 20
_MAX_ENTRIES = {
    "messages": 4096,
    "tools": 1024,
    "logit_bias": 1024,
    "stop": 64,
    "stop_token_ids": 1024,
    "bad_words": 1024,
    "allowed_token_ids": 1 << 14,
}
# Fields of OpenAI, vLLM and llama.cpp that would change the output.
_NOT_IMPLEMENTED = (
    "guided_decoding_backend", "guided_whitespace_pattern", "grammar", "json_schema",
    "use_beam_search", "length_penalty",
    "functions", "function_call", "chat_template", "documents", "prompt_embeds",
    "logits_processors", "include_stop_str_in_output", "typical_p", "mirostat", "audio",
)  # fmt: skip
# SamplingParams has no such fields, or other values.
_NOT_SAMPLING = frozenset(
    {"model", "stream", "stream_options", "max_tokens", "truncate_prompt_tokens"}
    | {"add_special_tokens", "skip_special_tokens", "response_format", "structured_outputs"}
    | {"guided_json", "guided_regex", "guided_choice", "guided_grammar"}
)


class BodyCounts(NamedTuple):
    """Contents of a JSON text, counted without parsing.

    strings     including keys
    containers  lists and objects
    values      separators between values
    fractions   at least the numbers with a fraction or an exponent
    """

    strings: int
    containers: int
    values: int
    fractions: int

    @classmethod
    def of_json(cls, raw: bytes) -> "BodyCounts":
        """Count the contents of a valid JSON text in UTF-8."""
        unescaped = raw.replace(rb"\\", b"").replace(rb"\"", b"")
        n_strings = unescaped.count(b'"') // 2
        if n_strings > _MAX_COUNTS.strings:  # splitting would create as many objects
            return cls(n_strings, 0, 0, 0)
        structure = b"".join(unescaped.split(b'"')[::2])
        n_containers = structure.count(b"[") + structure.count(b"{")
        n_fractions = sum(map(structure.count, (b".", b"e", b"E")))
        return cls(n_strings, n_containers, structure.count(b","), n_fractions)


# The JSON parser holds the interpreter lock. These limits bound it to a few dozen milliseconds.
_MAX_COUNTS = BodyCounts(strings=1 << 15, containers=1 << 15, values=1 << 18, fractions=1 << 15)


def read_body(kind: type[Body], raw: bytes, max_prompts: int, max_prompt_tokens: int) -> Body:
    """Parse and validate a request body. Counts are checked before any object is built.

    Raises SettingsError for the first wrong value.
    """
    max_values = max(_MAX_COUNTS.values, max_prompt_tokens)
    limits = _MAX_COUNTS._replace(values=max_values)
    for name, count, limit in zip(BodyCounts._fields, BodyCounts.of_json(raw), limits, strict=True):
        if count > limit:
            raise SettingsError(f"{count} {name} in the body", need=f"at most {limit}")
    try:
        body = json.loads(str(raw, "utf-8"))  # bytes may also be UTF-16, with other counts
    except (ValueError, RecursionError) as error:
        raise SettingsError("the body is not valid JSON", have=str(error)[:200]) from error
    if not isinstance(body, dict):
        raise SettingsError("the body", need="a JSON object", have=type(body).__name__)
    _check_entries(body, max_prompts)
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"]))[:100]
        raise SettingsError(f"{field}: {first['msg'][:200]}") from error


def _check_entries(body: Json, max_prompts: int) -> None:
    """Raises SettingsError for too many entries, and for fields without an implementation."""
    limits = dict(_MAX_ENTRIES)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        limits["prompt"] = max_prompts
    for name, limit in limits.items():
        value = body.get(name)
        if isinstance(value, list | dict) and len(value) > limit:
            raise SettingsError(f"{len(value)} entries in {name}", need=f"at most {limit}")
    for name in _NOT_IMPLEMENTED:
        if body.get(name) not in (None, False, [], {}, "none"):
            raise SettingsError(f"{name} is not implemented", change="leave it out")


class StreamOptions(BaseModel):
    """Contents of a stream beside the text.

    include_usage           a last chunk with token counts
    continuous_usage_stats  token counts in every chunk
    include_passes          the forward pass behind every chunk, as `pass`
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_passes: bool = False


class GenerationRequest(BaseModel):
    """Fields common to completions and chat completions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    n: int | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | FailFastList[str] | None = None
    stop_token_ids: FailFastList[int] | None = None
    bad_words: FailFastList[str] | None = None
    allowed_token_ids: FailFastList[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    skip_special_tokens: Literal[True] | None = None
    response_format: Json | None = None
    structured_outputs: Json | None = None
    guided_json: Json | str | None = None
    guided_regex: str | None = None
    guided_choice: FailFastList[str] | None = None
    guided_grammar: str | None = None

    @property
    def options(self) -> StreamOptions:
        """Options of the stream."""
        return self.stream_options or StreamOptions()

    def sampling_params(
        self, max_n: int, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """Build SamplingParams. Missing values follow the model's defaults.

        max_n       limit of `n`
        max_tokens  None: up to the context length
        Raises SettingsError for invalid values.
        """
        if self.stream_options is not None and not self.stream:
            change = "set it, or leave stream_options out"
            raise SettingsError("stream_options", need="stream to be true", change=change)
        if (self.n or 1) > max_n:
            change = "send several requests"
            raise SettingsError(f"n is {self.n}", need=f"at most {max_n}", change=change)
        names = GenerationRequest.model_fields.keys() - _NOT_SAMPLING
        values: Json = {name: getattr(self, name) for name in names}
        given = {name: value for name, value in values.items() if value is not None}
        if self.seed is not None:
            given["seed"] = self.seed % 2**63
        given |= {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        formats = self.formats()
        if formats:
            given["structured_outputs"] = StructuredOutputs(**formats)
        return SamplingParams(max_tokens=max_tokens, **given)

    @property
    def wanted_format(self) -> Json | None:
        """Format of the answer; None for text. Raises SettingsError for unknown formats."""
        kind = (self.response_format or {"type": "text"}).get("type")
        if kind not in ("text", "json_object", "json_schema"):
            need = "text, json_object or json_schema"
            raise SettingsError(f"response_format {reprlib.repr(kind)}", need=need)
        return None if kind == "text" else self.response_format

    def formats(self) -> Json:
        """Collect the fields of StructuredOutputs. Raises SettingsError for unknown fields."""
        formats = {name: value for name, value in (self.structured_outputs or {}).items() if value}
        unknown = formats.keys() - {"json", "regex", "choice", "grammar", "json_object"}
        if unknown:
            problem = f"structured_outputs: {reprlib.repr(min(unknown))} is not implemented"
            raise SettingsError(problem, change="leave it out")
        for name in ("json", "regex", "choice", "grammar"):
            value = getattr(self, f"guided_{name}")
            if value is not None:
                formats[name] = value
        wanted = self.wanted_format
        if wanted is not None and wanted["type"] == "json_object":
            formats["json_object"] = True
        elif wanted is not None:
            description = wanted.get("json_schema")
            schema = description.get("schema") if isinstance(description, dict) else None
            if not isinstance(schema, dict):
                raise SettingsError("response_format", need="json_schema with a schema")
            formats["json"] = schema
        return formats

    def truncate(self, prompt: list[int], max_model_len: int) -> list[int]:
        """Keep the last `truncate_prompt_tokens` tokens; -1 leaves room for one new token."""
        limit = self.truncate_prompt_tokens
        if limit is None:
            return prompt
        limit = max_model_len - 1 if limit == -1 else limit
        return prompt[max(len(prompt) - limit, 0) :]


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """Convert a prompt to a list of texts or of token id lists."""
    if isinstance(value, str):
        return [value]
    items = value if isinstance(value, list) else []
    if all(isinstance(item, str) for item in items) and items:
        return items
    if all(_is_token(item) for item in items) and items:
        return [items]
    is_token_lists = all(isinstance(item, list) and all(map(_is_token, item)) for item in items)
    if not items or not is_token_lists:
        raise ValueError("needs a text, token ids, or a list of texts or token id lists")
    return items


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(_prompts)]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool = True

    @property
    def n_prompts(self) -> int:
        """Number of prompts; each has `n` answers."""
        return len(self.prompt)

    @property
    def reads_only(self) -> bool:
        """Whether only log-probabilities of the prompt are requested."""
        return bool(self.echo) and self.max_tokens == 0

    def params(self, max_n: int) -> SamplingParams:
        """Build SamplingParams. Raises SettingsError for invalid values."""
        if self.suffix:
            raise SettingsError("suffix is not implemented", change="leave it out")
        if (self.best_of or 1) > 1 and self.best_of != self.n:
            change = "leave it out"
            raise SettingsError(f"best_of is {self.best_of}", need="the value of n", change=change)
        _check_logprobs("logprobs", self.logprobs)
        max_tokens = 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default
        if self.reads_only:
            max_tokens = 1  # the pass over a prompt always produces one token
        prompt_logprobs = self.logprobs if self.echo else None
        return self.sampling_params(max_n, max_tokens, self.logprobs, prompt_logprobs)


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    messages: FailFastList[Json]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: FailFastList[Json] | None = None
    tool_choice: Literal["none", "auto", "required"] | Json | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: Literal[False] | None = None
    echo: Literal[False] | None = None
    chat_template_kwargs: Json | None = None
    n_prompts: ClassVar[int] = 1
    reads_only: ClassVar[bool] = False

    def params(self, max_n: int) -> SamplingParams:
        """Build SamplingParams. Raises SettingsError for invalid values."""
        _check_logprobs("top_logprobs", self.top_logprobs)
        if self.top_logprobs and not self.logprobs:
            raise SettingsError("top_logprobs", need="logprobs to be true", change="set it")
        max_tokens = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        n_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling_params(max_n, max_tokens, n_logprobs, None)

    @property
    def offered_tools(self) -> list[Json] | None:
        """Tools in the prompt; None if `tool_choice` forbids calls."""
        return None if self.tool_choice == "none" else self.tools

    @property
    def max_calls(self) -> int | None:
        """Maximum number of tool calls in an answer; None for any number."""
        return 1 if self.parallel_tool_calls is False else None

    def formats(self) -> Json:
        """Collect the fields of StructuredOutputs, with a grammar for required tool calls."""
        formats = super().formats()
        if self.tool_choice in (None, "none", "auto"):
            return formats
        names = self.tool_names
        if isinstance(self.tool_choice, dict):
            function = self.tool_choice.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            if name not in names:
                choice = reprlib.repr(self.tool_choice)
                raise SettingsError(f"tool_choice {choice}", need="the name of a tool")
            names = frozenset([name])
        if not names:
            raise SettingsError("tool_choice required", need="tools", change="send tools")
        functions = [tool["function"] for tool in self.tools or ()]
        chosen = [function for function in functions if function["name"] in names]
        is_single = isinstance(self.tool_choice, dict) or self.max_calls == 1
        return formats | {"grammar": call_grammar(chosen, is_single)}

    @property
    def tool_names(self) -> frozenset[str]:
        """Names of the offered tools. Raises SettingsError for tools without a name."""
        functions = [tool.get("function") for tool in self.offered_tools or ()]
        names = [isinstance(entry, dict) and entry.get("name") for entry in functions]
        if not all(isinstance(name, str) and name for name in names):
            raise SettingsError("tools", need="a function with a name in each tool")
        return frozenset(map(str, names))

    def turns(self) -> list[Json]:
        """Convert messages for chat templates: content as text, call arguments as objects.

        Raises PromptError for content other than text.
        """
        if not self.messages:
            change = "send the user's turn"
            raise PromptError("messages", need="at least one", have="none", change=change)
        turns = [{**turn, "content": _text_of(turn.get("content"))} for turn in self.messages]
        for turn in turns:
            if isinstance(turn.get("tool_calls"), list):
                turn["tool_calls"] = [_parse_arguments(call) for call in turn["tool_calls"]]
        return turns


class TokenizeRequest(BaseModel):
    """Body of /tokenize."""

    prompt: str | None = None
    messages: FailFastList[Json] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(BaseModel):
    """Body of /detokenize."""

    tokens: FailFastList[Annotated[int, Field(ge=0, lt=2**32)]]


def _check_logprobs(name: str, n: int | None) -> None:
    if n is not None and not 0 <= n <= _MAX_LOGPROBS:
        raise SettingsError(f"{name} is {n}", need=f"0 to {_MAX_LOGPROBS}", change="ask for fewer")


def _parse_arguments(call: Any) -> Any:
    """Replace the JSON text of a call's arguments by an object, as templates require.

    Returns the call unchanged if that fails; the template then decides.
    """
    try:
        function = call["function"]
        arguments = json.loads(function["arguments"])
    except (TypeError, KeyError, ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _text_of(content: Any) -> str:
    """Join the text parts of a message."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        is_object = isinstance(part, dict)
        kind = part.get("type") if is_object else type(part).__name__
        if not (is_object and kind == "text" and isinstance(part.get("text"), str)):
            problem = f"content of type {reprlib.repr(kind)}"
            raise PromptError(problem, need="text", change="send text parts only")
    return "".join(part["text"] for part in parts)
