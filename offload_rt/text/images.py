"""Images of conversations: decoding within limits, and their places in the messages."""

import base64
import binascii
import io
import re
import reprlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_rt.errors import PromptError
from offload_rt.text.detokenize import Message

if TYPE_CHECKING:
    from PIL.Image import Image

# Types of parts with an image: OpenAI's two APIs, Anthropic's, and transformers' messages.
IMAGE_PARTS = ("image_url", "input_image", "image")
_OTHER_MEDIA = ("video", "video_url", "input_video", "audio", "audio_url", "input_audio")
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_DATA_URL = re.compile(r"data:([^;,]*)((?:;[^;,]*)*),", re.IGNORECASE)
# Progressive JPEG repeats passes over the image; small files can contain a million of them.
_MAX_JPEG_SCANS = 100
# Pillow holds the interpreter lock while it copies decoded WebP: 66 ms for 20 million pixels.
_MAX_WEBP_PIXELS = 16_000_000

# Reads a URL within a number of seconds.
Fetch = Callable[[str, float], bytes]


@dataclass(frozen=True)
class ImageLimits:
    """Limits of the images of a conversation.

    n_images      number of images
    nbytes        size of an encoded image
    n_pixels      pixels of an image
    total_pixels  pixels of all images, before they are scaled down
    fetch_s       seconds to read all images behind http URLs
    """

    n_images: int = 32
    nbytes: int = 20 << 20
    n_pixels: int = 50_000_000
    total_pixels: int = 100_000_000
    fetch_s: float = 20.0


DEFAULT_LIMITS = ImageLimits()


def has_images(messages: Sequence[Message]) -> bool:
    """Return whether a conversation has a part with an image."""
    return any(
        isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple)
        for part in message["content"]
    )


@dataclass
class ImageReader:
    """Decodes the images of one conversation, in order.

    fit          scales an image down, before the next image is decoded
    fetch        reads http URLs within seconds; None refuses them
    reads_files  whether parts may contain paths and images of Pillow; never for requests of clients
    """

    fit: "Callable[[Image], Image]"
    fetch: Fetch | None = None
    limits: ImageLimits = DEFAULT_LIMITS
    reads_files: bool = False
    images: "list[Image]" = field(default_factory=list)
    n_pixels: int = 0
    fetch_s: float = 0.0

    def read(self, messages: Sequence[Message]) -> "tuple[list[Message], list[Image]]":
        """Return the messages with {"type": "image"} for each image, and the images.

        Raises PromptError for unusable images, for video and audio.
        """
        return [self._convert(message) for message in messages], self.images

    def _convert(self, message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, list | tuple):
            return message
        return {**message, "content": [self._part(i, part) for i, part in enumerate(content)]}

    def _part(self, i: int, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _OTHER_MEDIA:
            raise PromptError(f"content[{i}] of type {kind!r}", need="text or images")
        if kind not in IMAGE_PARTS:
            return part
        n = len(self.images) + 1
        if n > self.limits.n_images:
            raise PromptError("too many images", need=f"at most {self.limits.n_images}")
        try:
            image = self._image(part)
            self.n_pixels += image.width * image.height
            if self.n_pixels > self.limits.total_pixels:
                need = f"at most {self.limits.total_pixels} in all images"
                raise PromptError("too many pixels", need=need, change="send smaller images")
            self.images.append(self.fit(image))
        except PromptError as error:
            raise error.prefixed(f"image {n}") from error
        return {"type": "image"}

    def _image(self, part: Mapping[str, Any]) -> "Image":
        from PIL.Image import Image

        source = _source(part)
        if self.reads_files and isinstance(source, Image):
            return _upright(source)
        start = source[:8].lower() if isinstance(source, str) else ""
        if start.startswith("data:"):
            content = decode_data_url(source, self.limits.nbytes)
        elif start.startswith(("http://", "https://")):
            if self.fetch is None:
                change = "send it as a data URL, or start the server with --allow-image-urls"
                raise PromptError("an http URL", need="a data URL", change=change)
            started = time.monotonic()
            content = self.fetch(source, self.limits.fetch_s - self.fetch_s)
            self.fetch_s += time.monotonic() - started
        elif self.reads_files and isinstance(source, str | PathLike):
            content = read_image(Path(source), self.limits.nbytes)
        else:
            more = ", a path or an image of Pillow" if self.reads_files else ""
            need = '"data:image/png;base64,..."' + more
            raise PromptError("no URL", need=need, have=reprlib.repr(source))
        return decode_image(content, self.limits)


def _source(part: Mapping[str, Any]) -> Any:
    """Return the URL of a part, or the path or image in `image`."""
    if part["type"] != "image":
        url = part.get("image_url")
        return url.get("url") if isinstance(url, Mapping) else url
    source = part.get("source")
    if not isinstance(source, Mapping):
        return part.get("image")
    if source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    return source.get("url")


def decode_data_url(url: str, max_nbytes: int) -> bytes:
    """Return the bytes of an image in a data URL. Raises PromptError."""
    head = _DATA_URL.match(url)
    if head is None or head[2].lower().rpartition(";")[2] != "base64":
        raise PromptError("a data URL", need='"data:image/png;base64,..."', have=url[:40])
    if not head[1].lower().startswith("image/"):
        need = "image/png, image/jpeg, image/webp or image/gif"
        raise PromptError("the media type of a data URL", need=need, have=head[1] or "none")
    _check_size((len(url) - head.end()) * 3 // 4, max_nbytes)
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise PromptError("a data URL is not valid base64", have=str(error)) from error


def encode_data_url(content: bytes) -> str:
    """Return the data URL of an image. Raises PromptError for other content."""
    from PIL import Image

    image = _open(content)
    return f"data:{Image.MIME[str(image.format)]};base64,{base64.b64encode(content).decode()}"


def read_image(path: Path, max_nbytes: int) -> bytes:
    """Read a file. Raises PromptError for a missing or too large file."""
    try:
        _check_size(path.stat().st_size, max_nbytes)
        return path.read_bytes()
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}") from error


def _check_size(nbytes: int, max_nbytes: int) -> None:
    if nbytes > max_nbytes:
        need = f"at most {max_nbytes} bytes"
        raise PromptError("the image is too large", need=need, have=f"{nbytes} bytes")


def decode_image(content: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> "Image":
    """Decode PNG, JPEG, WebP or GIF to an upright RGB image; the first frame of an animation.

    Raises PromptError for other data, incomplete data, and for images above the limits.
    """
    _check_size(len(content), limits.nbytes)
    image = _open(content)
    most_webp = _MAX_WEBP_PIXELS if image.format == "WEBP" else limits.n_pixels
    max_pixels = min(limits.n_pixels, most_webp)
    if image.width * image.height > max_pixels:
        have = f"{image.width} x {image.height}"
        need = f"at most {max_pixels} pixels"
        raise PromptError("the image is too large", need=need, have=have, change="scale it down")
    if image.format in ("JPEG", "MPO") and content.count(b"\xff\xda") > _MAX_JPEG_SCANS:
        raise PromptError("the image has too many scans", need=f"at most {_MAX_JPEG_SCANS}")
    try:
        return _upright(image)
    except Exception as error:  # Pillow's decoders raise errors of a dozen types
        raise PromptError("the image is damaged or incomplete", have=str(error)[:200]) from error


def _open(content: bytes) -> "Image":
    """Read the header of an image, without decoding. Raises PromptError."""
    from PIL import Image

    try:
        return Image.open(io.BytesIO(content), formats=_FORMATS)
    except Image.DecompressionBombError as error:
        raise PromptError("the image is too large", have=str(error)[:200]) from error
    except Exception as error:  # Pillow's parsers raise errors of a dozen types
        raise PromptError("no readable image", need="PNG, JPEG, WebP or GIF") from error


def _upright(image: "Image") -> "Image":
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # `convert` would clip values above 255
        image = image.point(lambda value: value * (1 / 256)).convert("L")
    return image.convert("RGB")
