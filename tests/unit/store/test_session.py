"""Session records: replaced in one step, read with whatever they hold."""

import errno
import json
import os
import socket
from pathlib import Path

import pytest
from faulty_disk import FailAt, disk
from toy_store import make_info

from sglang_hs_capture.errors import CorruptionError, DiskFullError, StoreError
from sglang_hs_capture.store.identity import model_identity
from sglang_hs_capture.store.session import (
    Counters,
    SessionRecord,
    is_running,
    missing_columns,
    read_session,
    read_sessions,
    session_path,
    write_session,
)


def make_record(writer: str = "dp0-pp0") -> SessionRecord:
    return SessionRecord(
        writer, "5e55", pid=42, host="here", model=model_identity(make_info()), counters=Counters(rows=3)
    )


def test_round_trip(tmp_path: Path) -> None:
    record = make_record()
    write_session(tmp_path / "new", record)
    assert record.updated_at >= record.started_at
    again = read_session(session_path(tmp_path / "new", "dp0-pp0"))
    assert again is not None
    assert again.to_json() == json.loads(json.dumps(record.to_json()))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["session-dp0-pp0.json"]


def test_the_latest_record_replaces_the_former(tmp_path: Path) -> None:
    record = make_record()
    write_session(tmp_path, record)
    record.state, record.counters.rows = "ready", 7
    write_session(tmp_path, record)
    write_session(tmp_path, make_record("dp1-pp0"))
    assert [(r.writer, r.state, r.counters.rows) for r in read_sessions(tmp_path)] == [
        ("dp0-pp0", "ready", 7),
        ("dp1-pp0", "starting", 3),
    ]


@pytest.mark.parametrize(
    ("call", "place"), [("pwrite", ".tmp"), ("fsync", ".tmp"), ("rename", ".tmp"), ("open", ".tmp")]
)
def test_failure_leaves_the_former_record(tmp_path: Path, call: str, place: str) -> None:
    write_session(tmp_path, make_record())
    record = make_record()
    record.state = "closed"
    with (
        disk(FailAt(errno.ENOSPC, call, place)),
        pytest.raises(DiskFullError, match=r"session-dp0-pp0.json: could not write"),
    ):
        write_session(tmp_path, record)
    assert [r.state for r in read_sessions(tmp_path)] == ["starting"]
    assert len(list(tmp_path.iterdir())) == 1


def test_no_record_is_none(tmp_path: Path) -> None:
    assert read_session(session_path(tmp_path, "dp0-pp0")) is None
    assert read_sessions(tmp_path) == []


def test_unknown_fields_are_passed_over_and_missing_ones_told(tmp_path: Path) -> None:
    path = session_path(tmp_path, "dp0-pp0")
    raw = make_record().to_json()
    path.write_text(json.dumps({**raw, "later": 1, "counters": {"rows": 1, "later": 2}}))
    record = read_session(path)
    assert record is not None
    assert record.counters == Counters(rows=1)
    path.write_text(json.dumps({name: raw[name] for name in raw if name not in ("pid", "state")}))
    with pytest.raises(CorruptionError, match="the fields pid, state are missing"):
        read_session(path)


def test_a_record_of_an_older_release_has_no_kind_of_error(tmp_path: Path) -> None:
    raw = make_record().to_json()
    del raw["error_kind"]
    session_path(tmp_path, "dp0-pp0").write_text(json.dumps(raw))
    (record,) = read_sessions(tmp_path)
    assert record.error_kind is None


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_what_is_no_record_is_told(tmp_path: Path, text: str) -> None:
    path = session_path(tmp_path, "dp0-pp0")
    path.write_text(text)
    with pytest.raises(CorruptionError, match="can be removed while nothing captures"):
        read_session(path)
    path.write_text('{"format": "other", "version": 1}')
    with pytest.raises(StoreError, match="expected the format"):
        read_session(path)


def test_a_record_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    path = session_path(tmp_path, "dp0-pp0")
    path.mkdir()
    with pytest.raises(StoreError, match=r"session-dp0-pp0.json: could not read: Is a directory"):
        read_session(path)


def test_a_process_is_running_gone_or_out_of_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record()
    record.pid, record.host = os.getpid(), socket.gethostname()
    assert is_running(record) is True
    record.pid = 2**22 + 1  # above the kernel's largest
    assert is_running(record) is False
    record.host = "elsewhere"
    assert is_running(record) is None

    def refuse(pid: int, signum: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    record.host = socket.gethostname()
    assert is_running(record) is True


def test_columns_that_no_stage_captures_are_named():
    def stage(number: int, *columns: str) -> SessionRecord:
        model = {"columns": ["boundary:3", "boundary:31", "final:pre_norm"]}
        return SessionRecord(f"dp0-pp{number}", "5e55", 1, "here", model=model, columns=list(columns))

    first, last = stage(0, "boundary:3"), stage(2, "final:pre_norm")
    assert missing_columns([first, last]) == ["boundary:31"]
    assert missing_columns([first, stage(1, "boundary:31"), last]) == []
    assert missing_columns([stage(0)]) == [], "a record of an older release, whose only writer had all"
    assert missing_columns([]) == []
