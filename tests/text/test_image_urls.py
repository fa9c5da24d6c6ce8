"""Images behind URLs: only public addresses are reached, also by redirects, within limits."""

import asyncio
import socket
from functools import partial
from typing import Any

import httpx2
import pytest

from offload_rt.errors import PromptError
from offload_rt.text.image_urls import ImageFetcher, is_public

CONTENT = bytes(range(256))
FETCH = partial(ImageFetcher(1000), timeout_s=20.0)
V4, V6 = "93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"
# Answers by the first part of a path.
STATUS = {"to": 302, "missing": 404}
HEADERS = {"html": {"Content-Type": "text/html"}, "zip": {"Content-Encoding": "gzip"}}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """Addresses by name, one list per query."""
    answers = {"site.example": [[V4]], "six.example": [[V6]], "inner.example": [["127.0.0.2"]],
               "both.example": [[V4, "10.0.0.1"]],
               "rebind.example": [[V4], ["127.0.0.2"]]}  # fmt: skip

    def resolve(host: str, *_: Any, **__: Any) -> list[Any]:
        if host not in answers:
            raise socket.gaierror("unknown")
        entries = answers[host].pop(0) if len(answers[host]) > 1 else answers[host][0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (entry, 0)) for entry in entries]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return answers


@pytest.fixture
def asked(names: Any, monkeypatch: pytest.MonkeyPatch) -> list[httpx2.Request]:
    """Requests that reach the network."""
    requests = []

    async def answer(_: Any, request: httpx2.Request) -> httpx2.Response:
        requests.append(request)
        kind, _, rest = request.url.path[1:].partition("/")
        if kind == "slow":
            await asyncio.sleep(60)
        if kind == "closed":
            raise httpx2.ConnectError("refused")
        headers = {"Content-Type": "image/png; x=y"} | HEADERS.get(kind, {})
        headers |= {"Location": rest} if kind == "to" else {}
        stream = httpx2.ByteStream(CONTENT * (5 if kind == "large" else 1))
        return httpx2.Response(STATUS.get(kind, 200), headers=headers, stream=stream)

    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", answer)
    return requests


def test_private_and_special_addresses_are_not_public():
    assert all(map(is_public, (V4, V6, f"::ffff:{V4}")))
    for address in (
        "127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254",
        "100.64.0.1", "224.0.0.1", "239.255.255.250", "255.255.255.255", "240.0.0.1", "198.18.0.1",
        "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fec0::1", "ff02::1", "ff0e::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::",
        "2001:0:4136:e378::1",
    ):  # fmt: skip
        assert not is_public(address), address
    for host in ("2130706433", "0x7f000001", "0177.0.0.1", "127.1", "[::1]", "[::ffff:7f00:1]",
                 "localhost"):  # fmt: skip
        with pytest.raises(PromptError, match=r"is no public address|cannot be (read|resolved)"):
            FETCH(f"http://{host}:1/image")


def test_image_is_read_from_the_checked_address(asked, names):
    for host, address in (("site.example", V4), ("six.example", V6)):
        assert FETCH(f"https://user@{host.upper()}:8443/a?b=c") == CONTENT
        request = asked.pop()
        assert (request.url.host, request.url.port) == (address, 8443)
        assert request.url.raw_path == b"/a?b=c" and request.headers["Host"] == f"{host}:8443"
        assert request.extensions["sni_hostname"] == host  # of the certificate
    assert FETCH("http://site.example/to//to//to//image") == CONTENT
    # A second query would have another answer.
    assert FETCH("http://rebind.example/image") == CONTENT
    assert names["rebind.example"] == [["127.0.0.2"]]


def test_other_answers_are_refused(asked):
    for url, message in (
        ("http://inner.example/image", "inner.example is no public address"),
        ("http://both.example/", "both.example is no public address"),
        ("http://nowhere.example/", "cannot be resolved"), ("http://[::1/", "cannot be read"),
        *((f"http://site.example/{path}", message) for path, message in (
            ("to/http://inner.example/image", "inner.example is no public address"),
            ("to/file:///etc/passwd", "a redirect to file"),
            ("to//to//to//to//image", "more than 3 redirects"),
            ("html", "sent 'text/html': needs image/png"), ("zip", "compressed"),
            ("large", "the image is too large"), ("missing", "status 404"),
            ("closed", "cannot be read"), ("slow", "no image within 0.3 s"))),
    ):  # fmt: skip
        with pytest.raises(PromptError, match=message):
            ImageFetcher(1000)(url, 0.3 if "0.3" in message else 20.0)
    assert {request.headers["Host"] for request in asked} == {"site.example"}
