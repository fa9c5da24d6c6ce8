"""Requests for completions, chat completions, embeddings and tokens."""

import base64
import reprlib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, PlainValidator
from torch import Tensor

from offload_rt.errors import PromptError, SettingsError
from offload_rt.sampling_params import SamplingParams, StructuredOutputs
from offload_rt.server.bodies import Json, LongList, Messages, ShortList, check_counts, validate
from offload_rt.server.call_format import calls_of
from offload_rt.server.call_grammar import call_grammar
from offload_rt.server.call_parser import decoded
from offload_rt.server.chat_format import ChatFormat
from offload_rt.text.images import IMAGE_PARTS

NLogprobs = Annotated[int, Field(ge=0, le=20)] | None
_Stop = Annotated[str, Field(max_length=1024)]
Stops = Annotated[list[_Stop], Field(fail_fast=True, max_length=64)]
_TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
_CONTENT = "The content is a text, or a list of parts of type text and image_url."
_TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text")
_SAMPLING = {field.name for field in fields(SamplingParams)} - {"max_tokens", "structured_outputs"}


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(BaseModel):
    """Contents of a stream beside the text.

    include_usage           a last chunk with token counts
    continuous_usage_stats  with include_usage, token counts in every chunk
    include_passes          the forward pass behind every chunk, as `pass`
    """

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
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
    logit_bias: Annotated[dict[int, float], Field(max_length=1024)] | None = None
    n: int | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[Stops | None, BeforeValidator(_as_list)] = None
    stop_token_ids: ShortList[int] | None = None
    bad_words: ShortList[Annotated[str, Field(max_length=128)]] | None = None
    allowed_token_ids: LongList[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left"] | None = None
    skip_special_tokens: bool | None = None
    response_format: Json | None = None
    structured_outputs: Json | None = None
    guided_json: Json | str | None = None
    guided_regex: str | None = None
    guided_choice: LongList[str] | None = None
    guided_grammar: str | None = None
    json_schema: Json | None = None
    grammar: str | None = None

    def generation(self) -> Self:
        """Return the request; bodies of other APIs convert to a chat request."""
        return self

    def sampling_params(
        self,
        max_n: int,
        formats: Json,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """Build SamplingParams. Missing values follow the model's defaults.

        max_n       limit of `n`
        formats     fields of StructuredOutputs
        max_tokens  None: up to the context length
        Raises SettingsError for invalid values.
        """
        if self.stream_options is not None and not self.stream:
            change = "set it, or leave stream_options out"
            raise SettingsError("stream_options", need="stream to be true", change=change)
        if (self.n or 1) > max_n:
            change = "send several requests"
            raise SettingsError(f"n is {self.n}", need=f"at most {max_n}", change=change)
        names = GenerationRequest.model_fields.keys() & _SAMPLING
        given = self.model_dump(include=names, exclude_none=True)
        if self.seed is not None:
            given["seed"] = self.seed % 2**63
        given |= {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
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
        aliases = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        given = {name.removeprefix("guided_"): getattr(self, name) for name in aliases}
        formats |= {name: value for name, value in given.items() if value is not None}
        # Names of llama.cpp, whose clients send an empty grammar.
        if self.json_schema is not None:
            formats["json"] = self.json_schema
        if self.grammar:
            formats["grammar"] = self.grammar
        if isinstance(formats.get("json"), str):
            check_counts("the JSON schema", [formats["json"].encode("utf-8", "replace")])
        wanted = self.wanted_format
        if wanted is None:
            return formats
        if wanted["type"] == "json_object" and wanted.get("schema") is None:
            return formats | {"json_object": True}
        # llama.cpp accepts the schema of a json_object beside its type.
        place = wanted if wanted["type"] == "json_object" else wanted.get("json_schema")
        schema = place.get("schema") if isinstance(place, dict) else None
        if not isinstance(schema, dict):
            raise SettingsError("response_format", need=f"{wanted['type']} with a schema")
        return formats | {"json": schema}


def _prompts_of(value: Any) -> list[str] | list[list[int]]:
    items = _as_list(value)
    if isinstance(items, list) and items:
        if all(isinstance(item, str) for item in items):
            return items
        items = items if isinstance(items[0], list) else [items]
        if all(type(item) is list and all(type(i) is int for i in item) for item in items):
            return items
    raise ValueError("needs a text, token ids, or a list of texts or token id lists")


Prompts = Annotated[list[str] | list[list[int]], PlainValidator(_prompts_of)]


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: NLogprobs = None
    best_of: int | None = None
    suffix: Literal["", None] = None
    add_special_tokens: bool = True
    parallel_tool_calls: ClassVar[None] = None

    @property
    def reads_only(self) -> bool:
        """Whether only log-probabilities of the prompt are requested."""
        return bool(self.echo) and self.max_tokens == 0

    def params(self, max_n: int, _: ChatFormat) -> SamplingParams:
        """Build SamplingParams. Raises SettingsError for invalid values."""
        if (self.best_of or 1) > 1 and self.best_of != self.n:
            change = "leave it out"
            raise SettingsError(f"best_of is {self.best_of}", need="the value of n", change=change)
        max_tokens = 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default
        if self.reads_only:
            max_tokens = 1  # the pass over a prompt always produces one token
        prompt_logprobs = self.logprobs if self.echo else None
        formats = self.formats()
        return self.sampling_params(max_n, formats, max_tokens, self.logprobs, prompt_logprobs)


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    messages: Annotated[Messages, Field(description=_CONTENT)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: NLogprobs = None
    tools: ShortList[Json] | None = None
    tool_choice: Literal["none", "auto", "required"] | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: Literal[False] | None = None
    echo: Literal[False] | None = None
    chat_template_kwargs: Json | None = None
    reads_only: ClassVar[bool] = False

    def params(self, max_n: int, chat_format: ChatFormat) -> SamplingParams:
        """Build SamplingParams. Raises SettingsError for invalid values."""
        if self.top_logprobs and not self.logprobs:
            raise SettingsError("top_logprobs", need="logprobs to be true", change="set it")
        max_tokens = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        n_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        formats = self.formats()
        form = chat_format.tool_format
        functions = self.functions
        if self.requires_calls:
            is_single = self.parallel_tool_calls is False
            if isinstance(self.tool_choice, dict):
                function = self.tool_choice.get("function")
                name = function.get("name") if isinstance(function, dict) else None
                if name not in functions:
                    choice = reprlib.repr(self.tool_choice)
                    raise SettingsError(f"tool_choice {choice}", need="the name of a tool")
                functions = {name: functions[name]}
                is_single = True
            if not functions:
                raise SettingsError("tool_choice required", need="tools", change="send tools")
            called = [*functions.values()]
            formats["grammar"] = call_grammar(form, called, chat_format.lark, is_single)
        elif functions:
            grammar = form.answer_grammar([*functions.values()], chat_format.lark, formats)
            formats = formats if grammar is None else {"grammar": grammar}
        params = self.sampling_params(max_n, formats, max_tokens, n_logprobs, None)
        if chat_format.needs_special:
            params = replace(params, skip_special_tokens=False)
        return params

    @property
    def wanted_format(self) -> Json | None:
        return None if self.requires_calls else super().wanted_format

    @property
    def offered_tools(self) -> list[Json] | None:
        """Tools in the prompt; None if `tool_choice` forbids calls."""
        return None if self.tool_choice == "none" else self.tools

    @property
    def requires_calls(self) -> bool:
        """Whether the answer consists of tool calls."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def functions(self) -> dict[str, Json]:
        """Functions of the offered tools by name. Raises SettingsError for malformed tools."""
        functions: dict[str, Json] = {}
        for tool in self.offered_tools or ():
            function = tool.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            if function is None or not isinstance(name, str) or not name:
                raise SettingsError("tools", need="a function with a name in each tool")
            if not isinstance(function.get("parameters") or {}, dict):
                raise SettingsError("tools", need="a JSON schema as the parameters")
            functions[name] = function
        return functions

    @property
    def template_variables(self) -> Json:
        """Variables of the chat template."""
        effort = {}
        if self.reasoning_effort is not None:
            is_on = self.reasoning_effort not in ("none", "minimal")
            effort = {"reasoning_effort": self.reasoning_effort, "enable_thinking": is_on}
        return effort | (self.chat_template_kwargs or {})

    def turns(self) -> list[Json]:
        """Convert messages for chat templates: content as text, call arguments as objects.

        Content with images remains a list of parts.
        Raises PromptError for content other than text and images.
        """
        if not self.messages:
            change = "send the user's turn"
            raise PromptError("messages", need="at least one", have="none", change=change)
        if not all(isinstance(turn.get("role"), str) for turn in self.messages):
            raise PromptError("messages", need="a role in each message")
        turns = []
        for turn in self.messages:
            parts = _parts_of(turn.get("content"), IMAGE_PARTS)
            is_text = all(part["type"] == "text" for part in parts)
            content = "".join(part["text"] for part in parts) if is_text else parts
            turns.append({**turn, "content": content})
        functions = [call["function"] for turn in turns for call in calls_of(turn)]
        texts = [f["arguments"] for f in functions if isinstance(f.get("arguments"), str)]
        check_counts("arguments of calls", [text.encode("utf-8", "replace") for text in texts])
        for turn in turns:
            calls = [{**call, "function": {**call["function"]}} for call in calls_of(turn)]
            for function in (call["function"] for call in calls):
                # An empty text stands for no arguments, as in vLLM. The template decides on other
                # text than JSON.
                if isinstance(text := function.get("arguments"), str):
                    value = decoded(text or "{}")
                    function["arguments"] = text if value is None else value
            if calls:
                turn["tool_calls"] = calls
            # gpt-oss has its own name, and refuses reasoning beside content and calls.
            if "reasoning_content" in turn and not (turn["content"] and turn.get("tool_calls")):
                turn["thinking"] = turn["reasoning_content"]
        return turns


class EmbeddingsRequest(BaseModel):
    """Body of /v1/embeddings."""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Literal[None] = None

    def whole(self, vectors: Tensor, n_tokens: int, name: str) -> Json:
        """Return the response to embeddings (n, hidden_size) of prompts with `n_tokens` tokens."""
        data = []
        for i, vector in enumerate(vectors):
            value = vector.tolist()
            if self.encoding_format == "base64":
                value = base64.b64encode(vector.numpy().tobytes()).decode()
            data.append({"object": "embedding", "index": i, "embedding": value})
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return {"object": "list", "model": name, "data": data, "usage": usage}


class TokenizeRequest(BaseModel):
    """Body of /tokenize: a text, or the fields of a chat request that its prompt depends on."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    tools: ShortList[Json] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Json | None = None

    def generation(self) -> CompletionRequest | ChatRequest:
        """Return the request of a completion or a chat. Raises SettingsError without a prompt."""
        if self.messages is None:
            return validate(CompletionRequest, self.model_dump())
        return validate(ChatRequest, self.model_dump(exclude={"add_special_tokens"}))


class DetokenizeRequest(BaseModel):
    """Body of /detokenize."""

    tokens: Annotated[list[_TokenId], Field(fail_fast=True)]


def text_of(content: Any) -> str:
    """Join the text parts of a message. Raises PromptError for other parts."""
    return "".join(part["text"] for part in _parts_of(content, ()))


def _parts_of(content: Any, images: Sequence[str]) -> list[Json]:
    """Convert a content to parts of the type text, and of the types of images."""
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content or ""}]
    parts: list[Json] = []
    for i, part in enumerate(content if isinstance(content, list) else [content]):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind in images:
            parts.append(part)
        else:
            problem = f"content[{i}] of type {reprlib.repr(kind)}"
            raise PromptError(problem, need="text, or an image in the user's turn")
    return parts
