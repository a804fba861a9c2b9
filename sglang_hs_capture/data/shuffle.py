"""Gives the rows of an input in a random order that a seed decides, however large the input is."""

import os
import pickle
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sglang_hs_capture.data.files import Kind, Row, kind_of
from sglang_hs_capture.data.lines import read_lines
from sglang_hs_capture.errors import InputError
from sglang_hs_capture.store.hashing import splitmix64


def shuffled_rows(
    files: Sequence[Path], read: Callable[[Path, int], Iterator[tuple[int, Row]]], seed: int, line_limit: int
) -> Iterator[tuple[Path, int, Row]]:
    """All rows of some files, every order being equally likely.

    First every file is read once. Of a line in a plain file its place is remembered, and it is read again when its turn
    has come. Other rows (of compressed files, tables and pipes) cannot be found again by a place, so they are copied to
    a temporary file without a name, in ``TMPDIR``, which then has about the size of what is in them. Memory grows by 40
    bytes for each row (its file, number, place, size and turn), and by as much again while the order is found.

    Args:
        files: from ``files.find_files``.
        read: ``files.read_rows`` with the columns chosen: the numbered rows of a file with a line limit.
        seed: chooses the order. It depends on nothing else than the seed and the number of rows.
        line_limit: a longer line is a ``BadRow``.

    Yields:
        file, number in it, and row.

    Raises:
        InputError: the operating system cannot read a file, or the temporary file cannot be written.
    """
    with tempfile.TemporaryFile(prefix="hs-capture-shuffle-") as spill:
        index = _Index()
        for place, file in enumerate(files):
            if kind_of(file) is Kind.LINES:
                _find_lines(index, place, file, line_limit, spill.fileno())
            else:
                for number, row in read(file, line_limit):
                    index.add_copy(spill.fileno(), place, number, row)
        for turn in random_order(len(index.numbers), seed):
            file = files[index.files[turn]]
            yield file, index.numbers[turn], index.read(turn, file, spill.fileno())


def random_order(count: int, seed: int) -> NDArray[np.int64]:
    """The numbers below ``count`` in an order that the seed decides, today and with any version of numpy.

    Returns:
        int64 ``[count]``.
    """
    start = splitmix64(np.array([seed & (1 << 64) - 1], dtype=np.uint64))
    return np.argsort(splitmix64(np.arange(count, dtype=np.uint64) ^ start), kind="stable")


class _Index:
    """Where each row can be found again: at a place in its own file, or in the temporary one."""

    def __init__(self) -> None:
        self.files = array("q")
        self.numbers = array("q")
        self._places = array("q")  # in the temporary file where negative: -1 - place
        self._sizes = array("q")
        self._end = 0

    def add_line(self, file: int, number: int, place: int, size: int) -> None:
        """Remember a line of a plain file."""
        for column, value in zip(self._columns(), (file, number, place, size), strict=True):
            column.append(value)

    def add_copy(self, spill: int, file: int, number: int, row: Row) -> None:
        """Copy a row to the temporary file."""
        data = pickle.dumps(row, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(spill, memoryview(data)[written:], self._end + written)
        except OSError as error:
            raise InputError(
                f"{tempfile.gettempdir()}: rows to shuffle cannot be written here: {error.strerror}; set TMPDIR to a "
                "folder with more room, or leave out --shuffle-seed"
            ) from error
        self.add_line(file, number, -1 - self._end, len(data))
        self._end += len(data)

    def read(self, turn: int, file: Path, spill: int) -> Row:
        """Read a row again."""
        place, size = self._places[turn], self._sizes[turn]
        if place < 0:
            row: Row = pickle.loads(os.pread(spill, size, -1 - place))
            return row
        try:
            with file.open("rb", buffering=0) as stream:
                line = os.pread(stream.fileno(), size, place)
        except OSError as error:
            raise InputError(f"{file}: cannot be read: {error.strerror or error}") from error
        # What was cut off would pass for a blank line, and what has moved for lines that are in pieces.
        if len(line) != size or b"\n" in line[:-1]:
            raise InputError(
                f"{file}:{self.numbers[turn]}: expected the line of {size} bytes that was found there at first; the "
                "file has changed while it was read; leave it alone, and start again"
            )
        return line

    def _columns(self) -> tuple["array[int]", ...]:
        return self.files, self.numbers, self._places, self._sizes


def _find_lines(index: _Index, place: int, file: Path, line_limit: int, spill: int) -> None:
    for number, start, line in read_lines(file, line_limit):
        if isinstance(line, bytes):
            index.add_line(place, number, start, len(line))
        else:
            index.add_copy(spill, place, number, line)
