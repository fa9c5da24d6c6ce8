"""Settings of the server."""

from dataclasses import dataclass

from offload_rt.config import check_settings, parse_size, setting
from offload_rt.errors import SettingsError


@dataclass(frozen=True)
class ServeSettings:
    """Address and limits of the server."""

    host: str = setting(
        "127.0.0.1", "address to listen on; use 0.0.0.0 with an API key for other machines"
    )
    port: int = setting(8000, "port to listen on; 0: any free port")
    api_key: str | None = setting(
        None, "API key of clients; default: OFFLOAD_RT_API_KEY, or no key"
    )
    served_model_name: str | None = setting(
        None, "model name for clients; default: the last part of --model"
    )
    cors_origin: tuple[str, ...] = setting(
        (),
        "origin of web pages that may use the API, like https://example.org; *: all (repeatable)",
    )
    any_model_name: bool = setting(
        False, "answer requests for other model names, as llama.cpp does, instead of status 404"
    )
    tool_call_parser: str = setting(
        "auto",
        "format of tool calls: hermes, granite, lfm2, harmony or generic;"
        " auto: derived from the chat template",
    )
    reasoning_parser: str = setting(
        "auto",
        "format of the reasoning: think, mistral, harmony or none; auto: by the chat template",
    )
    embeddings: str = setting(
        "", "answer /v1/embeddings with this pooling of hidden states: mean or last"
    )
    allow_image_urls: bool = setting(
        False, "read images behind http URLs, from public addresses only; otherwise data URLs only"
    )
    max_body: str = setting(
        "16MiB", "maximum size of a request body, with its images in base64", least=1
    )
    max_n: int = setting(16, "maximum answers per request", least=1)
    max_waiting: int = setting(
        128, "maximum answers in the queue; further requests get status 429", least=1
    )
    timeout: int = setting(3600, "maximum seconds of a request", least=1)
    prompt_wait: float = setting(
        2.0, "maximum additional seconds of a pass for new prompts while answers are running"
    )
    drain: int = setting(30, "seconds for running requests after SIGTERM or Ctrl-C", least=1)

    @property
    def body_nbytes(self) -> int:
        """Maximum size of a request body."""
        return parse_size(self.max_body)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.embeddings not in ("", "mean", "last"):
            raise SettingsError(f"--embeddings={self.embeddings}", need="mean or last")
