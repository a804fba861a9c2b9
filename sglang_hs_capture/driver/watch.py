"""What the capturing processes write, followed while they write it: acknowledged samples, failures, and their state."""

from pathlib import Path
from typing import Any

from sglang_hs_capture.errors import HsCaptureError, StoreError, class_of_kind
from sglang_hs_capture.store.identity import read_info
from sglang_hs_capture.store.journal import JournalTail, malformed
from sglang_hs_capture.store.replay import journal_path, journal_writers
from sglang_hs_capture.store.schema import FailureRecord, SampleRecord, ShardRecord
from sglang_hs_capture.store.session import Counters, SessionRecord, read_sessions, replica_of
from sglang_hs_capture.store.stages import StageJoin

_SHARED = ("rows", "samples", "failed", "incomplete")
_NOW = ("ring_bytes", "slot_table_bytes")


class JournalWatch:
    """Follows every journal of a dataset, those included that appear later.

    With pipeline parallelism every stage acknowledges a sample for its own columns; the last one makes it whole.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tails: dict[str, JournalTail] = {}
        self._columns: dict[tuple[str, int], tuple[str, ...]] = {}
        self._join: StageJoin[None] | None = None

    def poll(self) -> list[SampleRecord | FailureRecord]:
        """The samples acknowledged, with all columns of the dataset, and the failures recorded since the last call.

        Raises:
            CorruptionError: a journal is damaged.
        """
        found: list[SampleRecord | FailureRecord] = []
        for writer in journal_writers(self._directory):
            tail = self._tails.setdefault(writer, JournalTail(journal_path(self._directory, writer)))
            for raw in tail.poll():
                try:
                    record = self._record(writer, raw)
                except (KeyError, TypeError, ValueError, IndexError) as error:
                    raise malformed(tail.path, error, raw) from None
                if record is not None:
                    found.append(record)
        return found

    def _record(self, writer: str, raw: dict[str, Any]) -> SampleRecord | FailureRecord | None:
        """What one record of a journal tells the driver."""
        match raw["t"]:
            case "shard":
                shard = ShardRecord.from_json(raw)
                self._columns[writer, shard.shard] = shard.columns
            case "sample":
                sample = SampleRecord.from_json(raw)
                return sample if self._is_whole(writer, sample) else None
            case "failed":
                return FailureRecord.from_json(raw)
        return None

    def _is_whole(self, writer: str, sample: SampleRecord) -> bool:
        if self._join is None:
            # What a dataset holds never changes, and is written before the first sample.
            self._join = StageJoin(read_info(self._directory).columns)
        return self._join.add(sample, self._columns[writer, sample.extents[0].shard], None).whole


class SessionWatch:
    """Follows the session records of a run's servers, those included that begin while it goes on.

    Counters are told from the start of the watch.
    """

    def __init__(self, directory: Path, sessions: list[SessionRecord]) -> None:
        self._directory = directory
        # Each writer's sessions in turn: a server may be started anew.
        self._sessions = {record.writer: [record] for record in sessions}
        self._base = {record.session_id: record.counters for record in sessions}
        followed = {record.session_id for record in sessions}
        self._others = {record.session_id for record in read_sessions(directory)} - followed

    def poll(self) -> list[SessionRecord]:
        """Read the records anew.

        Raises:
            CorruptionError, StoreError: one of them cannot be read.
        """
        for record in read_sessions(self._directory):
            if record.session_id in self._others:
                continue
            known = self._sessions.setdefault(record.writer, [record])
            if known[-1].session_id == record.session_id:
                known[-1] = record
            else:
                known.append(record)
        return [known[-1] for known in self._sessions.values()]

    def stops(self) -> dict[str, HsCaptureError]:
        """For each server or replica whose capture has stopped, such as ``dp0``, the reason.

        It is the capturing process's own, and of that error's class; a StoreError where the record names no class.
        """
        found: dict[str, HsCaptureError] = {}
        for *_, record in self._sessions.values():
            if record.state == "stopped":
                reason = record.error or "no reason given"
                kind = class_of_kind(record.error_kind, StoreError)
                safe = "" if "acknowledged" in reason else "; all acknowledged samples are safe"
                found.setdefault(replica_of(record), kind(f"capture has stopped: {reason}{safe}; run again to go on"))
        return found

    def ends(self) -> set[str]:
        """The servers or replicas, such as ``dp0``, whose capture was ended in order and has not begun anew."""
        return {replica_of(record) for *_, record in self._sessions.values() if record.state == "closed"}

    def counters(self) -> Counters:
        """What all writers together have done since the watch began.

        The stages of a pipeline count the same rows and samples, each for its own columns: the furthest one tells.
        """
        total = Counters()
        shared: dict[tuple[str, int, str], float] = {}
        for known in self._sessions.values():
            for number, record in enumerate(known):
                base = self._base.get(record.session_id, Counters())
                for name, value in vars(record.counters).items():
                    now = value if record is known[-1] else 0
                    gain = now if name in _NOW else value - getattr(base, name)
                    if name in _SHARED:
                        key = (replica_of(record), number, name)
                        gain, before = max(gain, shared.get(key, 0)), shared.get(key, 0)
                        shared[key] = gain
                        gain -= before
                    setattr(total, name, getattr(total, name) + gain)
        return total
