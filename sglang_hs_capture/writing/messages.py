"""What the model's process tells the writing process, and what it is answered: JSON, one message at a time.

A request's id may be any string, also one with lone surrogates, which JSON's ``\\u`` escapes carry.
"""

import json
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal

from sglang_hs_capture.errors import HsCaptureError, class_of_kind, kind_of
from sglang_hs_capture.staging.ring import Span
from sglang_hs_capture.writing.plan import BatchHeader, ImageSpan, KeptRequest, RowPlan

Content = Literal["metadata", "absmax", "rows", "norm"]


@dataclass(frozen=True)
class Setup:
    """The first message: what to open, and how.

    Attributes:
        config: ``CaptureConfig.to_mapping()``.
        info: ``DatasetInfo.to_json()``.
        session: ``SessionRecord.to_json()``, complete but for the counters.
        columns: the columns that this process's rows have.
        placeholder: the prompt that SGLang runs in place of one that it refused.
        served_name: the model's name in SGLang's metrics.
        media_token: what stands for an image in a prompt as it is sent; None for a server that takes no images.
    """

    config: dict[str, Any]
    info: dict[str, Any]
    session: dict[str, Any]
    columns: list[str]
    placeholder: list[int]
    served_name: str
    media_token: int | None


@dataclass(frozen=True)
class PieceNotice:
    """A piece of the ring holds the next bytes of ``content``, once the device has copied them."""

    content: Content
    number: int
    span: Span


@dataclass(frozen=True)
class NormNotice:
    """The final norm's weight follows in pieces; ``dtype`` as in a safetensors header."""

    dtype: str
    nbytes: int
    eps: float


@dataclass(frozen=True)
class Failure:
    """Capture ends: one side's error; ``kind`` as of ``errors.kind_of``, ``text`` one line for a person."""

    kind: str | None
    text: str


@dataclass(frozen=True)
class Opened:
    """The answer to :class:`Setup`: the dataset is open."""


@dataclass(frozen=True)
class Stop:
    """The last message: store what was sent, finish the shard, end."""


Message = Setup | BatchHeader | PieceNotice | NormNotice | Failure | Opened | Stop
_KINDS: dict[str, type] = {
    kind.__name__: kind for kind in (Setup, BatchHeader, PieceNotice, NormNotice, Failure, Opened, Stop)
}


_JSON = json.JSONEncoder(separators=(",", ":"))


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    # Not ``dataclasses.asdict``: it copies every value, on the scheduler's thread.
    fields: dict[str, Any] = dict(vars(message))
    if isinstance(message, BatchHeader):
        requests = [list(vars(request).values()) for request in message.plan.requests]
        fields["plan"] = [message.plan.n_rows, requests]
    elif isinstance(message, PieceNotice):
        fields["span"] = vars(message.span)
    return _JSON.encode([type(message).__name__, fields]).encode("ascii")


def decode(data: bytes) -> Message:
    """The message that ``encode`` made the bytes of.

    Raises:
        ValueError: it made no such bytes.
    """
    try:
        name, fields = json.loads(data)
        if name == "BatchHeader":
            n_rows, requests = fields["plan"]
            fields["plan"] = RowPlan(tuple(_kept(request) for request in requests), n_rows)
        elif name == "PieceNotice":
            fields["span"] = Span(**fields["span"])
        message: Message = _KINDS[name](**fields)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"expected a message of this release, got {data[:80]!r} ({len(data)} bytes)") from error
    return message


def _kept(values: list[Any]) -> KeptRequest:
    rid, index, prefix_len, length, source, target, images = values
    spans = tuple(ImageSpan(start, count, tuple(ids)) for start, count, ids in images)
    return KeptRequest(rid, index, prefix_len, length, source, target, spans)


class Channel:
    """One end of the connection between the two processes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: Message) -> None:
        """Send a message; waits while the other side has many unread.

        Raises:
            OSError: the other side has ended.
        """
        self._connection.send_bytes(encode(message))

    def receive(self, timeout_s: float | None) -> Message | None:
        """The next message, or None if none came in time.

        Raises:
            EOFError, OSError: the other side has ended, and all it sent was read.
        """
        if not self._connection.poll(timeout_s):
            return None
        return decode(self._connection.recv_bytes())

    def close(self) -> None:
        """Close this end."""
        self._connection.close()


@dataclass
class Assembly:
    """Bytes that come in pieces.

    Attributes:
        content: what they are.
        nbytes: how many there will be.
    """

    content: Content
    nbytes: int
    _parts: list[bytes] = field(default_factory=list)
    _got: int = 0

    def add(self, part: memoryview) -> bytes | None:
        """Copy the next bytes; all of them together once they are complete."""
        self._parts.append(bytes(part))
        self._got += len(part)
        return b"".join(self._parts) if self._got >= self.nbytes else None


def failure_of(error: BaseException) -> Failure:
    """An error as a message."""
    kind, text = kind_of(error), " ".join(str(error).split())
    return Failure(kind, text if kind else f"{type(error).__name__}: {text}")


def error_of(failure: Failure) -> HsCaptureError:
    """The error that a message tells of."""
    return class_of_kind(failure.kind, HsCaptureError)(failure.text)
