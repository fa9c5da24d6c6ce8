"""An engine that several use: callers step by step in turn, and tasks of asyncio through a thread
that steps for them.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from threading import RLock

import torch

from offload_rt.engine.engine import Engine
from offload_rt.engine.outputs import Piece, Request
from offload_rt.errors import SettingsError

_Tell = Callable[[Piece | Exception], None]


def closed() -> SettingsError:
    """The error of a model that is asked for more once it is closed."""
    return SettingsError("this LLM is closed", change="make a new one")


class EngineThread:
    """The thread begins with the first task and ends when this is closed.

    turn  held by who steps the engine or reads what a step brought; a step takes all requests
          further, whosever they are
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.turn, self._is_closed = engine, RLock(), False
        device = engine.runner.device
        begin = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "engine", begin)
        # Of tasks: what lets them leave, and how to tell them something. The thread alone reads and
        # writes it.
        self._running: dict[Request, tuple[ExitStack, _Tell]] = {}

    @contextmanager
    def running(self, requests: list[Request]) -> Iterator[Engine]:
        """The engine, with these requests until then; what has not ended is aborted."""
        with self.turn:
            ids = [self.engine.add(one) for request in requests for one in request.sequences]
        try:
            yield self.engine
        finally:
            with self.turn:
                for id in ids:
                    self.engine.abort(id)

    async def pieces(self, request: Request) -> AsyncGenerator[Piece, None]:
        """Run a request among those of other tasks. An error of a step is raised in all, one of a
        request in it alone.
        """
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
        """End the thread after the step under way, with an error for tasks that wait, and close the
        engine.
        """
        self._is_closed = True
        self._submit(partial(self._fail, closed()))
        self._thread.shutdown()
        self.engine.close()

    def _submit(self, act: Callable[[], None]) -> None:
        """Let the thread do something behind what it has been given before; it takes nothing more
        once it is shut down.
        """
        with suppress(RuntimeError):
            self._thread.submit(act)

    def _enter(self, request: Request, tell: _Tell) -> None:
        leaves = ExitStack()
        leaves.enter_context(self.running([request]))
        self._running[request] = leaves, tell
        if len(self._running) == 1:
            self._step()

    def _leave(self, request: Request) -> None:
        if request in self._running:
            self._running.pop(request)[0].close()

    def _step(self) -> None:
        try:
            with self.turn:
                self.engine.step()
                news = [(one, piece) for one in self._running for piece in _news(one)]
        except Exception as error:  # whatever it is, it is for those who wait
            return self._fail(error)
        for one, piece in news:
            self._tell(one, piece)
        if self._running:
            self._submit(self._step)

    def _fail(self, error: Exception) -> None:
        for one in list(self._running):
            self._tell(one, error)

    def _tell(self, request: Request, what: Piece | Exception) -> None:
        """Tell a task something. The last it hears ends its request, and so does an event loop that
        has closed.
        """
        if request in self._running:
            is_last = isinstance(what, Exception) or what.output is not None
            try:
                self._running[request][1](what)
            except RuntimeError:
                is_last = True
            if is_last:
                self._leave(request)


def _news(request: Request) -> list[Piece] | list[Exception]:
    try:
        return request.pieces()
    except Exception as error:  # it is for who waits for this request
        return [error]
