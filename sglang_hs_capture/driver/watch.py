"""What the capturing processes write, followed while they write it: acknowledged samples, failures, and their state."""

from pathlib import Path
from typing import Any

from sglang_hs_capture.errors import StoreError, class_of_kind
from sglang_hs_capture.store.identity import read_info
from sglang_hs_capture.store.journal import JournalTail, malformed
from sglang_hs_capture.store.replay import journal_path, journal_writers
from sglang_hs_capture.store.schema import FailureRecord, SampleRecord, ShardRecord
from sglang_hs_capture.store.session import Counters, SessionRecord, read_sessions, replica_of

_SHARED = ("rows", "samples", "failed", "incomplete")


class JournalWatch:
    """Follows every journal of a dataset, those included that appear later.

    With pipeline parallelism every stage acknowledges a sample for its own columns; the last one makes it whole.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tails: dict[str, JournalTail] = {}
        self._columns: dict[tuple[str, int], tuple[str, ...]] = {}
        self._missing: dict[tuple[str, int, int], frozenset[str]] = {}
        self._all: frozenset[str] = frozenset()

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
        key = (sample.rid, sample.length, sample.end_hash)
        # What a dataset holds never changes, and is written before the first sample.
        self._all = self._all or frozenset(read_info(self._directory).columns)
        missing = self._missing.pop(key, self._all).difference(self._columns[writer, sample.extents[0].shard])
        if missing:
            self._missing[key] = missing
        return not missing


class SessionWatch:
    """Follows the session records of one server's writers; counters are told from the start of the watch."""

    def __init__(self, directory: Path, sessions: list[SessionRecord]) -> None:
        self._directory = directory
        self._latest = {record.writer: record for record in sessions}
        self._base = {record.session_id: record.counters for record in sessions}

    def poll(self) -> list[SessionRecord]:
        """Read the records anew.

        Raises:
            CorruptionError, StoreError: one of them cannot be read.
        """
        for record in read_sessions(self._directory):
            if record.writer in self._latest:
                self._latest[record.writer] = record
        return list(self._latest.values())

    def check(self) -> None:
        """Raise if capture has stopped.

        Raises:
            HsCaptureError: with the capturing process's own reason, and of that error's class; a StoreError where the
                record names no class.
        """
        for record in self._latest.values():
            if record.state == "stopped":
                reason = record.error or "no reason given"
                kind = class_of_kind(record.error_kind, StoreError)
                safe = "" if "acknowledged" in reason else "; all acknowledged samples are safe"
                raise kind(f"capture has stopped: {reason}{safe}; run again to go on")

    def counters(self) -> Counters:
        """What all writers together have done since the watch began.

        The stages of a pipeline count the same rows and samples, each for its own columns: the furthest one tells.
        """
        total = Counters()
        shared: dict[tuple[str, str], float] = {}
        for record in self._latest.values():
            base = self._base.get(record.session_id, Counters())
            replica = replica_of(record)
            for name, value in vars(record.counters).items():
                gain = value if name == "ring_bytes" else value - getattr(base, name)
                if name in _SHARED:
                    gain, before = max(gain, shared.get((replica, name), 0)), shared.get((replica, name), 0)
                    shared[replica, name] = gain
                    gain -= before
                setattr(total, name, getattr(total, name) + gain)
        return total
