"""Images of conversations: formats, damaged files, limits, and parts of all APIs."""

import base64
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from offload_rt.errors import PromptError
from offload_rt.text import images
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


def same(image: Image.Image) -> Image.Image:
    return image


def error_of(content: Any, **options: Any) -> str:
    with pytest.raises(PromptError) as raised:
        ImageReader(same, **options).read([{"role": "user", "content": content}])
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_formats_are_decoded_as_pillow_does():
    for kind in ("PNG", "WEBP", "GIF", "JPEG"):
        content = encoded(Image.fromarray(PIXELS), kind, lossless=True)
        expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        image = decode_image(content)
        assert image.mode == "RGB" and np.array_equal(np.asarray(image), expected)
        assert kind in ("GIF", "JPEG") or np.array_equal(expected, PIXELS)


def test_orientation_frames_and_depth():
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


def test_unusable_files_are_refused():
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


def test_limits_are_checked_before_decoding(monkeypatch):
    def decode(_: Image.Image) -> Image.Image:
        pytest.fail("an image above the limits was decoded")

    monkeypatch.setattr(images, "_upright", decode)
    with pytest.raises(PromptError, match="needs at most 53 pixels, has 9 x 6"):
        decode_image(PNG, replace(DEFAULT_LIMITS, n_pixels=53))
    with pytest.raises(PromptError, match=f"has {len(PNG)} bytes"):
        decode_image(PNG, replace(DEFAULT_LIMITS, nbytes=len(PNG) - 1))
    monkeypatch.setattr(images, "_MAX_WEBP_PIXELS", 53)
    with pytest.raises(PromptError, match="at most 53 pixels"):
        decode_image(encoded(Image.fromarray(PIXELS), "WEBP"))
    # Pillow's own check refuses a header of 4 billion pixels.
    bomb = PNG[:16] + (65535).to_bytes(4, "big") * 2 + PNG[24:29]
    bomb += images.binascii.crc32(bomb[12:]).to_bytes(4, "big") + PNG[33:]
    with pytest.raises(PromptError, match="too large: has Image size"):
        decode_image(bomb)


PARTS = [
    {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
    {"type": "image_url", "image_url": URL},
    {"type": "input_image", "image_url": URL},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                 "data": base64.b64encode(PNG).decode()}},
]  # fmt: skip


def test_parts_of_all_apis_are_extracted_in_order():
    text, mark = {"type": "text", "text": "x"}, {"type": "image"}
    url = url_of(encoded(Image.new("RGB", (3, 2), "blue")))

    def messages(*images):
        return [
            {"role": "system", "content": "S"},
            {"role": "user", "content": [*images[:4], text], "name": "n"},
            {"role": "user", "content": [text, images[4]]},
        ]

    other = {"type": "image_url", "image_url": {"url": url}}
    marked, extracted = ImageReader(same).read(messages(*PARTS, other))
    assert marked == messages(*[mark] * 5)
    assert [image.size for image in extracted] == [(9, 6)] * 4 + [(3, 2)]
    assert all(np.array_equal(np.asarray(image), PIXELS) for image in extracted[:4])


def test_files_and_images_belong_to_python_only(tmp_path):
    path = tmp_path / "x.png"
    path.write_bytes(PNG)
    for source in (path, str(path), Image.fromarray(PIXELS)):
        message = {"role": "user", "content": [{"type": "image", "image": source}]}
        (image,) = ImageReader(same, reads_files=True).read([message])[1]
        assert np.array_equal(np.asarray(image), PIXELS)
    for source in (str(path), {"url": f"file://{path}"}):
        assert "image 1: no URL" in error_of([{"type": "image_url", "image_url": source}])
    assert "image 1: no URL" in error_of([{"type": "image", "image": str(path)}])
    for part in ({"type": "image"}, {"type": "image_url"}, {"type": "image", "image": PIXELS}):
        assert "image 1: no URL" in error_of([part], reads_files=True)
    part = {"type": "image", "image": tmp_path / "nowhere"}
    assert "cannot be read: No such file" in error_of([part], reads_files=True)


def test_wrong_parts_are_named_and_numbers_limited():
    for content, message in (
        ([{"type": "text", "text": "x"}, {"type": "video_url"}], "content[1] of type 'video_url'"),
        ([{"type": "input_audio"}], "content[0] of type 'input_audio': needs text or images"),
        ([{"type": "image_url"}], "image 1: no URL"),
        ([{"type": "image", "source": {"type": "file", "file_id": "x"}}], "image 1: no URL"),
        ([PARTS[0], {"type": "image_url", "image_url": "data:,x"}], "image 2: a data URL: needs"),
        ([PARTS[0], {"type": "image_url", "image_url": url_of(PNG, "text/html")}], "has text/html"),
        ([{"type": "image_url", "image_url": URL + "*"}], "not valid base64"),
        ([{"type": "image_url", "image_url": "http://example.org/x"}], "allow_image_urls"),
    ):
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
    fetched = ImageReader(same, fetch).read([{"role": "user", "content": [part, part]}])[1]
    assert [image.size for image in fetched] == [(9, 6)] * 2
    # 20 seconds in total
    assert asked == [("HTTPS://a.example/x", 20), ("HTTPS://a.example/x", 17)]
    assert encode_data_url(PNG) == URL
    with pytest.raises(PromptError, match="no readable image"):
        encode_data_url(b"x")
