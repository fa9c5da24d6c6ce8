"""Routes: the OpenAI API, tokenization, health, counters, and the web page."""

import asyncio
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from offload_rt.errors import OffloadError
from offload_rt.llm import LLM
from offload_rt.server.bodies import Json
from offload_rt.server.chat_format import ChatFormat
from offload_rt.server.completions import ChatWriter, CompletionWriter
from offload_rt.server.limits import Limits
from offload_rt.server.messages import CountRequest, MessagesRequest, MessagesWriter
from offload_rt.server.metrics import Metrics
from offload_rt.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from offload_rt.server.responses import ResponsesRequest, ResponsesWriter
from offload_rt.server.service import Refused, ServerLimits, Service

_PAGE = Path(__file__).with_name("page")
# The page loads scripts and styles from this server only.
_CONTENT_POLICY = (
    "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'"
)
_PAGE_HEADERS = {"Content-Security-Policy": _CONTENT_POLICY, "Referrer-Policy": "no-referrer"}


def make_app(
    llm: LLM,
    name: str,
    limits: ServerLimits,
    api_key: str | None = None,
    hosts: frozenset[str] = frozenset(),
    chat_format: ChatFormat | None = None,
) -> FastAPI:
    """Build the app of a model.

    name     name of the model for clients
    api_key  required from clients; None: no key
    hosts    accepted host names in lower case; empty: all
    chat_format  format of answers; None: by the chat template
    """
    chat_format = chat_format or ChatFormat.select(llm.tokenizer, "auto", "auto")
    service = Service(llm, name, limits, chat_format, Metrics(llm))
    # A redirect to the path with a slash would name the host of the client's choice.
    app = FastAPI(
        title="offload_rt", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.state.service = service
    app.add_middleware(Limits, api_key=api_key, hosts=hosts, body_nbytes=limits.body_nbytes)
    for kind in (HTTPException, OffloadError, Refused, Exception):
        app.add_exception_handler(kind, service.error_response)
    _add_openai_routes(app, service)
    _add_agent_routes(app, service)
    _add_extra_routes(app, service)
    return app


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [service.card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        service.check_model(name)
        return service.card

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        request = await service.read(http, CompletionRequest)
        return await service.answer(
            http, request, lambda answer: CompletionWriter(answer, request, service.name)
        )

    @app.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        request = await service.read(http, ChatRequest)
        return await service.answer(
            http, request, lambda answer: ChatWriter(answer, request, service.name)
        )


def _add_agent_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/responses")
    async def responses(http: Request) -> Response:
        request = await service.read(http, ResponsesRequest)
        chat = await asyncio.to_thread(request.chat)
        return await service.answer(
            http, chat, lambda answer: ResponsesWriter(answer, request, service.name)
        )

    @app.post("/v1/messages")
    async def messages(http: Request) -> Response:
        request = await service.read(http, MessagesRequest)
        chat = await asyncio.to_thread(request.chat)
        return await service.answer(http, chat, lambda answer: MessagesWriter(answer, service.name))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(http: Request) -> Json:
        request = await service.read(http, CountRequest)
        service.check_model(request.model)
        chat = await asyncio.to_thread(request.chat)
        return {"input_tokens": len(await asyncio.to_thread(service.render, chat))}


def _add_extra_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(http: Request) -> Json:
        request = await service.read(http, TokenizeRequest)
        if request.messages is not None:
            chat = ChatRequest(messages=request.messages)
            tokens = await asyncio.to_thread(service.render, chat)
        else:
            special = request.add_special_tokens
            tokens = await asyncio.to_thread(service.llm.encode, request.prompt or "", special)
        length = {"max_model_len": service.llm.max_model_len}
        return {"tokens": tokens, "count": len(tokens), **length}

    @app.post("/detokenize")
    async def detokenize(http: Request) -> Json:
        request = await service.read(http, DetokenizeRequest)
        return {"prompt": await asyncio.to_thread(service.decode, request.tokens)}

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def page() -> Response:
        return FileResponse(_PAGE / "index.html", headers=_PAGE_HEADERS)

    app.mount("/page", StaticFiles(directory=_PAGE))
