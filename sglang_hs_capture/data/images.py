"""What is in an image: found, bounded in size, decoded once to see that it is whole, and identified by its bytes."""

import base64
import binascii
import hashlib
import io
import math
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from sglang_hs_capture.data.records import BadRow
from sglang_hs_capture.text import one_line, shown

MAX_BYTES = 32 * 2**20
MAX_PIXELS = 2**26
MAX_IMAGES = 512
# Pixels on a side for one position of the prompt, and most positions, as Kimi-K2.5 has them by default. The server
# decides; here they only tell how much work an image is.
_SIDE, _MOST_POSITIONS = 28, 4096


@dataclass(frozen=True, slots=True)
class Image:
    """One image to send.

    Attributes:
        name: what identifies it: ``sha256:`` and the hash of its bytes, or ``url-sha256:`` and that of its URL.
        place: its path or URL; empty where ``data`` is set.
        data: its bytes where the input holds them itself.
        nbytes: how many bytes; 0 where only the server will know.
        positions: about how many positions of the prompt it takes.
    """

    name: str
    place: str = ""
    data: bytes | None = None
    nbytes: int = 0
    positions: int = 64

    @property
    def held(self) -> int:
        """Bytes that are in memory as long as this object."""
        return 0 if self.data is None else len(self.data)

    def payload(self) -> str:
        """What SGLang is sent: the image as a ``data:`` URI, or its URL.

        Raises:
            BadRow: the file is not what it was when the input was read.
        """
        if self.name.startswith("url-"):
            return self.place
        data = _read(Path(self.place)) if self.data is None else self.data
        if _name(data) != self.name:
            raise BadRow(f"image {self.place}: it has changed since the input was read")
        return f"data:;base64,{base64.b64encode(data).decode('ascii')}"


def load_images(references: list[str], folder: Path) -> tuple[Image, ...]:
    """The images that a row refers to.

    Args:
        references: paths, ``data:`` URIs or http(s) URLs.
        folder: what relative paths are relative to.

    Raises:
        BadRow: one cannot be used, and why.
    """
    if len(references) > MAX_IMAGES:
        raise BadRow(f"{len(references)} images in one row; the limit is {MAX_IMAGES}")
    return tuple(_load(reference, folder) for reference in references)


def _load(reference: str, folder: Path) -> Image:
    scheme = reference[:8].lower()
    if scheme.startswith(("http://", "https://")):
        digest = hashlib.sha256(reference.encode("utf-8", "surrogatepass")).hexdigest()
        return Image(f"url-sha256:{digest}", place=reference)
    if scheme.startswith("data:"):
        data = _decode(reference)
        return Image(_name(data), data=data, nbytes=len(data), positions=_check(data, "image in a data: URI"))
    try:
        path = folder / (unquote(urlsplit(reference).path) if scheme.startswith("file://") else reference)
        data = _read(path)
    except ValueError as error:  # a URL that is none
        raise BadRow(f"image {shown(reference)}: no such file can be ({error})") from None
    return Image(_name(data), place=str(path), nbytes=len(data), positions=_check(data, f"image {shown(str(path))}"))


def _name(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise BadRow(f"image {shown(str(path), 200)}: {'not a file' if path.exists() else 'no such file'}")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadRow(f"image {shown(str(path), 200)}: cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise BadRow(f"image {shown(str(path), 200)}: larger than the limit of {MAX_BYTES // 2**20} MiB")
    return data


def _decode(uri: str) -> bytes:
    """The bytes of a ``data:`` URI, in base64 or percent-encoded."""
    head, comma, body = uri.partition(",")
    try:
        if not comma:
            raise ValueError("there is no comma")
        # Encoders break lines, as in mail.
        plain = "".join(body.split())
        data = base64.b64decode(plain, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
    except (ValueError, binascii.Error) as error:
        raise BadRow(f"image in a data: URI, {shown(uri, 40)}: {error}") from None
    if len(data) > MAX_BYTES:
        raise BadRow(f"image in a data: URI: larger than the limit of {MAX_BYTES // 2**20} MiB")
    return data


def _check(data: bytes, what: str) -> int:
    """Decode an image to its end; about how many positions it takes."""
    from PIL import Image as Pillow

    try:
        with Pillow.open(io.BytesIO(data)) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise BadRow(f"{what}: {width} x {height} pixels; the limit is {MAX_PIXELS} together")
            image.load()
    except BadRow:
        raise
    except Exception as error:  # what a broken file makes a decoder raise cannot be listed
        raise BadRow(f"{what}: no image that can be decoded: {one_line(str(error))}") from None
    return min(_MOST_POSITIONS, math.ceil(width / _SIDE) * math.ceil(height / _SIDE))
