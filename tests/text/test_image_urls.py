"""Images behind URLs: only public addresses are reached, also by redirects, within limits."""

import socket
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2
import pytest

from offload_rt.errors import PromptError
from offload_rt.text import image_urls
from offload_rt.text.image_urls import ImageFetcher, is_public

CONTENT = bytes(range(256))
FETCH = partial(ImageFetcher(1000), timeout_s=20.0)


class Handler(BaseHTTPRequestHandler):
    """Answers by path; records the Host headers."""

    hosts: list[str]

    def do_GET(self) -> None:
        self.hosts.append(str(self.headers["Host"]))
        kind, _, rest = self.path[1:].partition("/")
        self.send_response({"to": 302, "missing": 404}.get(kind, 200))
        for name, value in {
            "to": [("Location", rest)],
            "html": [("Content-Type", "text/html")],
            "zip": [("Content-Type", "image/png"), ("Content-Encoding", "gzip")],
        }.get(kind, [("Content-Type", "image/png; x=y")]):
            self.send_header(name, value)
        self.end_headers()
        if kind == "slow":
            self.server.stopped.wait()
        self.wfile.write(CONTENT * (5 if kind == "large" else 1))

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[Any]:
    """A server on 127.0.0.1."""
    handler = type("Recorder", (Handler,), {"hosts": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.stopped = threading.Event()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.stopped.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """Addresses by name, one list per query; 127.0.0.1 alone counts as public."""
    answers = {"site.example": [["127.0.0.1"]], "inner.example": [["127.0.0.2"]],
               "both.example": [["127.0.0.1", "10.0.0.1"]],
               "rebind.example": [["127.0.0.1"], ["127.0.0.2"]]}  # fmt: skip

    def resolve(host: str, port: Any, *_: Any, **__: Any) -> list[Any]:
        if host not in answers:
            raise socket.gaierror("unknown")
        entries = answers[host].pop(0) if len(answers[host]) > 1 else answers[host][0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (entry, 0)) for entry in entries]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(image_urls, "is_public", lambda address: address == "127.0.0.1")
    return answers


def test_private_and_special_addresses_are_not_public():
    public = "93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "::ffff:93.184.216.34"
    assert all(map(is_public, public))
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


def test_image_is_read_from_the_checked_address(site, names):
    port = site.server_address[1]
    assert FETCH(f"http://site.example:{port}/image") == CONTENT
    assert site.RequestHandlerClass.hosts[-1] == f"site.example:{port}"
    redirect = f"http://site.example:{port}/to//to//to//image"
    assert FETCH(redirect) == CONTENT
    # A second query would have another answer.
    assert FETCH(f"http://rebind.example:{port}/image") == CONTENT
    assert names["rebind.example"] == [["127.0.0.2"]]


@pytest.mark.usefixtures("names")
def test_other_answers_are_refused(site):
    place = f"http://site.example:{site.server_address[1]}"
    inner = place.replace("site", "inner")
    for url, message in (
        (f"{inner}/image", "inner.example is no public address"),
        (place.replace("site", "both"), "both.example is no public address"),
        (place.replace("site.example", "127.0.0.2"), "cannot be resolved"),
        ("http://nowhere.example/", "cannot be resolved"),
        (f"{place}/to/{inner}/image", "inner.example is no"),
        (f"{place}/to/file:///etc/passwd", "a redirect to file"),
        (f"{place}/to//to//to//to//image", "more than 3 redirects"),
        (f"{place}/html", "sent 'text/html': needs image/png"),
        (f"{place}/zip", "compressed"), (f"{place}/large", "the image is too large"),
        (f"{place}/missing", "status 404"), ("http://site.example:1/image", "cannot be read"),
        ("http://[::1/", "cannot be read"), (f"{place}/slow", "no image within 0.3 s"),
    ):  # fmt: skip
        n_asked = len(site.RequestHandlerClass.hosts)
        with pytest.raises(PromptError, match=message):
            ImageFetcher(1000)(url, 0.3 if "0.3" in message else 20.0)
        hosts = site.RequestHandlerClass.hosts[n_asked:]
        assert all(host.startswith("site.example") for host in hosts), url


@pytest.mark.parametrize("address", ["127.0.0.1", "2606:2800:220:1:248:1893:25c8:1946"])
def test_certificates_are_checked_for_the_name(names, monkeypatch, address):
    names["site.example"] = [[address]]
    monkeypatch.setattr(image_urls, "is_public", lambda _: True)
    requests = []

    async def answer(_: Any, request: httpx2.Request) -> httpx2.Response:
        requests.append(request)
        stream = httpx2.ByteStream(CONTENT)
        return httpx2.Response(200, headers={"Content-Type": "image/png"}, stream=stream)

    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", answer)
    assert FETCH("https://user@SITE.example:8443/a?b=c") == CONTENT
    (request,) = requests
    assert (request.url.host, request.url.port) == (address, 8443)
    assert request.url.raw_path == b"/a?b=c"
    assert request.headers["Host"] == "site.example:8443"
    assert request.extensions["sni_hostname"] == "site.example"
