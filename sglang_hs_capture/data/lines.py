"""Reads the lines of a plain, gzip- or zstd-compressed file in bounded memory."""

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from sglang_hs_capture.data.records import BadRow
from sglang_hs_capture.errors import InputError

LINE_LIMIT = 64 * 2**20
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIP_BYTES = 2**20
_BOM = b"\xef\xbb\xbf"


def open_input(file: Path) -> io.BufferedReader:
    """Open a file, or a pipe, for reading from its beginning.

    Raises:
        InputError: the operating system refuses.
    """
    try:
        stream = file.open("rb")
        stream.peek(1)
        return stream
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror or error}") from error


def read_lines(file: Path, limit: int = LINE_LIMIT) -> Iterator[tuple[int, int, bytes | BadRow]]:
    """The file's lines without a byte order mark; compression is found by content.

    A line of more than ``limit`` bytes is skipped and given as a ``BadRow``, as is the place where compressed data
    breaks off, after which the file has no further lines.

    Yields:
        the line's number, counted from 1; the byte of the uncompressed data at which it begins; the line.

    Raises:
        InputError: the operating system cannot read the file.
    """
    number, start = 0, 0
    with open_input(file) as plain:
        stream = _uncompressed(plain)
        while True:
            number += 1
            try:
                line = stream.readline(limit + 1)
                size = len(line)
                over = size > limit and not (size == limit + 1 and line.endswith(b"\n"))
                if over:
                    size += _skip_line(stream, line)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                yield number, start, _broken_off(error)
                return
            except OSError as error:
                if error.errno is None and stream is not plain:  # how pyarrow tells that compressed data is damaged
                    yield number, start, _broken_off(error)
                    return
                raise InputError(f"{file}:{number}: cannot be read: {error.strerror or error}") from error
            if not line:
                return
            if over:
                yield number, start, BadRow(f"the line is longer than the limit of {limit} bytes")
            else:
                mark = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
                yield number, start + mark, line[mark:]
            start += size


def is_compressed(head: bytes) -> bool:
    """Whether a file that begins so is compressed in a way that ``read_lines`` knows."""
    return head.startswith((GZIP_MAGIC, ZSTD_MAGIC))


def _uncompressed(plain: io.BufferedReader) -> BinaryIO:
    head = plain.peek(len(ZSTD_MAGIC))
    if head.startswith(GZIP_MAGIC):
        return cast(BinaryIO, gzip.GzipFile(fileobj=plain))
    if head.startswith(ZSTD_MAGIC):
        import pyarrow

        # Unlike zstandard's own reader, this one tells where data was cut off.
        return cast(BinaryIO, io.BufferedReader(pyarrow.CompressedInputStream(plain, "zstd")))
    return plain


def _broken_off(error: Exception) -> BadRow:
    return BadRow(f"the compressed data is damaged or cut off here ({error})")


def _skip_line(stream: BinaryIO, piece: bytes) -> int:
    skipped = 0
    while piece and not piece.endswith(b"\n"):
        piece = stream.readline(_SKIP_BYTES)
        skipped += len(piece)
    return skipped
