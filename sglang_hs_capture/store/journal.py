"""Append-only files of checksummed JSON lines: written durably, read back, and followed while they grow."""

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sglang_hs_capture.errors import CorruptionError, StoreError
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.schema import RESTORE
from sglang_hs_capture.text import shown

_SEAL = re.compile(rb',"crc":"([0-9a-f]{8})"\}')
_SEAL_BYTES = len(b',"crc":"00000000"}')
_BLOCK = 1 << 16


def encode_line(record: Mapping[str, Any]) -> bytes:
    """One line: compact JSON, sealed by ``"crc"``, the CRC-32 of the bytes before ``,"crc"``; ends with a newline."""
    body = json.dumps(record, separators=(",", ":"), allow_nan=False).encode("ascii")[:-1]
    return b'%s,"crc":"%08x"}\n' % (body, zlib.crc32(body))


def decode_line(line: bytes) -> dict[str, Any]:
    """The record of one line, without its ``"crc"``.

    Args:
        line: with or without the newline.

    Raises:
        ValueError: the line is not one that ``encode_line`` made, or was changed since.
    """
    line = line.removesuffix(b"\n")
    body, seal = line[:-_SEAL_BYTES], _SEAL.fullmatch(line[-_SEAL_BYTES:])
    if seal is None:
        raise ValueError("the line does not end with a checksum")
    if int(seal[1], 16) != zlib.crc32(body):
        raise ValueError("the checksum is wrong")
    try:
        record = json.loads(body + b"}")
    except RecursionError:
        raise ValueError("the record is nested too deeply") from None
    if not isinstance(record, dict) or not isinstance(record.get("t"), str):
        raise ValueError("the record has no type")
    return record


def decode_or_raise(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """``decode_line``, with the file and the line's number, from 1, in the error.

    Raises:
        CorruptionError: the line is damaged.
    """
    try:
        return decode_line(line)
    except ValueError as error:
        raise CorruptionError(f"{path}, line {number}: {error}; the file was damaged or edited: {RESTORE}") from None


def malformed(path: Path | str, error: Exception, record: Mapping[str, Any]) -> CorruptionError:
    """What to raise for a record that is sealed, and is none of its type or contradicts those before it."""
    problem = f"{error!r}" if isinstance(error, KeyError) else str(error)
    return CorruptionError(f"{path}: {problem} in the record {shown(record, 300)}; {RESTORE}")


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each complete record with its line number, from 1; a torn last line, which has no newline, is passed over.

    A file that does not exist has no records.

    Raises:
        CorruptionError: a complete line is damaged.
        StoreError: the file system refuses.
    """
    with fs.io_errors(path, "read"):
        try:
            file = os.fdopen(fs.open_to_read(path), "rb")
        except FileNotFoundError:
            return
    with file:
        number = 0
        while True:
            with fs.io_errors(path, "read"):
                line = file.readline()
            if not line.endswith(b"\n"):
                return
            number += 1
            yield number, decode_or_raise(line, path, number)


def _complete_length(fd: int) -> int:
    """Where the last newline of a file ends."""
    end = os.fstat(fd).st_size
    while end:
        start = max(0, end - _BLOCK)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


class JournalFile:
    """A file of lines, open for appending by the one process that holds its lock."""

    def __init__(self, path: Path) -> None:
        """Open or create the file, cut a torn last line, and make what is left durable.

        Raises:
            StoreError: the file system refuses.
        """
        self.path = path
        self._lines: list[bytes] = []
        self._failed = False
        with fs.io_errors(path, "open"):
            self._fd = fs.open_file(path, os.O_RDWR | os.O_CREAT)
            try:
                self._length = _complete_length(self._fd)
                if os.fstat(self._fd).st_size != self._length:
                    fs.truncate(self._fd, self._length)
                # A predecessor may have died between writing lines and making them durable. From here on they count.
                fs.fsync(self._fd)
                fs.fsync_dir(path.parent)
            except BaseException:
                self.close()
                raise

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record to what the next ``sync`` writes."""
        self._lines.append(encode_line(record))

    def sync(self) -> None:
        """Write the records added since the last call, and make them durable.

        After a failure the file is cut back to what is durable, as far as the disk lets it, and nothing more is
        accepted: a page whose write-back failed may look written for as long as it is cached.

        Raises:
            DiskFullError, StoreError: none of the records counts.
        """
        if self._failed:
            raise StoreError(f"{self.path}: an earlier write failed; open the dataset anew")
        if not self._lines:
            return
        data = b"".join(self._lines)
        with fs.io_errors(self.path, "write"):
            try:
                fs.pwrite_all(self._fd, data, self._length)
                fs.fsync(self._fd)
            except OSError:
                self._failed = True
                with suppress(OSError):
                    fs.truncate(self._fd, self._length)
                raise
        self._length += len(data)
        self._lines.clear()

    def close(self) -> None:
        """Close the file; records that were not synced are lost. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class JournalTail:
    """Follows a file of lines that another process writes.

    The file need not exist yet. A line is delivered once its newline is there, which may be a moment before it is
    durable; a torn line is waited for, and may vanish when the writer is restarted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._number = 0

    def poll(self) -> list[dict[str, Any]]:
        """The records completed since the last call.

        Raises:
            CorruptionError: a complete line is damaged, or the file lost lines that were delivered.
            StoreError: the file system refuses.
        """
        with fs.io_errors(self.path, "read"):
            data = self._new_bytes()
        *lines, torn = data.split(b"\n")
        records = [decode_or_raise(line, self.path, self._number + i) for i, line in enumerate(lines, start=1)]
        self._number += len(lines)
        self._offset += len(data) - len(torn)
        return records

    def _new_bytes(self) -> bytes:
        try:
            fd = fs.open_to_read(self.path)
        except FileNotFoundError:
            if self._offset:
                raise CorruptionError(
                    f"{self.path}: it was read before, and is not there any more: the dataset was moved or removed, or "
                    "its file system is gone; bring it back, and run again"
                ) from None
            return b""
        try:
            size = os.fstat(fd).st_size
            if size < self._offset:
                raise CorruptionError(
                    f"{self.path}: {self._offset - size} bytes that were read before are gone: the writer's disk "
                    "failed; see that it works, and run again"
                )
            return self._read(fd, size - self._offset)
        finally:
            os.close(fd)

    def _read(self, fd: int, size: int) -> bytes:
        parts = []
        offset = self._offset
        while size > 0 and (part := os.pread(fd, size, offset)):
            parts.append(part)
            offset += len(part)
            size -= len(part)
        return b"".join(parts)
