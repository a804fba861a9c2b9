"""The writer: rows go to shards, samples to the journal, and a sample is acknowledged only when both are durable.

The order that makes this so, in ``commit``: states, then tokens, then journal lines, each made durable before the next
is begun. A record in the journal therefore names only what was durable before it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sglang_hs_capture.errors import DatasetMismatchError
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.disk import DiskHealth
from sglang_hs_capture.store.identity import check_or_write_info
from sglang_hs_capture.store.journal import JournalFile
from sglang_hs_capture.store.lock import FileLock
from sglang_hs_capture.store.recovery import finished_record, lock_path, recover
from sglang_hs_capture.store.replay import journal_path
from sglang_hs_capture.store.schema import (
    VERSION,
    DatasetInfo,
    Extent,
    FailureRecord,
    SampleRecord,
    check_writer,
    merge_extents,
)
from sglang_hs_capture.store.session import utc_now
from sglang_hs_capture.store.shard import PartialShard, ShardLayout, ShardPaths, finish, pack_tokens


class StoreWriter:
    """Writes one writer's shards and journal. All methods are for one thread; the properties are for any.

    When the disk is full, or its floor is reached, rows are refused from then on, and what was appended before can
    still be committed. After any other failure, and after one in ``commit``, nothing more is accepted. In both cases
    the dataset on disk is consistent and holds every acknowledged sample; opening it anew goes on from there.

    Attributes:
        info: what the dataset holds.
        columns: the columns of a row here; all of the dataset's unless a pipeline stage captures a part of them.
        row_bytes: bytes of one row's states.
    """

    def __init__(
        self,
        *,
        directory: Path,
        writer: str,
        info: DatasetInfo,
        columns: tuple[str, ...],
        session_id: str,
        max_rows: int,
        disk: DiskHealth,
        lock: FileLock,
        journal: JournalFile,
        next_shard: int,
    ) -> None:
        """Not for use from outside: see ``open``."""
        self.directory = directory
        self.writer = writer
        self.info = info
        self.columns = columns
        self.row_bytes = len(columns) * info.column_bytes
        self._session_id = session_id
        self._max_rows = max_rows
        self._disk = disk
        self._lock = lock
        self._journal = journal
        self._next_shard = next_shard
        self._partial: PartialShard | None = None
        self._shard_rows: dict[int, int] = {}
        self._pending: list[SampleRecord | FailureRecord] = []
        self._acknowledged: list[SampleRecord] = []
        self._closed = False
        self._rows = 0

    @classmethod
    def open(
        cls,
        directory: Path,
        writer: str,
        info: DatasetInfo,
        *,
        session_id: str,
        shard_bytes: int,
        min_free_bytes: int,
        columns: Sequence[str] | None = None,
        lock_timeout_s: float = 10.0,
    ) -> "StoreWriter":
        """Create a dataset, or go on with one after recovering what an earlier process left.

        Args:
            directory: the dataset's folder; created where missing.
            writer: this process's name, such as ``dp0-pp0``.
            info: what is captured; must agree with what the dataset holds.
            session_id: identifies this process in the records.
            shard_bytes: the size of a shard's states; at least one row goes into each.
            min_free_bytes: rows are refused when the file system has less room than this.
            columns: those of ``info.columns`` that this process captures, for a pipeline stage; all by default.
            lock_timeout_s: how long to wait for an earlier process of the same name to end.

        Raises:
            DatasetLockedError: another process writes under this name.
            DatasetMismatchError: the dataset holds something else.
            CorruptionError: the dataset was damaged.
            DiskFullError: there is less room than ``min_free_bytes``.
            StoreError: the file system refuses.
        """
        directory = Path(directory)
        columns = info.columns if columns is None else tuple(columns)
        if not columns or not set(columns) <= set(info.columns):
            raise DatasetMismatchError(f"columns: expected some of {list(info.columns)}; got {list(columns)}")
        with fs.io_errors(directory, "create the dataset"):
            fs.make_dir(directory)
        lock = FileLock(lock_path(directory, check_writer(writer)), lock_timeout_s)
        journal = None
        try:
            info = check_or_write_info(directory, info)
            journal = JournalFile(journal_path(directory, writer))
            next_shard = recover(directory, writer, info, journal)
            disk = DiskHealth(directory, min_free_bytes)
            disk.check_space(0)
            max_rows = max(1, shard_bytes // (len(columns) * info.column_bytes))
            self = cls(
                directory=directory,
                writer=writer,
                info=info,
                columns=columns,
                session_id=session_id,
                max_rows=max_rows,
                disk=disk,
                lock=lock,
                journal=journal,
                next_shard=next_shard,
            )
            journal.append(
                {"t": "journal", "version": VERSION, "writer": writer, "session": session_id, "time": utc_now()}
            )
            journal.sync()
        except BaseException:
            if journal is not None:
                journal.close()
            lock.release()
            raise
        return self

    @property
    def rows(self) -> int:
        """Rows appended since ``open``."""
        return self._rows

    @property
    def bytes(self) -> int:
        """Bytes of states appended since ``open``."""
        return self._rows * self.row_bytes

    @property
    def disk_wait_s(self) -> float:
        """Seconds spent in writing and waiting for the disk."""
        return self._disk.wait_s

    def append(
        self,
        rows: fs.Buffer | NDArray[np.uint8],
        input_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        prefix_hash: NDArray[np.uint64],
        release: Callable[[], None] = lambda: None,
    ) -> list[Extent]:
        """Write rows behind those written before. They are durable, and can be acknowledged, after ``commit``.

        Args:
            rows: the states' bytes, contiguous, [n * row_bytes]; not copied, and free for reuse on return.
            input_ids: int64 [n].
            positions: int64 [n].
            prefix_hash: uint64 [n], the chained token hash at each row.
            release: called once ``rows`` is free for reuse, also after an error.

        Returns:
            Where the rows lie; more than one extent when a shard was filled.

        Raises:
            ValueError: the sizes do not agree.
            DiskFullError, StoreError: none of the rows counts, and no more are accepted.
        """
        try:
            return self._append_all(rows, input_ids, positions, prefix_hash)
        finally:
            release()

    def _append_all(
        self,
        rows: fs.Buffer | NDArray[np.uint8],
        input_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        prefix_hash: NDArray[np.uint64],
    ) -> list[Extent]:
        view = (rows.data if isinstance(rows, np.ndarray) else memoryview(rows)).cast("B")
        tokens = pack_tokens(input_ids, positions, prefix_hash)
        if len(view) != len(tokens) * self.row_bytes:
            raise ValueError(f"rows: expected {len(tokens)} of {self.row_bytes} bytes; got {len(view)} bytes")
        self._disk.require_room()
        extents = []
        start = 0
        while start < len(tokens):
            extent = self._append_some(view[start * self.row_bytes :], tokens[start:])
            extents.append(extent)
            start += extent.count
        return extents

    def add_sample(self, rid: str, length: int, extents: Sequence[Extent], end_hash: int) -> None:
        """Have the next ``commit`` acknowledge a sample.

        Args:
            rid: the request's id.
            length: number of tokens S.
            extents: its rows, from position 0 to S - 1, all appended to this writer since ``open``.
            end_hash: the chained token hash of the last row.

        Raises:
            ValueError: the extents do not add up to the length, or name rows that were not appended.
        """
        if length < 1 or sum(extent.count for extent in extents) != length or min(e.count for e in extents) < 1:
            raise ValueError(f"sample {rid!r}: expected extents of {length} rows together; got {list(extents)}")
        merged = merge_extents(extents)
        for extent in merged:
            if (
                extent.start < 0
                or extent.count < 1
                or extent.start + extent.count > self._shard_rows.get(extent.shard, 0)
            ):
                raise ValueError(
                    f"sample {rid!r}: {extent} names rows that were not appended since the store was opened"
                )
        self._pending.append(SampleRecord(rid, length, merged, end_hash, self._session_id))

    def add_failure(self, rid: str, reason: str, detail: str) -> None:
        """Have the next ``commit`` record that a request's sample is not stored.

        Args:
            rid: the request's id.
            reason: one word, such as ``non_finite``, ``zero_row`` or ``incomplete``.
            detail: one line for a person.
        """
        self._pending.append(FailureRecord(rid, reason, detail))

    def begin_commit(self) -> None:
        """Have everything appended and added so far made durable.

        Raises:
            DiskFullError, StoreError: see ``commit``.
        """
        self._sync()
        self._disk.forget_space()

    def acknowledged(self) -> list[SampleRecord]:
        """The samples acknowledged since the last call, or the last ``commit``."""
        acknowledged, self._acknowledged = self._acknowledged, []
        return acknowledged

    def commit(self) -> list[SampleRecord]:
        """Make everything appended and added so far durable.

        Returns:
            The samples acknowledged since the last call.

        Raises:
            DiskFullError, StoreError: what was not acknowledged before is lost, and nothing more is accepted.
        """
        self.begin_commit()
        return self.acknowledged()

    def close(self) -> list[SampleRecord]:
        """Commit, finish the shard being written, and let go of the dataset, in any case. A second call does nothing.

        After a failure that is final nothing is written; the next ``open`` recovers.

        Returns:
            The samples acknowledged since the last ``commit``.

        Raises:
            DiskFullError, StoreError: the last commit, or finishing the shard, failed.
        """
        if self._closed:
            return []
        self._closed = True
        try:
            if self._disk.failed:
                return []
            acknowledged = self.commit()
            if self._partial is not None:
                self._finish_or_drop(self._partial)
            return acknowledged
        finally:
            if self._partial is not None:
                self._partial.close()
            self._journal.close()
            self._lock.release()

    def _append_some(self, view: memoryview, tokens: NDArray[np.void]) -> Extent:
        """Write as many rows as the shard being written takes; at least one."""
        if self._partial is not None and self._partial.rows >= self._max_rows:
            self._sync()
            self._finish_or_drop(self._partial)
        partial = self._partial or self._create()
        count = min(len(tokens), self._max_rows - partial.rows)
        start = partial.rows
        with self._disk.step(partial.paths.partial, "write", lasting=False):
            self._disk.check_space(count * self.row_bytes)
            partial.append(view[: count * self.row_bytes], tokens[:count])
        self._rows += count
        self._shard_rows[partial.layout.record.shard] = partial.rows
        return Extent(partial.layout.record.shard, start, count)

    def _create(self) -> PartialShard:
        layout = ShardLayout.plan(self.info, self.writer, self._next_shard, self.columns, self._max_rows)
        path = ShardPaths.of(self.directory, self.writer, self._next_shard).partial
        with self._disk.step(path, "create", lasting=False):
            self._partial = PartialShard(self.directory, layout)
        self._next_shard += 1
        return self._partial

    def _sync(self) -> None:
        """Make rows durable, then say so in the journal, together with the samples and failures added so far."""
        self._disk.require_open()
        if self._partial is not None:
            with self._disk.step(self._partial.paths.partial, "make rows durable", lasting=True):
                rows = self._partial.sync()
            if rows is not None:
                if rows.start == 0:
                    self._journal.append(self._partial.layout.record.to_json())
                self._journal.append(rows.to_json())
        for record in self._pending:
            self._journal.append(record.to_json())
        with self._disk.step(self._journal.path, "make records durable", lasting=True):
            self._journal.sync()
        self._acknowledged += [record for record in self._pending if isinstance(record, SampleRecord)]
        self._pending.clear()

    def _finish_or_drop(self, partial: PartialShard) -> None:
        """Finish the shard being written, whose rows are all durable, or remove it if it has none."""
        self._partial = None
        partial.close()
        paths, record = partial.paths, partial.layout.record
        with self._disk.step(paths.partial, "finish", lasting=False):
            if partial.rows:
                finish(self.directory, partial.layout, partial.rows)
            else:
                fs.remove(paths.partial)
        if partial.rows:
            self._journal.append(finished_record(record.shard, partial.rows))
            with self._disk.step(self._journal.path, "make records durable", lasting=True):
                self._journal.sync()
        with self._disk.step(paths.tokens, "remove", lasting=False):
            fs.remove(paths.tokens)
