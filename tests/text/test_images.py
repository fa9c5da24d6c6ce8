"""Images of conversations: formats, damaged files, limits, parts of all APIs, and URLs."""

import asyncio
import base64
import io
import socket
from dataclasses import replace
from functools import partial
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image

from offload_rt.errors import PromptError
from offload_rt.text import images
from offload_rt.text.image_urls import ImageFetcher, is_public
from offload_rt.text.images import DEFAULT_LIMITS, ImageReader, decode_image, encode_data_url

PIXELS = np.random.default_rng(1).integers(0, 256, (6, 9, 3)).astype("uint8")


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def url_of(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


PNG = encoded(Image.fromarray(PIXELS))
URL = url_of(PNG)


def error_of(content: Any, **options: Any) -> str:
    with pytest.raises(PromptError) as raised:
        ImageReader(Image.Image.copy, **options).read([{"role": "user", "content": content}])
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_formats_orientation_frames_and_depth():
    for kind in ("PNG", "WEBP", "GIF", "JPEG"):
        content = encoded(Image.fromarray(PIXELS), kind, lossless=True)
        expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        image = decode_image(content)
        assert image.mode == "RGB" and np.array_equal(np.asarray(image), expected)
        assert kind in ("GIF", "JPEG") or np.array_equal(expected, PIXELS)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    turned = decode_image(encoded(Image.fromarray(PIXELS), exif=exif))
    assert np.array_equal(np.asarray(turned), np.rot90(PIXELS, -1))
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    animated = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode_image(animated).getpixel((0, 0)) == (255, 0, 0)
    deep = np.arange(0, 65536, 1024, dtype="uint16").reshape(8, 8)
    flat = decode_image(encoded(Image.fromarray(deep)))
    assert np.array_equal(np.asarray(flat)[..., 1], deep >> 8)


def test_unusable_files_are_refused_and_limits_checked_before_decoding(monkeypatch):
    image = Image.fromarray(PIXELS)
    jpeg, scans = (encoded(image, "JPEG", progressive=each) for each in (False, True))
    for content, message in (
        (b"", "no readable image: needs PNG, JPEG"), (b"%PDF-1.7", "no readable image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no readable image"),
        (encoded(image, "BMP"), "no readable image"),
        (PNG[:-40], "damaged or incomplete"), (jpeg[:-60], "damaged or incomplete"),
        (scans[:-2] + scans[scans.index(b"\xff\xda") : -2] * 20 + scans[-2:], "too many scans"),
    ):  # fmt: skip
        with pytest.raises(PromptError, match=message):
            decode_image(content)
    # Pillow's own check refuses a header of 4 billion pixels.
    bomb = PNG[:16] + (65535).to_bytes(4, "big") * 2 + PNG[24:29]
    bomb += images.binascii.crc32(bomb[12:]).to_bytes(4, "big") + PNG[33:]
    monkeypatch.setattr(images, "_upright", lambda _: pytest.fail("an image was decoded"))
    monkeypatch.setattr(images, "_MAX_WEBP_PIXELS", 53)
    for content, limits, message in (
        (PNG, {"n_pixels": 53}, "needs at most 53 pixels, has 9 x 6"),
        (PNG, {"nbytes": len(PNG) - 1}, f"has {len(PNG)} bytes"),
        (encoded(image, "WEBP"), {}, "at most 53 pixels"), (bomb, {}, "too large: has Image size"),
    ):  # fmt: skip
        with pytest.raises(PromptError, match=message):
            decode_image(content, replace(DEFAULT_LIMITS, **limits))


PARTS = [
    {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
    {"type": "image_url", "image_url": URL},
    {"type": "input_image", "image_url": URL},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": URL[22:]}},
]


def test_parts_of_all_apis_are_extracted_in_order():
    text = {"type": "text", "text": "x"}
    blue = {"type": "image_url", "image_url": url_of(encoded(Image.new("RGB", (3, 2), "blue")))}
    messages, expected = (
        [
            {"role": "system", "content": "S"},
            {"role": "user", "content": [*parts[:4], text], "name": "n"},
            {"role": "user", "content": [text, parts[4]]},
        ]
        for parts in ([*PARTS, blue], [{"type": "image"}] * 5)
    )
    marked, extracted = ImageReader(Image.Image.copy).read(messages)
    assert marked == expected
    assert [image.size for image in extracted] == [(9, 6)] * 4 + [(3, 2)]
    assert all(np.array_equal(np.asarray(image), PIXELS) for image in extracted[:4])


def test_files_and_images_belong_to_python_only(tmp_path):
    path = tmp_path / "x.png"
    path.write_bytes(PNG)
    for source in (path, str(path), Image.fromarray(PIXELS)):
        message = {"role": "user", "content": [{"type": "image", "image": source}]}
        (image,) = ImageReader(Image.Image.copy, reads_files=True).read([message])[1]
        assert np.array_equal(np.asarray(image), PIXELS)
    for part in ({"type": "image"}, {"type": "image_url"}, {"type": "image", "image": PIXELS}):
        assert "image 1: no URL" in error_of([part], reads_files=True)
    part = {"type": "image", "image": tmp_path / "nowhere"}
    assert "cannot be read: No such file" in error_of([part], reads_files=True)


def test_wrong_parts_are_named_and_numbers_limited():
    for content, message in (
        ([{"type": "text", "text": "x"}, {"type": "video_url"}], "content[1] of type 'video_url'"),
        ([{"type": "input_audio"}], "content[0] of type 'input_audio': needs text or images"),
        *(([part], "image 1: no URL") for part in (
            {"type": "image_url"}, {"type": "image_url", "image_url": "/x.png"},
            {"type": "image_url", "image_url": {"url": "file:///x.png"}},
            {"type": "image", "image": "/x.png"},
            {"type": "image", "source": {"type": "file", "file_id": "x"}})),
        ([PARTS[0], {"type": "image_url", "image_url": "data:,x"}], "image 2: a data URL: needs"),
        ([PARTS[0], {"type": "image_url", "image_url": url_of(PNG, "text/html")}], "has text/html"),
        ([{"type": "image_url", "image_url": URL + "*"}], "not valid base64"),
        ([{"type": "image_url", "image_url": "http://example.org/x"}], "allow_image_urls"),
    ):  # fmt: skip
        assert message in error_of(content)
    limits = replace(DEFAULT_LIMITS, n_images=2, total_pixels=107)
    assert "image 2: too many pixels: needs at most 107" in error_of(PARTS[:2], limits=limits)
    limits = replace(limits, total_pixels=200)
    assert error_of(PARTS[:3], limits=limits) == "too many images: needs at most 2"


def test_urls_are_fetched_and_files_become_data_urls(monkeypatch):
    asked = []
    clock = [5.0]
    monkeypatch.setattr(images.time, "monotonic", lambda: clock[0])

    def fetch(url: str, timeout_s: float) -> bytes:
        asked.append((url, timeout_s))
        clock[0] += 3
        return PNG

    part = {"type": "image_url", "image_url": {"url": "HTTPS://a.example/x"}}
    messages = [{"role": "user", "content": [part, part]}]
    fetched = ImageReader(Image.Image.copy, fetch).read(messages)[1]
    assert [image.size for image in fetched] == [(9, 6)] * 2
    # 20 seconds in total
    assert asked == [("HTTPS://a.example/x", 20), ("HTTPS://a.example/x", 17)]
    assert encode_data_url(PNG) == URL
    with pytest.raises(PromptError, match="no readable image"):
        encode_data_url(b"x")


# Only public addresses are reached, also by redirects.
CONTENT = bytes(range(256))
FETCH = partial(ImageFetcher(1000), timeout_s=20.0)
V4, V6 = "93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"
# Answers by the first part of a path.
STATUS = {"to": 302, "missing": 404}
HEADERS = {"html": {"Content-Type": "text/html"}, "zip": {"Content-Encoding": "gzip"}}


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> tuple[list[httpx2.Request], dict[str, Any]]:
    """Requests that reach the network, and addresses by name, one list per query."""
    requests = []
    names = {"site.example": [[V4]], "six.example": [[V6]], "inner.example": [["127.0.0.2"]],
             "both.example": [[V4, "10.0.0.1"]],
             "rebind.example": [[V4], ["127.0.0.2"]]}  # fmt: skip

    def resolve(host: str, *_: Any, **__: Any) -> list[Any]:
        if host not in names:
            raise socket.gaierror("unknown")
        entries = names[host].pop(0) if len(names[host]) > 1 else names[host][0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (entry, 0)) for entry in entries]

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

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", answer)
    return requests, names


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


def test_image_is_read_from_the_checked_address(network):
    asked, names = network
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


def test_other_answers_are_refused(network):
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
    assert {request.headers["Host"] for request in network[0]} == {"site.example"}
