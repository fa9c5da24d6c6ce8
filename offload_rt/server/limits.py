"""Middleware for every request: host names, API key, cancellation."""

import asyncio
import hmac
import re
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/@]+)(?::\d{1,5})?", re.IGNORECASE)
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_response(
    status: int, message: str, code: str | None = None, retry_after_s: int | None = None
) -> JSONResponse:
    """Build an error of OpenAI and Anthropic. Clients retry only with `retry_after_s`."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    headers = {"x-should-retry": "false"}
    if retry_after_s is not None:
        headers = {"Retry-After": str(retry_after_s)}
    error = {"message": message[:1000], "type": kind, "param": None, "code": code}
    return JSONResponse({"type": "error", "error": error}, status, headers)


@dataclass(frozen=True)
class Access:
    """Accepted clients.

    api_key  required except for the page and /health; None: no key
    hosts    accepted host names in lower case, against DNS rebinding; empty: all
    origins  origins of web pages that may read answers; "*": all
    """

    api_key: str | None = None
    hosts: frozenset[str] = frozenset()
    origins: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limits:
    """ASGI middleware that refuses requests before routing."""

    app: ASGIApp
    access: Access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if scope["method"] == "HEAD":  # uvicorn omits the body of the response
            scope = {**scope, "method": "GET"}
        is_started = False

        async def watched_send(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        refusal = self._refusal(scope["path"], Headers(scope=scope))
        try:
            await (refusal or self.app)(scope, receive, watched_send)
        except asyncio.CancelledError:  # uvicorn cancels open requests at the end of the drain
            if not is_started:
                refusal = error_response(503, "the server is shutting down", retry_after_s=5)
                await refusal(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> JSONResponse | None:
        host = _HOST.fullmatch(headers.get("host", ""))
        hosts = self.access.hosts
        if hosts and (host is None or host[1].lower() not in hosts):
            return error_response(403, "this host name is not accepted")
        api_key = self.access.api_key
        if api_key is None or path == "/" or path.startswith(("/page/", "/health")):
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":  # Anthropic's clients
            key = headers.get("x-api-key", "")
        if hmac.compare_digest(key.strip().encode("utf-8", "replace"), api_key.encode()):
            return None
        return error_response(401, "the API key is missing or wrong", "invalid_api_key")
