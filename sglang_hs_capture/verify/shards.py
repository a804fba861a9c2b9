"""Shards read as far as they can be read, each byte once: checksums, headers, and numbers of every row."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from sglang_hs_capture.errors import CorruptionError, StoreError
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.origin import Origin, layout_as_written
from sglang_hs_capture.store.replay import ShardState
from sglang_hs_capture.store.schema import DatasetInfo, RowsRecord, to_hex
from sglang_hs_capture.store.shard import TOKEN_DTYPE, TOKEN_TENSORS, ShardLayout, ShardPaths
from sglang_hs_capture.store.shard_reader import finished_rows
from sglang_hs_capture.verify.findings import Finding, Findings
from sglang_hs_capture.verify.owners import Owners
from sglang_hs_capture.verify.statistics import EXTREMES_KEPT, Place, RowNumbers, Statistics, equal_pairs, row_numbers

BLOCK_BYTES = 4 << 20
JOB_BYTES = 256 << 20


class ShardFile:
    """A shard's files, open for reading, whole or not.

    Attributes:
        rows: rows whose states the file is long enough for, of those that the journal says are durable.
        token_rows: likewise for their tokens.
        finished: whether it has its final name.
        name, tokens_name: its files, relative to the dataset.
    """

    def __init__(self, directory: Path, layout: ShardLayout, rows: int) -> None:
        """Open a shard of which ``rows`` rows are durable.

        Raises:
            FileNotFoundError: it is not there.
            OSError: the file system refuses.
        """
        self.layout = layout
        self.paths = ShardPaths.of(directory, layout.writer, layout.record.shard)
        self._fds: list[int] = []
        self._directory = directory
        # A writer may finish the shard between two of these tries, never take it back.
        for paths in ((self.paths.finished,), (self.paths.partial, self.paths.tokens), (self.paths.finished,)):
            with suppress(FileNotFoundError):
                for path in paths:
                    self._fds.append(fs.open_to_read(path))
                break
            self.close()
        else:
            raise FileNotFoundError(self.paths.finished)
        self.finished = len(self._fds) == 1
        self.size = os.fstat(self._fds[0]).st_size
        self.durable = rows
        self.rows = max(0, min(rows, (self.size - layout.record.data_offset) // layout.row_bytes))
        if self.finished:
            self._file_rows = self._rows_of_file()
            # The arrays lie behind each other; where the file is cut, the last of them is.
            self.token_rows = rows if self.size >= layout.file_size(self._file_rows) else 0
        else:
            self.token_rows = min(rows, os.fstat(self._fds[1]).st_size // layout.token_dtype.itemsize)

    def _rows_of_file(self) -> int:
        """The rows that a finished shard was made for: the journal's, or its own header's where that fits its size."""
        if self.size != self.layout.file_size(self.durable):
            with suppress(CorruptionError, OSError):
                return max(self.durable, finished_rows(self.paths.finished, self.layout))
        return self.durable

    @property
    def name(self) -> str:
        """The file with the states."""
        return str((self.paths.finished if self.finished else self.paths.partial).relative_to(self._directory))

    @property
    def tokens_name(self) -> str:
        """The file with the tokens."""
        return str((self.paths.finished if self.finished else self.paths.tokens).relative_to(self._directory))

    def read_states(self, start: int, count: int, into: memoryview) -> None:
        """Read rows into uint8 [count * row_bytes].

        Raises:
            OSError: the disk refuses.
            EOFError: the file has become shorter.
        """
        fs.pread_all(self._fds[0], into, self.layout.data_end(start))

    def read_tokens(self, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]]:
        """The input ids, positions and chained hashes of rows: int64 [count], int64 [count] and uint64 [count].

        Raises:
            OSError: the disk refuses.
            EOFError: the file has become shorter.
        """
        if not self.finished:
            records = self._read_records(start, count)
            return tuple(np.ascontiguousarray(records[field]) for field in TOKEN_TENSORS.values())  # type: ignore[return-value]
        return tuple(self._read_tensor(name, TOKEN_DTYPE[field], start, count) for name, field in TOKEN_TENSORS.items())  # type: ignore[return-value]

    def read_scales(self, start: int, count: int) -> NDArray[np.float32]:
        """The scales of rows whose states have scales: float32 [count, C].

        Raises:
            OSError: the disk refuses.
            EOFError: the file has become shorter.
        """
        if not self.finished:
            return np.ascontiguousarray(self._read_records(start, count)["scales"])
        dtype = np.dtype(("<f4", (len(self.layout.record.columns),)))
        return self._read_tensor("scales", dtype, start, count)

    def _read_records(self, start: int, count: int) -> NDArray[np.void]:
        records = np.empty(count, self.layout.token_dtype)
        fs.pread_all(self._fds[1], records.view(np.uint8).data, start * records.itemsize)
        return records

    def _read_tensor(self, name: str, dtype: "np.dtype[Any]", start: int, count: int) -> NDArray[Any]:
        """Rows of a tensor of the finished shard."""
        values = np.empty(count, dtype)
        begin = self.layout.record.data_offset + self.layout.tensors(self._file_rows)[name].begin
        fs.pread_all(self._fds[0], values.view(np.uint8).reshape(-1).data, begin + start * dtype.itemsize)
        return values

    def head(self, length: int) -> bytes:
        """The first bytes of the file, fewer where it ends."""
        return os.pread(self._fds[0], min(length, self.size), 0)

    def padding(self) -> bytes:
        """What lies between states and tokens of a finished shard."""
        tensor = self.layout.tensors(self.durable).get("_pad")
        if tensor is None:
            return b""
        return os.pread(self._fds[0], tensor.end - tensor.begin, self.layout.record.data_offset + tensor.begin)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        while self._fds:
            os.close(self._fds.pop())

    def __del__(self) -> None:
        self.close()


def check_file(
    shard: ShardFile, state: ShardState, live: bool, findings: Findings, origins: Sequence[Origin] = ()
) -> None:
    """Compare a shard's size and header with what its journal says.

    Args:
        origins: where the writer's shards were written, if not in this dataset.
        live: whether a capture may be writing: then a file may have more rows than the journal had when it was read.
    """
    if not shard.finished:
        _check_partial(shard, findings)
        return
    expected = shard.layout.file_size(state.rows)
    if shard.size != expected:
        text = f"expected {expected} bytes for {state.rows} rows; the file has {shard.size}"
        if not (live and not state.finished and shard.size > expected):
            findings.add(Finding("shard-size", text, shard.name))
    if live and not state.finished:
        return
    found = shard.head(shard.layout.record.data_offset)
    try:
        wanted = layout_as_written(shard.layout, origins).header(state.rows)
    except CorruptionError as error:
        findings.add(Finding("shard-header", str(error), shard.name))
        return
    if found != wanted:
        findings.add(Finding("shard-header", _header_difference(found, wanted), shard.name))
    if any(shard.padding()):
        findings.add(Finding("shard-header", "the bytes between states and tokens are not zero", shard.name))


def _check_partial(shard: ShardFile, findings: Findings) -> None:
    if shard.rows < shard.durable:
        text = (
            f"expected {shard.layout.data_end(shard.durable)} bytes or more for {shard.durable} durable rows; the file "
            f"has {shard.size}"
        )
        findings.add(Finding("shard-size", text, shard.name))
    if shard.token_rows < shard.durable:
        text = f"expected the tokens of {shard.durable} durable rows; the file has those of {shard.token_rows}"
        findings.add(Finding("shard-size", text, shard.tokens_name))


def _header_difference(found: bytes, wanted: bytes) -> str:
    """What a header says otherwise than it should."""
    if found[:8] != wanted[:8]:
        return (
            f"expected a header of {int.from_bytes(wanted[:8], 'little')} bytes; the file says "
            f"{int.from_bytes(found[:8], 'little')}"
        )
    try:
        there, here = json.loads(found[8:]), json.loads(wanted[8:])
        for header in (there, here):
            header["__metadata__"] = {
                name: json.loads(value) if name in {"columns", "dataset"} else value
                for name, value in header["__metadata__"].items()
            }
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        return f"the header cannot be read ({error!r})"
    for name in sorted({*there, *here}):
        mine, theirs = here.get(name), there.get(name)
        if mine != theirs and isinstance(mine, dict) and isinstance(theirs, dict):
            if name == "__metadata__" and mine.get("dataset") != theirs.get("dataset"):
                mine, theirs = mine["dataset"], theirs.get("dataset") or {}
            fields = [field for field in sorted({*mine, *theirs}) if mine.get(field) != theirs.get(field)]
            expected, there_is = ({field: side.get(field) for field in fields} for side in (mine, theirs))
            return f"{name}: expected {expected}; the header has {there_is}"
        if mine != theirs:
            return f"expected {name} as {mine}; the header has {theirs}"
    return "it says what it should, in other bytes than were written"


def info_of_header(path: Path) -> DatasetInfo | None:
    """What a finished shard says of its dataset; None where it cannot be read."""
    try:
        with os.fdopen(fs.open_to_read(path), "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, 1 << 27)))
        return DatasetInfo.from_json(json.loads(header["__metadata__"]["dataset"]), str(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, StoreError):
        return None


def record_of_header(path: Path, shard: int) -> tuple[int, tuple[str, ...]] | None:
    """Where a finished shard's data begins, and its columns; None where it cannot be read, or is another shard's."""
    try:
        with os.fdopen(fs.open_to_read(path), "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            metadata = json.loads(file.read(min(length, 1 << 27)))["__metadata__"]
        return (length + 8, tuple(json.loads(metadata["columns"]))) if int(metadata["shard"]) == shard else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


@dataclass(frozen=True)
class Job:
    """Rows of a shard that one thread looks at: those of some ``rows`` records, each behind the one before it."""

    writer: str
    shard: int
    records: tuple[RowsRecord, ...]
    bytes: int


def jobs_of(shard: ShardFile, records: Iterable[RowsRecord]) -> Iterator[Job]:
    """Cut the records of a shard into jobs of about 256 MiB, leaving out rows that the file is too short for."""
    mine: list[RowsRecord] = []
    rows = 0
    row_bytes = shard.layout.row_bytes
    for record in records:
        if record.start + record.count > shard.rows:
            continue
        behind = not mine or mine[-1].start + mine[-1].count == record.start
        if mine and (not behind or (rows + record.count) * row_bytes > JOB_BYTES):
            yield Job(shard.layout.writer, shard.layout.record.shard, tuple(mine), rows * row_bytes)
            mine, rows = [], 0
        mine.append(record)
        rows += record.count
    if mine:
        yield Job(shard.layout.writer, shard.layout.record.shard, tuple(mine), rows * row_bytes)


class StateCheck:
    """One pass over the states of a job: checksums and numbers together."""

    def __init__(
        self, file: ShardFile, records: Sequence[RowsRecord], owners: Owners, findings: Findings, statistics: Statistics
    ) -> None:
        self._file, self._records, self._owners = file, records, owners
        self._findings, self._statistics = findings, statistics
        self._layout = file.layout
        self._writer, self._shard = self._layout.writer, self._layout.record.shard
        self._columns = self._layout.record.columns

    def run(self, tick: Callable[[int], None]) -> int:
        """Look at every row; ``tick`` is called with the number of bytes looked at since the last time.

        Returns:
            The number of rows looked at; fewer than there are where the disk refuses.
        """
        row_bytes = self._layout.row_bytes
        per_block = max(1, BLOCK_BYTES // row_bytes)
        buffer = np.empty(per_block * row_bytes, np.uint8)
        records = iter(self._records)
        record = next(records)
        begin, end = record.start, self._records[-1].start + self._records[-1].count
        digest, scales_digest = xxhash.xxh3_64(), xxhash.xxh3_64()
        for row in range(begin, end, per_block):
            count = min(per_block, end - row)
            block = buffer[: count * row_bytes]
            try:
                self._file.read_states(row, count, block.data)
            except (OSError, EOFError) as error:
                text = f"from row {row} on: {error}"
                affected = self._owners.of(self._writer, self._shard, row, end)
                self._findings.add(Finding("unreadable", text, self._file.name), affected)
                return row - begin
            scales = self._scales(row, count)
            done = row
            while done < row + count:
                upto = min(row + count, record.start + record.count)
                digest.update(block[(done - row) * row_bytes : (upto - row) * row_bytes].data)
                if scales is not None:
                    scales_digest.update(scales[done - row : upto - row].data)
                done = upto
                if done == record.start + record.count:
                    self._compare(record, "states", digest.intdigest(), record.xxh3)
                    if scales is not None and record.scales_xxh3 is not None:
                        self._compare(record, "scales", scales_digest.intdigest(), record.scales_xxh3)
                    digest.reset()
                    scales_digest.reset()
                    record = next(records, record)
            self._look(row, block.reshape(count, row_bytes), scales)
            tick(count * row_bytes)
        return end - begin

    def _compare(self, record: RowsRecord, what: str, found: int, expected: int) -> None:
        if found == expected:
            return
        end = record.start + record.count
        affected = self._owners.of(self._writer, self._shard, record.start, end)
        named = f"; {len(affected)} samples have rows there, such as {affected[0]!r}" if affected else "; no sample's"
        text = (
            f"the {what} of rows {record.start} to {end - 1} have the checksum {to_hex(found)}, the journal has "
            f"{to_hex(expected)}{named}"
        )
        sample = affected[0] if len(affected) == 1 else None
        self._findings.add(Finding("checksum", text, self._file.name, sample), affected)

    def _look(self, row: int, block: NDArray[np.uint8], scales: NDArray[np.float32] | None) -> None:
        numbers = row_numbers(block, len(self._columns), self._layout.info.dtype, scales)
        positions = self._positions(row, len(block))
        self._statistics.add(self._columns, numbers, positions, self._writer, self._shard, row)
        self._faulty_rows(numbers, positions, row)
        for pair, rows in equal_pairs(block, self._columns, numbers):
            places = [
                Place(self._writer, self._shard, row + int(r), int(positions[r])) for r in rows[:EXTREMES_KEPT].tolist()
            ]
            self._statistics.add_equal(pair, places, len(rows))

    def _scales(self, row: int, count: int) -> NDArray[np.float32] | None:
        """float32 [count, C]; None where states have none, or they cannot be read."""
        if not self._layout.info.scaled or row + count > self._file.token_rows:
            return None
        try:
            return self._file.read_scales(row, count)
        except (OSError, EOFError):  # told by the check of the tokens
            return None

    def _positions(self, row: int, count: int) -> NDArray[np.int64]:
        """int64 [count]; of rows whose tokens cannot be read, -1."""
        shard = self._file
        if row + count > shard.token_rows:
            return np.full(count, -1, np.int64)
        try:
            return shard.read_tokens(row, count)[1]
        except (OSError, EOFError):  # told by the check of the tokens
            return np.full(count, -1, np.int64)

    def _faulty_rows(self, numbers: RowNumbers, positions: NDArray[np.int64], row: int) -> None:
        faults = (
            ("non-finite", ~numbers.finite, "has a NaN or an infinity"),
            ("zero-row", numbers.zero, "is nothing but zeros"),
            ("constant-row", numbers.constant, "has one value in all of its elements"),
        )
        for kind, where, text in faults:
            if not where.any():
                continue
            places = np.argwhere(where)
            for told, (index, column) in enumerate(places.tolist()):
                if not self._findings.has_room(kind):
                    rest = np.unique(places[told:, 0]) + row
                    self._findings.count(
                        kind, len(places) - told, self._owners.of_rows(self._writer, self._shard, rest)
                    )
                    break
                number = row + index
                affected = self._owners.of(self._writer, self._shard, number, number + 1)
                position = int(positions[index])
                finding = Finding(
                    kind,
                    f"row {number} {text}{'' if affected else '; it belongs to no sample'}",
                    self._file.name,
                    affected[0] if affected else None,
                    position if position >= 0 else None,
                    self._columns[column],
                )
                self._findings.add(finding, affected)
