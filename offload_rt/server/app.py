"""Routes: the APIs of OpenAI and Anthropic, tokenization, health, counters, pages, docs."""

import asyncio
import json
from html import escape
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from offload_rt import __version__
from offload_rt.errors import OffloadError
from offload_rt.llm import LLM
from offload_rt.models.image_prompt import token_ids
from offload_rt.server import protocol
from offload_rt.server.bodies import Json
from offload_rt.server.chat_format import ChatFormat
from offload_rt.server.completions import ChatWriter, CompletionWriter
from offload_rt.server.limits import Access, Limits
from offload_rt.server.messages import CountRequest, MessagesRequest, MessagesWriter
from offload_rt.server.prompts import PromptEncoder
from offload_rt.server.responses import ResponsesRequest, ResponsesWriter
from offload_rt.server.service import Metrics, Refused, Service, Writer
from offload_rt.server.settings import ServeSettings
from offload_rt.text.image_urls import ImageFetcher
from offload_rt.text.images import DEFAULT_LIMITS

_PAGE = Path(__file__).with_name("page")
# The page loads scripts and styles from this server only.
_POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'"
_PAGE_HEADERS = {"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"}
_OPEN = Access()
_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>offload_rt API</title>
<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="/page/style.css">
<style>body { max-width: 60rem; margin: auto; padding: 1rem; overflow: auto }
td { padding-right: 2rem }</style>
<h1>API</h1><p><a href="/openapi.json">openapi.json</a></p>
"""
# 4XX responses of a route.
_REFUSAL: Json = {"4XX": {"description": "Refused request", "content": {"application/json": {}}}}


def make_app(
    llm: LLM,
    name: str,
    settings: ServeSettings,
    access: Access = _OPEN,
    chat_format: ChatFormat | None = None,
) -> FastAPI:
    """Build the app of a model, with its name for clients."""
    chat_format = chat_format or ChatFormat.select(llm.tokenizer, "auto", "auto")
    fetch = ImageFetcher(DEFAULT_LIMITS.nbytes) if settings.allow_image_urls else None
    prompts = PromptEncoder(llm.requests, fetch, chat_format.tool_format)
    service = Service(llm, name, settings, chat_format, prompts, Metrics(llm))
    # A redirect to the path with a slash would name the host of the client's choice.
    app = FastAPI(title="offload_rt", version=__version__, openapi_url=None, redirect_slashes=False)
    app.state.service = service
    app.add_middleware(Limits, access=access)
    if access.origins:  # outside the limits: browsers ask for permission without a key
        app.add_middleware(
            CORSMiddleware, allow_origins=access.origins, allow_methods=["*"], allow_headers=["*"]
        )
    for kind in (HTTPException, OffloadError, Refused, Exception):
        app.add_exception_handler(kind, service.error_response)
    _add_model_routes(app, service)
    _add_extra_routes(app, service)
    _add_docs(app)
    app.mount("/page", StaticFiles(directory=_PAGE))
    return app


def _add_model_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models(response: Response) -> Json:
        """List the model. A header names the format of tool calls."""
        response.headers["X-Tool-Call-Format"] = service.chat_format.tool_format.name
        return {"object": "list", "data": [service.card]}

    @app.get("/v1/models/{name:path}", openapi_extra={"responses": _REFUSAL})
    async def model(name: str) -> Json:
        """Describe the model."""
        service.check_model(name)
        return service.card

    @app.post("/v1/embeddings", openapi_extra=_body_of(protocol.EmbeddingsRequest))
    async def embeddings(http: Request) -> Response:
        """Embed texts, if the server was started with `--embeddings`."""
        return await service.embed(await service.read(http, protocol.EmbeddingsRequest))

    def add(path: str, kind: type[BaseModel], writer: type[Writer], text: str) -> None:
        @app.post(path, name=path, description=text, openapi_extra=_body_of(kind))
        async def generate(http: Request) -> Response:
            return await service.answer(http, await service.read(http, kind), writer)

    add("/v1/completions", protocol.CompletionRequest, CompletionWriter, "Continue prompts.")
    add("/v1/chat/completions", protocol.ChatRequest, ChatWriter, "Answer a conversation.")
    text = "Answer a conversation of output items; nothing is stored."
    add("/v1/responses", ResponsesRequest, ResponsesWriter, text)
    text = "Answer a conversation of content blocks, as Anthropic does."
    add("/v1/messages", MessagesRequest, MessagesWriter, text)


def _add_extra_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/messages/count_tokens", openapi_extra=_body_of(CountRequest))
    async def count_tokens(http: Request) -> Json:
        """Count the tokens of a conversation."""
        request = await service.read(http, CountRequest)
        service.check_model(request.model)
        chat = await asyncio.to_thread(request.generation)
        (prompt,) = await service.prompts.encode(chat, is_checked=False)
        return {"input_tokens": len(prompt)}

    @app.post("/tokenize", openapi_extra=_body_of(protocol.TokenizeRequest))
    async def tokenize(http: Request) -> Response:
        """Convert a text or a conversation to token ids."""
        body = await service.read(http, protocol.TokenizeRequest)
        request = await asyncio.to_thread(body.generation)
        (prompt,) = await service.prompts.encode(request, is_checked=False)
        content = {"tokens": token_ids(prompt), "count": len(prompt)}
        content["max_model_len"] = service.llm.max_model_len
        return await asyncio.to_thread(JSONResponse, content)

    @app.post("/detokenize", openapi_extra=_body_of(protocol.DetokenizeRequest))
    async def detokenize(http: Request) -> Response:
        """Convert token ids to a text."""
        request = await service.read(http, protocol.DetokenizeRequest)
        tokenizer = service.llm.tokenizer
        text = await asyncio.to_thread(tokenizer.decode, request.tokens) if tokenizer else ""
        return await asyncio.to_thread(JSONResponse, {"prompt": text})

    @app.get("/health", response_class=Response)
    async def health() -> Response:
        """Answer with status 200."""
        return Response()

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return counters for Prometheus."""
        text = generate_latest(service.metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(_PAGE / "index.html", headers=_PAGE_HEADERS)


def _body_of(kind: type[BaseModel]) -> Json:
    """Describe a request body and the types of its responses, for a route's `openapi_extra`."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    types = ["application/json", *(["text/event-stream"] if "stream" in kind.model_fields else [])]
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"content": {name: {} for name in types}}, **_REFUSAL},
    }


def _add_docs(app: FastAPI) -> None:
    """Add both routes. The description covers the routes added so far."""
    description = app.openapi()
    schemas = description.setdefault("components", {}).setdefault("schemas", {})
    page = _HEAD
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            body = operation.get("requestBody")
            schema = body["content"]["application/json"]["schema"] if body else {}
            schemas |= schema.pop("$defs", {})
            page += _section(f"{method.upper()} {path}", operation.get("description", ""), schema)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Json:
        return description

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page)


def _section(name: str, text: str, schema: Json) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{' (required)' if field in required else ''}</td>"
        f"<td><code>{escape(json.dumps(entry))}</code></td></tr>"
        for field, entry in schema.get("properties", {}).items()
    )
    return f"<h2>{escape(name)}</h2><p>{escape(text)}</p><table>{rows}</table>\n"
