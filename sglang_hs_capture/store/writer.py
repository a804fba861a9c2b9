"""The writer: rows go to shards, samples to the journal, and a sample is acknowledged only when both are durable.

The order that makes this so: states, then tokens, then journal lines, each made durable before the next is begun. A
record in the journal therefore names only what was durable before it. The work is done in threads of the store's own,
those of ``commits.py`` and, for each of the ``lanes.py``, of ``appender.py``. Their system calls, checksums and waits
all let go of the GIL.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sglang_hs_capture.errors import DatasetMismatchError, StoreError
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.appender import Appender, Piece, Run
from sglang_hs_capture.store.commits import Commits
from sglang_hs_capture.store.disk import DiskHealth
from sglang_hs_capture.store.identity import check_or_write_info
from sglang_hs_capture.store.journal import JournalFile
from sglang_hs_capture.store.lanes import Lane, Lanes
from sglang_hs_capture.store.lock import FileLock
from sglang_hs_capture.store.recovery import lock_path, recover
from sglang_hs_capture.store.replay import journal_path
from sglang_hs_capture.store.schema import (
    VERSION,
    DatasetInfo,
    Extent,
    FailureRecord,
    Media,
    SampleRecord,
    check_writer,
    merge_extents,
)
from sglang_hs_capture.store.session import utc_now
from sglang_hs_capture.store.shard import PartialShard, ShardLayout, pack_tokens

# Whether states are written past the page cache where nobody says: benchmarks/store.py compares both ways.
DIRECT = True
# How much may wait for a shard before another is begun beside it: of a ring from which rows are written, this part.
SPILL_SHARE = 8
SPILL_BYTES = 512 << 20


class StoreWriter:
    """Writes one writer's shards and journal. All methods are for one thread; the properties are for any.

    When the disk is full, or its floor is reached, rows are refused from then on, and what was written before can
    still be committed. After any other failure, and after one in a commit, nothing more is accepted. In both cases
    the dataset on disk is consistent and holds every acknowledged sample; opening it anew goes on from there.

    A failure in the background is raised by the next call of ``append``, ``begin_commit``, ``commit``,
    ``acknowledged`` or ``close``: once where the disk is full, but for ``append``, which goes on to refuse; again and
    again by all but the last two where nothing more is accepted. Such a call has done what it was to do as far as
    the disk lets it; in particular ``acknowledged`` still gives the samples that a commit has acknowledged.

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
        direct: bool,
        max_open_shards: int,
        spill_bytes: int,
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
        self._shard_rows: dict[int, int] = {}
        self._runs: list[Run] = []
        self._full: list[int] = []
        self._pending: list[SampleRecord | FailureRecord] = []
        self._closed = False
        self._rows = 0
        self._shards: dict[int, PartialShard] = {}
        make = partial(Appender, directory, disk, self._shards, direct=direct)
        self._lanes = Lanes(make, most=max_open_shards, spill_bytes=spill_bytes)
        self._commits = Commits(directory, disk, self._lanes, self._shards, journal)
        # The threads of a store that is dropped without ``close`` end; its files stay as they are.
        gone = StoreError(f"{directory}: the store was dropped without being closed")
        self._dropped = weakref.finalize(self, disk.fail, gone)
        self._dropped.atexit = False

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
        direct: bool | None = None,
        max_open_shards: int = 1,
        spill_bytes: int = SPILL_BYTES,
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
            direct: write states past the page cache (O_DIRECT), or not; by default as ``DIRECT`` says. Where the file
                system has no such thing, or a row is no multiple of 4096 bytes, they go through the cache in any case.
            max_open_shards: shards that are written side by side at most, each by threads of its own.
            spill_bytes: another shard is begun when more than this waits for each of those that are being written.

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
            disk.check_space()
            journal.append(
                {"t": "journal", "version": VERSION, "writer": writer, "session": session_id, "time": utc_now()}
            )
            journal.sync()
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
                direct=DIRECT if direct is None else direct,
                max_open_shards=max_open_shards,
                spill_bytes=spill_bytes,
            )
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
        """Seconds that ``append``, ``commit`` and ``close`` have waited for the disk."""
        return self._disk.wait_s

    @property
    def write_s(self) -> float:
        """Seconds in which rows were being written, by one thread or by several."""
        return self._disk.seconds("write")

    @property
    def sync_s(self) -> float:
        """Seconds in which rows and records were being made durable, or shards finished."""
        return self._disk.seconds("sync")

    def append(
        self,
        rows: fs.Buffer | NDArray[np.uint8],
        input_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        prefix_hash: NDArray[np.uint64],
        release: Callable[[], None] | None = None,
        scales: NDArray[np.float32] | None = None,
    ) -> list[Extent]:
        """Write rows behind those written before. They are durable, and can be acknowledged, after a commit.

        Args:
            rows: the states' bytes, contiguous, [n * row_bytes]; not copied. Without ``release`` they are written, and
                free for reuse, on return. With it they are queued, and must stay as they are until it is called.
                Memory that begins at a multiple of 4096 bytes is written fastest.
            input_ids: int64 [n].
            positions: int64 [n].
            prefix_hash: uint64 [n], the chained token hash at each row.
            release: called once when the rows are no longer needed, written or not, from a thread of the store's, in
                any order; at once where there are no rows. It must be quick, and not call the store. When ``append``
                itself raises, it is not called.
            scales: float32 [n, C], what each state of each row is to be multiplied by; for a dataset in float8, and no
                other.

        Returns:
            Where the rows lie; more than one extent when a shard was filled.

        Raises:
            ValueError: the sizes do not agree.
            DiskFullError, StoreError: none of the rows counts, and no more are accepted.
        """
        view = (rows.data if isinstance(rows, np.ndarray) else memoryview(rows)).cast("B")
        self._check_scales(scales, len(input_ids))
        tokens = pack_tokens(input_ids, positions, prefix_hash, scales)
        if len(view) != len(tokens) * self.row_bytes:
            raise ValueError(f"rows: expected {len(tokens)} of {self.row_bytes} bytes; got {len(view)} bytes")
        self._require_open()
        lane = self._lanes.pick()
        pieces = self._plan(lane, view, tokens)
        if pieces:
            pieces[-1].release = release
        lane.appender.put(pieces)
        if release is not None and not pieces:
            release()
        self._rows += len(tokens)
        if self._full:
            self._begin()
        if release is None and pieces:
            with self._disk.waiting():
                lane.appender.wait(pieces[-1].number)
            if not all(piece.written for piece in pieces):
                self._disk.refuse_rows()
        return [Extent(piece.run.shard, piece.end - len(piece.tokens), len(piece.tokens)) for piece in pieces]

    def add_sample(
        self, rid: str, length: int, extents: Sequence[Extent], end_hash: int, media: Media | None = None
    ) -> None:
        """Have the next ``commit`` acknowledge a sample.

        Args:
            rid: the request's id.
            length: number of tokens S.
            extents: its rows, from position 0 to S - 1, all appended to this writer since ``open``.
            end_hash: the chained token hash of the last row.
            media: where its images are.

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
        self._pending.append(SampleRecord(rid, length, merged, end_hash, self._session_id, media))

    def add_failure(self, rid: str, reason: str, detail: str) -> None:
        """Have the next ``commit`` record that a request's sample is not stored.

        Args:
            rid: the request's id.
            reason: one word, such as ``non_finite``, ``zero_row`` or ``incomplete``.
            detail: one line for a person.
        """
        self._pending.append(FailureRecord(rid, reason, detail))

    def begin_commit(self) -> None:
        """Have everything appended and added so far made durable, and go on at once.

        While a commit is under way, what is asked for becomes one commit that follows it.

        Raises:
            DiskFullError, StoreError: see the class.
        """
        self._require_open()
        self._begin()
        self._disk.tell()

    def acknowledged(self) -> list[SampleRecord]:
        """The samples acknowledged since the last call of this or of ``commit``, without waiting.

        Raises:
            DiskFullError, StoreError: once after a failure that no other call has raised.
        """
        self._disk.tell()
        return self._commits.take()

    def commit(self) -> list[SampleRecord]:
        """Make everything appended and added so far durable. Shards that are full are finished, too.

        Returns:
            The samples acknowledged since the last call.

        Raises:
            DiskFullError: there was no room for rows that were queued; all else is committed.
            DiskFullError, StoreError: what was not acknowledged before is lost, and nothing more is accepted.
        """
        self._require_open()
        number = self._begin()
        with self._disk.waiting():
            self._commits.wait(number)
        self._disk.refuse_all()
        return self.acknowledged()

    def close(self) -> list[SampleRecord]:
        """Commit, finish the shard being written, and let go of the dataset, in any case. A second call does nothing.

        After a failure that is final nothing is written; the next ``open`` recovers.

        Returns:
            The samples acknowledged since the last call of ``commit`` or ``acknowledged``.

        Raises:
            DiskFullError, StoreError: the last commit or finishing the shard failed, or something before that no call
                has raised; ``acknowledged`` still gives the samples that a commit has acknowledged.
        """
        if self._closed:
            return []
        self._closed = True
        try:
            self._full += [lane.layout.record.shard for lane in self._lanes if lane.layout is not None]
            with self._disk.waiting():
                self._commits.wait(self._begin())
        finally:
            self._commits.stop()
            self._lanes.stop()
            for shard in self._shards.values():
                shard.close()
            self._shards.clear()
            self._dropped.detach()
            self._journal.close()
            self._lock.release()
        return self.acknowledged()

    def _check_scales(self, scales: NDArray[np.float32] | None, rows: int) -> None:
        expected = f"float32 {[rows, len(self.columns)]}" if self.info.scaled else "none"
        got = "none" if scales is None else f"{scales.dtype} {list(scales.shape)}"
        if got != expected:
            raise ValueError(f"scales: expected {expected} for rows of {self.info.dtype}; got {got}")

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self.directory}: the store is closed; open it anew")
        self._disk.refuse_all()

    def _begin(self) -> int:
        """Begin a commit of all that was put and added; its number."""
        runs, self._runs = self._runs, []
        for lane in self._lanes:
            lane.run = None
        pending, self._pending = self._pending, []
        full, self._full = self._full, []
        return self._commits.begin(runs, pending, full)

    def _plan(self, lane: Lane, view: memoryview, tokens: NDArray[np.void]) -> list[Piece]:
        """Distribute rows among a lane's shards: the one that it is filling, and the next ones where that is full."""
        pieces = []
        start = 0
        while start < len(tokens):
            run = self._run_with_room(lane)
            begin = self._shard_rows[run.shard]
            count = min(len(tokens) - start, self._max_rows - begin)
            self._shard_rows[run.shard] = begin + count
            states = view[start * self.row_bytes : (start + count) * self.row_bytes]
            pieces.append(Piece(run, begin + count, states, tokens[start : start + count]))
            start += count
        return pieces

    def _run_with_room(self, lane: Lane) -> Run:
        """The rows since the last commit in the shard being filled, or in the next shard where that one is full."""
        if lane.layout is not None and self._shard_rows[lane.layout.record.shard] >= self._max_rows:
            self._full.append(lane.layout.record.shard)
            lane.layout = lane.run = None
        if lane.layout is None:
            lane.layout = ShardLayout.plan(self.info, self.writer, self._next_shard, self.columns, self._max_rows)
            self._shard_rows[self._next_shard] = 0
            self._next_shard += 1
        if lane.run is None:
            lane.run = Run(lane.layout, self._shard_rows[lane.layout.record.shard])
            self._runs.append(lane.run)
        return lane.run
