"""Journals and ledger read past whatever is damaged in them, so that one bad line hides nothing behind it."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_hs_capture.errors import StoreError
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.journal import decode_line
from sglang_hs_capture.store.known_answers import KNOWN_ANSWERS_FILE, KnownAnswer
from sglang_hs_capture.store.replay import Replay, ShardState, journal_path
from sglang_hs_capture.store.requests import LEDGER_FILE, DroppedRecord, RequestRecord, Requests
from sglang_hs_capture.store.schema import ShardRecord, sample_key
from sglang_hs_capture.store.shard import ShardPaths
from sglang_hs_capture.verify.findings import Finding, Findings
from sglang_hs_capture.verify.shards import record_of_header

# A line longer than this is no record; it is passed over without being held in memory.
MAX_LINE = 1 << 28
MOST_ROWS = 1 << 48


@dataclass
class LineCounts:
    """How many lines a file has, and how many of them are damaged."""

    lines: int = 0
    damaged: int = 0


@dataclass
class Journal:
    """A writer's journal: what its sound lines say, and how many there are.

    ``unknown_shards`` are shards that records speak of and whose own record is missing.
    """

    replay: Replay
    counts: LineCounts = field(default_factory=LineCounts)
    unknown_shards: dict[int, int] = field(default_factory=dict)


def sound_lines(path: Path, kind: str, findings: Findings, counts: LineCounts) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each record that can be read, with its line number from 1; what cannot be read becomes a finding.

    Args:
        kind: of the finding for a damaged line.

    """
    try:
        yield from _sound_lines(path, kind, findings, counts)
    except FileNotFoundError:
        return
    except OSError as error:
        findings.add(Finding("unreadable", f"behind line {counts.lines}: {error.strerror or error}", path.name))


def _sound_lines(path: Path, kind: str, findings: Findings, counts: LineCounts) -> Iterator[tuple[int, dict[str, Any]]]:
    with os.fdopen(fs.open_to_read(path), "rb") as file:
        number = 0
        while line := file.readline(MAX_LINE):
            number += 1
            counts.lines += 1
            if not line.endswith(b"\n"):
                counts.damaged += 1
                _without_newline(path, kind, number, line, findings)
                while line and not line.endswith(b"\n"):  # the rest of a line that is too long
                    line = file.readline(MAX_LINE)
                continue
            try:
                record = decode_line(line)
            except (ValueError, RecursionError) as error:
                counts.damaged += 1
                findings.add(Finding(kind, f"line {number}: {error}; its {len(line)} bytes are passed over", path.name))
                continue
            yield number, record


def _without_newline(path: Path, kind: str, number: int, line: bytes, findings: Findings) -> None:
    """Tell a line that was cut off in a crash from one whose newline was changed, which is whole otherwise."""
    whole = len(line) == MAX_LINE
    for candidate in (line, line[:-1]):
        try:
            decode_line(candidate)
            whole = True
        except (ValueError, RecursionError):
            continue
    if whole:
        findings.add(Finding(kind, f"line {number}: it does not end with a newline, and is whole otherwise", path.name))
    else:
        findings.add(Finding("torn-line", f"line {number}: the last {len(line)} bytes are no whole line", path.name))


def read_journal(directory: Path, writer: str, findings: Findings) -> Journal:
    """Read a writer's journal to its end.

    A record that contradicts those before it is a finding. Where the rows of a shard have a gap, because a line is
    damaged, those behind the gap count nevertheless, so that they are checked too.

    Raises:
        StoreError: it is of a newer version.
    """
    path = journal_path(directory, writer)
    journal = Journal(Replay(writer))
    for number, raw in sound_lines(path, "journal-line", findings, journal.counts):
        if number == 1 and raw["t"] != "journal":
            text = f"line {number}: a {raw['t']!r} record, and no line before it says whose journal this is"
            findings.add(Finding("journal-record", text, path.name))
        shard = raw.get("shard")
        if raw["t"] in {"rows", "finished"} and isinstance(shard, int) and shard not in journal.replay.shards:
            recovered = record_of_header(ShardPaths.of(directory, writer, shard).finished, shard)
            if recovered is not None and shard not in journal.unknown_shards:
                journal.replay.shards[shard] = ShardState(ShardRecord(shard, *recovered))
        if raw["t"] in {"rows", "finished"} and isinstance(shard, int) and shard not in journal.replay.shards:
            journal.unknown_shards[shard] = journal.unknown_shards.get(shard, 0) + 1
            continue
        try:
            _apply(journal.replay, raw)
        except StoreError as error:
            raise StoreError(f"{path}, line {number}: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"{error!r}" if isinstance(error, KeyError) else str(error)
            text = json.dumps(raw)
            shown = text if len(text) <= 300 else f"{text[:300]}..."
            rid = raw.get("rid")
            finding = Finding(
                "journal-record",
                f"line {number}: {problem} in the record {shown}",
                path.name,
                rid if isinstance(rid, str) else None,
            )
            findings.add(finding)
    for shard, records in sorted(journal.unknown_shards.items()):
        findings.add(
            Finding(
                "journal-record",
                f"{records} records speak of shard {shard}, whose own record is missing: its rows are not checked",
                path.name,
            )
        )
    return journal


def _apply(replay: Replay, raw: dict[str, Any]) -> None:
    if raw["t"] in {"sample", "failed"} and not isinstance(raw["rid"], str):
        raise ValueError(f"a request cannot have the id {raw['rid']!r}")
    if raw["t"] == "rows" and not int(raw["start"]) + int(raw["count"]) < MOST_ROWS:
        raise ValueError("no shard has so many rows")
    try:
        replay.apply(raw)
    except ValueError:
        if raw["t"] == "rows":
            state, start = replay.shards[raw["shard"]], raw["start"]
            if isinstance(start, int) and start > state.rows:
                gap, state.rows = state.rows, start
                replay.apply(raw)
                raise ValueError(
                    f"rows {gap} to {start - 1} of shard {raw['shard']} have no record before it"
                ) from None
        if raw["t"] == "finished" and isinstance(raw.get("rows"), int):
            replay.shards[raw["shard"]].finished = True
            replay.shards[raw["shard"]].rows = max(replay.shards[raw["shard"]].rows, raw["rows"])
        raise


@dataclass
class Ledger:
    """The ledger: what its sound lines say, and how many there are; ``exists`` is false where there is no such file."""

    content: Requests
    counts: LineCounts
    exists: bool


def read_ledger(directory: Path, findings: Findings) -> Ledger:
    """Read the ledger to its end.

    A record with a wrong loss mask still names its sample, so that the sample is checked.
    """
    path = directory / LEDGER_FILE
    ledger = Ledger(Requests({}, {}), LineCounts(), path.exists())
    for number, raw in sound_lines(path, "ledger-line", findings, ledger.counts):
        if raw["t"] not in {"request", "dropped"}:
            continue
        sample = raw["id"] if isinstance(raw.get("id"), str) else None
        try:
            if raw["t"] == "dropped":
                ledger.content.add(DroppedRecord.from_json(raw))
                continue
            mask, runs = raw["loss_mask"], raw["loss_mask"]
            if not _is_mask(mask, raw["length"]):
                covered = sum(mask) if isinstance(mask, list) and all(isinstance(run, int) for run in mask) else "no"
                text = f"line {number}: the loss mask covers {covered} tokens of {raw['length']}"
                findings.add(Finding("loss-mask", text, path.name, sample))
                runs = [int(raw["length"])]
            record = RequestRecord.from_json({**raw, "loss_mask": runs})
            if record.key != (key := sample_key(record.id, record.images)):
                raise ValueError(f"the key of this id is {key}, not {record.key}")
            ledger.content.add(record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            findings.add(Finding("ledger-record", f"line {number}: {error!r}", path.name, sample))
    return ledger


def read_answers(directory: Path, findings: Findings) -> LineCounts | None:
    """Check the lines of the known answers; None where there are none."""
    path = directory / KNOWN_ANSWERS_FILE
    if not path.exists():
        return None
    counts = LineCounts()
    for number, raw in sound_lines(path, "answer-line", findings, counts):
        try:
            if raw["t"] == "answer":
                KnownAnswer.from_json(raw)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            findings.add(Finding("answer-record", f"line {number}: {error!r}", path.name))
    return counts


def _is_mask(runs: Any, length: Any) -> bool:
    """Whether these are run lengths of zeros and ones in turn, as ``rle_encode`` makes them, for so many tokens."""
    if not isinstance(runs, list) or not all(isinstance(run, int) and run >= 0 for run in runs):
        return False
    return bool(runs) and sum(runs) == length and 0 not in runs[1:]
