"""What OpenAI's clients send. Fields that are not known are ignored; what is not computed is refused."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from offload_rt.config import SamplingParams
from offload_rt.errors import PromptError, SettingsError

# Fields of both kinds of request that are fields of `SamplingParams`, by the same names.
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "n", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
)  # fmt: skip
_MOST_LOGPROBS = 20


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
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
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
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if (seed := given.get("seed")) is not None:
            given["seed"] = seed % 2**63
        return SamplingParams(max_tokens=max_tokens, **given, **more)


class CompletionRequest(Sampled):
    """Of /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
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
        return self.sampling(n_most, 16 if self.max_tokens is None else self.max_tokens, **more)  # OpenAI's default


class ResponseFormat(BaseModel):
    """Of an answer."""

    type: str = "text"


class ChatRequest(Sampled):
    """Of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def params(self, n_most: int) -> SamplingParams:
        """How tokens are chosen. Raises SettingsError for what cannot be computed."""
        if self.response_format is not None and self.response_format.type != "text":
            raise SettingsError(f"response_format {self.response_format.type}", need="text", change="ask in the prompt")
        if self.tool_choice not in (None, "none", "auto"):
            raise SettingsError(f"tool_choice {self.tool_choice}", need="none or auto", change="ask in the prompt")
        check_logprobs("top_logprobs", self.top_logprobs)
        if self.top_logprobs and not self.logprobs:
            raise SettingsError("top_logprobs", need="logprobs to be true", change="set it")
        most = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return self.sampling(n_most, most, logprobs=(self.top_logprobs or 0) if self.logprobs else None)

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Those that the model may call."""
        return None if self.tool_choice == "none" else self.tools

    def turns(self) -> list[dict[str, Any]]:
        """The messages with texts in place of lists of parts. Raises PromptError for what is no text."""
        return [{**one, "content": _text_of(one.get("content"))} for one in self.messages]


class TokenizeRequest(BaseModel):
    """Of /tokenize."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(BaseModel):
    """Of /detokenize."""

    tokens: list[int]


def check_logprobs(name: str, n: int | None) -> None:
    """Raises SettingsError unless so many log-probabilities may be asked for."""
    if n is not None and not 0 <= n <= _MOST_LOGPROBS:
        raise SettingsError(f"{name} is {n}", need=f"0 to {_MOST_LOGPROBS}", change="ask for fewer")


def _text_of(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise PromptError(f"content of type {kind}", need="text", change="send text alone")
    return "".join(part["text"] for part in parts)
