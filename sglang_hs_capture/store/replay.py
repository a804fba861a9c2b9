"""What a writer's journal says: its shards, samples and failures, each record checked against those before it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_hs_capture.errors import StoreError
from sglang_hs_capture.store.journal import malformed, read_records
from sglang_hs_capture.store.schema import VERSION, FailureRecord, RowsRecord, SampleRecord, ShardRecord, count_of


@dataclass
class ShardState:
    """A shard as its writer's journal has it: only the first ``rows`` rows are durable."""

    record: ShardRecord
    rows: int = 0
    finished: bool = False
    checksums: list[RowsRecord] = field(default_factory=list)


@dataclass
class Replay:
    """A writer's journal, read to its end.

    ``samples`` and ``failures`` are in the order written; with ``keep_samples`` false they are checked and not kept.
    """

    writer: str
    keep_samples: bool = True
    shards: dict[int, ShardState] = field(default_factory=dict)
    samples: list[SampleRecord] = field(default_factory=list)
    failures: list[FailureRecord] = field(default_factory=list)

    def apply(self, raw: Mapping[str, Any]) -> None:
        """Apply the next record; one of a type that this release does not know is passed over.

        Raises:
            ValueError, KeyError, TypeError: the record contradicts those before it, or is malformed.
        """
        match raw["t"]:
            case "journal":
                if count_of(raw, "version") > VERSION:
                    raise StoreError(
                        f"the journal has version {raw['version']}, this release reads up to {VERSION}; upgrade"
                    )
                _require(raw["writer"] == self.writer, f"it belongs to the writer {raw['writer']!r}")
            case "shard":
                record = ShardRecord.from_json(raw)
                _require(record.shard not in self.shards, "the shard is there already")
                self.shards[record.shard] = ShardState(record)
            case "rows":
                self._rows(RowsRecord.from_json(raw))
            case "finished":
                state = self._shard(count_of(raw, "shard"))
                _require(state.rows == raw["rows"], f"the shard has {state.rows} rows")
                state.finished = True
            case "sample":
                self._sample(SampleRecord.from_json(raw))
            case "failed":
                failure = FailureRecord.from_json(raw)
                if self.keep_samples:
                    self.failures.append(failure)

    def columns(self, sample: SampleRecord) -> tuple[str, ...]:
        """The columns of a sample's rows."""
        return self.shards[sample.extents[0].shard].record.columns

    def _shard(self, number: int) -> ShardState:
        _require(number in self.shards, f"there is no shard {number}")
        return self.shards[number]

    def _rows(self, rows: RowsRecord) -> None:
        state = self._shard(rows.shard)
        _require(rows.start == state.rows and rows.count > 0, f"the shard's next row is {state.rows}")
        _require(not state.finished, "the shard is finished")
        state.rows += rows.count
        state.checksums.append(rows)

    def _sample(self, sample: SampleRecord) -> None:
        _require(sample.length > 0, "the sample is empty")
        _require(sum(e.count for e in sample.extents) == sample.length, "the extents do not add up to the length")
        for extent in sample.extents:
            rows = self._shard(extent.shard).rows
            _require(
                extent.start >= 0 and extent.count > 0 and extent.start + extent.count <= rows,
                f"{extent} lies outside the shard's {rows} durable rows",
            )
        columns = {self.shards[extent.shard].record.columns for extent in sample.extents}
        _require(len(columns) == 1, "the extents lie in shards of different columns")
        if self.keep_samples:
            self.samples.append(sample)


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def journal_path(directory: Path, writer: str) -> Path:
    """The journal of a writer."""
    return directory / f"journal-{writer}.jsonl"


def journal_writers(directory: Path) -> list[str]:
    """The names of all who ever wrote to a dataset, sorted."""
    return sorted(p.name.removeprefix("journal-").removesuffix(".jsonl") for p in directory.glob("journal-*.jsonl"))


def replay_journal(directory: Path, writer: str, *, keep_samples: bool = True) -> Replay:
    """Read a writer's journal, also while it grows; a torn last line is passed over.

    Raises:
        CorruptionError: a line is damaged or contradicts those before it; the message has the file and the line.
    """
    path = journal_path(directory, writer)
    replay = Replay(writer, keep_samples)
    for number, raw in read_records(path):
        try:
            replay.apply(raw)
        except StoreError as error:
            raise StoreError(f"{path}, line {number}: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise malformed(f"{path}, line {number}", error, raw) from None
    return replay
