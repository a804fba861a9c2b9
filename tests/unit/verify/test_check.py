"""The check of a dataset: a sound one passes, and each fault is found and named, alone and together with others."""

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_dataset as made
import numpy as np
import pytest
from made_dataset import HIDDEN, JOURNAL, LENGTHS

from sglang_hs_capture.errors import StoreError
from sglang_hs_capture.store.hashing import end_hash, prefix_hashes
from sglang_hs_capture.store.index import load_index
from sglang_hs_capture.store.jsonfile import read_object, write_object
from sglang_hs_capture.store.known_answers import KNOWN_ANSWERS_FILE
from sglang_hs_capture.store.requests import LEDGER_FILE, DroppedRecord, RequestLedger, RequestRecord
from sglang_hs_capture.store.schema import Media, make_rid, rle_encode, sample_key
from sglang_hs_capture.store.session import SessionRecord, write_session
from sglang_hs_capture.store.writer import StoreWriter
from sglang_hs_capture.verify import check as check_module
from sglang_hs_capture.verify.check import CheckResult, CheckSettings, CheckView, check_dataset
from sglang_hs_capture.verify.findings import KEPT_PER_KIND, KINDS, Finding, Findings

ROW_BYTES = 3 * HIDDEN * 2
COLUMN_BYTES = HIDDEN * 2


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "dataset"
    made.make(directory)
    return directory


@pytest.fixture
def dataset(template, tmp_path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "dataset"))


def check(directory: Path, **settings) -> CheckResult:
    return check_dataset(directory, CheckSettings(**settings), CheckView())


def kinds(result: CheckResult) -> set[str]:
    return {kind for kind, count in result.findings.counts.items() if count}


def found(result: CheckResult, kind: str) -> list[Finding]:
    return [finding for finding in result.findings.listed() if finding.kind == kind]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3"])
@pytest.mark.parametrize("close", [True, False])
def test_a_sound_dataset_passes(tmp_path, dtype, close):
    made.make(tmp_path, dtype, close=close)
    result = check(tmp_path)
    assert kinds(result) == set()
    assert result.sound
    assert (result.samples, result.tokens, result.asked) == (6, sum(LENGTHS), 6)
    assert (result.rows, result.rows_checked) == (sum(LENGTHS), sum(LENGTHS))
    assert result.bytes_checked == result.bytes == sum(LENGTHS) * made.info_of(dtype).row_bytes
    assert result.shards == 4
    partial = list((tmp_path / "shards").glob("*.partial"))
    assert len(partial) == (0 if close else 1)


@pytest.mark.parametrize(
    ("dtype", "close", "rel"), [("float32", True, 1e-5)] + [("float8_e4m3", close, 0.03) for close in (True, False)]
)
def test_the_norms_reported_are_those_of_the_states(tmp_path, dtype, close, rel):
    made.make(tmp_path, dtype, close=close)
    result = check(tmp_path, threads=2)
    states = np.concatenate([made.states_of(made.tokens_of(n, length)) for n, length in enumerate(LENGTHS)])
    norms = np.linalg.norm(states, axis=-1)
    assert result.statistics.low == pytest.approx(norms.min(axis=0), rel=rel)
    assert result.statistics.high == pytest.approx(norms.max(axis=0), rel=rel)
    for column in range(3):
        (median,) = result.statistics.quantiles(column, [0.5])
        assert median == pytest.approx(np.median(norms[:, column]), rel=0.1)  # the width of a bin


def test_rows_are_read_in_blocks_and_jobs_of_any_size(dataset, monkeypatch):
    """Blocks smaller than a record, and jobs of a few records: the checksums come out the same."""
    monkeypatch.setattr("sglang_hs_capture.verify.shards.BLOCK_BYTES", 2 * ROW_BYTES)
    monkeypatch.setattr("sglang_hs_capture.verify.shards.JOB_BYTES", 5 * ROW_BYTES)
    result = check(dataset, threads=2)
    assert kinds(result) == set()
    assert result.rows_checked == sum(LENGTHS)


# Each fault: what it does, the kind it must be found as, and what must be named.


def flipped_state(dataset: Path) -> None:
    place = made.where(dataset, "s1", 3)
    made.flip(place.file, place.offset + 5, 1)


def flipped_token(dataset: Path) -> None:
    place = made.where(dataset, "s1", 3)
    made.flip(place.file, made.token_offset(dataset, "input_ids", place))


def flipped_position(dataset: Path) -> None:
    place = made.where(dataset, "s1", 3)
    made.flip(place.file, made.token_offset(dataset, "positions", place), 2)


def flipped_hash(dataset: Path) -> None:
    place = made.where(dataset, "s1", 3)
    made.flip(place.file, made.token_offset(dataset, "prefix_hash", place) + 7, 5)


def flipped_header(dataset: Path) -> None:
    place = made.where(dataset, "s1", 3)
    made.flip(place.file, place.file.read_bytes().index(b'"shape"') + 1)


def line_of(path: Path, text: bytes) -> int:
    """Where in a file a text begins."""
    return path.read_bytes().index(text)


def flipped_journal_byte(dataset: Path) -> None:
    made.flip(dataset / JOURNAL, line_of(dataset / JOURNAL, made.rid_of("s1").encode()) + 4)


def flipped_rows_line(dataset: Path) -> None:
    made.flip(dataset / JOURNAL, line_of(dataset / JOURNAL, b'"t":"rows"') + 30)


def flipped_shard_line(dataset: Path) -> None:
    made.flip(dataset / JOURNAL, line_of(dataset / JOURNAL, b'"t":"shard"') + 6)


def flipped_last_newline(dataset: Path) -> None:
    made.flip(dataset / JOURNAL, (dataset / JOURNAL).stat().st_size - 1, 4)


def flipped_ledger_byte(dataset: Path) -> None:
    made.flip(dataset / LEDGER_FILE, line_of(dataset / LEDGER_FILE, b'"id":"s1"') + 7)


def truncated_shard(dataset: Path) -> None:
    place = made.where(dataset, "s1", 3)
    os.truncate(place.file, place.offset)


def missing_shard(dataset: Path) -> None:
    made.where(dataset, "s1", 3).file.unlink()


def extent_beyond(dataset: Path) -> None:
    def change(record):
        if record["t"] == "sample" and record["rid"] == made.rid_of("s1"):
            shard, start, count = record["extents"][0]
            record["extents"][0] = [shard, start + 50, count]
        return record

    made.rewrite(dataset / JOURNAL, change)


def wrong_end_hash(dataset: Path) -> None:
    def change(record):
        if record.get("rid") == made.rid_of("s1"):
            return {**record, "end_hash": "0123456789abcdef"}
        return record

    made.rewrite(dataset / JOURNAL, change)


def other_ledger_hash(dataset: Path) -> None:
    def change(record):
        return {**record, "end_hash": "0123456789abcdef"} if record["id"] == "s1" else record

    made.rewrite(dataset / LEDGER_FILE, change)


def swap(dataset: Path, states: bool, tokens: bool) -> None:
    """Swap a row of one sample with one of another."""
    one, other = made.where(dataset, "s1", 3), made.where(dataset, "s3", 3)
    spans = [(one.offset, other.offset, ROW_BYTES)] if states else []
    if tokens:
        for name in ("input_ids", "positions", "prefix_hash"):
            spans.append((made.token_offset(dataset, name, one), made.token_offset(dataset, name, other), 8))
    mine, theirs = bytearray(one.file.read_bytes()), bytearray(other.file.read_bytes())
    if one.file == other.file:
        theirs = mine
    for here, there, size in spans:
        mine[here : here + size], theirs[there : there + size] = (
            theirs[there : there + size],
            mine[here : here + size],
        )
    one.file.write_bytes(mine)
    other.file.write_bytes(theirs)


def swapped_states(dataset: Path) -> None:
    swap(dataset, states=True, tokens=False)


def swapped_rows(dataset: Path) -> None:
    swap(dataset, states=True, tokens=True)
    made.reseal(dataset)


def put(dataset: Path, id: str, position: int, column: int, data: bytes) -> None:
    """Store other bytes in a state, as if they had come from the engine: the checksums agree."""
    place = made.where(dataset, id, position)
    content = bytearray(place.file.read_bytes())
    begin = place.offset + column * COLUMN_BYTES
    content[begin : begin + len(data)] = data
    place.file.write_bytes(content)
    made.reseal(dataset)


def nan_state(dataset: Path) -> None:
    put(dataset, "s1", 3, 1, b"\xc0\x7f")


def zero_row(dataset: Path) -> None:
    put(dataset, "s1", 3, 1, bytes(COLUMN_BYTES))


def constant_row(dataset: Path) -> None:
    put(dataset, "s1", 3, 1, b"\x80\x3f" * HIDDEN)


def outlier(dataset: Path) -> None:
    put(dataset, "s1", 3, 1, b"\x00\x7f")


def equal_rows(dataset: Path) -> None:
    place = made.where(dataset, "s1", 3)
    data = place.file.read_bytes()[place.offset : place.offset + COLUMN_BYTES]
    put(dataset, "s1", 3, 1, data)


def wrong_mask(dataset: Path) -> None:
    made.rewrite(
        dataset / LEDGER_FILE, lambda record: {**record, "loss_mask": [2, 3]} if record["id"] == "s1" else record
    )


def lost_ledger_record(dataset: Path) -> None:
    made.rewrite(dataset / LEDGER_FILE, lambda record: [] if record["id"] == "s1" else record)


def duplicate_sample(dataset: Path) -> None:
    made.rewrite(dataset / JOURNAL, lambda record: [record] * (1 + (record.get("rid") == made.rid_of("s1"))))


def lost_sample(dataset: Path) -> None:
    made.rewrite(dataset / JOURNAL, lambda record: [] if record.get("rid") == made.rid_of("s1") else record)


def damaged_norm(dataset: Path) -> None:
    os.truncate(dataset / "final_norm.safetensors", 100)


def lost_norm(dataset: Path) -> None:
    (dataset / "final_norm.safetensors").unlink()


def other_norm(dataset: Path) -> None:
    made.write_norm(dataset, eps=1e-5)


def damaged_info(dataset: Path) -> None:
    made.flip(dataset / "dataset.json", 0)


def lost_info(dataset: Path) -> None:
    (dataset / "dataset.json").unlink()


def changed_info(dataset: Path) -> None:
    """With a checksum that fits."""
    raw = read_object(dataset / "dataset.json", "")
    assert raw is not None
    write_object(dataset / "dataset.json", {**raw, "model_path": "/models/mbde"})


def edited_info(dataset: Path) -> None:
    text = (dataset / "dataset.json").read_text()
    (dataset / "dataset.json").write_text(text.replace("/models/made", "/models/mbde"))


def flipped_norm(dataset: Path) -> None:
    made.flip(dataset / "final_norm.safetensors", (dataset / "final_norm.safetensors").stat().st_size - 3)


def flipped_answer(dataset: Path) -> None:
    made.write_answers(dataset, [{"t": "answer"}, {"t": "later"}])
    made.flip(dataset / KNOWN_ANSWERS_FILE, 8)


def malformed_answer(dataset: Path) -> None:
    made.write_answers(dataset, [{"t": "later"}, {"t": "answer", "id": "s1", "length": 12}])


def lost_header(dataset: Path) -> None:
    made.rewrite(dataset / JOURNAL, lambda record: [] if record["t"] == "journal" else record)


def torn_line(dataset: Path) -> None:
    with (dataset / JOURNAL).open("ab") as file:
        file.write(b'{"t":"rows","sha')


def stray_shard(dataset: Path) -> None:
    (dataset / "shards" / "dp0-pp0-000077.safetensors").write_bytes(b"x")


def damaged_session(dataset: Path) -> None:
    (dataset / "session-dp0-pp0.json").write_bytes(b"{")


SHARD = "shards/dp0-pp0-00000"
FAULTS: dict[str, tuple[Callable[[Path], None], dict[str, object]]] = {
    "checksum": (flipped_state, {"file": SHARD}),
    "checksum of swapped states": (swapped_states, {"file": SHARD}),
    "tokens: id": (flipped_token, {"file": SHARD, "sample": "s1", "position": 3}),
    "tokens: position": (flipped_position, {"file": SHARD, "sample": "s1", "position": 3}),
    "tokens: hash": (flipped_hash, {"file": SHARD, "sample": "s1", "position": 3}),
    "tokens: swapped": (swapped_rows, {"sample": "s1", "position": 3}),
    "tokens: end": (wrong_end_hash, {"file": JOURNAL, "sample": "s1"}),
    "shard-header": (flipped_header, {"file": SHARD}),
    "dataset-file: edited": (edited_info, {"file": "dataset.json"}),
    "final-norm: flipped": (flipped_norm, {"file": "final_norm.safetensors"}),
    "answer-line": (flipped_answer, {"file": KNOWN_ANSWERS_FILE}),
    "answer-record": (malformed_answer, {"file": KNOWN_ANSWERS_FILE}),
    "shard-header: dataset": (changed_info, {"file": SHARD}),
    "journal-line": (flipped_journal_byte, {"file": JOURNAL}),
    "journal-line: rows": (flipped_rows_line, {"file": JOURNAL}),
    "journal-line: shard": (flipped_shard_line, {"file": JOURNAL}),
    "journal-line: newline": (flipped_last_newline, {"file": JOURNAL}),
    "journal-record": (extent_beyond, {"file": JOURNAL, "sample": made.rid_of("s1")}),
    "ledger-line": (flipped_ledger_byte, {"file": LEDGER_FILE}),
    "other-tokens": (other_ledger_hash, {"sample": "s1"}),
    "shard-size": (truncated_shard, {"file": SHARD}),
    "shard-missing": (missing_shard, {"file": SHARD}),
    "non-finite": (nan_state, {"file": SHARD, "sample": "s1", "position": 3, "column": "boundary:3"}),
    "zero-row": (zero_row, {"file": SHARD, "sample": "s1", "position": 3, "column": "boundary:3"}),
    "constant-row": (constant_row, {"file": SHARD, "sample": "s1", "position": 3, "column": "boundary:3"}),
    "outlier": (outlier, {"file": SHARD, "sample": "s1", "position": 3, "column": "boundary:3"}),
    "rows-copied": (equal_rows, {"file": SHARD, "sample": "s1", "position": 3, "column": "boundary:3"}),
    "loss-mask": (wrong_mask, {"file": LEDGER_FILE, "sample": "s1"}),
    "unclaimed": (lost_ledger_record, {"file": LEDGER_FILE, "sample": made.rid_of("s1")}),
    "duplicate": (duplicate_sample, {"sample": "s1"}),
    "missing": (lost_sample, {"sample": "s1"}),
    "final-norm": (damaged_norm, {"file": "final_norm.safetensors"}),
    "final-norm: eps": (other_norm, {"file": "final_norm.safetensors"}),
    "final-norm-missing": (lost_norm, {"file": "final_norm.safetensors"}),
    "dataset-file": (damaged_info, {"file": "dataset.json"}),
    "dataset-file: lost": (lost_info, {"file": "dataset.json"}),
    "journal-record: header": (lost_header, {"file": JOURNAL}),
    "torn-line": (torn_line, {"file": JOURNAL}),
    "stray-file": (stray_shard, {"file": "shards/dp0-pp0-000077.safetensors"}),
    "session-file": (damaged_session, {"file": "session-dp0-pp0.json"}),
}


def named(result: CheckResult, name: str) -> bool:
    """Whether the fault is among the findings, with all that must be named."""
    kind = name.split(":", maxsplit=1)[0].split(" ", maxsplit=1)[0]
    wanted = FAULTS[name][1]
    return any(
        all(
            str(getattr(finding, key)).startswith(str(value)) if key == "file" else getattr(finding, key) == value
            for key, value in wanted.items()
        )
        for finding in found(result, kind)
    )


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(dataset, name):
    FAULTS[name][0](dataset)
    result = check(dataset)
    assert named(result, name), "\n".join(map(str, result.findings.listed()))
    kind = name.split(":")[0].split(" ")[0]
    assert result.sound is (KINDS[kind].severity.value == "warning")
    assert all(finding.what and finding.remedy for finding in result.findings.listed())


@pytest.mark.parametrize("name", ["checksum", "non-finite", "zero-row", "rows-copied", "tokens: id", "loss-mask"])
def test_a_fault_alone_is_the_only_finding(dataset, name):
    FAULTS[name][0](dataset)
    assert kinds(check(dataset)) == {name.split(":")[0]}


def test_faults_in_several_files_are_all_found(dataset):
    """Those of one file do not hide those of another, nor those behind them in the same file."""
    place = made.where(dataset, "s3", 19)
    put(dataset, "s5", 2, 0, b"\x80\x7f")
    put(dataset, "s0", 1, 2, bytes(COLUMN_BYTES))
    flipped_header(dataset)
    wrong_mask(dataset)
    damaged_norm(dataset)
    damaged_session(dataset)
    made.rewrite(dataset / JOURNAL, lambda record: [] if record.get("rid") == made.rid_of("s2") else record)
    made.flip(dataset / JOURNAL, 20)
    made.flip(place.file, place.offset)
    result = check(dataset)
    wanted = {"non-finite", "zero-row", "shard-header", "loss-mask", "final-norm", "session-file", "missing"}
    assert kinds(result) == wanted | {"journal-line", "checksum"}
    assert {"s0", "s1", "s5"} <= result.findings.samples
    (line,) = found(result, "checksum")
    assert "'s3'" in str(line)


def test_a_truncated_shard_leaves_what_is_there_checked(dataset):
    place = made.where(dataset, "s3", 10)
    made.flip(place.file, made.where(dataset, "s3", 8).offset)
    os.truncate(place.file, place.offset + 1)
    result = check(dataset)
    assert {"shard-size", "tokens"} <= kinds(result)
    assert "s3" in result.findings.samples
    assert result.rows_checked < result.rows


def test_a_truncated_shard_that_is_not_finished(tmp_path):
    made.make(tmp_path, close=False)
    place = made.where(tmp_path, "s5", 8)
    assert place.file.suffix == ".partial"
    made.flip(place.file, made.where(tmp_path, "s5", 5).offset)
    assert kinds(check(tmp_path)) == {"checksum"}
    os.truncate(place.file, place.offset)
    os.truncate(place.file.with_suffix(".rows"), 24 * place.row)
    result = check(tmp_path)
    assert [finding.file for finding in found(result, "shard-size")] == [
        f"shards/{place.file.name}",
        f"shards/{place.file.with_suffix('.rows').name}",
    ]
    assert found(result, "tokens")[0].sample == "s5"


def test_a_duplicated_column_is_an_error(tmp_path):
    def change(_id, states):
        states[:, 1] = states[:, 0]

    made.make(tmp_path, change=change)
    result = check(tmp_path)
    assert kinds(result) == {"column-copied"}
    (finding,) = found(result, "column-copied")
    assert (finding.column, finding.position) == ("boundary:3", 0)
    assert "all of 52 rows have the bytes of boundary:1" in finding.what


def test_equal_norms_are_told(tmp_path):
    def change(_id, states):
        states[:, 1] = np.where(states[:, 1] < 0, -1.0, 1.0)

    made.make(tmp_path, "float32", change=change)
    result = check(tmp_path)
    assert kinds(result) == {"equal-norms"}
    assert result.sound
    assert found(result, "equal-norms")[0].column == "boundary:3"


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_norms_beyond_float32_are_computed(tmp_path, scale):
    made.make(tmp_path, "float32", change=lambda _id, states: np.multiply(states, np.float32(scale), out=states))
    result = check(tmp_path)
    assert result.statistics.low[0] == pytest.approx(3.85 * scale, rel=0.01)
    assert result.sound


def test_a_session_that_runs_may_be_ahead_of_its_journal(tmp_path):
    store = made.make(tmp_path, close=False)
    lines = (tmp_path / JOURNAL).read_bytes()
    store.close()
    (tmp_path / JOURNAL).write_bytes(lines)
    host = os.uname().nodename
    write_session(tmp_path, SessionRecord("dp0-pp0", "5e55", os.getpid(), host, state="ready"))
    torn_line(tmp_path)
    result = check(tmp_path)
    assert result.live
    assert kinds(result) == {"torn-line"}


@pytest.mark.parametrize("more", [1, 5])
def test_a_capture_of_another_host_may_be_ahead_of_what_was_read(tmp_path, monkeypatch, more):
    """Whether its process runs cannot be seen from here; that its journal grows can."""
    store = made.make(tmp_path, close=False)
    record = SessionRecord(made.WRITER, "5e55", 1, "another-host", state="ready")
    write_session(tmp_path, record)
    read = check_module.read_journal

    def read_and_go_on(*args: Any) -> Any:
        journal = read(*args)
        with RequestLedger.open(tmp_path) as ledger:
            for number in range(more):
                tokens = made.tokens_of(100 + number, 16)
                made.put_sample(store, ledger, f"t{number}", tokens, "bfloat16", lambda _id, _states: None)
        return journal

    monkeypatch.setattr(check_module, "read_journal", read_and_go_on)
    result = check(tmp_path)
    store.close()
    assert result.live
    assert kinds(result) == {"missing"}, result.findings.listed()
    monkeypatch.undo()
    assert not check(tmp_path).live


@pytest.fixture
def _no_endless_wait() -> Iterator[None]:
    """Whoever opens a pipe to read waits until somebody writes."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("_no_endless_wait")
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("shards/dp0-pp0-000001.safetensors", "unreadable"),
        (JOURNAL, "unreadable"),
        ("requests.jsonl", "unreadable"),
        ("known_answers.jsonl", "unreadable"),
        ("final_norm.safetensors", "unreadable"),
        ("dataset.json", "dataset-file"),
        ("session-x.json", "session-file"),
        ("origin-dp0-pp0.json", "origin-file"),
    ],
)
def test_what_is_no_file_is_a_finding(dataset, name, kind, put):
    (dataset / name).unlink(missing_ok=True)
    put(dataset / name)
    assert any(finding.file == name or name in finding.what for finding in found(check(dataset), kind))
    if kind != "session-file" and name not in {"known_answers.jsonl", "final_norm.safetensors", "origin-dp0-pp0.json"}:
        with pytest.raises(StoreError):
            load_index(dataset)


@pytest.mark.parametrize("name", ["x-000001", "dp0-pp0-\u00b2", "-", "dp0-pp0-"])
def test_a_stray_shard_may_have_any_name_and_lead_nowhere(dataset, name):
    (dataset / "shards" / f"{name}.safetensors").symlink_to("nowhere")
    result = check(dataset)
    assert kinds(result) == {"stray-file"}
    assert found(result, "stray-file")[0].file == f"shards/{name}.safetensors"


def test_a_lost_journal_is_an_error(dataset):
    (dataset / JOURNAL).unlink()
    result = check(dataset)
    assert kinds(result) == {"stray-file", "missing"}
    assert len(found(result, "stray-file")) == 4
    assert result.findings.errors == 4


def test_a_lost_journal_of_a_shard_that_is_not_finished(tmp_path):
    made.make(tmp_path, close=False)
    (tmp_path / JOURNAL).unlink()
    files = [finding.file for finding in found(check(tmp_path), "stray-file")]
    assert "shards/dp0-pp0-000003.partial" in files


def test_a_journal_that_ends_too_early_is_found(dataset):
    """Cut behind a whole line, which no checksum of a line can find: rows or samples are missing."""
    lines = (dataset / JOURNAL).read_bytes().splitlines(keepends=True)
    for end in range(len(lines)):
        (dataset / JOURNAL).write_bytes(b"".join(lines[:end]))
        result = check(dataset, threads=1)
        if any(b'"t":"rows"' in line for line in lines[end:]):
            assert kinds(result) & {"shard-size", "stray-file"}
        if any(b'"t":"sample"' in line for line in lines[end:]):
            assert "missing" in kinds(result)


def test_dropped_samples_are_listed(dataset):
    with RequestLedger.open(dataset) as ledger:
        ledger.append(RequestRecord("late", sample_key("late"), 2, 1, tuple(rle_encode([0, 1])), "data.jsonl:7"))
        ledger.append(DroppedRecord("late", "data.jsonl:7", "not captured in 3 attempts"))
    result = check(dataset)
    assert kinds(result) == {"dropped"}
    assert "not captured in 3 attempts (data.jsonl:7)" in found(result, "dropped")[0].what


def test_a_quick_look_reads_the_states_of_some_samples(dataset):
    everything = check(dataset)
    some = check(dataset, samples=1, seed=3)
    assert 0 < some.rows_checked < everything.rows
    assert some.rows_checked == check(dataset, fraction=1 / 6, seed=3).rows_checked
    assert check(dataset, samples=100).rows_checked == everything.rows
    flipped_token(dataset)
    assert "tokens" in kinds(check(dataset, samples=1))


def test_where_there_is_no_dataset_nothing_is_said(tmp_path):
    with pytest.raises(StoreError, match="expected a dataset"):
        check(tmp_path)


def test_a_disk_that_refuses_is_a_finding(dataset, monkeypatch):
    place = made.where(dataset, "s3", 0)
    read = check_module.ShardFile.read_states

    def refuse(self, start, count, into):
        if self.paths.finished == place.file:
            raise OSError(5, "Input/output error")
        read(self, start, count, into)

    monkeypatch.setattr(check_module.ShardFile, "read_states", refuse)
    result = check(dataset)
    assert kinds(result) == {"unreadable"}
    assert result.rows_checked < result.rows
    assert "Input/output error" in found(result, "unreadable")[0].what
    assert "s3" in result.findings.samples


def test_lists_are_bounded_and_counts_are_not(tmp_path):
    made.make(tmp_path, change=lambda _id, states: states.fill(0))
    result = check(tmp_path)
    assert result.findings.counts["zero-row"] == 3 * sum(LENGTHS)
    assert len(found(result, "zero-row")) == KEPT_PER_KIND
    assert result.findings.samples == {f"s{number}" for number in range(6)}
    assert json.loads(json.dumps(result.to_json()))["counts"] == {"zero-row": 3 * sum(LENGTHS)}


def test_findings_are_listed_errors_first():
    findings = Findings()
    for kind in reversed(KINDS):
        findings.add(Finding(kind, "x"))
    severities = [finding.severity.value for finding in findings.listed()]
    assert severities == sorted(severities)
    assert findings.errors + findings.warnings == len(KINDS)


def test_a_shared_prefix_is_checked_once_and_damages_all_who_share_it(tmp_path):
    """Two samples begin with the same rows; one of their rows is damaged."""
    store = made.open_store(tmp_path, "bfloat16")
    tokens = made.tokens_of(0, 10)
    hashes = prefix_hashes(tokens, 0, 0)
    data = made.to_bytes(made.states_of(tokens), "bfloat16")
    prefix = store.append(data[:6], tokens[:6], np.arange(6), hashes[:6])
    rest = store.append(data[6:], tokens[6:], np.arange(6, 10), hashes[6:])
    store.add_sample("long", 10, [*prefix, *rest], int(hashes[-1]))
    store.add_sample("short", 6, prefix, int(hashes[5]))
    store.close()
    made.write_norm(tmp_path)
    sound = check(tmp_path)
    assert kinds(sound) == set()
    assert (sound.samples, sound.tokens, sound.rows, sound.asked) == (2, 16, 10, 0)
    (file,) = (tmp_path / "shards").glob("*.safetensors")
    offset = next(record["data_offset"] for record in made.records(tmp_path / JOURNAL) if record["t"] == "shard")
    made.flip(file, offset + 2 * ROW_BYTES)
    result = check(tmp_path)
    assert kinds(result) == {"checksum"}
    assert result.findings.samples == {"long", "short"}


def test_no_damage_whatever_ends_the_check(dataset):
    """Bytes overwritten, cut off and put in, in any file: there is always a result, or one foreseen error."""
    choose = random.Random(7)
    files = [path for path in sorted(dataset.rglob("*")) if path.is_file() and not path.name.startswith("lock-")]
    outcomes = set()
    for _ in range(60):
        path = choose.choice(files)
        whole = path.read_bytes()
        at, size = choose.randrange(len(whole)), choose.choice([1, 3, 40])
        junk = choose.choice([b"", choose.randbytes(size), b'"' * size, b"9" * size, b"[" * 5000])
        path.write_bytes(whole[:at] + junk + whole[at + choose.choice([0, len(junk), size]) :])
        try:
            outcomes.add(check(dataset, threads=1).sound)
        except StoreError:
            assert path.name == "dataset.json"
        path.write_bytes(whole)
    assert False in outcomes
    assert check(dataset).sound


@pytest.mark.parametrize(
    "changes",
    [{"columns": []}, {"data_offset": -4096}, {"data_offset": 2**70}, {"shard": -1}, {"columns": ["other"]}],
)
def test_a_shard_record_that_lies_is_a_finding(dataset, changes):
    made.rewrite(dataset / JOURNAL, lambda record: {**record, **changes} if record["t"] == "shard" else record)
    result = check(dataset)
    assert not result.sound
    assert kinds(result) & {"journal-record", "shard-header", "shard-size"}


@pytest.mark.parametrize(
    ("kind", "changes"), [("sample", {"rid": []}), ("rows", {"count": 2**62}), ("sample", {"extents": [[0, 0]]})]
)
def test_a_record_that_lies_is_a_finding(dataset, kind, changes):
    made.rewrite(dataset / JOURNAL, lambda record: {**record, **changes} if record["t"] == kind else record)
    assert "journal-record" in kinds(check(dataset))


@pytest.mark.parametrize("field", ["columns", "hidden_size", "dtype", "model_path", "final_norm_eps"])
def test_a_description_that_lies_is_a_finding(dataset, field):
    info = json.loads((dataset / "dataset.json").read_text())
    (dataset / "dataset.json").write_text(json.dumps({**info, field: [None]}))
    result = check(dataset)
    assert kinds(result) == {"dataset-file"}
    assert result.info == made.info_of()


def test_names_cannot_speak_to_the_terminal():
    finding = Finding("dropped", "given up: \x1b[2J\nSound", "requests.jsonl", "a\ud800\x07")
    assert str(finding).isprintable()
    assert "\\x1b[2J\\nSound" in str(finding)


def make_stages(tmp_path: Path, more: tuple[str, ...] = ()) -> None:
    """A dataset of two writers that have some of the columns each; the second one lacks a sample.

    ``more`` are the writers that capture that sample afterwards.
    """
    info = made.info_of()
    stages = {"dp0-pp0": made.COLUMNS[:1], "dp0-pp1": made.COLUMNS[1:]}
    rids = [f"r{number}" for number in range(3)]
    for writer, columns in stages.items():
        store = StoreWriter.open(
            tmp_path, writer, info, session_id="5e55", min_free_bytes=0, shard_bytes=1 << 20, columns=columns
        )
        asked = list(enumerate(rids[: 3 if writer == "dp0-pp0" else 2]))
        asked += [(2, "r2")] * (writer in more)
        for number, rid in asked:
            tokens = made.tokens_of(number, 9)
            hashes = prefix_hashes(tokens, 0, 0)
            states = made.states_of(tokens)[:, [made.COLUMNS.index(name) for name in columns]]
            extents = store.append(made.to_bytes(states, "bfloat16"), tokens, np.arange(9), hashes)
            store.add_sample(rid, 9, extents, int(hashes[-1]))
        store.close()
    made.write_norm(tmp_path)


def test_the_stages_of_a_pipeline_are_put_together(tmp_path):
    """A sample is there when its parts have all of the columns."""
    make_stages(tmp_path)
    result = check(tmp_path)
    assert kinds(result) == {"incomplete"}
    (finding,) = found(result, "incomplete")
    assert (finding.sample, finding.file) == ("r2", JOURNAL)
    assert "boundary:3, final:pre_norm" in finding.what
    assert (result.samples, result.shards) == (2, 2)
    assert result.statistics.rows.tolist() == [27, 18, 18]
    assert {sample.id for sample in load_index(tmp_path).samples} == {"r0", "r1"}


def test_what_one_stage_acknowledged_before_the_pipeline_died_is_nothing_to_a_sample_captured_since(tmp_path):
    make_stages(tmp_path, more=("dp0-pp0", "dp0-pp1"))
    result = check(tmp_path)
    assert kinds(result) == set()
    assert result.samples == 3


def test_another_writers_rows_are_named_too(tmp_path):
    make_stages(tmp_path)
    (file,) = (tmp_path / "shards").glob("dp0-pp1-*.safetensors")
    journal = tmp_path / "journal-dp0-pp1.jsonl"
    offset = next(record["data_offset"] for record in made.records(journal) if record["t"] == "shard")
    made.flip(file, offset + 3)
    result = check(tmp_path)
    assert found(result, "checksum")[0].file == f"shards/{file.name}"
    assert result.findings.samples == {"r0", "r1"}  # both lie in the rows of one checksum


def test_a_flipped_scale_of_float8_states_is_found(tmp_path):
    made.make(tmp_path, "float8_e4m3")
    place = made.where(tmp_path, "s1", 3, "float8_e4m3")
    offset = made.token_offset(tmp_path, "scales", place) - 8 * place.row + 4 * len(made.COLUMNS) * place.row
    made.flip(place.file, offset, 1)
    result = check(tmp_path)
    assert not result.sound
    (finding,) = found(result, "checksum")
    assert "the scales of rows" in finding.what


def with_images(directory: Path, media: Media, asked: tuple[int, ...] = (1, 2, 99, 3)) -> None:
    """A dataset of one sample with an image of three positions."""
    tokens, images = np.array([1, 2, 10**15, 10**16, 10**15, 3]), ("sha256:a",)
    store = made.open_store(directory, "bfloat16")
    key, prompt_hash = sample_key("a", images), end_hash(np.array(asked))
    with RequestLedger.open(directory) as ledger:
        ledger.append(RequestRecord("a", key, 4, prompt_hash, (1, 3), "f:1", images))
    hashes = prefix_hashes(tokens, 0, 0)
    data = made.to_bytes(made.states_of(tokens), "bfloat16")
    extents = store.append(data, tokens, np.arange(6), hashes)
    store.add_sample(make_rid("hs-", key, 0, prompt_hash), 6, extents, int(hashes[-1]), media)
    store.close()
    made.write_norm(directory)


IMAGE = Media(((2, 3),), 99, end_hash(np.array([1, 2, 99, 3])))


def test_a_sample_with_images_is_sound(tmp_path):
    with_images(tmp_path, IMAGE)
    assert kinds(check(tmp_path)) == set()


def test_images_at_other_positions_than_the_rows_are_found(tmp_path):
    with_images(tmp_path, replace(IMAGE, runs=((2, 2),), prompt_hash=end_hash(np.array([1, 2, 99, 3]))))
    result = check(tmp_path)
    assert kinds(result) == {"tokens", "other-tokens"}
    assert "with a placeholder for each image its stored tokens have the hash" in found(result, "tokens")[0].what


def test_a_sample_of_another_text_around_its_image_is_found(tmp_path):
    with_images(tmp_path, IMAGE, asked=(1, 2, 99, 4))
    result = check(tmp_path)
    assert kinds(result) == {"other-tokens"}
    assert "4 tokens, 1 of them images, with the hash" in found(result, "other-tokens")[0].what


def test_a_journal_of_a_later_version_is_refused_with_its_file_and_line(dataset: Path) -> None:
    made.rewrite(dataset / JOURNAL, lambda record: {**record, "version": 9} if record["t"] == "journal" else record)
    with pytest.raises(StoreError, match=r"journal-dp0-pp0\.jsonl, line 1: the journal has version 9, .*; upgrade"):
        check(dataset)
