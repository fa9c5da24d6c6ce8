"""Thread that steps the engine for all callers, and the queue of pieces of each call."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import torch

from offload_rt.engine.engine import Engine
from offload_rt.engine.outputs import Piece, Request
from offload_rt.errors import SettingsError

# A request by its index within its call, and its next piece.
IndexedPiece = tuple[int, Piece]
_Put = Callable[[IndexedPiece | BaseException], None]


class _Member(NamedTuple):
    """Position of a running request within its call, and the queue of its call."""

    position: int
    put: _Put


def closed() -> SettingsError:
    """Return the error for the use of a closed model."""
    return SettingsError("this LLM is closed", change="create another LLM")


class EngineThread:
    """Steps the engine while requests run. The thread starts with the first call.

    Requests join and leave between steps. An error of a step ends all calls, an error of a request
    ends its call.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._is_closed = False
        self._is_stepping = False  # the next step is queued
        device = engine.runner.device
        begin = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "engine", begin)
        self._running: dict[Request, _Member] = {}  # read and written by the thread only

    def pieces(self, requests: Sequence[Request]) -> Generator[IndexedPiece, None, None]:
        """Run requests and yield their pieces. Closing the iterator aborts them."""
        arrivals: SimpleQueue[IndexedPiece | BaseException] = SimpleQueue()
        n_left = len(requests)
        self._submit(partial(self._join, requests, arrivals.put))
        try:
            self._check_open()
            while n_left:
                arrival = _raised(arrivals.get())
                n_left -= arrival[1].output is not None
                yield arrival
        finally:
            left = self._submit(partial(self._leave, requests))
            if left is not None:  # later calls of this caller see an engine without the requests
                left.result()

    async def apieces(self, requests: Sequence[Request]) -> AsyncGenerator[IndexedPiece, None]:
        """`pieces` for asyncio. Leaving does not wait for the step in progress."""
        arrivals: asyncio.Queue[IndexedPiece | BaseException] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        n_left = len(requests)

        def put(arrival: IndexedPiece | BaseException) -> None:
            loop.call_soon_threadsafe(arrivals.put_nowait, arrival)

        self._submit(partial(self._join, requests, put))
        try:
            self._check_open()
            while n_left:
                arrival = _raised(await arrivals.get())
                n_left -= arrival[1].output is not None
                yield arrival
        finally:
            self._submit(partial(self._leave, requests))

    def close(self) -> None:
        """End running calls with an error after the step in progress, and close the engine."""
        self._is_closed = True
        self._submit(partial(self._fail, closed()))
        self._thread.shutdown()
        self.engine.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed()

    def _submit(self, act: Callable[[], None]) -> Future[None] | None:
        """Queue work behind earlier work; None after the shutdown of the thread."""
        with suppress(RuntimeError):
            return self._thread.submit(act)
        return None

    def _join(self, requests: Sequence[Request], put: _Put) -> None:
        for i, request in enumerate(requests):
            for sequence in request.sequences:
                self.engine.add(sequence)
            self._running[request] = _Member(i, put)
        if not self._is_stepping:
            self._submit(self._step)
        self._is_stepping = True

    def _leave(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if self._running.pop(request, None) is not None:
                for sequence in request.sequences:
                    self.engine.abort(sequence)

    def _step(self) -> None:
        self._is_stepping = bool(self._running)
        if not self._is_stepping:
            return
        try:
            self.engine.step()
        except BaseException as error:  # callers raise it
            self._fail(error)
        for request in list(self._running):
            try:
                for piece in request.pieces():
                    self._put(request, piece)
            except BaseException as error:  # the caller raises it
                self._put(request, error)
        self._submit(self._step)

    def _fail(self, error: BaseException) -> None:
        for request in list(self._running):
            self._put(request, error)

    def _put(self, request: Request, arrival: Piece | BaseException) -> None:
        """Queue a piece or an error. The last piece and an error end the request."""
        member = self._running.get(request)
        if member is None:  # an earlier piece has ended it
            return
        is_last = isinstance(arrival, BaseException) or arrival.output is not None
        try:
            member.put(
                arrival if isinstance(arrival, BaseException) else (member.position, arrival)
            )
        except RuntimeError:  # the event loop of the call is closed
            is_last = True
        if is_last:
            self._leave([request])


def _raised(arrival: IndexedPiece | BaseException) -> IndexedPiece:
    if isinstance(arrival, BaseException):
        raise arrival
    return arrival
