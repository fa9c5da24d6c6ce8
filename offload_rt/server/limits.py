"""What holds for every request before its route is called: who may ask, and how much may be sent in what time."""

import asyncio
import hmac
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_BODY_S = 60.0  # in which the body of a request must have come
_OPEN_PATHS = ("/page/", "/health")


def error_response(status: int, message: str, code: str | None = None, retry_after: int | None = None) -> JSONResponse:
    """A refusal in the form that OpenAI's clients read. They send it again by themselves only where `retry_after` is given."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    retry = {"x-should-retry": "false"} if retry_after is None else {"Retry-After": str(retry_after)}
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status, retry)


@dataclass(frozen=True)
class Limits:
    """Middleware that refuses requests without the key, by another host's name, or with a body that is too long or too slow.

    api_key  that all but the page and /health ask for; None: nobody needs one
    hosts    names by which the server may be called, against pages that let their own name point to it; empty: any
    n_body   bytes of a body at most
    """

    app: ASGIApp
    api_key: str | None
    hosts: frozenset[str]
    n_body: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        refusal = self._refusal(scope["path"], Headers(scope=scope))
        messages: list[Message] = []
        if refusal is None:
            try:
                messages = await asyncio.wait_for(self._body(receive), _BODY_S)
            except TimeoutError:
                refusal = error_response(408, f"the body of the request has not come within {_BODY_S:.0f} s")
            except OverflowError:
                refusal = error_response(413, f"the body of the request has more than {self.n_body} bytes")

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await (refusal or self.app)(scope, replay, send)

    def _refusal(self, path: str, headers: Headers) -> JSONResponse | None:
        if self.hosts and headers.get("host", "").rsplit(":", 1)[0] not in self.hosts:
            return error_response(403, "this server is not called by that name: begin it with --host")
        if self.api_key is None or path == "/" or path.startswith(_OPEN_PATHS):
            return None
        given = headers.get("authorization", "").encode("utf-8", "replace")
        if hmac.compare_digest(given, b"Bearer " + self.api_key.encode()):
            return None
        return error_response(401, "the API key is missing or wrong", "invalid_api_key")

    async def _body(self, receive: Receive) -> list[Message]:
        """The messages up to the end of the body. Raises OverflowError if it is too long."""
        messages, n = [await receive()], 0
        while messages[-1]["type"] == "http.request":
            n += len(messages[-1].get("body", b""))
            if n > self.n_body:
                raise OverflowError
            if not messages[-1].get("more_body"):
                break
            messages.append(await receive())
        return messages
