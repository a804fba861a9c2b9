"""Images in conversations, in the forms they come in, as parts of messages in one form.

A part of a message's content that is an image becomes ``{"type": "image", "image": REFERENCE}``, where the reference
is a path, a ``data:`` URI or an http(s) URL. Chat templates look at the type. What is in an image is read later, see
``data/images.py``.
"""

import base64
import binascii
from collections.abc import Iterator, Sequence
from typing import Any

from sglang_hs_capture.data.records import BadRow, Message
from sglang_hs_capture.text import shown

# Where datasets in the form of LLaVA, LLaMA-Factory and TRL have an image of the row's own list.
MARK = "<image>"
IMAGE_KEYS = ("images", "image")
OTHER_MEDIA_KEYS = ("videos", "video", "audios", "audio")
IMAGE_TYPES = ("image", "image_url", "input_image")

_REFERENCE_KEYS = ("image_url", "image", "url", "path")


def image_part(part: dict[str, Any], where: str) -> dict[str, Any]:
    """A part of a message that is an image, in the form of this module; without ``image`` if it names none itself.

    Raises:
        BadRow: what it names is no reference.
    """
    key = next((key for key in _REFERENCE_KEYS if part.get(key) is not None), None)
    return {"type": "image"} if key is None else {"type": "image", "image": reference(part[key], f"{where}: {key}")}


def reference(value: Any, where: str) -> str:
    """A path, a ``data:`` URI or a URL, from one or from an object that has one or the image's bytes.

    Raises:
        BadRow: it is neither.
    """
    if isinstance(value, dict):
        if value.get("bytes") is not None:
            return _data_uri(value["bytes"], f"{where}: bytes")
        value = next((value[key] for key in _REFERENCE_KEYS if value.get(key) is not None), None)
    if not isinstance(value, str) or not value:
        raise BadRow(f"{where}: expected a path, a data: URI or an http(s) URL; got {shown(value)}")
    return value


def place_images(messages: Sequence[Message], row: dict[str, Any]) -> list[Message]:
    """Put the images of a row's own list where the messages have them.

    That is at each part of the type ``image`` that names none; where there is no such part, at each ``<image>`` in a
    text, in order. Without a list such a text is left as it is.

    Args:
        messages: with contents as ``parse_messages`` gives them.
        row: its ``images``, a list, or ``image``, a single one.

    Raises:
        BadRow: there are more images than places, or fewer.
    """
    images = row_images(row)
    rest = iter(images)
    nameless = any(part == {"type": "image"} for message in messages for part in media_parts(message))
    marked = bool(images) and not nameless
    placed: list[Message] = []
    for index, message in enumerate(messages):
        content = _marks_to_parts(message.get("content")) if marked else message.get("content")
        if isinstance(content, list):
            content = [
                _filled(part, rest, f"messages[{index}]", len(images)) if part["type"] == "image" else part
                for part in content
            ]
        placed.append(message if content is message.get("content") else {**message, "content": content})
    if left := len(list(rest)):
        raise BadRow(f"images: {len(images)} images, and the messages have places for {len(images) - left} of them")
    return placed


def row_images(row: dict[str, Any]) -> list[str]:
    """The references in a row's own list of images; empty without one.

    Raises:
        BadRow: it is no list of references.
    """
    key = next((key for key in IMAGE_KEYS if row.get(key)), None)
    if key is None:
        return []
    value = row[key]
    if isinstance(value, list):
        return [reference(item, f"{key}[{index}]") for index, item in enumerate(value)]
    if key == "images":
        raise BadRow(f"images: expected a list; got {type(value).__name__}")
    return [reference(value, key)]


def references(messages: Sequence[Message]) -> list[str]:
    """The references of all images of a conversation, in order."""
    return [part["image"] for message in messages for part in media_parts(message) if part["type"] == "image"]


def first_text(content: Any) -> str:
    """The text that a message's content begins with; empty where it begins with an image."""
    return content if isinstance(content, str) else str(content[0].get("text", "")) if content else ""


def last_text(content: Any) -> str:
    """The text that a message's content ends with; empty where it ends with an image."""
    return content if isinstance(content, str) else str(content[-1].get("text", "")) if content else ""


def media_parts(message: Message) -> list[dict[str, Any]]:
    """The parts of a message's content; none where it is a text."""
    content = message.get("content")
    return content if isinstance(content, list) else []


def _marks_to_parts(content: Any) -> Any:
    """The content with an image part for each mark; as it was if it has none."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not any(MARK in part.get("text", "") for part in parts):
        return content
    split: list[dict[str, Any]] = []
    for part in parts:
        for number, text in enumerate(part["text"].split(MARK) if part["type"] == "text" else ()):
            split += [{"type": "image"}] if number else []
            split += [{"type": "text", "text": text}] if text else []
        split += [part] if part["type"] != "text" else []
    return split


def _filled(part: dict[str, Any], rest: Iterator[str], where: str, count: int) -> dict[str, Any]:
    if "image" in part:
        return part
    found = next(rest, None)
    if found is None:
        raise BadRow(f"{where}: an image that names no file, and the row's own images, {count} of them, are used up")
    return {**part, "image": found}


def _data_uri(value: Any, where: str) -> str:
    """Bytes of a table, or base64 of a JSON line, as a URI."""
    if isinstance(value, bytes):
        return f"data:;base64,{base64.b64encode(value).decode('ascii')}"
    try:
        base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise BadRow(f"{where}: expected an image's bytes, in base64; got {shown(value)}") from None
    return f"data:;base64,{value}"
