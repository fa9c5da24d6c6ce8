"""What OpenAI's clients send. Fields that are not known are ignored; what is not computed is refused."""

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, Field

from offload_rt.config import SamplingParams
from offload_rt.errors import PromptError, SettingsError

# What both kinds of request share besides fields of `SamplingParams`, or for other numbers.
_OTHERS = frozenset({"model", "stream", "stream_options", "max_tokens"})
_MOST_LOGPROBS, _MOST_STOPS = 20, 64
_Item = TypeVar("_Item")
# The first wrong item is told: with a million of them, the errors would take gigabytes.
Several = Annotated[list[_Item], Field(fail_fast=True)]


class StreamOptions(BaseModel):
    """What a stream carries beside the text.

    include_usage           a last chunk with the number of tokens
    continuous_usage_stats  and such numbers in every chunk
    include_passes          in every chunk, as `pass`, the pass that brought it
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_passes: bool = False


class Sampled(BaseModel):
    """What requests for completions and for chat completions share."""

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
    stop: str | Several[str] | None = None
    stop_token_ids: Several[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None

    @property
    def options(self) -> StreamOptions:
        """Of the stream."""
        return self.stream_options or StreamOptions()

    def sampling(self, n_most: int, max_tokens: int | None, **more: Any) -> SamplingParams:
        """How tokens are chosen; by the model's own settings where the request says nothing.

        n_most      answers to one prompt at most
        max_tokens  of an answer; None: as many as there is room for
        Raises SettingsError for what cannot be computed.
        """
        if self.stream_options is not None and not self.stream:
            raise SettingsError(
                "stream_options", need="stream to be true", change="set it, or leave stream_options out"
            )
        if (self.n or 1) > n_most:
            raise SettingsError(f"n is {self.n}", need=f"at most {n_most}", change="ask several times")
        if isinstance(self.stop, list) and len(self.stop) > _MOST_STOPS:
            raise SettingsError(f"{len(self.stop)} texts in stop", need=f"at most {_MOST_STOPS}")
        names = Sampled.model_fields.keys() - _OTHERS
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if (seed := given.get("seed")) is not None:
            given["seed"] = seed % 2**63
        return SamplingParams(max_tokens=max_tokens, **given, **more)


class CompletionRequest(Sampled):
    """Of /v1/completions."""

    prompt: str | Several[int] | Several[str] | Several[Several[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Texts, or lists of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [one for one in self.prompt if isinstance(one, int)]
        return [ids] if ids else self.prompt  # type: ignore[return-value]  # no ids: these are several prompts

    @property
    def n_prompts(self) -> int:
        """Each has answers of its own."""
        return len(self.prompts)

    @property
    def reads_only(self) -> bool:
        """Whether the prompt alone is wanted, for its log-probabilities."""
        return bool(self.echo) and self.max_tokens == 0

    def params(self, n_most: int) -> SamplingParams:
        """How tokens are chosen. Raises SettingsError for what cannot be computed."""
        if self.suffix:
            raise SettingsError("suffix", need="a model that fills in", change="leave it out")
        if (self.best_of or 1) > 1 and self.best_of != self.n:
            raise SettingsError(f"best_of is {self.best_of}", need="as many as n", change="leave it out")
        if not self.prompts:
            raise PromptError("prompt", need="a text or token ids", have="an empty list")
        check_logprobs("logprobs", self.logprobs)
        more = {"logprobs": self.logprobs, "prompt_logprobs": self.logprobs if self.echo else None}
        # OpenAI's default is 16; the pass that reads a prompt makes a token, wanted or not.
        most = 1 if self.reads_only else 16 if self.max_tokens is None else self.max_tokens
        return self.sampling(n_most, most, **more)


class ChatRequest(Sampled):
    """Of /v1/chat/completions."""

    messages: Several[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Several[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    n_prompts: ClassVar[int] = 1
    reads_only: ClassVar[bool] = False

    def params(self, n_most: int) -> SamplingParams:
        """How tokens are chosen. Raises SettingsError for what cannot be computed."""
        if self.tool_choice not in (None, "none", "auto"):
            change = "ask in the prompt: no answer is forced into a form"
            raise SettingsError(f"tool_choice {self.tool_choice}", need="none or auto", change=change)
        check_logprobs("top_logprobs", self.top_logprobs)
        if self.top_logprobs and not self.logprobs:
            raise SettingsError("top_logprobs", need="logprobs to be true", change="set it")
        most = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return self.sampling(n_most, most, logprobs=(self.top_logprobs or 0) if self.logprobs else None)

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Those that the model may call."""
        return None if self.tool_choice == "none" else self.tools

    @property
    def wanted_format(self) -> dict[str, Any] | None:
        """Of the answer; None for text. Raises SettingsError for what OpenAI does not know."""
        kind = (self.response_format or {"type": "text"}).get("type")
        if kind not in ("text", "json_object", "json_schema"):
            raise SettingsError(f"response_format {kind}", need="text, json_object or json_schema")
        return None if kind == "text" else self.response_format

    def turns(self) -> list[dict[str, Any]]:
        """The messages as templates take them: with texts in place of lists of parts, and objects as arguments of calls.

        Raises PromptError for what is no text.
        """
        turns = [{**one, "content": _text_of(one.get("content"))} for one in self.messages]
        for turn in (turn for turn in turns if isinstance(turn.get("tool_calls"), list)):
            turn["tool_calls"] = [_with_object(call) for call in turn["tool_calls"]]
        return turns


class TokenizeRequest(BaseModel):
    """Of /tokenize."""

    prompt: str | None = None
    messages: Several[dict[str, Any]] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(BaseModel):
    """Of /detokenize."""

    tokens: Several[Annotated[int, Field(ge=0, lt=2**32)]]


def check_logprobs(name: str, n: int | None) -> None:
    """Raises SettingsError unless so many log-probabilities may be asked for."""
    if n is not None and not 0 <= n <= _MOST_LOGPROBS:
        raise SettingsError(f"{name} is {n}", need=f"0 to {_MOST_LOGPROBS}", change="ask for fewer")


def _with_object(call: Any) -> Any:
    """A call of a function with its arguments as an object, which OpenAI has as a text."""
    try:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (TypeError, KeyError, ValueError, RecursionError):  # an object already, or for the template to refuse
        return call


def _text_of(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise PromptError(f"content of type {kind}", need="text", change="send text alone")
    return "".join(part["text"] for part in parts)
