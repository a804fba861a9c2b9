"""Commits, in a thread of their own: what was appended is made durable, then the journal says so.

The order that makes a sample safe: states, then tokens, then the names of new shards, then journal lines, each made
durable before the next is begun. A record in the journal therefore names only what was durable before it.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_hs_capture.errors import StoreError
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.appender import Run
from sglang_hs_capture.store.disk import DiskHealth
from sglang_hs_capture.store.identity import SHARD_FOLDER
from sglang_hs_capture.store.journal import JournalFile
from sglang_hs_capture.store.lanes import Lanes, Marks
from sglang_hs_capture.store.recovery import finished_record
from sglang_hs_capture.store.schema import FailureRecord, SampleRecord
from sglang_hs_capture.store.shard import PartialShard, finish


@dataclass
class Request:
    """What one commit makes durable.

    Attributes:
        number: counts the commits, from 1.
        upto: the last piece of each lane that it covers.
        runs: the rows, in the order appended.
        records: samples and failures, in the order added.
        full: shards to be finished afterwards: no more rows come.
    """

    number: int
    upto: Marks = ()
    runs: list[Run] = field(default_factory=list)
    records: list[SampleRecord | FailureRecord] = field(default_factory=list)
    full: list[int] = field(default_factory=list)


class Commits:
    """Commits one request after the other; requests that wait for the one under way become one.

    The journal is this thread's alone. All methods are for any thread.
    """

    def __init__(
        self,
        directory: Path,
        health: DiskHealth,
        lanes: Lanes,
        shards: dict[int, PartialShard],
        journal: JournalFile,
    ) -> None:
        """Start the thread.

        Args:
            shards: those that the lanes have opened; a finished one is taken out.
        """
        self._directory = directory
        self._health = health
        self._lanes = lanes
        self._shards = shards
        self._journal = journal
        self._changed = health.changed
        self._asked = health.condition()
        self._waiting: Request | None = None
        self._begun = 0
        self._done = 0
        self._durable: dict[int, int] = {}
        self._acknowledged: list[SampleRecord] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._commit_all, name="hs-capture-store-sync", daemon=True)
        self._thread.start()

    def begin(
        self, runs: Sequence[Run], records: Sequence[SampleRecord | FailureRecord], full: Sequence[int] = ()
    ) -> int:
        """Ask for a commit of everything put so far.

        Returns:
            The number of the commit, for ``wait``.
        """
        with self._changed:
            request = self._waiting or Request(self._begun + 1)
            self._waiting = request
            request.upto = self._lanes.marks()
            request.runs += runs
            request.records += records
            request.full += full
            self._asked.notify()
            return request.number

    def wait(self, number: int) -> None:
        """Wait until the commit of this number has ended, or everything has."""
        with self._changed:
            self._changed.wait_for(lambda: self._done >= number or self._health.failed is not None)

    def take(self) -> list[SampleRecord]:
        """The samples acknowledged since the last call."""
        with self._changed:
            taken, self._acknowledged = self._acknowledged, []
        return taken

    def stop(self) -> None:
        """End the thread once all commits asked for have ended."""
        with self._changed:
            self._stopping = True
            self._asked.notify()
        self._thread.join()

    def _commit_all(self) -> None:
        while (request := self._next()) is not None:
            try:
                self._lanes.wait(request.upto)
                self._commit(request)
                self._finish_full(request.full)
            except BaseException as error:
                self._health.fail_unless_remembered(error)
            with self._changed:
                self._done = request.number
                self._changed.notify_all()

    def _next(self) -> Request | None:
        with self._asked:
            self._asked.wait_for(lambda: self._waiting or self._stopping or self._health.failed is not None)
            if self._health.failed is not None:
                return None
            request, self._waiting = self._waiting, None
            self._begun = request.number if request else self._begun
            return request

    def _commit(self, request: Request) -> None:
        runs = [run for run in request.runs if run.count]
        self._sync(dict.fromkeys(run.shard for run in runs))
        for run in runs:
            if run.start == 0:
                self._journal.append(run.layout.record.to_json())
            self._journal.append(run.record().to_json())
            self._durable[run.shard] = run.start + run.count
        records = [record for record in request.records if self._is_whole(record)]
        for record in records:
            self._journal.append(record.to_json())
        with self._health.step(self._journal.path, "make records durable", "sync", lasting=True):
            self._journal.sync()
        self._health.forget_space()
        with self._changed:
            self._acknowledged += [record for record in records if isinstance(record, SampleRecord)]

    def _sync(self, numbers: dict[int, None]) -> None:
        """Make the rows of some shards durable, and the shards' names."""
        shards = [self._shards[number] for number in numbers]
        for shard in shards:
            with self._health.step(shard.paths.partial, "make rows durable", "sync", lasting=True):
                shard.sync_states()
        for shard in shards:
            with self._health.step(shard.paths.tokens, "make rows durable", "sync", lasting=True):
                shard.sync_tokens()
        if not all(shard.named for shard in shards):
            folder = self._directory / SHARD_FOLDER
            with self._health.step(folder, "make the names of shards durable", "sync", lasting=True):
                fs.fsync_dir(folder)
            for shard in shards:
                shard.named = True

    def _is_whole(self, record: SampleRecord | FailureRecord) -> bool:
        """Whether a record may be written: not that of a sample of which rows were refused."""
        return isinstance(record, FailureRecord) or all(
            extent.start + extent.count <= self._durable.get(extent.shard, 0) for extent in record.extents
        )

    def _finish_full(self, numbers: Sequence[int]) -> None:
        """Finish shards whose rows are all durable, or remove those that have none."""
        failure: StoreError | None = None
        for number in numbers:
            shard = self._shards.pop(number, None)
            if shard is not None:
                shard.close()
                try:
                    self._finish_or_drop(shard, self._durable.get(number, 0))
                except StoreError as error:
                    failure = error
        if failure is not None:
            raise failure

    def _finish_or_drop(self, shard: PartialShard, rows: int) -> None:
        paths, number = shard.paths, shard.layout.record.shard
        with self._health.step(paths.partial, "finish", "sync", lasting=False):
            if rows:
                finish(self._directory, shard.layout, rows)
            else:
                fs.remove(paths.partial)
        if rows:
            self._journal.append(finished_record(number, rows))
            with self._health.step(self._journal.path, "make records durable", "sync", lasting=True):
                self._journal.sync()
        with self._health.step(paths.tokens, "remove", "sync", lasting=False):
            fs.remove(paths.tokens)
