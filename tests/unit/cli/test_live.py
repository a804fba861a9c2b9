"""``hs-capture inspect --watch``: what it shows of a dataset that grows, and how it ends."""

import os
import socket
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from fake_server import INFO, make_sample
from rich.console import Console

from sglang_hs_capture.cli import live
from sglang_hs_capture.cli.main import main
from sglang_hs_capture.errors import StoreError
from sglang_hs_capture.store.hashing import end_hash, prefix_hashes
from sglang_hs_capture.store.requests import RequestLedger, RequestRecord
from sglang_hs_capture.store.schema import make_rid, sample_key
from sglang_hs_capture.store.session import Counters, SessionRecord, write_session
from sglang_hs_capture.store.writer import StoreWriter


class Capture:
    """A capture that does one more step each time it is waited for, and ends with Ctrl-C."""

    def __init__(self, directory: Path, steps: int) -> None:
        self.directory, self.left = directory, steps
        settings = {"session_id": "5e" * 16, "shard_bytes": 2**20, "min_free_bytes": 0}
        self.store = StoreWriter.open(directory, "dp0-pp0", INFO, **settings)
        self.waited: list[float] = []
        with RequestLedger.open(directory) as ledger:
            for number in range(steps):
                ids = make_sample(f"s{number}").input_ids
                key = sample_key(f"s{number}")
                ledger.append(RequestRecord(f"s{number}", key, len(ids), end_hash(ids), (0, len(ids)), "data:1"))
        self.tell(0)

    def tell(self, rows: int) -> None:
        counters = Counters(rows=rows, bytes=rows * INFO.row_bytes, samples=rows // 5, blocked_s=0.25, disk_wait_s=1.5)
        record = SessionRecord("dp0-pp0", "5e" * 16, os.getpid(), socket.gethostname(), state="ready")
        record.counters = counters
        write_session(self.directory, record)

    def pause(self, seconds: float) -> None:
        self.waited.append(seconds)
        if not self.left:
            self.store.close()
            raise KeyboardInterrupt
        self.left -= 1
        ids = make_sample(f"s{self.left}").input_ids
        rows = bytes(len(ids) * INFO.row_bytes)
        rid = make_rid("hs-", sample_key(f"s{self.left}"), 0, end_hash(ids))
        if self.left:
            extents = self.store.append(rows, ids, np.arange(len(ids)), prefix_hashes(ids, 0, 0))
            self.store.add_sample(rid, len(ids), extents, end_hash(ids))
        else:
            self.store.add_failure(rid, "non_finite", "state 0\n at position 3")
        self.store.commit()
        self.tell(5 * len(self.waited))


def test_each_look_shows_what_has_come(tmp_path):
    stream = StringIO()
    capture = Capture(tmp_path / "states", steps=3)
    live.watch(tmp_path / "states", Console(file=stream, width=200), 0.5, capture.pause)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert capture.waited == [0.5] * 4
    assert "0 acknowledged of 3 asked for (0 tokens)" in lines[0]
    assert "1 acknowledged of 3 asked for (5 tokens)" in lines[1]
    assert "2 acknowledged of 3 asked for (10 tokens), 1 times one failed" in lines[3]
    assert "15 rows" not in lines[3]
    assert "Rows         15 (0.000 GB) in the latest sessions" in lines[3]
    assert "0.2 s for room in the ring, 1.5 s for the disk" in lines[3]


def test_on_a_terminal_it_is_drawn_in_place(tmp_path):
    stream = StringIO()
    capture = Capture(tmp_path / "states", steps=1)
    live.watch(tmp_path / "states", Console(file=stream, width=200, force_terminal=True), 2, capture.pause)
    shown = stream.getvalue()
    assert "dp0-pp0 ready (5 rows, 1 samples, ring full 0.2 s," in shown
    assert "non_finite: state 0\\n at position 3" in shown
    assert shown.rstrip("\n").endswith("\x1b[?25h"), "the cursor is shown again"


def test_rates_are_those_of_the_last_moments(tmp_path):
    capture = Capture(tmp_path / "states", steps=2)
    dataset = live.LiveDataset(tmp_path / "states")
    dataset.poll()
    dataset.lines(100.0)
    capture.pause(1)
    dataset.poll()
    assert "Rows         5 (0.000 GB) in the latest sessions, 2 rows/s" in dataset.lines(102.0)[2]


def test_stages_count_the_same_rows(tmp_path):
    Capture(tmp_path, steps=1)
    for writer, rows in (("dp0-pp0", 7), ("dp0-pp1", 6), ("dp1-pp0", 10)):
        record = SessionRecord(writer, "5e" * 16, 2**22, socket.gethostname(), state="ready")
        record.counters = Counters(rows=rows, bytes=10)
        write_session(tmp_path, record)
    dataset = live.LiveDataset(tmp_path)
    dataset.poll()
    assert (dataset.account.rows, dataset.account.total("bytes")) == (17, 30)
    assert "dp0-pp1 ready, but its process has ended" in "\n".join(dataset.lines(0.0))


def test_the_command_ends_with_0(tmp_path, capsys, monkeypatch):
    capture = Capture(tmp_path, steps=1)
    monkeypatch.setattr(live.watch, "__defaults__", (capture.pause,))
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(tmp_path), "--watch", "--interval", "0.2"])
    assert not ended.value.code
    assert capture.waited == [0.2, 0.2]
    assert "1 asked for" in capsys.readouterr().out


def test_a_capture_whose_model_is_not_loaded_yet_is_waited_for(tmp_path):
    stream = StringIO()
    states = tmp_path / "states"
    capture = Capture(tmp_path / "made", steps=1)
    states.mkdir()
    with RequestLedger.open(states):
        pass
    waited = []

    def pause(seconds):
        waited.append(seconds)
        if len(waited) < 2:
            return
        if not (states / "dataset.json").exists():
            states.rename(tmp_path / "begun")
            capture.directory.rename(states)
            return
        raise KeyboardInterrupt

    live.watch(states, Console(file=stream, width=200), 0.5, pause)
    lines = stream.getvalue().splitlines()
    assert lines[0] == f"Waiting for {states}/dataset.json, which is written when the model is loaded ..."
    assert "0 acknowledged of 1 asked for" in lines[1]
    assert len(waited) == 3


def test_watching_nothing_is_refused(tmp_path, capsys):
    with pytest.raises(StoreError, match="expected a dataset"):
        live.watch(tmp_path, Console(file=StringIO()), 1)
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(tmp_path), "--watch", "--json"])
    assert ended.value.code == 2
    assert "--watch and --json: give one of them" in capsys.readouterr().err


def test_a_sample_that_was_sent_again_counts_once(tmp_path):
    capture = Capture(tmp_path / "states", steps=1)
    dataset = live.LiveDataset(tmp_path / "states")
    ids = make_sample("s0").input_ids
    for attempt in range(2):
        extents = capture.store.append(
            bytes(len(ids) * INFO.row_bytes), ids, np.arange(len(ids)), prefix_hashes(ids, 0, 0)
        )
        rid = make_rid("hs-", sample_key("s0"), attempt, end_hash(ids))
        capture.store.add_sample(rid, len(ids), extents, end_hash(ids))
    capture.store.close()
    dataset.poll()
    assert "1 acknowledged of 1 asked for (5 tokens)" in dataset.lines(0.0)[1]


@pytest.mark.parametrize("again", [False, True])
def test_a_dataset_that_vanishes_or_is_replaced_is_told(tmp_path, again):
    capture = Capture(tmp_path / "states", steps=2)

    def vanish() -> None:
        capture.store.close()
        (tmp_path / "states").rename(tmp_path / "moved")
        if again:
            info = replace(INFO, created_at="2026-01-01T00:00:00.000Z")
            StoreWriter.open(
                tmp_path / "states", "dp0-pp0", info, session_id="5e", shard_bytes=2**20, min_free_bytes=0
            ).close()

    steps = iter([lambda: capture.pause(0.5), vanish])
    said = "another dataset, created at 2026" if again else "there is no dataset.json"
    with pytest.raises(StoreError, match=said):
        live.watch(tmp_path / "states", Console(file=StringIO(), width=200), 0.5, lambda _: next(steps)())
