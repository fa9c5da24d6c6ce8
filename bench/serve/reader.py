"""Process that streams completions by raw sockets and returns the times of the events."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from bench.common.measure import ROOT
from bench.common.processes import family

_END = b"data: [DONE]"


@dataclass(frozen=True)
class Reader:
    """A process that executes `read`; parsing of events would use the engine's processors."""

    process: subprocess.Popen

    def read(self, url: str, body: dict[str, object]) -> tuple[str, list[float]]:
        """Return the text of a streamed completion, and `time.perf_counter` at each chunk."""
        print(json.dumps([url, body]), file=self.process.stdin, flush=True)
        text, moments = json.loads(self.process.stdout.readline())
        return text, moments


@contextmanager
def reader_process() -> Iterator[Reader]:
    """Start a reader process."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "bench.serve.reader"]
    with family(subprocess.Popen(command, cwd=ROOT, **pipes)) as process:
        yield Reader(process)


def read(url: str, body: dict[str, object]) -> tuple[str, list[float]]:
    """Stream a completion. Several chunks received at once share a moment."""
    content = json.dumps(body).encode()
    place = urlsplit(url)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    received: list[tuple[float, bytes]] = []
    with socket.create_connection((place.hostname, place.port)) as connection:
        connection.sendall(head.encode() + content)
        while part := connection.recv(1 << 16):
            received.append((time.perf_counter(), part))
    moments = [moment for moment, part in received for _ in range(part.count(b"data: {"))]
    whole = b"".join(part for _, part in received)
    assert _END in whole, whole
    events = (line[6:] for line in whole.split(b"\r\n") if line.startswith(b"data: {"))
    return "".join(json.loads(event)["choices"][0]["text"] for event in events), moments


def main() -> None:
    """Execute jobs of stdin line by line."""
    for line in sys.stdin:
        print(json.dumps(read(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
