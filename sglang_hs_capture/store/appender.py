"""Rows on their way to the disk: one thread writes them, another computes their checksums meanwhile."""

import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from sglang_hs_capture.store.disk import DiskHealth
from sglang_hs_capture.store.schema import RowsRecord
from sglang_hs_capture.store.shard import PartialShard, ShardLayout, ShardPaths

_BATCH_BYTES = 64 << 20
_BATCH_PIECES = 512


@dataclass(eq=False)
class Run:
    """Rows of a shard between two commits: they become one record of the journal.

    Attributes:
        start: the first row.
        count: rows that are written and whose checksum is known.
        xxh3: the checksum of these rows' states.
        scales_xxh3: the checksum of their scales; None where rows have none.
    """

    layout: ShardLayout
    start: int
    count: int = 0
    xxh3: int = 0
    scales_xxh3: int | None = None
    hasher: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)
    scales_hasher: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)

    @property
    def shard(self) -> int:
        """The shard's number."""
        return self.layout.record.shard

    def record(self) -> RowsRecord:
        """What the journal says of these rows once they are durable."""
        return RowsRecord(self.shard, self.start, self.count, self.xxh3, self.scales_xxh3)


@dataclass(eq=False)
class Piece:
    """Rows of one ``append`` that go to one shard.

    Attributes:
        end: the shard's row behind the last one.
        states: uint8 [n * row_bytes]; borrowed until ``release``.
        tokens: the layout's ``token_dtype`` [n].
        release: called when the states are no longer needed.
        written: whether all rows are on their way to the disk; None while that is open.
        xxh3: the checksum of the run's states up to and with these rows.
        scales_xxh3: likewise of its scales; None where rows have none.
        hashed: whether the checksum has been computed, or is not wanted.
    """

    run: Run
    end: int
    states: memoryview
    tokens: NDArray[np.void]
    release: Callable[[], None] | None = None
    number: int = 0
    written: bool | None = None
    xxh3: int = 0
    scales_xxh3: int | None = None
    hashed: bool = False


class Appender:
    """Writes pieces in the order in which they are put, and opens their shards.

    A piece is *settled* when it is written and its checksum known, or when it was given up after a failure. Pieces are
    settled in order, and released just before. All methods are for any thread.

    Attributes:
        backlog: bytes of states put and not settled.
    """

    def __init__(self, directory: Path, health: DiskHealth, shards: dict[int, PartialShard], *, direct: bool) -> None:
        """Start the threads.

        Args:
            shards: where the shards that are opened go, by number; whoever finishes one takes it out.

        Raises:
            RuntimeError: the process may start no more threads; none is left behind.
        """
        self._directory = directory
        self._health = health
        self._direct = direct
        self._changed = health.changed
        # Each thread is woken for its own work only: a wake-up for nothing takes the interpreter's lock from another.
        self._writable = health.condition()
        self._hashable = health.condition()
        self._to_write: deque[Piece] = deque()
        self._to_hash: deque[Piece] = deque()
        self._unsettled: deque[Piece] = deque()
        self._last = 0
        self._settled = 0
        self._stopping = False
        self._shards = shards
        self.backlog = 0
        self._threads: list[threading.Thread] = []
        try:
            for name, target in (("store-write", self._write_all), ("store-hash", self._hash_all)):
                thread = threading.Thread(target=target, name=f"hs-capture-{name}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.stop()
            raise

    @property
    def last(self) -> int:
        """The number of the piece put last."""
        return self._last

    def put(self, pieces: Sequence[Piece]) -> None:
        """Queue pieces, all or none.

        Raises:
            DiskFullError, StoreError: something failed before; none is taken.
        """
        with self._changed:
            self._health.refuse_rows()
            for piece in pieces:
                self._last += 1
                piece.number = self._last
                self.backlog += piece.states.nbytes
            self._to_write.extend(pieces)
            self._to_hash.extend(pieces)
            self._writable.notify()
            self._hashable.notify()

    def wait(self, number: int) -> None:
        """Wait until the piece of this number is settled, well or not."""
        with self._changed:
            self._changed.wait_for(lambda: self._settled >= number)

    def stop(self) -> None:
        """End the threads once all pieces are settled."""
        with self._changed:
            self._stopping = True
            self._writable.notify()
            self._hashable.notify()
        for thread in self._threads:
            thread.join()

    @property
    def _ending(self) -> bool:
        return self._stopping or self._health.failed is not None

    def _write_all(self) -> None:
        while (batch := self._next_batch()) is not None:
            try:
                if batch:
                    self._write(batch)
            except BaseException as error:
                self._health.fail_unless_remembered(error)
                _let_go(error)
            self._unsettled.extend(batch)
            self._settle()

    def _next_batch(self) -> list[Piece] | None:
        """The next pieces that can be written in one go; none where one can be settled; None at the end."""
        with self._writable:
            while not self._to_write:
                if self._unsettled and self._unsettled[0].hashed:
                    return []
                if self._ending and not self._unsettled:
                    return None
                self._writable.wait()
            batch = [self._to_write.popleft()]
            size = batch[0].states.nbytes
            while self._to_write and len(batch) < _BATCH_PIECES:
                piece = self._to_write[0]
                size += piece.states.nbytes
                if size > _BATCH_BYTES or piece.run.shard != batch[0].run.shard:
                    break
                batch.append(self._to_write.popleft())
            return batch

    def _write(self, batch: list[Piece]) -> None:
        number = batch[0].run.shard
        try:
            if self._health.full is None and self._health.failed is None:
                self._append(self._shards.get(number) or self._open(batch[0].run.layout), batch)
        finally:
            shard = self._shards.get(number)
            for piece in batch:
                piece.written = shard is not None and piece.end <= shard.rows

    def _open(self, layout: ShardLayout) -> PartialShard:
        path = ShardPaths.of(self._directory, layout.writer, layout.record.shard).partial
        with self._health.step(path, "create", "write", lasting=False):
            shard = self._shards[layout.record.shard] = PartialShard(self._directory, layout, direct=self._direct)
        return shard

    def _append(self, shard: PartialShard, batch: list[Piece]) -> None:
        size = sum(piece.states.nbytes for piece in batch)
        step = self._health.step(shard.paths.partial, "write", "write", lasting=False)
        with step, self._health.room_for(size):
            tokens = batch[0].tokens if len(batch) == 1 else np.concatenate([piece.tokens for piece in batch])
            shard.append([piece.states for piece in batch], tokens)

    def _settle(self) -> None:
        """Settle pieces from the front, as far as their checksums are known."""
        while self._unsettled and self._unsettled[0].hashed:
            piece = self._unsettled.popleft()
            if piece.written:
                piece.run.count, piece.run.xxh3 = piece.end - piece.run.start, piece.xxh3
                piece.run.scales_xxh3 = piece.scales_xxh3
            size, piece.states = piece.states.nbytes, memoryview(b"")
            try:
                if piece.release is not None:
                    piece.release()
            except BaseException as error:
                self._health.fail(error)
            with self._changed:
                self._settled = piece.number
                self.backlog -= size
                self._changed.notify_all()

    def _hash_all(self) -> None:
        while (piece := self._next_to_hash()) is not None:
            try:
                # Behind a piece that is not written there is none that is, so the checksums of those before it hold.
                if piece.written is not False:
                    # ``update`` lets go of the GIL for large buffers in every xxhash release.
                    piece.run.hasher.update(piece.states)
                    piece.xxh3 = piece.run.hasher.intdigest()
                    if piece.run.layout.info.scaled:
                        piece.run.scales_hasher.update(np.ascontiguousarray(piece.tokens["scales"]).data)
                        piece.scales_xxh3 = piece.run.scales_hasher.intdigest()
            except BaseException as error:
                self._health.fail(error)
            with self._writable:
                piece.hashed = True
                self._writable.notify()

    def _next_to_hash(self) -> Piece | None:
        with self._hashable:
            self._hashable.wait_for(lambda: self._to_hash or self._ending)
            return self._to_hash.popleft() if self._to_hash else None


def _let_go(error: BaseException | None) -> None:
    """Forget the variables of the calls that failed: they hold on to memory that its owner may want to unmap."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__
