"""Capture with its writing process: whole samples on disk, whoever of the two is killed, or a reason."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import xxhash
from safetensors import safe_open

from sglang_hs_capture.capture import session as session_module
from sglang_hs_capture.capture import writer as writer_module
from sglang_hs_capture.errors import ConfigError, DatasetLockedError, DatasetMismatchError, EngineError, StoreError
from sglang_hs_capture.store.lock import FileLock
from sglang_hs_capture.store.recovery import lock_path
from sglang_hs_capture.store.session import SessionRecord, read_sessions
from sglang_hs_capture.store.writer import StoreWriter
from sglang_hs_capture.writing.reporter import SessionReporter
from tests.unit import toy_model
from tests.unit.toy_model import HIDDEN, ToyModel


def journal(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "journal-dp0-pp0.jsonl").read_text().splitlines()]


def samples(directory: Path) -> dict[str, torch.Tensor]:
    """The states of each acknowledged request; all shards must be finished."""
    out = {}
    for sample in (record for record in journal(directory) if record["t"] == "sample"):
        parts = []
        for number, start, count in sample["extents"]:
            with safe_open(directory / "shards" / f"dp0-pp0-{number:06d}.safetensors", "pt") as shard:
                parts.append(shard.get_slice("hidden_states")[start : start + count])
        out[sample["rid"]] = torch.cat(parts)
    return out


def session(directory: Path) -> SessionRecord:
    (record,) = read_sessions(directory)
    return record


def wait_for(done: Callable[[], object], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_prompts_become_samples_and_the_session_closes(tmp_path):
    model = ToyModel(tmp_path)
    assert session(tmp_path).state == "ready"
    long, short = list(range(500)), [7, 8]
    model.forward(("hs-long", long, 0, 300), ("other", [5] * 9, 0, 9))
    model.forward(("other-2", [5] * 9, 0, 9), ("hs-long", long, 300, 500), ("hs-short", short, 0, 2))
    model.close()
    stored = samples(tmp_path)
    assert set(stored) == {"hs-long", "hs-short"}
    assert torch.equal(stored["hs-long"], ToyModel.states(long))
    assert torch.equal(stored["hs-short"], ToyModel.states(short))
    record = session(tmp_path)
    assert (record.state, record.error) == ("closed", None)
    assert (record.counters.samples, record.counters.rows) == (2, 502)
    assert record.counters.ring_bytes == 2**20


def test_a_batch_larger_than_the_ring_is_stored_whole(tmp_path):
    model = ToyModel(tmp_path)
    prompt = list(range(4000)) * 4
    model.table = torch.zeros(64, len(prompt), dtype=torch.int32)
    assert len(prompt) * 2 * toy_model.HIDDEN * 4 > 2**20
    model.forward(("hs-1", prompt, 0, len(prompt)))
    model.close()
    assert torch.equal(samples(tmp_path)["hs-1"], ToyModel.states(prompt))


def test_metadata_larger_than_the_ring_arrives_whole(tmp_path):
    model = ToyModel(tmp_path)
    model.table = torch.zeros(64, 6002, dtype=torch.int32)
    prompts = {f"hs-{n}": [n + 1 + k % 5 for k in range(6001)] for n in range(30)}
    assert 8 * 6000 * len(prompts) > 2**20
    model.forward(*((rid, prompt, 0, 6000) for rid, prompt in prompts.items()))
    model.forward(*((rid, prompt, 6000, 6001) for rid, prompt in prompts.items()))
    model.close()
    stored = samples(tmp_path)
    assert set(stored) == set(prompts)
    assert all(torch.equal(stored[rid], ToyModel.states(prompt)) for rid, prompt in prompts.items())


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGCONT])
def test_a_forward_that_waits_for_a_stopped_writing_process_goes_on_when_that_is_killed_or_continued(tmp_path, signum):
    model = ToyModel(tmp_path)
    model.forward(("hs-first", [1], 0, 1))
    wait_for(lambda: any(r["t"] == "sample" for r in journal(tmp_path)))
    os.kill(model.capture._writer.pid, signal.SIGSTOP)
    prompts = {f"hs-{n}": list(range(400)) for n in range(40)}
    thread = threading.Thread(target=lambda: [model.forward((rid, prompts[rid], 0, 400)) for rid in prompts])
    thread.start()
    wait_for(lambda: model.capture._memory.blocked_s > 0.2)
    assert thread.is_alive()
    os.kill(model.capture._writer.pid, signum)
    thread.join(20)
    assert not thread.is_alive()
    model.close()
    if signum == signal.SIGKILL:
        assert session(tmp_path).state == "stopped"
        model = ToyModel(tmp_path)
        model.close()
    assert set(samples(tmp_path)) == {"hs-first"} | (set(prompts) if signum == signal.SIGCONT else set())


@pytest.mark.parametrize("rid", ["hs-\ud800", "hs-\n\0'\"\\../..", "hs-" + "é" * 500_000])
def test_any_string_may_be_an_id(tmp_path, rid):
    model = ToyModel(tmp_path)
    model.forward((rid, [1, 2, 3], 0, 3))
    model.close()
    assert torch.equal(samples(tmp_path)[rid], ToyModel.states([1, 2, 3]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_final_norm_is_stored_and_checked(tmp_path, dtype):
    for number, again in enumerate([dtype, torch.float32]):
        model = ToyModel(tmp_path, norm_dtype=again)
        model.forward((f"hs-{number}", [1], 0, 1))
        model.close()
        assert session(tmp_path).state == "closed", session(tmp_path).error
    with safe_open(tmp_path / "final_norm.safetensors", "pt") as file:
        weight = file.get_tensor("weight")
        checksum = xxhash.xxh3_64_hexdigest(weight.view(torch.uint8).numpy().data)
        assert file.metadata() == {"eps": "1e-06", "xxh3": checksum}
    assert weight.dtype == (torch.float32 if dtype == torch.float64 else dtype)
    assert weight.tolist() == list(range(1, toy_model.HIDDEN + 1))
    assert set(samples(tmp_path)) == {"hs-0", "hs-1"}


def test_another_norm_stops_capture_and_not_the_model(tmp_path):
    first = ToyModel(tmp_path)
    first.forward(("hs-1", [1], 0, 1))
    first.close()
    other = ToyModel(tmp_path)
    with torch.no_grad():
        other.decoder.norm.weight[3] = 99
    other.forward(("hs-2", [1], 0, 1))
    wait_for(lambda: session(tmp_path).state == "stopped")
    assert "weights are of another model" in session(tmp_path).error
    assert torch.isfinite(other.forward(("hs-3", [1], 0, 1))).all()
    other.close()
    assert set(samples(tmp_path)) == {"hs-1"}


def test_a_dataset_of_another_model_is_refused_by_its_own_error(tmp_path):
    StoreWriter.open(
        tmp_path, "dp0-pp0", toy_model.info(config_hash="d"), session_id="s", shard_bytes=2**16, min_free_bytes=0
    ).close()
    with pytest.raises(DatasetMismatchError, match="config_hash"):
        ToyModel(tmp_path)


def test_a_locked_dataset_is_refused_by_its_own_error(tmp_path):
    tmp_path.mkdir(exist_ok=True)
    lock = FileLock(lock_path(tmp_path, "dp0-pp0"), 1)
    with pytest.raises(DatasetLockedError):
        ToyModel(tmp_path)
    lock.release()


def test_a_ring_too_small_for_a_row_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(toy_model, "HIDDEN", 2**16)
    with pytest.raises(ConfigError, match="raise it"):
        ToyModel(tmp_path)


def test_a_process_that_does_not_start_is_an_engine_error(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module.sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match="the writing process ended with status 1"):
        ToyModel(tmp_path)


@pytest.mark.parametrize("executable", ["", "/no/such/python"])
def test_a_python_that_cannot_be_started_is_an_engine_error(tmp_path, monkeypatch, executable):
    monkeypatch.setattr(writer_module.sys, "executable", executable)
    with pytest.raises(EngineError, match=f"a writing process with '{executable}'"):
        ToyModel(tmp_path)


def test_the_writing_process_finds_the_modules_that_this_process_found(tmp_path, monkeypatch):
    strange = tmp_path / "strange"
    for name in ("sglang_hs_capture", "numpy", "xxhash", "json"):
        (strange / name).mkdir(parents=True)
        (strange / name / "__init__.py").write_text("raise SystemExit(77)")
    (strange / "writing.py").write_text("raise SystemExit(78)")
    # Neither the working directory nor what PYTHONPATH has come to say since comes before what was imported here.
    monkeypatch.chdir(strange)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "/no/such/folder", str(strange), "."]))
    model = ToyModel(tmp_path / "dataset")
    model.forward(("hs-1", [1, 2, 3], 0, 3))
    model.close()
    assert set(samples(tmp_path / "dataset")) == {"hs-1"}


def open_files(pid: int) -> dict[int, str]:
    links = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the one through which the folder is read
            links[int(entry.name)] = os.readlink(entry)
    return links


def test_the_writing_process_inherits_nothing_but_the_ring_and_its_channel(tmp_path):
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    listening.set_inheritable(True)
    model = ToyModel(tmp_path)
    inherited = {name: link for name, link in open_files(model.capture._writer.pid).items() if name > 2}
    sockets = [link for link in inherited.values() if link.startswith("socket:")]
    others = [x for x in inherited.values() if not x.startswith(("socket:", "/memfd:hs-capture", str(tmp_path)))]
    assert (len(sockets), others) == (1, [])
    assert sockets[0] not in open_files(os.getpid()).values(), "this process holds the other's end of the channel"
    model.close()
    listening.close()


@pytest.mark.parametrize("data", [b"\xff nonsense", b'["Opened",{}]'])
def test_a_message_that_makes_no_sense_stops_capture_and_loses_nothing_stored(tmp_path, data):
    model = ToyModel(tmp_path, commit_interval_s=30)
    model.forward(("hs-1", [1, 2, 3], 0, 3))
    model.capture._writer._channel._connection.send_bytes(data)
    wait_for(lambda: session(tmp_path).state == "stopped")
    assert "expected a message" in session(tmp_path).error
    for number in range(2, 40):
        model.forward((f"hs-{number}", list(range(400)), 0, 400))
    model.close()
    assert set(samples(tmp_path)) == {"hs-1"}


def test_the_end_of_the_writing_process_is_told_once_the_record_can_be_written(tmp_path, monkeypatch):
    model = ToyModel(tmp_path)
    refused: list[str] = []
    monkeypatch.setattr(session_module, "_TELL_AGAIN_S", 0.05)

    def fail(_self: SessionReporter, error: Exception, _counters: object) -> None:
        refused.append(str(error))
        if len(refused) == 3:
            monkeypatch.undo()
        raise StoreError("read-only file system")

    monkeypatch.setattr(SessionReporter, "stopped", fail)
    os.kill(model.capture._writer.pid, signal.SIGKILL)
    wait_for(lambda: session(tmp_path).state == "stopped")
    assert len(refused) == 3
    assert session(tmp_path).error == refused[0]
    model.close()


def test_a_killed_writing_process_stops_capture_and_not_the_model(tmp_path):
    model = ToyModel(tmp_path)
    model.forward(("hs-1", [1, 2, 3], 0, 3))
    wait_for(lambda: any(r["t"] == "sample" for r in journal(tmp_path)))
    os.kill(model.capture._writer.pid, signal.SIGKILL)
    wait_for(lambda: session(tmp_path).state == "stopped")
    assert "killed by signal 9" in session(tmp_path).error
    for number in range(2, 40):
        model.forward((f"hs-{number}", list(range(400)), 0, 400))
    model.close()
    again = ToyModel(tmp_path)
    again.forward(("hs-2", [4], 0, 1))
    again.close()
    assert set(samples(tmp_path)) == {"hs-1", "hs-2"}
    assert session(tmp_path).state == "closed"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_whole_group_do_not_end_the_writing_process(tmp_path, signum):
    model = ToyModel(tmp_path)
    os.kill(model.capture._writer.pid, signum)
    model.forward(("hs-1", [1, 2, 3], 0, 3))
    model.close()
    assert set(samples(tmp_path)) == {"hs-1"}


def test_what_a_killed_model_process_had_sent_is_stored(tmp_path):
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.toy_model", str(tmp_path)], env=environment, cwd=root, check=False
    )
    assert done.returncode == -signal.SIGKILL
    lock = FileLock(lock_path(tmp_path, "dp0-pp0"), 15)
    lock.release()
    wait_for(lambda: session(tmp_path).state == "closed")
    assert set(samples(tmp_path)) == {"hs-1", "hs-2"}
    assert session(tmp_path).state == "closed"


def test_a_state_that_does_not_come_stops_capture(tmp_path):
    model = ToyModel(tmp_path)
    model.forward(("hs-1", [1], 0, 1))
    model.decoder.layers[1] = model.decoder.layers[2]
    model.forward(("hs-2", [1], 0, 1))
    wait_for(lambda: session(tmp_path).state == "stopped")
    assert "boundary:1 did not come" in session(tmp_path).error
    model.forward(("hs-3", [1], 0, 1))
    model.close()
    assert set(samples(tmp_path)) == {"hs-1"}


def test_a_state_with_fewer_rows_than_the_forward_stops_capture(tmp_path):
    """As where rows are scattered over ranks; the requests kept may be those at the end of the batch."""
    model = ToyModel(tmp_path)
    model.forward(("hs-1", [1, 2, 3], 0, 3))
    hidden, batch = model.prepare(("x", [1, 2, 3], 0, 3), ("hs-2", [4, 5, 6], 0, 3))
    model.run(hidden[:3], batch)
    wait_for(lambda: session(tmp_path).state == "stopped")
    assert "expected the 6 rows of a prefill forward at boundary:1, 3 came" in session(tmp_path).error
    assert session(tmp_path).error_kind == "GuardError"
    model.close()
    assert set(samples(tmp_path)) == {"hs-1"}


def test_rows_and_requests_that_fill_up_a_batch_leave_nothing(tmp_path):
    """As with DP attention, where each rank's batch is made as long as the longest."""
    model = ToyModel(tmp_path)
    prompts = {"hs-1": [1, 2, 3], "hs-2": [4, 5]}
    hidden, batch = model.prepare(*((rid, prompt, 0, len(prompt)) for rid, prompt in prompts.items()))
    batch.extend_seq_lens_cpu.append(2)
    batch.extend_prefix_lens_cpu.append(0)
    batch.input_ids = torch.cat([batch.input_ids, torch.zeros(3, dtype=torch.int64)])
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, torch.zeros(3, dtype=torch.int64)])
    model.run(torch.cat([hidden, torch.full((3, HIDDEN), torch.nan)]), batch)
    model.close()
    assert set(samples(tmp_path)) == {"hs-1", "hs-2"}
    assert sum(record["count"] for record in journal(tmp_path) if record["t"] == "rows") == 5


@pytest.mark.parametrize("mode", ["DECODE", "IDLE"])
def test_a_batch_that_goes_by_the_name_of_a_prefill_leaves_nothing(tmp_path, mode):
    """As with DP attention, on a rank that decodes or has nothing to do while others prefill."""
    model = ToyModel(tmp_path)
    hidden, batch = model.prepare(("hs-1", [1, 2, 3], 2, 3))
    batch._original_forward_mode = SimpleNamespace(name=mode)
    model.run(hidden, batch)
    model.close()
    assert [record for record in journal(tmp_path) if record["t"] in ("rows", "sample", "failed")] == []


def test_a_bad_row_fails_its_sample_alone(tmp_path):
    model = ToyModel(tmp_path)
    hidden = ToyModel.hidden

    def spoilt(prompt: list[int], start: int, end: int) -> torch.Tensor:
        rows = hidden(prompt, start, end)
        if prompt[0] == 9:
            rows[1, 2] = float("inf")
        return rows

    model.hidden = spoilt
    model.forward(("hs-bad", [9, 9, 9], 0, 3), ("hs-good", [1, 2, 3], 0, 3))
    model.close()
    assert set(samples(tmp_path)) == {"hs-good"}
    (failed,) = [record for record in journal(tmp_path) if record["t"] == "failed"]
    assert (failed["rid"], failed["reason"]) == ("hs-bad", "non_finite")


def test_with_a_slow_disk_and_a_ring_that_is_overwritten_nothing_is_lost(tmp_path, monkeypatch):
    shim = Path(__file__).parents[2] / "slow_disk"
    monkeypatch.setenv("PYTHONPATH", str(shim))
    monkeypatch.setenv("HS_DISK_BYTES_PER_S", "4e6")
    model = ToyModel(tmp_path)
    prompts = {f"hs-{n}": [n + 1 + k % 7 for k in range(1 + 137 * n % 900)] for n in range(64)}
    for first in range(0, 64, 4):
        rids = [f"hs-{n}" for n in range(first, first + 4)]
        model.forward(*((rid, prompts[rid], 0, len(prompts[rid])) for rid in rids))
    blocked = model.capture._memory.blocked_s
    model.close()
    stored = samples(tmp_path)
    assert set(stored) == set(prompts)
    for rid, prompt in prompts.items():
        assert torch.equal(stored[rid], ToyModel.states(prompt)), rid
    assert blocked > 0.1, "the ring never filled"
