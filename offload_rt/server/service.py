"""Generation for HTTP requests: validation, admission, chunks, errors, and counters."""

import asyncio
import json
import logging
import reprlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from offload_rt.errors import CapacityError, DeviceError, OffloadError, SettingsError, UserError
from offload_rt.llm import LLM
from offload_rt.models.image_prompt import token_ids
from offload_rt.sampling_params import SamplingParams
from offload_rt.server.answer import Answer, Delta
from offload_rt.server.bodies import Body, Json, read_body
from offload_rt.server.chat_format import ChatFormat
from offload_rt.server.completions import CompletionWriter
from offload_rt.server.limits import error_response
from offload_rt.server.messages import MessagesWriter
from offload_rt.server.prompts import GenerationRequest, PromptEncoder
from offload_rt.server.protocol import ChatRequest, CompletionRequest, EmbeddingsRequest
from offload_rt.server.responses import ResponsesWriter
from offload_rt.server.settings import ServeSettings

Writer = CompletionWriter | MessagesWriter | ResponsesWriter
_T = TypeVar("_T")
_RETRY_S = 5
_BODY_TIMEOUT_S = 60
# A stream gets this long to send the error of a timeout.
_STREAM_GRACE_S = 5
# Grammars of all open requests together. Compiling a character takes up to 750 bytes.
_MAX_GRAMMAR_CHARACTERS = 3 << 16
_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)


class Metrics:
    """Counters of requests, and of the engine at the time of the query."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.registry = CollectorRegistry()
        place: Json = {"namespace": "offload_rt", "registry": self.registry}
        timed: Json = {**place, "buckets": _BUCKETS_S}
        self.requests = Counter("requests", "Requests by finish reason", ["end"], **place)
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens", **place)
        self.tokens = Counter("tokens", "Generated tokens", **place)
        self.first_token = Histogram("first_token_seconds", "Time to the first token", **timed)
        self.request_seconds = Histogram("request_seconds", "Duration of a request", **timed)
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Read the counters of the engine."""
        engine = self._llm.engine
        nbytes, busy_s = engine.runner.streamer.meter.read()
        for kind, name, text, value in (
            (CounterMetricFamily, "passes", "Forward passes", engine.n_passes),
            (CounterMetricFamily, "link_bytes", "Bytes copied over the link", nbytes),
            (CounterMetricFamily, "link_busy_seconds", "Busy time of the link", busy_s),
            (GaugeMetricFamily, "running", "Running sequences", engine.n_running),
            (GaugeMetricFamily, "waiting", "Waiting sequences", engine.n_waiting),
        ):
            yield kind(f"offload_rt_{name}", text, value)


@dataclass(eq=False)
class Refused(Exception):
    """A refused request, with the fields of `error_response`."""

    status: int
    reason: str
    code: str | None = None
    retry_after_s: int | None = None


@dataclass(eq=False)
class Service:
    """A model and its open requests, with their answers and characters of grammars."""

    llm: LLM
    name: str
    settings: ServeSettings
    chat_format: ChatFormat
    prompts: PromptEncoder
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    n_open: int = 0
    n_grammar_characters: int = 0
    _parsing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def read(self, http: Request, kind: type[Body]) -> Body:
        """Read and validate a body in a worker thread, one body at a time.

        Parsers hold the interpreter lock in steps; several at once would add up.
        """
        raw = bytearray()
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                async for part in http.stream():
                    raw += part
                    if len(raw) > self.settings.body_nbytes:
                        reason = f"the request body exceeds {self.settings.body_nbytes} bytes"
                        raise Refused(413, reason)
        except TimeoutError as error:
            reason = f"the request body did not arrive within {_BODY_TIMEOUT_S} s"
            raise Refused(408, reason) from error
        except ClientDisconnect as error:
            raise Refused(499, "the client disconnected") from error
        # Browsers send other content types across origins without asking.
        if "json" not in http.headers.get("content-type", "").lower():
            raise Refused(415, "the Content-Type must be application/json")
        async with self._parsing:
            return await asyncio.to_thread(read_body, kind, bytes(raw), self.llm.max_model_len)

    async def answer(self, http: Request, body: Any, kind: type[Writer]) -> Response:
        """Answer a request, as a stream or whole. Bodies of all APIs have a method `generation`."""
        request: GenerationRequest = await asyncio.to_thread(body.generation)
        self.check_model(request.model)
        params = await asyncio.to_thread(request.params, self.settings.max_n, self.chat_format)
        n_answers = params.n
        if isinstance(request, CompletionRequest):
            n_answers *= len(request.prompt)
        n_characters = await asyncio.to_thread(lambda: len(ascii(params.structured_outputs)))
        self._admit(n_answers, n_characters)
        answer = Answer(request, n_answers, self.llm.tokenizer)
        writer = kind(answer, body, self.name)
        deltas = self._deltas(answer, request, params, n_characters)
        if not request.stream:
            await _unless_gone(http, _exhaust(deltas))
            return await asyncio.to_thread(lambda: JSONResponse(writer.whole()))
        # The first delta precedes the status: errors of the request get a status of their own.
        events = self._events(await _unless_gone(http, anext(deltas)), deltas, writer)
        return _EventStream(self.settings.timeout + _STREAM_GRACE_S, events, deltas)

    async def embed(self, request: EmbeddingsRequest) -> Response:
        """Answer a request for embeddings."""
        self.check_model(request.model)
        if not self.settings.embeddings:
            raise Refused(404, "this server has no embeddings")
        n = len(request.input)
        self._admit(n)
        try:
            texts = CompletionRequest.model_construct(prompt=request.input)
            encoded = await self.prompts.encode(texts, is_checked=False)
            prompts = [*map(token_ids, encoded)]
            vectors = await asyncio.to_thread(self.llm.embed, prompts, self.settings.embeddings)
        finally:
            self.n_open -= n
        content = await asyncio.to_thread(request.whole, vectors, sum(map(len, prompts)), self.name)
        return await asyncio.to_thread(JSONResponse, content)

    def _admit(self, n: int, n_characters: int = 0) -> None:
        """Reserve n places in the queue until `_deltas` ends. Raises Refused for a full queue."""
        engine = self.llm.engine
        if engine.is_short:
            reason = "device memory is exhausted by running answers"
            raise Refused(503, reason, retry_after_s=_RETRY_S)
        if n > self.settings.max_waiting:
            need = f"at most {self.settings.max_waiting}"
            change = "send several requests"
            raise SettingsError(f"{n} answers in one request", need=need, change=change)
        if self.n_open + n - engine.n_running > self.settings.max_waiting:
            raise Refused(429, "the queue is full", retry_after_s=_RETRY_S)
        if n_characters > _MAX_GRAMMAR_CHARACTERS:
            need = f"at most {_MAX_GRAMMAR_CHARACTERS} characters"
            raise SettingsError("structured outputs", need=need, have=str(n_characters))
        if self.n_grammar_characters + n_characters > _MAX_GRAMMAR_CHARACTERS:
            reason = "the structured outputs of open requests are too large together"
            raise Refused(429, reason, retry_after_s=_RETRY_S)
        self.n_open += n
        self.n_grammar_characters += n_characters

    async def _deltas(
        self, answer: Answer, request: GenerationRequest, params: SamplingParams, n_characters: int
    ) -> AsyncGenerator[Delta, None]:
        """Yield the new parts of the answers. Leaving the iterator aborts the answers."""
        started = time.perf_counter()
        deadline = asyncio.get_running_loop().time() + self.settings.timeout
        end = "aborted"
        has_begun = False
        try:
            prompts = await self.prompts.encode(request)
            answer.start(prompts, self.chat_format)
            outputs = params.structured_outputs
            if outputs and isinstance(request, ChatRequest):
                tail = self.chat_format.tail(token_ids(prompts[0]))
                around = self.chat_format.around(tail, request.requires_calls)
                params = replace(params, structured_outputs=replace(outputs, around=around))
            async with aclosing(self.llm.astream_all(prompts, params)) as pieces:
                while True:
                    async with asyncio.timeout_at(deadline):  # `wait_for` would start a task
                        arrival = await anext(pieces, None)
                    if arrival is None:
                        break
                    i_prompt, piece = arrival
                    i = i_prompt * params.n + piece.index
                    if not has_begun:
                        has_begun = True
                        self.metrics.first_token.observe(time.perf_counter() - started)
                        self.metrics.prompt_tokens.inc(answer.n_prompt)
                    if request.echo and not answer.choices[i].n_tokens:
                        prompt = token_ids(prompts[i_prompt])
                        logprobs = piece.prompt_logprobs or []
                        yield await asyncio.to_thread(answer.echo, i, prompt, logprobs)
                    self.metrics.tokens.inc(len(piece.token_ids))
                    yield answer.add(i, piece)
            end = answer.choices[0].finish_reason or ""
        except TimeoutError as error:
            end = "timeout"
            raise Refused(504, f"the request took more than {self.settings.timeout} s") from error
        except Exception as error:
            end = "refused" if isinstance(error, UserError) else "error"
            raise
        finally:
            self.n_open -= len(answer.choices)
            self.n_grammar_characters -= n_characters
            self.metrics.requests.labels(end).inc()
            self.metrics.request_seconds.observe(time.perf_counter() - started)

    async def _events(
        self, first: Delta, deltas: AsyncIterator[Delta], writer: Writer
    ) -> AsyncGenerator[str, None]:
        """Yield server-sent events. An error in the middle is the last event."""
        try:
            # The first and last events of some APIs repeat fields of any size.
            yield "".join(await asyncio.to_thread(writer.start))
            yield "".join(writer.add(first))
            async for delta in deltas:
                yield "".join(writer.add(delta))
            yield "".join(await asyncio.to_thread(writer.end))
        except Exception as error:
            response = await self.error_response(None, error)
            yield "".join(writer.error(json.loads(bytes(response.body))["error"]))
            if not isinstance(error, OffloadError | Refused):
                logging.getLogger("uvicorn.error").exception("error in the middle of a stream")

    def check_model(self, name: str | None) -> None:
        """Raises Refused for the name of another model."""
        if name and name != self.name and not self.settings.any_model_name:
            reason = f"there is no model {reprlib.repr(name)} here, but {self.name!r}"
            raise Refused(404, reason, "model_not_found")

    @property
    def card(self) -> Json:
        """Description of the model, as listed by OpenAI."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "offload_rt",
            "tool_call_format": self.chat_format.tool_format.name,
            "max_model_len": self.llm.max_model_len,
            "max_body": self.settings.body_nbytes,
            "input_modalities": ["text", "image"] if self.llm.supports_images else ["text"],
        }

    async def error_response(self, http: Request | None, error: Exception) -> JSONResponse:
        """Convert an exception to a response."""
        if isinstance(error, HTTPException):
            response = error_response(error.status_code, str(error.detail))
            response.headers.update(error.headers or {})  # `Allow` of status 405
            return response
        if isinstance(error, Refused):
            return error_response(error.status, error.reason, error.code, error.retry_after_s)
        if not isinstance(error, OffloadError):
            return error_response(500, "internal server error; the server's log has details")
        text = str(error)
        if isinstance(error, CapacityError):
            length = f"This model's maximum context length is {self.llm.max_model_len} tokens."
            return error_response(400, f"{length} {text}", "context_length_exceeded")
        if isinstance(error, DeviceError):
            return error_response(503, text, retry_after_s=_RETRY_S)
        return error_response(400 if isinstance(error, UserError) else 500, text)


class _EventStream(StreamingResponse):
    """Events of the first generator, with a deadline also for clients that do not read."""

    def __init__(self, timeout_s: float, *generators: AsyncGenerator[Any, None]) -> None:
        headers = {"Cache-Control": "no-cache"}
        super().__init__(generators[0], headers=headers, media_type="text/event-stream")
        self._generators = generators
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await super().__call__(scope, receive, send)
        except TimeoutError:  # uvicorn closes connections with incomplete responses
            pass
        finally:
            # Suspended generators would wait for the garbage collector.
            for generator in self._generators:
                await generator.aclose()


async def _exhaust(deltas: AsyncIterator[Delta]) -> None:
    async for _ in deltas:
        pass


async def _unless_gone(http: Request, work: Awaitable[_T]) -> _T:
    """Await some work. A disconnect of the client cancels it."""

    async def disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refused(499, "the client disconnected")
        return task.result()
    finally:
        watch.cancel()
        task.cancel()
