"""The check of a whole dataset: structure first, then every byte of its shards, in several threads."""

import json
import os
import random
import threading
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from sglang_hs_capture.errors import StoreError
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.elements import to_float32
from sglang_hs_capture.store.identity import DATASET_FILE, FINAL_NORM_FILE, SHARD_FOLDER, read_info
from sglang_hs_capture.store.index import SampleEntry
from sglang_hs_capture.store.known_answers import KNOWN_ANSWERS_FILE
from sglang_hs_capture.store.origin import Origin, origin_path, read_origins
from sglang_hs_capture.store.replay import ShardState, journal_path, journal_writers
from sglang_hs_capture.store.schema import DTYPE_OF_SAFETENSORS, DatasetInfo, RowsRecord, check_writer
from sglang_hs_capture.store.session import is_running, read_session
from sglang_hs_capture.store.shard import ShardLayout, ShardPaths
from sglang_hs_capture.verify.findings import Finding, Findings
from sglang_hs_capture.verify.journals import Journal, LineCounts, read_answers, read_journal, read_ledger
from sglang_hs_capture.verify.owners import Owners
from sglang_hs_capture.verify.samples import check_tokens, join
from sglang_hs_capture.verify.shards import Job, ShardFile, StateCheck, check_file, info_of_header, jobs_of
from sglang_hs_capture.verify.statistics import Extreme, Place, Statistics

OPEN_SHARDS = 64
MOST_BYTES = 2**60
SAMPLES_PER_TASK = 256
# Norms this many times above or below the median of their column are told. Massive activations at a prompt's first
# token and at delimiters lie tens to hundreds of times above it, and are right.
OUTLIER_ABOVE, OUTLIER_BELOW = 1024.0, 1 / 1024
EQUAL_NORMS_ROWS = 8
EQUAL_NORMS_SPREAD = 1e-6


class CheckView:
    """Where a check reports to while it goes on; this one keeps silent. Called from several threads."""

    def begin(self, what: str, total: int, unit: str) -> None:
        """A part of the check begins: ``total`` of ``unit``, which is ``"bytes"`` or ``"samples"``."""

    def advance(self, amount: int) -> None:
        """So much of it is done since the last call."""


@dataclass(frozen=True)
class CheckSettings:
    """How much is looked at.

    Attributes:
        samples: look at the states of so many samples only, chosen at random; structure is always whole.
        fraction: likewise, of such a share of the samples.
        seed: of that choice.
        threads: None for one a processor.
    """

    samples: int | None = None
    fraction: float | None = None
    seed: int = 0
    threads: int | None = None


@dataclass
class CheckResult:
    """What a check looked at, and what it found.

    Attributes:
        journals: lines of each journal, of the ledger and of the known answers, by file name.
        samples: whole acknowledgements, by which every sample is counted once.
        rows, bytes: durable, of states.
        rows_checked, bytes_checked: of these, those whose every byte was looked at.
        live: whether a capture was running, which adds to the dataset.
    """

    path: str
    info: DatasetInfo
    findings: Findings
    statistics: Statistics
    journals: dict[str, LineCounts] = field(default_factory=dict)
    samples: int = 0
    tokens: int = 0
    asked: int = 0
    shards: int = 0
    rows: int = 0
    bytes: int = 0
    rows_checked: int = 0
    bytes_checked: int = 0
    live: bool = False
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether nothing was found that makes the dataset wrong."""
        return not self.findings.errors

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        findings = self.findings
        return {
            "path": self.path,
            "sound": self.sound,
            "errors": findings.errors,
            "warnings": findings.warnings,
            "counts": dict(sorted(findings.counts.items())),
            "findings": [finding.to_json() for finding in findings.listed()],
            "affected_samples": {"count": len(findings.samples), "ids": sorted(findings.samples)[:1000]},
            "dataset": self.info.to_json(),
            "live": self.live,
            "lines": {name: vars(counts) for name, counts in self.journals.items()},
            "samples": self.samples,
            "tokens": self.tokens,
            "asked": self.asked,
            "shards": self.shards,
            "rows": self.rows,
            "bytes": self.bytes,
            "rows_checked": self.rows_checked,
            "bytes_checked": self.bytes_checked,
            "columns": [self._column(number) for number in range(len(self.statistics.columns))],
            "seconds": round(self.seconds, 3),
        }

    def _column(self, number: int) -> dict[str, Any]:
        statistics = self.statistics
        low, median, high = statistics.quantiles(number, [0.01, 0.5, 0.99])
        values = {
            "norm_min": statistics.low[number],
            "norm_p1": low,
            "norm_median": median,
            "norm_p99": high,
            "norm_max": statistics.high[number],
        }
        plain = {name: float(f"{value:.6g}") if np.isfinite(value) else None for name, value in values.items()}
        return {"column": statistics.columns[number], "rows": int(statistics.rows[number]), **plain}


def check_dataset(directory: Path, settings: CheckSettings, view: CheckView) -> CheckResult:
    """Check all of a dataset. It may be one that is being captured: then what is durable at the start is checked.

    Raises:
        StoreError: there is no dataset, or it is of a newer version, so that nothing can be said.
    """
    return _Check(directory, settings, view).run()


class _Check:
    def __init__(self, directory: Path, settings: CheckSettings, view: CheckView) -> None:
        self._directory, self._settings, self._view = directory, settings, view
        self._findings = Findings()
        self._info = self._read_info()
        self._result = CheckResult(str(directory), self._info, self._findings, Statistics(self._info.columns))
        self._states: dict[tuple[str, int], ShardState] = {}
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()
        self._origins_read: dict[str, tuple[Origin, ...]] = {}
        self._open = lru_cache(OPEN_SHARDS)(self._open_shard)

    def run(self) -> CheckResult:
        begun = time.monotonic()
        self._result.live = self._sessions()
        journals = self._journals()
        ledger = read_ledger(self._directory, self._findings)
        self._result.asked = len(ledger.content.requests)
        if ledger.exists:
            self._result.journals["requests.jsonl"] = ledger.counts
        if (answers := read_answers(self._directory, self._findings)) is not None:
            self._result.journals[KNOWN_ANSWERS_FILE] = answers
        samples = join(self._info, [journal.replay for journal in journals], ledger.content, self._findings)
        self._result.samples = len({sample.id for sample in samples})
        self._result.tokens = sum(sample.length for sample in {sample.id: sample for sample in samples}.values())
        self._final_norm()
        self._stray_files()
        owners = Owners(samples)
        jobs = self._shard_files(self._chosen_rows(samples), owners)
        threads = self._settings.threads or len(os.sched_getaffinity(0))
        pool = ThreadPoolExecutor(threads, thread_name_prefix="hs-capture-verify")
        try:
            self._check_tokens(pool, samples)
            self._check_states(pool, jobs, owners)
        finally:
            pool.shutdown(cancel_futures=True)
            self._open.cache_clear()  # the cache and this object hold each other, and so would the files stay open
        self._judge_columns(owners)
        self._result.seconds = time.monotonic() - begun
        return self._result

    def _read_info(self) -> DatasetInfo:
        """``dataset.json``, or what a finished shard repeats of it where that file is damaged."""
        try:
            return read_info(self._directory)
        except StoreError as error:
            if not (self._directory / DATASET_FILE).exists() and not (self._directory / SHARD_FOLDER).is_dir():
                raise
            found = next(filter(None, map(info_of_header, self._finished_files())), None)
            if found is None:
                raise
            self._findings.add(Finding("dataset-file", str(error), DATASET_FILE))
            return found

    def _finished_files(self) -> list[Path]:
        return sorted((self._directory / SHARD_FOLDER).glob("*.safetensors"))

    def _sessions(self) -> bool:
        """Whether a capture is running, as far as the session records say."""
        live = False
        for path in sorted(self._directory.glob("session-*.json")):
            try:
                record = read_session(path)
            except (StoreError, TypeError, AttributeError) as error:
                self._findings.add(Finding("session-file", str(error), path.name))
                continue
            if record is not None and record.state in {"starting", "ready"} and is_running(record):
                live = True
        return live

    def _goes_on(self, writers: Iterable[str]) -> bool:
        """Whether a capture adds to the dataset, also one of another host, of whose processes nothing is known.

        To be asked after a file was looked at: rows are in the journal before a file with them has its final name.
        """
        if not self._result.live:
            self._result.live = any(
                _size(journal_path(self._directory, writer)) != self._sizes.get(writer, 0) for writer in writers
            )
        return self._result.live

    def _journals(self) -> list[Journal]:
        journals = []
        for writer in journal_writers(self._directory):
            try:
                check_writer(writer)
            except ValueError as error:
                self._findings.add(Finding("stray-file", str(error), f"journal-{writer}.jsonl"))
                continue
            self._sizes[writer] = _size(journal_path(self._directory, writer))
            journal = read_journal(self._directory, writer, self._findings)
            self._result.journals[f"journal-{writer}.jsonl"] = journal.counts
            journals.append(journal)
            for number, state in journal.replay.shards.items():
                record = state.record
                if state.rows and not (record.columns and number >= 0 and 8 <= record.data_offset < MOST_BYTES):
                    text = f"there is no shard as in the record {record.to_json()}: its rows are not checked"
                    self._findings.add(Finding("journal-record", text, f"journal-{writer}.jsonl"))
                elif state.rows:
                    self._states[writer, number] = state
        return journals

    def _open_shard(self, writer: str, shard: int) -> ShardFile | None:
        state = self._states.get((writer, shard))
        if state is None:
            return None
        try:
            return ShardFile(self._directory, ShardLayout(self._info, writer, state.record), state.rows)
        except OSError:  # told by _shard_files
            return None

    def _chosen_rows(self, samples: Sequence[SampleEntry]) -> dict[tuple[str, int], list[tuple[int, int]]] | None:
        """By shard the rows, begin and end, of the samples chosen for a quick look; None to look at all."""
        count = self._settings.samples
        if self._settings.fraction is not None:
            count = max(1, round(len(samples) * self._settings.fraction))
        if count is None or count >= len(samples):
            return None
        rows: defaultdict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        for sample in random.Random(self._settings.seed).sample(list(samples), count):
            for part in sample.parts:
                for shard, start, length in part.extents:
                    rows[part.writer, shard].append((start, start + length))
        return rows

    def _shard_files(self, chosen: dict[tuple[str, int], list[tuple[int, int]]] | None, owners: Owners) -> list[Job]:
        """Check every shard's files, and say what of their states is to be read."""
        jobs: list[Job] = []
        for (writer, number), state in sorted(self._states.items()):
            layout = ShardLayout(self._info, writer, state.record)
            name = f"{SHARD_FOLDER}/{ShardPaths.of(self._directory, writer, number).finished.name}"
            self._result.shards += 1
            self._result.rows += state.rows
            self._result.bytes += state.rows * layout.row_bytes
            affected = owners.of(writer, number, 0, state.rows)
            try:
                file = ShardFile(self._directory, layout, state.rows)
                check_file(file, state, self._goes_on([writer]), self._findings, self._origins(writer))
            except FileNotFoundError:
                text = f"the journal has {state.rows} durable rows in it, and it is not there" + _such_as(affected)
                self._findings.add(Finding("shard-missing", text, name), affected)
                continue
            except OSError as error:
                self._findings.add(Finding("unreadable", str(error.strerror or error), name), affected)
                continue
            if file.rows < state.rows:
                self._findings.samples.update(owners.of(writer, number, file.rows, state.rows))
            records = state.checksums
            if chosen is not None:
                records = list(_overlapping(records, chosen.get((writer, number), [])))
            jobs += jobs_of(file, records)
            file.close()
        return jobs

    def _origins(self, writer: str) -> tuple[Origin, ...]:
        """Where a writer's shards were written, as far as it can be read."""
        if writer not in self._origins_read:
            self._origins_read[writer] = ()
            try:
                self._origins_read[writer] = read_origins(self._directory, writer)
            except StoreError as error:
                self._findings.add(Finding("origin-file", str(error), origin_path(self._directory, writer).name))
        return self._origins_read[writer]

    def _check_tokens(self, pool: ThreadPoolExecutor, samples: Sequence[SampleEntry]) -> None:
        ordered = sorted(samples, key=lambda sample: (sample.writer, sample.extents[0]))
        self._view.begin("tokens", len(ordered), "samples")

        def check(some: Sequence[SampleEntry]) -> None:
            for sample in some:
                check_tokens(sample, self._open, self._findings)
            self._view.advance(len(some))

        tasks = (ordered[start : start + SAMPLES_PER_TASK] for start in range(0, len(ordered), SAMPLES_PER_TASK))
        for done in as_completed([pool.submit(check, some) for some in tasks]):
            done.result()

    def _check_states(self, pool: ThreadPoolExecutor, jobs: Sequence[Job], owners: Owners) -> None:
        self._view.begin("states", sum(job.bytes for job in jobs), "bytes")

        def check(job: Job) -> None:
            file = self._open(job.writer, job.shard)
            if file is None:
                text = "it was there when the check began, and cannot be opened now"
                self._findings.add(Finding("unreadable", text, f"{SHARD_FOLDER}/{job.writer}-{job.shard:06d}"))
                return
            statistics = Statistics(self._info.columns)
            rows = StateCheck(file, job.records, owners, self._findings, statistics).run(self._view.advance)
            with self._lock:
                self._result.statistics.merge(statistics)
                self._result.rows_checked += rows
                self._result.bytes_checked += rows * file.layout.row_bytes

        for done in as_completed([pool.submit(check, job) for job in jobs]):
            done.result()

    def _final_norm(self) -> None:
        path = self._directory / FINAL_NORM_FILE
        try:
            data = fs.read_bytes(path)
        except FileNotFoundError:
            text = "there is no such file, so post-norm states cannot be derived from pre-norm ones"
            self._findings.add(Finding("final-norm-missing", text, FINAL_NORM_FILE))
            return
        except OSError as error:
            self._findings.add(Finding("unreadable", str(error.strerror or error), FINAL_NORM_FILE))
            return
        if problem := _norm_problem(data, self._info):
            self._findings.add(Finding("final-norm", problem, FINAL_NORM_FILE))

    def _stray_files(self) -> None:
        """Shards that no journal names. Unfinished ones without durable rows are what a crash leaves."""
        paths = sorted((self._directory / SHARD_FOLDER).glob("*"))
        writers = set(journal_writers(self._directory))
        if self._goes_on(writers):
            return
        for path in paths:
            writer, _, number = path.stem.rpartition("-")
            finished = path.suffix == ".safetensors"
            known = number.isdecimal() and (writer, int(number)) in self._states
            if (finished and not known) or (path.suffix == ".partial" and writer not in writers):
                text = f"a shard of {path.lstat().st_size} bytes, of whose rows there is nothing in a journal"
                self._findings.add(Finding("stray-file", text, f"{SHARD_FOLDER}/{path.name}"))

    def _judge_columns(self, owners: Owners) -> None:
        statistics = self._result.statistics
        for (first, second), (count, places) in sorted(statistics.equal.items()):
            rows = int(statistics.rows[statistics.columns.index(second)])
            kind = "column-copied" if count == rows else "rows-copied"
            number = "all" if count == rows else f"{count}"
            text = f"{number} of {rows} rows have the bytes of {first}, as if one boundary had been captured twice"
            self._tell(kind, text, places[0], second, owners)
        for column, name in enumerate(statistics.columns):
            self._judge_norms(column, name, owners)

    def _judge_norms(self, column: int, name: str, owners: Owners) -> None:
        statistics = self._result.statistics
        low, high = float(statistics.low[column]), float(statistics.high[column])
        # A norm's output has one length wherever its weight is uniform.
        may_be_equal = name == "final:post_norm" or statistics.norms[column].sum() < EQUAL_NORMS_ROWS
        if not may_be_equal and high - low <= EQUAL_NORMS_SPREAD * high:
            text = f"all {statistics.rows[column]} rows have the norm {high:.6g}"
            self._tell("equal-norms", text, statistics.lowest[column][0].place, name, owners)
        count, far = statistics.outliers(column, OUTLIER_ABOVE, OUTLIER_BELOW)
        (median,) = statistics.quantiles(column, [0.5])
        for extreme in far:
            self._tell("outlier", _outlier_text(extreme, median), extreme.place, name, owners)
        self._findings.count("outlier", count - len(far))

    def _tell(self, kind: str, text: str, place: Place, column: str, owners: Owners) -> None:
        affected = owners.of(place.writer, place.shard, place.row, place.row + 1)
        file = f"{SHARD_FOLDER}/{place.writer}-{place.shard:06d}"
        finding = Finding(
            kind,
            f"row {place.row}: {text}",
            file,
            affected[0] if affected else None,
            place.position if place.position >= 0 else None,
            column,
        )
        self._findings.add(finding, affected)


def _size(path: Path) -> int:
    """A file's size; 0 where it cannot be told, which whoever reads the file will say."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _outlier_text(extreme: Extreme, median: float) -> str:
    ratio = extreme.norm / median
    away = f"{ratio:.3g} times" if ratio > 1 else f"1/{1 / ratio:.3g} of"
    return f"the norm {extreme.norm:.4g} is {away} the column's median of {median:.4g}"


def _such_as(ids: Sequence[str]) -> str:
    return f"; {len(ids)} samples have rows there, such as {ids[0]!r}" if ids else "; no sample has rows there"


def _overlapping(records: Sequence[RowsRecord], ranges: Sequence[tuple[int, int]]) -> Iterator[RowsRecord]:
    """Those ``records``, which are in the order of their rows, that have a row of one of the ranges."""
    starts = [record.start for record in records]
    wanted: set[int] = set()
    for start, end in ranges:
        wanted.update(range(max(0, bisect_right(starts, start) - 1), bisect_left(starts, end)))
    return (records[number] for number in sorted(wanted))


def _norm_problem(data: bytes, info: DatasetInfo) -> str:
    """What is wrong with the file of the final norm; empty if it can be used."""
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
        entry, metadata = header["weight"], header["__metadata__"]
        eps, checksum = json.loads(metadata["eps"]), metadata.get("xxh3")
        begin, end = entry["data_offsets"]
        dtype, shape = DTYPE_OF_SAFETENSORS[entry["dtype"]], entry["shape"]
        raw = np.frombuffer(data, np.uint8, offset=8 + length)
        weight = to_float32(np.ascontiguousarray(raw[begin:end]), dtype)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"the file cannot be read ({error!r})"
    if shape != [info.hidden_size] or len(weight) != info.hidden_size or end != len(raw):
        return f"expected a weight of {info.hidden_size} elements; the file has {shape} in {len(raw)} bytes"
    if not np.isfinite(weight).all() or not weight.any():
        return "the weight has a NaN or an infinity, or is nothing but zeros"
    # Releases before the checksum wrote nothing in its place.
    if set(metadata) != {"eps"} and checksum != xxhash.xxh3_64_hexdigest(raw.data):
        return f"the weight has not the checksum {checksum} that it was written with"
    if eps != info.final_norm_eps or metadata["eps"] != json.dumps(eps):
        return f"the epsilon is {eps}, and that of {DATASET_FILE} is {info.final_norm_eps}"
    return ""
