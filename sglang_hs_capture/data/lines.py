"""Reads the lines of a plain or gzip-compressed file in bounded memory."""

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from sglang_hs_capture.data.records import BadRow
from sglang_hs_capture.errors import InputError

LINE_LIMIT = 64 * 2**20
GZIP_MAGIC = b"\x1f\x8b"
_SKIP_BYTES = 2**20
_BOM = b"\xef\xbb\xbf"


def check_files(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """The files to read, all of which can be opened.

    Raises:
        InputError: none is given, or one is missing, a directory or not readable.
    """
    files = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    if not files:
        raise InputError("expected at least one conversation file; got none")
    for file in files:
        if not file.exists():
            raise InputError(f"{file}: no such file; expected a JSON Lines file of conversations")
        if file.is_dir():
            raise InputError(f"{file}: is a directory; name the JSON Lines files in it one by one")
        if file.is_file():  # opening a pipe here would take its data away
            _open(file).close()
    return files


def read_lines(file: Path, limit: int = LINE_LIMIT) -> Iterator[tuple[int, bytes | BadRow]]:
    """The file's lines with their numbers, counted from 1, without a byte order mark; compression is found by content.

    A line of more than ``limit`` bytes is skipped and given as a ``BadRow``, as is the place where compressed data
    breaks off, after which the file has no further lines.

    Raises:
        InputError: the operating system cannot read the file.
    """
    number = 0
    with _open(file) as plain:
        compressed = plain.peek(2)[:2] == GZIP_MAGIC
        stream = cast(BinaryIO, gzip.GzipFile(fileobj=plain)) if compressed else plain
        while True:
            number += 1
            try:
                line = stream.readline(limit + 1)
                over = len(line) > limit and not (len(line) == limit + 1 and line.endswith(b"\n"))
                if over:
                    _skip_line(stream, line)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                yield number, BadRow(f"the compressed data is damaged or cut off here ({error})")
                return
            except OSError as error:
                raise InputError(f"{file}:{number}: cannot be read: {error.strerror or error}") from error
            if not line:
                return
            if over:
                yield number, BadRow(f"the line is longer than the limit of {limit} bytes")
            else:
                yield number, line.removeprefix(_BOM) if number == 1 else line


def _open(file: Path) -> io.BufferedReader:
    try:
        stream = file.open("rb")
        stream.peek(1)
        return stream
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror or error}") from error


def _skip_line(stream: BinaryIO, piece: bytes) -> None:
    while piece and not piece.endswith(b"\n"):
        piece = stream.readline(_SKIP_BYTES)
