"""The routes of the server: OpenAI's, a page for people, and counters for Prometheus."""

import asyncio
import inspect
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from transformers import PreTrainedTokenizerBase

from offload_rt.config import SamplingParams
from offload_rt.errors import CapacityError, DeviceError, OffloadError, PromptError, SettingsError, UserError
from offload_rt.llm import LLM, Piece
from offload_rt.sampling import Logprob
from offload_rt.server.limits import Limits, error_response
from offload_rt.server.metrics import Metrics
from offload_rt.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from offload_rt.server.responses import Answer, Json

_T = TypeVar("_T")
_PAGE = Path(__file__).with_name("page")
# Scripts, styles and requests of the page are this server's alone.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "no-referrer",
}
_RETRY_S = 5


@dataclass(frozen=True)
class ServerLimits:
    """What clients may take.

    n_body     bytes of a request's body
    n_answers  `n` of a request
    n_waiting  answers that wait for room, beside those that are computed
    seconds    that a request may take
    """

    n_body: int
    n_answers: int
    n_waiting: int
    seconds: float


class _Refused(Exception):
    """A request that is not answered: status, reason, and OpenAI's code for it."""

    def __init__(self, status: int, reason: str, code: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(reason)
        self.status, self.code, self.retry_after = status, code, retry_after


@dataclass(eq=False)
class _Server:
    """A model, and the answers that are under way."""

    llm: LLM
    name: str
    limits: ServerLimits
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    n_open: int = 0

    async def answer(self, http: Request, request: CompletionRequest | ChatRequest) -> Response:
        """Answer the prompts of a request, as a stream or in one piece."""
        self.check_model(request.model)
        params = request.params(self.limits.n_answers)
        answer = Answer(request, self.name, request.n_prompts * params.n)
        self._admit(len(answer.choices))
        chunks = self._chunks(answer, request, params)
        if not request.stream:
            await _unless_gone(http, _drained(chunks))
            return JSONResponse(answer.whole())
        first = await _unless_gone(http, anext(chunks))  # what is wrong with a request is told by its status
        events = _events(http, first, chunks, answer, request.options.include_usage)
        return StreamingResponse(events, headers={"Cache-Control": "no-cache"}, media_type="text/event-stream")

    def _admit(self, n: int) -> None:
        """Count so many answers more, until `_chunks` ends. Raises _Refused if there is no room for them."""
        engine = self.llm.engine
        if engine.is_short:
            raise _Refused(503, "the device's memory is used up by the answers that are computed", retry_after=_RETRY_S)
        if n > self.limits.n_waiting:
            need = f"at most {self.limits.n_waiting}"
            raise SettingsError(f"{n} answers in one request", need=need, change="send several")
        if self.n_open + n - engine.n_running > self.limits.n_waiting:
            raise _Refused(429, "too many answers wait for room", retry_after=_RETRY_S)
        self.n_open += n

    async def _chunks(
        self, answer: Answer, request: CompletionRequest | ChatRequest, params: SamplingParams
    ) -> AsyncIterator[Json]:
        """The chunks of a stream as they come, the first when the first pass has ended. Whatever ends it aborts the answers."""
        started, end = time.perf_counter(), "aborted"
        arrived: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()
        tasks: list[asyncio.Task[None]] = []
        n_left, has_begun = len(answer.choices), False
        echo = isinstance(request, CompletionRequest) and request.echo
        try:
            prompts = await self._prompts(request)
            for prompt in prompts:
                self.llm.check_prompt(prompt)
            answer.n_prompt = sum(map(len, prompts))
            work = (self._run(i, prompts[i // params.n], params, arrived) for i in range(n_left))
            tasks += map(asyncio.create_task, work)
            while n_left:
                left_s = started + self.limits.seconds - time.perf_counter()
                i, piece = await asyncio.wait_for(arrived.get(), max(left_s, 0))
                if isinstance(piece, Exception):
                    raise piece
                if not has_begun:
                    has_begun = True
                    self.metrics.first_token.observe(time.perf_counter() - started)
                    self.metrics.prompt_tokens.inc(answer.n_prompt)
                    for chunk in answer.begin():
                        yield chunk
                if echo and not answer.choices[i].n_tokens:
                    yield self._echo(answer, i, prompts[i // params.n], piece)
                self.metrics.tokens.inc(len(piece.token_ids))
                n_left -= piece.output is not None
                yield answer.take(i, piece)
            end = answer.choices[0].finish_reason or ""
        except TimeoutError as error:
            end = "timeout"
            raise _Refused(504, f"the request took more than {self.limits.seconds:.0f} s") from error
        except Exception as error:
            end = "refused" if isinstance(error, UserError) else "error"
            raise
        finally:
            self.n_open -= len(answer.choices)
            for task in tasks:
                task.cancel()
            self.metrics.requests.labels(end).inc()
            self.metrics.request_seconds.observe(time.perf_counter() - started)

    async def _run(
        self, i: int, prompt: list[int], params: SamplingParams, arrived: "asyncio.Queue[tuple[int, Piece | Exception]]"
    ) -> None:
        seed = None if params.seed is None else (params.seed + i % params.n) % 2**63
        try:
            async with aclosing(self.llm.astream(prompt, replace(params, n=1, seed=seed))) as pieces:
                async for piece in pieces:
                    arrived.put_nowait((i, piece))
        except Exception as error:  # it is for the request
            arrived.put_nowait((i, error))

    def _echo(self, answer: Answer, i: int, prompt: list[int], piece: Piece) -> Json:
        """The chunk that begins an answer with its prompt."""
        found = piece.prompt_logprobs or []
        nothing = {prompt[0]: Logprob(math.nan, 0, self.text(prompt[:1]))}
        return answer.echo(i, self.text(prompt, skip_special_tokens=True), [one or nothing for one in found])

    def text(self, ids: list[int], **how: Any) -> str:
        return "" if self.llm.tokenizer is None else str(self.llm.tokenizer.decode(ids, **how))

    async def _prompts(self, request: CompletionRequest | ChatRequest) -> list[list[int]]:
        if isinstance(request, ChatRequest):
            return [await self.render(request)]
        return [await self.encode(one) for one in request.prompts]

    async def encode(self, prompt: str | list[int], add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt; a long text holds nobody else up."""
        if isinstance(prompt, list):
            return prompt
        return await asyncio.to_thread(self.llm.encode, prompt, add_special_tokens)

    async def render(self, request: ChatRequest) -> list[int]:
        """Token ids of a conversation. Raises PromptError or SettingsError for what the model's template does not take."""
        given = request.chat_template_kwargs or {}
        # Nothing but variables of the template: not a template of the client's own, nor where one is found.
        reserved = given.keys() & inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()
        if reserved:
            raise SettingsError(f"chat_template_kwargs {min(reserved)}", need="variables of the model's template")
        wanted = request.wanted_format
        if wanted and "response_format" not in str(self.llm.tokenizer and self.llm.tokenizer.chat_template):
            problem, need = f"response_format {wanted['type']}", "a model whose chat template knows of it, or text"
            raise SettingsError(problem, need=need, change="ask in the prompt")
        options = {"add_generation_prompt": True, "tools": request.offered_tools, **given}
        options |= {"response_format": wanted} if wanted else {}
        turns = request.turns()
        if not turns:
            raise PromptError("messages", need="at least one", have="none", change="send the user's turn")
        return await asyncio.to_thread(self.llm.encode_chat, turns, options)

    def check_model(self, name: str | None) -> None:
        """Raises _Refused for a model that is not this one."""
        if name and name != self.name:
            raise _Refused(404, f"there is no model {name!r} here, but {self.name!r}", "model_not_found")

    @property
    def card(self) -> Json:
        """The model as OpenAI lists it."""
        length = {"max_model_len": self.llm.max_model_len}
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "offload_rt", **length}


def make_app(
    llm: LLM, name: str, limits: ServerLimits, api_key: str | None = None, hosts: frozenset[str] = frozenset()
) -> FastAPI:
    """The server of a model.

    name     by which clients ask for the model
    api_key  that they give; None: nobody needs one
    hosts    names by which the server may be called; empty: any
    """
    server = _Server(llm, name, limits, Metrics(llm))
    app = FastAPI(title="offload_rt", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.server = server
    app.add_middleware(Limits, api_key=api_key, hosts=hosts, n_body=limits.n_body)
    for kind in (RequestValidationError, HTTPException, OffloadError, _Refused, Exception):
        app.add_exception_handler(kind, _told)
    _add_openai_routes(app, server)
    _add_other_routes(app, server)
    return app


def _add_openai_routes(app: FastAPI, server: _Server) -> None:
    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [server.card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        server.check_model(name)
        return server.card

    @app.post("/v1/completions")
    async def completions(http: Request, request: CompletionRequest) -> Response:
        return await server.answer(http, request)

    @app.post("/v1/chat/completions")
    async def chat(http: Request, request: ChatRequest) -> Response:
        return await server.answer(http, request)


def _add_other_routes(app: FastAPI, server: _Server) -> None:
    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> Json:
        if request.messages is not None:
            ids = await server.render(ChatRequest(messages=request.messages))
        else:
            ids = await server.encode(request.prompt or "", request.add_special_tokens)
        return {"tokens": ids, "count": len(ids), "max_model_len": server.llm.max_model_len}

    @app.post("/detokenize")
    async def detokenize(request: DetokenizeRequest) -> Json:
        return {"prompt": await asyncio.to_thread(server.text, request.tokens)}

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def page() -> Response:
        return FileResponse(_PAGE / "index.html", headers=_PAGE_HEADERS)

    app.mount("/page", StaticFiles(directory=_PAGE))


# How errors are told: status, and OpenAI's code. The first class that fits counts.
_STATUS: tuple[tuple[type[Exception], int, str | None], ...] = (
    (CapacityError, 400, "context_length_exceeded"),
    (UserError, 400, None),
    (DeviceError, 503, None),
    (OffloadError, 500, None),
)


async def _told(http: Request, error: Exception) -> Response:
    """An error as the client reads it."""
    if isinstance(error, RequestValidationError):
        found = [f"{'.'.join(map(str, one['loc'][1:])) or 'the body'}: {one['msg']}" for one in error.errors()]
        return error_response(400, "; ".join(found)[:1000])
    if isinstance(error, HTTPException):
        return error_response(error.status_code, str(error.detail))
    if isinstance(error, _Refused):
        return error_response(error.status, str(error), error.code, error.retry_after)
    status, code = next(((status, code) for kind, status, code in _STATUS if isinstance(error, kind)), (500, None))
    text = str(error) if isinstance(error, OffloadError) else "a fault of the server, which has printed it"
    return error_response(status, text, code, _RETRY_S if status == 503 else None)


async def _events(
    http: Request, first: Json, chunks: AsyncIterator[Json], answer: Answer, has_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events of chunks. An error that comes in the middle is the last of them."""
    try:
        yield _event(first)
        async for chunk in chunks:
            yield _event(chunk)
        if has_usage:
            yield _event(answer.end())
    except Exception as error:
        yield f"data: {bytes((await _told(http, error)).body).decode()}\n\n"
        if not isinstance(error, OffloadError | _Refused):
            logging.getLogger("uvicorn.error").exception("in the middle of a stream")
    yield "data: [DONE]\n\n"


def _event(content: Json) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def _drained(chunks: AsyncIterator[Json]) -> None:
    async for _ in chunks:
        pass


async def _unless_gone(http: Request, work: Awaitable[_T]) -> _T:
    """The result of some work, which is cancelled if the client goes away before it ends."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _Refused(499, "the client has gone")
        return task.result()
    finally:
        watch.cancel()
        task.cancel()
