"""Process that streams completions by raw sockets and returns the times of the events.

Parsing of events would use the engine's processors.
"""

import json
import socket
import time
from urllib.parse import urlsplit

from bench.common.processes import answer_jobs

_END = b"data: [DONE]"


def read(url: str, body: dict[str, object]) -> tuple[str, list[float]]:
    """Return the text of a streamed completion, and `time.perf_counter` at each chunk.

    Several chunks received at once share a moment.
    """
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


if __name__ == "__main__":
    answer_jobs(read)
