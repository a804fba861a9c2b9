"""Reading a shard's rows, finished or not, into the caller's memory; every size is checked before any byte is used."""

import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hs_capture.errors import CorruptionError
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.schema import RESTORE
from sglang_hs_capture.store.shard import TOKEN_TENSORS, ShardLayout, ShardPaths
from sglang_hs_capture.text import shown

_MAX_HEADER = 100_000_000


def finished_rows(path: Path, layout: ShardLayout) -> int:
    """The number of rows of a finished shard, whose header and size must be just what ``layout`` makes for it.

    Raises:
        CorruptionError: they are not.
        FileNotFoundError: there is no such file.
    """
    with os.fdopen(fs.open_to_read(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if length != layout.record.data_offset - 8 or length > _MAX_HEADER:
            raise CorruptionError(
                f"{path}: expected a header of {layout.record.data_offset - 8} bytes; the file says {length}; {RESTORE}"
            )
        try:
            header = json.loads(file.read(length))
            rows = header["input_ids"]["shape"][0]
            if type(rows) is not int or not 0 <= rows < 2**62:
                raise ValueError(f"there cannot be {shown(rows)} rows")
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise CorruptionError(f"{path}: the header is damaged ({error!r}); {RESTORE}") from None
    for name, tensor in layout.tensors(rows).items():
        entry = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [tensor.begin, tensor.end]}
        if header.get(name) != entry:
            raise CorruptionError(
                f"{path}: expected the tensor {name} as {entry}; the header has {shown(header.get(name), 300)}; "
                f"{RESTORE}"
            )
    if size != layout.file_size(rows):
        raise CorruptionError(
            f"{path}: expected {layout.file_size(rows)} bytes for {rows} rows; the file has {size}; {RESTORE}"
        )
    return rows


class ShardReader:
    """A shard open for reading. Safe for several threads and after a fork; the files are closed with the object."""

    def __init__(self, directory: Path, layout: ShardLayout, rows: int) -> None:
        """Open a shard of which at least ``rows`` rows are durable.

        Raises:
            CorruptionError: the shard is not there, is shorter, or its header is not the layout's.
        """
        self.layout = layout
        self.paths = ShardPaths.of(directory, layout.writer, layout.record.shard)
        self._fds: list[int] = []
        # A writer may finish the shard between two of these tries, never take it back.
        if not (self._open_finished(rows) or self._open_partial(rows) or self._open_finished(rows)):
            raise CorruptionError(
                f"{self.paths.finished}: the journal has {rows} durable rows and there is no such shard; {RESTORE}"
            )

    def _open_finished(self, rows: int) -> bool:
        with fs.io_errors(self.paths.finished, "read"):
            try:
                self.rows = finished_rows(self.paths.finished, self.layout)
                self._fds = [fs.open_to_read(self.paths.finished)]
            except FileNotFoundError:
                return False
        if self.rows < rows:
            raise CorruptionError(
                f"{self.paths.finished}: expected {rows} rows or more; the file has {self.rows}; {RESTORE}"
            )
        return True

    def _open_partial(self, rows: int) -> bool:
        self.rows = rows
        with fs.io_errors(self.paths.partial, "read"):
            try:
                self._fds.append(fs.open_to_read(self.paths.partial))
                self._fds.append(fs.open_to_read(self.paths.tokens))
            except FileNotFoundError:
                self.close()
                return False
        ends = (self.layout.data_end(rows), rows * self.layout.token_dtype.itemsize)
        for path, fd, end in zip((self.paths.partial, self.paths.tokens), self._fds, ends, strict=True):
            size = os.fstat(fd).st_size
            if size < end:
                raise CorruptionError(
                    f"{path}: expected {end} bytes or more for {rows} durable rows; the file has {size}; {RESTORE}"
                )
        return True

    def read_states(self, start: int, count: int, into: memoryview) -> None:
        """Read the states of ``count`` rows from row ``start``.

        Args:
            into: uint8 [count * row_bytes], contiguous.

        Raises:
            CorruptionError: the file has become shorter.
            StoreError: the disk refuses.
        """
        self._read(self._fds[0], into, self.layout.data_end(start))

    def read_tokens(self, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]]:
        """The input ids, positions and chained hashes of ``count`` rows from row ``start``.

        Returns:
            int64 [count], int64 [count] and uint64 [count].

        Raises:
            CorruptionError: the file has become shorter.
            StoreError: the disk refuses.
        """
        return tuple(self._read_columns(TOKEN_TENSORS, start, count))  # type: ignore[return-value]

    def read_scales(self, start: int, count: int) -> NDArray[np.float32]:
        """The scales of ``count`` rows from row ``start``, of a dataset whose states have scales.

        Returns:
            float32 [count, C].

        Raises:
            CorruptionError: the file has become shorter.
            StoreError: the disk refuses.
        """
        (scales,) = self._read_columns(["scales"], start, count)
        return scales

    def _read_columns(self, names: Iterable[str], start: int, count: int) -> list[NDArray[Any]]:
        """The rows of some of the finished shard's tensors, each contiguous."""
        dtype, fields = self.layout.token_dtype, self.layout.row_tensors
        if len(self._fds) > 1:
            records = np.empty(count, dtype)
            self._read(self._fds[1], records.view(np.uint8).data, start * dtype.itemsize)
            return [np.ascontiguousarray(records[fields[name]]) for name in names]
        tensors, columns = self.layout.tensors(self.rows), []
        for name in names:
            column = np.empty(count, dtype[fields[name]])
            offset = self.layout.record.data_offset + tensors[name].begin + start * dtype[fields[name]].itemsize
            self._read(self._fds[0], column.reshape(-1).view(np.uint8).data, offset)
            columns.append(column)
        return columns

    def _read(self, fd: int, into: memoryview, offset: int) -> None:
        path = self.paths.partial if len(self._fds) > 1 else self.paths.finished
        with fs.io_errors(path, "read"):
            try:
                fs.pread_all(fd, into, offset)
            except EOFError as error:
                raise CorruptionError(f"{path}: {error}; the file was cut while it was open; {RESTORE}") from None

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        while self._fds:
            os.close(self._fds.pop())

    def __del__(self) -> None:
        self.close()
