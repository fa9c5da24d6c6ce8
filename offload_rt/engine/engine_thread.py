"""An engine that several use: callers step by step in turn, and tasks of asyncio through a thread that steps for them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from threading import RLock

from offload_rt.engine.engine import Engine
from offload_rt.engine.outputs import Piece, Request
from offload_rt.errors import SettingsError

_Tell = Callable[[Piece | Exception], None]


def closed() -> SettingsError:
    """The error of a model that is asked for more once it is closed."""
    return SettingsError("this LLM is closed", change="make a new one")


class EngineThread:
    """The thread begins with the first task and ends when this is closed.

    turn  held by who steps the engine or reads what a step brought; a step takes all requests further, whosever they are
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.turn, self._is_closed = engine, RLock(), False
        self._thread = ThreadPoolExecutor(1, "engine")
        # Of tasks, with the engine's ids and how to tell; the thread alone reads and writes it.
        self._running: dict[Request, tuple[list[int], _Tell]] = {}

    @contextmanager
    def running(self, requests: list[Request]) -> Iterator[Engine]:
        """The engine, with requests that the caller steps; what has not ended by then is aborted."""
        ids = [id for one in requests for id in self._add(one)]
        try:
            yield self.engine
        finally:
            self._abort(ids)

    async def pieces(self, request: Request) -> AsyncGenerator[Piece, None]:
        """Run a request among those of other tasks. An error of a step is raised in all of them."""
        arrived: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(what: Piece | Exception) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, what)

        self._submit(partial(self._enter, request, tell))
        try:
            if self._is_closed:
                raise closed()
            while not isinstance(piece := await arrived.get(), Exception):
                yield piece
                if piece.output is not None:
                    return
            raise piece
        finally:
            self._submit(partial(self._leave, request))

    def close(self) -> None:
        """End the thread after the step under way, with an error for tasks that wait, and close the engine."""
        self._is_closed = True
        self._submit(self._fail)
        self._thread.shutdown()
        self.engine.close()

    def _submit(self, act: Callable[[], None]) -> None:
        """Let the thread do something behind what it has been given before; it takes nothing more once it is shut down."""
        with suppress(RuntimeError):
            self._thread.submit(act)

    def _enter(self, request: Request, tell: _Tell) -> None:
        self._running[request] = self._add(request), tell
        if len(self._running) == 1:
            self._step()

    def _step(self) -> None:
        try:
            with self.turn:
                self.engine.step()
                news: list[tuple[Request, Piece | Exception]]
                news = [(one, piece) for one in self._running for piece in one.pieces()]
        except Exception as error:  # whatever it is, it is for those who wait
            news = [(one, error) for one in self._running]
        for one, piece in news:
            if one in self._running:
                self._tell(one, piece)
        if self._running:
            self._submit(self._step)

    def _fail(self) -> None:
        for one in list(self._running):
            self._tell(one, closed())

    def _tell(self, request: Request, what: Piece | Exception) -> None:
        """Tell a task something. The last it hears ends its request, and so does an event loop that has closed."""
        is_last = isinstance(what, Exception) or what.output is not None
        try:
            self._running[request][1](what)
        except RuntimeError:
            is_last = True
        if is_last:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        self._abort(self._running.pop(request, ([], None))[0])

    def _add(self, request: Request) -> list[int]:
        with self.turn:
            return [self.engine.add(one) for one in request.sequences]

    def _abort(self, ids: list[int]) -> None:
        with self.turn:
            for id in ids:
                self.engine.abort(id)
