"""Connection limits that uvicorn lacks: count, header timeout, write timeout.

No server compared here has a write timeout or a connection limit.
hypercorn 0.18 closes idle connections, and thereby half-sent heads, after 5 s.
granian 2.8 has a header timeout, but its server inside a process is experimental.
"""

import asyncio
import os
import resource
import sys
from dataclasses import dataclass
from typing import ClassVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

# asyncio accepts this many connections at once, before it closes surplus connections.
_BACKLOG = 64
# Connections in the hands of asyncio, and files of the engine.
_RESERVED_FILES = 5 * _BACKLOG
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nConnection: close\r\n"
_BUSY += b"Content-Length: 0\r\n\r\n"


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of connections.

    n_connections  further connections get status 503
    header_s       time for the head of a request
    write_s        time without progress while the client does not read
    """

    n_connections: int
    header_s: float = 10.0
    write_s: float = 30.0

    @classmethod
    def from_ulimit(cls) -> "ConnectionLimits":
        """Derive the number of connections from the limit of open files."""
        n_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        n_free = n_files - len(os.listdir("/proc/self/fd"))
        return cls(max(n_free - _RESERVED_FILES, _BACKLOG))


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 connection with limits."""

    limits: ClassVar[ConnectionLimits]
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the header timer, or refuse the connection."""
        super().connection_made(transport)
        # Every unsent byte counts: `pause_writing` follows at once.
        transport.set_write_buffer_limits(high=0)
        if len(self.connections) > self.limits.n_connections:
            transport.write(_BUSY)
            transport.close()
        else:
            self._watch_header()

    def data_received(self, data: bytes) -> None:
        """Parse data. The header timer runs from the first byte to the end of the head."""
        super().data_received(data)
        self._watch_header()

    def _watch_header(self) -> None:
        is_complete = self.cycle is not None and not self.cycle.response_complete
        if is_complete and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        elif not is_complete and self._header_timer is None:
            self._header_timer = self.loop.call_later(self.limits.header_s, self.transport.abort)

    def pause_writing(self) -> None:
        """Start the write timer."""
        super().pause_writing()
        self._check_write(sys.maxsize)

    def resume_writing(self) -> None:
        """Stop the write timer."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _check_write(self, n_unsent: int) -> None:
        """Abort the connection unless the client has read something; check again later."""
        remaining = self.transport.get_write_buffer_size()
        if remaining >= n_unsent:
            return self.transport.abort()
        self._write_timer = self.loop.call_later(self.limits.write_s, self._check_write, remaining)

    def shutdown(self) -> None:
        """Refuse an incomplete request, or close the connection behind its last answer."""
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_started:
            self.transport.write(_BUSY)
            self.transport.close()
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        for timer in (self._header_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)


def make_server(app: ASGIApp, drain_s: int, limits: ConnectionLimits) -> uvicorn.Server:
    """Build the HTTP server of an app, with a time for open requests after SIGTERM."""
    config = uvicorn.Config(
        app,
        http=type("Protocol", (BoundedProtocol,), {"limits": limits}),
        backlog=_BACKLOG,
        log_level="error",  # invalid requests are warnings, as many as a client sends
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=drain_s,
    )
    return uvicorn.Server(config)
