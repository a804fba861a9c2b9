"""One shard: its layout as a safetensors file, appending to it, and finishing it."""

import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sglang_hs_capture.errors import CorruptionError
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.identity import SHARD_FOLDER
from sglang_hs_capture.store.schema import FORMAT, SAFETENSORS_DTYPE, VERSION, DatasetInfo, ShardRecord
from sglang_hs_capture.store.states import PAGE, StateFile

TOKEN_DTYPE = np.dtype([("input_id", "<i8"), ("position", "<i8"), ("prefix_hash", "<u8")])
TOKEN_TENSORS = {"input_ids": "input_id", "positions": "position", "prefix_hash": "prefix_hash"}
_CHUNK_ROWS = 1 << 16


@lru_cache
def token_dtype(scales: int) -> np.dtype[np.void]:
    """A record of a token file: ``TOKEN_DTYPE``, and behind it the row's scales where there are any."""
    return np.dtype([*TOKEN_DTYPE.descr, ("scales", "<f4", (scales,))]) if scales else TOKEN_DTYPE


@dataclass(frozen=True)
class ShardPaths:
    """The three names that a shard has in the course of its life."""

    finished: Path
    partial: Path
    tokens: Path

    @classmethod
    def of(cls, directory: Path, writer: str, shard: int) -> "ShardPaths":
        """The names of shard number ``shard`` of a writer."""
        stem = directory / SHARD_FOLDER / f"{writer}-{shard:06d}"
        return cls(stem.with_suffix(".safetensors"), stem.with_suffix(".partial"), stem.with_suffix(".rows"))


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors header: ``begin`` and ``end`` count bytes from ``data_offset``."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class ShardLayout:
    """Where everything lies in a shard; ``data_offset`` is where the first row's first byte is in the file."""

    info: DatasetInfo
    writer: str
    record: ShardRecord

    @classmethod
    def plan(cls, info: DatasetInfo, writer: str, shard: int, columns: tuple[str, ...], max_rows: int) -> "ShardLayout":
        """Lay out a new shard of at most ``max_rows`` rows."""
        draft = cls(info, writer, ShardRecord(shard, 0, columns))
        needed = 8 + len(draft._header_json(max_rows))
        return cls(info, writer, ShardRecord(shard, -(-needed // PAGE) * PAGE, columns))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's states."""
        return len(self.record.columns) * self.info.column_bytes

    @property
    def token_dtype(self) -> np.dtype[np.void]:
        """A record of the shard's token file."""
        return token_dtype(len(self.record.columns) if self.info.scaled else 0)

    @property
    def row_tensors(self) -> dict[str, str]:
        """The tensors of a finished shard that are made of a field of these records, with the field."""
        return {**TOKEN_TENSORS, "scales": "scales"} if self.info.scaled else TOKEN_TENSORS

    def data_end(self, rows: int) -> int:
        """Where the states of ``rows`` rows end in the file."""
        return self.record.data_offset + rows * self.row_bytes

    def tensors(self, rows: int) -> dict[str, Tensor]:
        """The tensors of a finished shard, in file order.

        ``_pad`` is there only where alignment to 8 asks for it, and ``scales`` only where states have scales.
        """
        shape = (rows, len(self.record.columns), self.info.hidden_size)
        end = rows * self.row_bytes
        tensors = {"hidden_states": Tensor(SAFETENSORS_DTYPE[self.info.dtype], shape, 0, end)}
        if end % 8:
            tensors["_pad"] = Tensor("U8", (-end % 8,), end, end - end % 8 + 8)
            end = tensors["_pad"].end
        for name in TOKEN_TENSORS:
            tensors[name] = Tensor("I64", (rows,), end, end + 8 * rows)
            end += 8 * rows
        if self.info.scaled:
            tensors["scales"] = Tensor("F32", shape[:2], end, end + 4 * rows * shape[1])
        return tensors

    def file_size(self, rows: int) -> int:
        """Bytes of the finished shard."""
        return self.record.data_offset + max(tensor.end for tensor in self.tensors(rows).values())

    def _header_json(self, rows: int) -> bytes:
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "writer": self.writer,
            "shard": str(self.record.shard),
            "columns": json.dumps(self.record.columns),
            "dataset": json.dumps(self.info.to_json()),
        }
        header: dict[str, object] = {"__metadata__": metadata}
        for name, tensor in self.tensors(rows).items():
            header[name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [tensor.begin, tensor.end],
            }
        return json.dumps(header, separators=(",", ":")).encode("ascii")

    def header(self, rows: int) -> bytes:
        """The first ``data_offset`` bytes of a finished shard: length, JSON, and spaces up to the first row.

        Raises:
            CorruptionError: the reserved room is too small, since ``dataset.json`` grew after the shard was begun.
        """
        text = self._header_json(rows)
        room = self.record.data_offset - 8
        if len(text) > room:
            raise CorruptionError(
                f"shard {self.record.shard} of {self.writer}: the header needs {len(text)} bytes, {room} are reserved; "
                "dataset.json was changed since: restore it"
            )
        return struct.pack("<Q", room) + text.ljust(room)


def pack_tokens(
    input_ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    prefix_hash: NDArray[np.uint64],
    scales: NDArray[np.float32] | None = None,
) -> NDArray[np.void]:
    """Put three arrays [n], and scales float32 [n, C] if there are any, into records, as in a token file.

    Returns:
        ``token_dtype(C)`` [n]; without scales C is 0.

    Raises:
        ValueError: they are not of one length.
    """
    if not len(input_ids) == len(positions) == len(prefix_hash):
        raise ValueError(
            f"expected an id, a position and a hash for each row; got {len(input_ids)}, {len(positions)} and "
            f"{len(prefix_hash)}"
        )
    if scales is not None and len(scales) != len(input_ids):
        raise ValueError(f"expected scales for each of {len(input_ids)} rows; got those of {len(scales)}")
    tokens = np.empty(len(input_ids), token_dtype(0 if scales is None else scales.shape[1]))
    tokens["input_id"], tokens["position"], tokens["prefix_hash"] = input_ids, positions, prefix_hash
    if scales is not None:
        tokens["scales"] = scales
    return tokens


class PartialShard:
    """A shard being written: states in ``.partial``, tokens in ``.rows``. Failures come as ``OSError``.

    One thread appends, and another makes durable what was appended before.

    Attributes:
        rows: rows of which states and tokens are written.
        named: whether the names of both files are known to be durable.
    """

    def __init__(self, directory: Path, layout: ShardLayout, *, direct: bool = False) -> None:
        """Create both files; their names are durable once their folder is.

        Args:
            direct: write states past the page cache, where the file system and the size of a row allow it.
        """
        self.layout = layout
        self.paths = ShardPaths.of(directory, layout.writer, layout.record.shard)
        self.rows = 0
        self.named = False
        direct = direct and layout.row_bytes % PAGE == 0
        self._states = StateFile(self.paths.partial, layout.record.data_offset, direct=direct)
        try:
            self._tokens = fs.open_file(self.paths.tokens, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except BaseException:
            self._states.close()
            raise

    @property
    def direct(self) -> bool:
        """Whether states are written past the page cache."""
        return self._states.direct

    def append(self, states: Sequence[memoryview], tokens: NDArray[np.void]) -> None:
        """Write rows behind those that are there. After a failure ``rows`` counts those that are there as a whole.

        Args:
            states: uint8, together [n * row_bytes].
            tokens: the layout's ``token_dtype`` [n].
        """
        fs.pwrite_all(self._tokens, tokens.view(np.uint8).data, self.rows * tokens.itemsize)
        try:
            self._states.append(states)
        finally:
            self.rows = (self._states.end - self.layout.record.data_offset) // self.layout.row_bytes

    def sync_states(self) -> None:
        """Make the states written so far durable."""
        self._states.sync()

    def sync_tokens(self) -> None:
        """Make the tokens written so far durable."""
        fs.fsync(self._tokens)

    def close(self) -> None:
        """Close both files, as they are."""
        self._states.close()
        os.close(self._tokens)


def finish(directory: Path, layout: ShardLayout, rows: int) -> None:
    """Turn a partial shard into a finished one, durably, and keep its token file.

    Whatever lies behind the first ``rows`` rows is cut, so the call can be made again after it was interrupted.

    Raises:
        CorruptionError: fewer than ``rows`` rows are there.
        OSError: the disk failed; the rows are still in the partial shard.
    """
    paths = ShardPaths.of(directory, layout.writer, layout.record.shard)
    end = layout.data_end(rows)
    data = fs.open_file(paths.partial, os.O_RDWR)
    try:
        if os.fstat(data).st_size < end:
            raise CorruptionError(
                f"{paths.partial}: the journal has {rows} durable rows, {end} bytes with the header, "
                f"and the file has {os.fstat(data).st_size}; restore it from a copy, or capture anew"
            )
        fs.truncate(data, end)
        tensors = layout.tensors(rows)
        if "_pad" in tensors:
            fs.pwrite_all(data, bytes(tensors["_pad"].shape[0]), end)
        for start, tokens in read_token_chunks(paths.tokens, rows, layout.token_dtype):
            for name, field in layout.row_tensors.items():
                column = np.ascontiguousarray(tokens[field])
                offset = layout.record.data_offset + tensors[name].begin + start * column[:1].nbytes
                fs.pwrite_all(data, column.reshape(-1).view(np.uint8).data, offset)
        fs.pwrite_all(data, layout.header(rows), 0)
        fs.fsync(data)
    finally:
        os.close(data)
    fs.rename(paths.partial, paths.finished)


def read_token_chunks(path: Path, rows: int, dtype: np.dtype[np.void]) -> Iterator[tuple[int, NDArray[np.void]]]:
    """The first ``rows`` records of a token file, in pieces: the first row's number and ``dtype`` [n].

    Raises:
        CorruptionError: the file is shorter.
    """
    fd = fs.open_to_read(path)
    try:
        for start in range(0, rows, _CHUNK_ROWS):
            tokens = np.empty(min(_CHUNK_ROWS, rows - start), dtype)
            try:
                fs.pread_all(fd, tokens.view(np.uint8).data, start * dtype.itemsize)
            except EOFError as error:
                raise CorruptionError(
                    f"{path}: {error}; the journal has {rows} durable rows of {dtype.itemsize} bytes: "
                    "restore it from a copy, or capture anew"
                ) from None
            yield start, tokens
    finally:
        os.close(fd)
