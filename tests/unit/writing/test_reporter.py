"""The session record: it can be written when nothing else can, and leaves a live session of another process alone."""

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hs_capture.errors import DiskFullError, GuardError, StoreError
from sglang_hs_capture.store.session import Counters, SessionRecord, read_sessions, write_session
from sglang_hs_capture.writing import reporter as reporter_module
from sglang_hs_capture.writing.reporter import SessionReporter


def reporter(directory: Path, run_id: str = "r", pid: int | None = None, host: str = "") -> SessionReporter:
    record = SessionRecord("dp0-pp0", "5e55", pid or os.getpid(), host or socket.gethostname(), run_id=run_id)
    return SessionReporter(directory, record)


def test_on_a_full_disk_the_reserve_makes_room_for_the_reason(tmp_path, monkeypatch):
    mine = reporter(tmp_path)
    mine.ready()
    reserve = tmp_path / "reserve-dp0-pp0"
    assert reserve.stat().st_size >= 2**16

    def write(directory, record):
        if reserve.exists():
            raise DiskFullError("full")
        write_session(directory, record)

    monkeypatch.setattr(reporter_module, "write_session", write)
    mine.stopped(DiskFullError("the disk is full"), Counters(rows=7))
    (session,) = read_sessions(tmp_path)
    assert (session.state, session.error, session.counters.rows) == ("stopped", "the disk is full", 7)
    assert session.error_kind == "DiskFullError"


def test_an_error_that_nobody_foresaw_is_named_with_its_type(tmp_path):
    mine = reporter(tmp_path)
    mine.ready()
    mine.stopped(ValueError("odd\nshape"), Counters())
    (session,) = read_sessions(tmp_path)
    assert (session.error, session.error_kind) == ("ValueError: odd shape", None)


def test_a_refusal_does_not_hide_a_live_session(tmp_path):
    live = reporter(tmp_path, "live")
    live.ready()
    reporter(tmp_path, "second", pid=os.getppid()).refused(GuardError("locked"))
    (session,) = read_sessions(tmp_path)
    assert (session.run_id, session.state) == ("live", "ready")


def test_a_refusal_takes_the_place_of_a_dead_session(tmp_path):
    dead = reporter(tmp_path, "dead", pid=2**22 + 1)
    dead.ready()
    reporter(tmp_path, "second").refused(GuardError("no graph"))
    (session,) = read_sessions(tmp_path)
    assert (session.run_id, session.state, session.error) == ("second", "refused", "no graph")
    assert session.error_kind == "GuardError"


def test_a_refusal_takes_the_place_of_a_session_whose_process_id_is_now_its_own(tmp_path):
    reporter(tmp_path, "before").ready()
    reporter(tmp_path, "second").refused(GuardError("no graph"))
    (session,) = read_sessions(tmp_path)
    assert (session.run_id, session.state) == ("second", "refused")


def test_a_refusal_does_not_hide_a_session_of_another_host(tmp_path):
    there = reporter(tmp_path, "there", host="elsewhere")
    there.ready()
    reporter(tmp_path, "second").refused(GuardError("no graph"))
    (session,) = read_sessions(tmp_path)
    assert (session.run_id, session.state) == ("there", "ready")


def rows_on_disk(directory: Path) -> int:
    (session,) = read_sessions(directory)
    return session.counters.rows


def wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_counters_reach_the_disk_at_once_if_asked_and_else_within_a_second(tmp_path, monkeypatch):
    mine = reporter(tmp_path)
    mine.ready()
    mine.progress(Counters(rows=5), now=True)
    wait_for(lambda: rows_on_disk(tmp_path) == 5)
    mine.progress(Counters(rows=6), now=False)
    mine.progress(Counters(rows=7), now=False)
    assert rows_on_disk(tmp_path) == 5
    monkeypatch.setattr(reporter_module, "_REPORT_INTERVAL_S", 0.0)
    mine.progress(Counters(rows=8), now=False)
    wait_for(lambda: rows_on_disk(tmp_path) == 8)
    mine.closed()


def test_a_disk_that_takes_its_time_holds_nobody_up_and_the_last_word_counts(tmp_path, monkeypatch):
    others = set(threading.enumerate())
    mine = reporter(tmp_path)
    mine.ready()
    (thread,) = set(threading.enumerate()) - others
    begun, go_on = threading.Event(), threading.Event()

    def write(directory, record):
        begun.set()
        go_on.wait(20)
        write_session(directory, record)

    monkeypatch.setattr(reporter_module, "write_session", write)
    mine.progress(Counters(rows=1), now=True)
    assert begun.wait(20)
    for rows in range(2, 9):
        mine.progress(Counters(rows=rows), now=True)
    assert rows_on_disk(tmp_path) == 0
    go_on.set()
    mine.stopped(StoreError("hung"), Counters(rows=9))
    thread.join(20)
    assert not thread.is_alive()
    (session,) = read_sessions(tmp_path)
    assert (session.state, session.counters.rows) == ("stopped", 9)


def test_counters_that_cannot_be_written_are_an_error_of_the_next_call(tmp_path, monkeypatch):
    mine = reporter(tmp_path)
    mine.ready()
    failed = threading.Event()

    def write(directory, record):
        failed.set()
        raise StoreError("read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(reporter_module, "write_session", write)
        mine.progress(Counters(rows=1), now=True)
        assert failed.wait(20)
        wait_for(lambda: mine._failure is not None)
    with pytest.raises(StoreError, match="read-only"):
        mine.progress(Counters(rows=2), now=True)
    mine.stopped(StoreError("x"), Counters(rows=2))
    assert rows_on_disk(tmp_path) == 2
