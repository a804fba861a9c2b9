"""The driver's ledger, ``requests.jsonl``: what was asked for, so that the dataset alone says what is still missing."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hs_capture.store.journal import JournalFile, malformed, read_records
from sglang_hs_capture.store.lock import FileLock
from sglang_hs_capture.store.schema import Media, count_of, hash_of, text_of, to_hex
from sglang_hs_capture.text import shown

LEDGER_FILE = "requests.jsonl"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One sample that was asked for.

    Attributes:
        id: the user's name of the sample.
        key: ``schema.sample_key(id, images)``.
        length: number of tokens S; each image counts as one, its placeholder.
        end_hash: chained hash of all these tokens (``hashing.end_hash``).
        loss_mask: run lengths of the loss mask [S] (``schema.rle_encode``).
        source: where the sample came from, ``file:line``.
        images: what identifies each image, in the prompt's order.
    """

    id: str
    key: str
    length: int
    end_hash: int
    loss_mask: tuple[int, ...]
    source: str
    images: tuple[str, ...] = ()

    def is_met_by(self, length: int, end_hash: int, media: Media | None) -> bool:
        """Whether an acknowledged sample has the tokens asked for, and as many images."""
        images = 0
        if media is not None:
            length, end_hash, images = media.prompt_length(length), media.prompt_hash, len(media.runs)
        return (length, end_hash, images) == (self.length, self.end_hash, len(self.images))

    def to_json(self) -> dict[str, Any]:
        """The record as a line of the ledger has it."""
        record = {
            "t": "request",
            "id": self.id,
            "key": self.key,
            "length": self.length,
            "end_hash": to_hex(self.end_hash),
            "loss_mask": list(self.loss_mask),
            "source": self.source,
        }
        return {**record, "images": list(self.images)} if self.images else record

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "RequestRecord":
        """Read such a record.

        Raises:
            KeyError, TypeError, ValueError: it is malformed.
        """
        mask, length = tuple(raw["loss_mask"]), count_of(raw, "length")
        if not all(type(run) is int and run >= 0 for run in mask):
            raise ValueError(f"loss_mask: expected whole numbers from 0 up, got {shown(raw['loss_mask'])}")
        if sum(mask) != length:
            raise ValueError(f"the loss mask covers {sum(mask)} tokens of {length}")
        images = raw.get("images", [])
        if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
            raise ValueError(f"images: expected a list of names, got {shown(images)}")
        id, key, source = text_of(raw, "id"), text_of(raw, "key"), text_of(raw, "source")
        return cls(id, key, length, hash_of(raw, "end_hash"), mask, source, tuple(images))


@dataclass(frozen=True, slots=True)
class DroppedRecord:
    """One sample that was given up, and why."""

    id: str
    source: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """The record as a line of the ledger has it."""
        return {"t": "dropped", "id": self.id, "source": self.source, "reason": self.reason}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "DroppedRecord":
        """Read such a record.

        Raises:
            KeyError, TypeError, ValueError: it is malformed.
        """
        return cls(text_of(raw, "id"), text_of(raw, "source"), text_of(raw, "reason"))


@dataclass
class Requests:
    """The ledger's content.

    A sample asked for again keeps its place, and its latest record counts; being asked for again, it is no longer
    dropped.
    """

    requests: dict[str, RequestRecord]
    dropped: dict[str, DroppedRecord]

    def add(self, record: RequestRecord | DroppedRecord) -> None:
        """Apply one more record."""
        if isinstance(record, RequestRecord):
            self.requests[record.id] = record
            self.dropped.pop(record.id, None)
        else:
            self.dropped[record.id] = record


def load_requests(directory: Path) -> Requests:
    """Read the ledger, also while a driver writes it; empty where there is none.

    Raises:
        CorruptionError: a line is damaged.
    """
    path = directory / LEDGER_FILE
    result = Requests({}, {})
    for number, raw in read_records(path):
        try:
            if raw["t"] == "request":
                result.add(RequestRecord.from_json(raw))
            elif raw["t"] == "dropped":
                result.add(DroppedRecord.from_json(raw))
        except (KeyError, TypeError, ValueError) as error:
            raise malformed(f"{path}, line {number}", error, raw) from None
    return result


class RequestLedger:
    """The ledger, open for the one driver that may write it."""

    def __init__(self, lock: FileLock, file: JournalFile, content: Requests) -> None:
        self._lock = lock
        self._file = file
        self._content = content

    @classmethod
    def open(cls, directory: Path, *, lock_timeout_s: float = 10.0) -> "RequestLedger":
        """Lock the ledger, cut a torn last line, and read what is there. The folder must exist.

        Raises:
            DatasetLockedError: another driver works on this dataset.
            CorruptionError: a line is damaged.
        """
        lock = FileLock(directory / "lock-requests", lock_timeout_s)
        try:
            file = JournalFile(directory / LEDGER_FILE)
            try:
                return cls(lock, file, load_requests(directory))
            except BaseException:
                file.close()
                raise
        except BaseException:
            lock.release()
            raise

    @property
    def requests(self) -> dict[str, RequestRecord]:
        """Each sample asked for, by id, in the order first asked for."""
        return self._content.requests

    @property
    def dropped(self) -> dict[str, DroppedRecord]:
        """Each sample given up, by id."""
        return self._content.dropped

    def append(self, record: RequestRecord | DroppedRecord) -> None:
        """Add a record; durable after ``fsync``."""
        self._file.append(record.to_json())
        self._content.add(record)

    def fsync(self) -> None:
        """Make the records added so far durable.

        Raises:
            DiskFullError, StoreError: they are not; open the ledger anew.
        """
        self._file.sync()

    def close(self) -> None:
        """Make all records durable and release the lock, also when that fails."""
        try:
            self._file.sync()
        finally:
            self._file.close()
            self._lock.release()

    def __enter__(self) -> "RequestLedger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
