"""The two overhead benchmarks: the order of their rounds, and what they make of the timings."""

import argparse
import shutil

import pytest

from benchmarks import capture_overhead, decode_overhead
from benchmarks.capture_overhead import LISTS, OFF, ON, Measured
from benchmarks.decode_overhead import CAPTURED, IDLE, UPSTREAM
from benchmarks.load import Timing
from sglang_hs_capture.store.session import Counters, SessionRecord, write_session


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    for module in (capture_overhead, decode_overhead):
        monkeypatch.setattr(module, "machine", lambda: {"gpu": "none", "sglang": "0", "date": "today"})


class RecordingLoad:
    """Takes the place of a server: says which rounds were asked for."""

    def __init__(self) -> None:
        self.rounds: list[tuple[str, int, int]] = []

    def round(self, kind: str, number: int, times: int = 1) -> Timing:
        self.rounds.append((kind, number, times))
        return Timing(100 * times, 0, 1.0, 2.0)

    list_elements = 3

    def host_memory(self) -> int:
        return 11

    def blocked(self) -> dict[str, float]:
        # The second writer appears late, as a replica does that had nothing to do in the warm-up.
        return {"dp0-pp0": 1.0} if len(self.rounds) == 2 else {"dp0-pp0": 1.5, "dp1-pp0": 2.0}


def test_all_three_kinds_take_turns_and_each_begins_once(monkeypatch):
    monkeypatch.setattr(capture_overhead, "server_memory", lambda url: {"weight": 1.0})
    readings = iter([5, 7])
    load = RecordingLoad()
    monkeypatch.setattr(capture_overhead, "device_memory", lambda: (next(readings), len(load.rounds))[0])
    arguments = argparse.Namespace(rounds=3, sustained_rounds=4)
    found = capture_overhead.measure(load, "", (OFF, ON, LISTS), arguments)
    assert load.rounds == [
        *((OFF, -1, 1), (ON, -1, 1)),
        *((OFF, 0, 1), (ON, 0, 1), (LISTS, 0, 1)),
        *((ON, 1, 1), (LISTS, 1, 1), (OFF, 1, 1)),
        *((LISTS, 2, 1), (OFF, 2, 1), (ON, 2, 1)),
        *((OFF, 0, 4), (ON, 0, 4)),
    ]
    assert {kind: len(timings) for kind, timings in found.timings.items()} == {OFF: 3, ON: 3, LISTS: 3}
    assert found.sustained[ON].tokens == 400
    assert (found.warm_bytes, found.end_bytes, found.host_bytes, found.list_elements) == (5, 7, 11, 3)
    # Three rounds and the sustained phase, 2 s each to the last acknowledgement; the writer that waited most.
    assert found.blocked_share == 2.0 / 8.0


def capture_timings() -> tuple[Measured, Measured]:
    off = [Timing(1000, 0, 1.0, None), Timing(1000, 0, 1.25, None)]
    on = [Timing(1000, 0, 1.0, 2.0), Timing(1000, 0, 1.25, 5.0)]
    lists = [Timing(10, 0, 1.0, None), Timing(10, 0, 1.0, None)]
    sustained = {OFF: Timing(5000, 0, 5.0, None), ON: Timing(5000, 0, 5.0, 10.0)}
    plugin = Measured(
        {OFF: off, ON: on, LISTS: lists},
        sustained,
        3 * 10**9,
        4 * 10**9,
        blocked_share=0.25,
        host_bytes=8 * 10**9,
        start_s=30.0,
    )
    upstream = Measured({OFF: [Timing(1000, 0, 0.5, None)]}, {}, warm_bytes=2 * 10**9, end_bytes=2 * 10**9)
    return plugin, upstream


def test_capture_is_rated_by_answers_and_by_acknowledgement():
    plugin, upstream = capture_timings()
    report = capture_overhead.build_report(argparse.Namespace(own_boundaries=[]), "toy", plugin, upstream)
    assert report.series == {
        "SGLang's own class": [2000.0],
        "capture off": [1000.0, 800.0],
        "capture on, by answers": [1000.0, 800.0],
        "capture on, by acknowledgement": [500.0, 200.0],
        "`return_hidden_states`": [10.0, 10.0],
        "sustained, capture off": [1000.0],
        "sustained, capture on, by answers": [1000.0],
        "sustained, capture on, by acknowledgement": [500.0],
    }
    assert report.ratios == {
        "on / off, by answers": [1.0, 1.0],
        "on / off, by acknowledgement": [0.5, 0.25],
        "off / SGLang's own class": [0.5, 0.4],
        "on, by acknowledgement / `return_hidden_states`": [50.0, 20.0],
        "sustained, on / off, by acknowledgement": [0.5],
    }
    assert report.figures == {
        "acknowledged after the last answer, median, s": 2.375,
        "share of the time with capture for which the ring was full": 0.25,
        "device memory on all GPUs with capture, GB": 4.0,
        "host memory with capture, GB": 8.0,
        "start of the server, s": 30.0,
        "extra device memory with capture, GB": 1.0,
        "the same after all rounds, GB": 2.0,
    }
    assert report.to_json()["details"]["plugin"]["sustained"][ON]["acknowledged_s"] == 10.0


def test_boundaries_that_sglang_returns_itself_are_a_baseline_too():
    plugin, upstream = capture_timings()
    upstream.timings[LISTS] = [Timing(4, 0, 1.0, None), Timing(5, 0, 1.0, None)]
    report = capture_overhead.build_report(argparse.Namespace(own_boundaries=[1, 3]), "toy", plugin, upstream)
    assert report.series["`return_hidden_states`, boundaries 1, 3"] == [4.0, 5.0]
    assert report.ratios["on, by acknowledgement / `return_hidden_states`, boundaries 1, 3"] == [125.0, 40.0]
    flags = capture_overhead.own_boundaries_flags([1, 3])
    assert flags[-3:] == ["--return-aux-hidden-state-layer-ids", "1", "3"]


@pytest.mark.parametrize("left_out", [["--skip-upstream"], ["--return-hidden-states-prompts", "0"]])
def test_boundaries_that_nothing_would_return_are_refused(monkeypatch, capsys, left_out):
    words = ["capture_overhead", "--output", "/nowhere", *left_out, "--own-boundaries", "1", "3"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit):
        capture_overhead.parse_arguments()
    assert "--own-boundaries: expected SGLang's own class" in capsys.readouterr().err


def test_what_was_left_out_is_not_reported():
    plugin, _ = capture_timings()
    del plugin.timings[LISTS]
    plugin.sustained.clear()
    report = capture_overhead.build_report(argparse.Namespace(own_boundaries=[]), "toy", plugin, None)
    assert list(report.series) == ["capture off", "capture on, by answers", "capture on, by acknowledgement"]
    assert list(report.ratios) == ["on / off, by answers", "on / off, by acknowledgement"]
    assert list(report.figures) == [
        "acknowledged after the last answer, median, s",
        "share of the time with capture for which the ring was full",
        "device memory on all GPUs with capture, GB",
        "host memory with capture, GB",
        "start of the server, s",
    ]


def test_memory_that_could_not_be_read_is_no_zero():
    plugin, upstream = capture_timings()
    upstream.warm_bytes = None
    report = capture_overhead.build_report(argparse.Namespace(own_boundaries=[]), "toy", plugin, upstream)
    assert report.figures["extra device memory with capture, GB"] is None


@pytest.mark.parametrize(("rounds", "fits"), [(1, True), (4, False)])
def test_room_for_the_largest_phase_is_looked_for_first(tmp_path, monkeypatch, rounds, fits):
    monkeypatch.setattr(capture_overhead, "RESERVE_BYTES", 0)
    usage = shutil.disk_usage(tmp_path)._replace(free=3 * 64 * 100 * 7168 * 8)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    arguments = argparse.Namespace(output=tmp_path, prompts=64, length=100, sustained_rounds=rounds)
    if fits:
        capture_overhead.check_room(arguments, 7168)
    else:
        with pytest.raises(SystemExit, match=r"25,600 tokens in one phase need 1\.5 GB and there are 1\.1 GB"):
            capture_overhead.check_room(arguments, 7168)


def test_decode_warms_up_and_takes_turns(monkeypatch):
    asked = []

    def one_round(url, kind, number, arguments, vocab_size):
        asked.append((url, kind, number))
        return Timing(0, 100, 1.0, None)

    monkeypatch.setattr(decode_overhead, "one_round", one_round)
    urls = {UPSTREAM: "a", IDLE: "b", CAPTURED: "b"}
    found = decode_overhead.measure(urls, argparse.Namespace(rounds=2), 100)
    assert [number for *_, number in asked] == [-2] * 3 + [-1] * 3 + [0] * 3 + [1] * 3
    assert [kind for _, kind, _ in asked[:6]] == [IDLE, CAPTURED, UPSTREAM, CAPTURED, UPSTREAM, IDLE]
    assert all(urls[kind] == url for url, kind, _ in asked)
    assert {kind: len(timings) for kind, timings in found.items()} == dict.fromkeys(urls, 2)


def test_decode_is_compared_round_by_round():
    def timings(*rates: int) -> list[Timing]:
        return [Timing(0, rate, 1.0, None) for rate in rates]

    found = {UPSTREAM: timings(100, 200), IDLE: timings(100, 190), CAPTURED: timings(50, 160)}
    report = decode_overhead.build_report(argparse.Namespace(), "toy", found)
    assert report.series[UPSTREAM] == [100.0, 200.0]
    assert report.ratios == {f"{IDLE} / {UPSTREAM}": [1.0, 0.95], f"{CAPTURED} / {UPSTREAM}": [0.5, 0.8]}


def test_a_plugin_that_captured_too_little_is_an_error(tmp_path, monkeypatch):
    record = SessionRecord(writer="dp0-pp0", session_id="5e55" * 8, pid=1, host="here", counters=Counters(samples=63))
    write_session(tmp_path, record)
    assert decode_overhead.captured_samples(tmp_path, 63).samples == 63
    monkeypatch.setattr(decode_overhead, "SILENCE_TIMEOUT_S", 0.1)
    with pytest.raises(RuntimeError, match="expected 64 captured samples, there are 63"):
        decode_overhead.captured_samples(tmp_path, 64)


def test_off_and_on_of_a_number_have_the_same_prompts_and_only_one_is_captured(tmp_path, monkeypatch):
    sent = []

    def run_round(url, prompts, rids, *, in_flight, dataset, **fields):
        sent.append((prompts, rids[0], in_flight, dataset, fields))
        return Timing(6, 0, 1.0, 2.0)

    monkeypatch.setattr(capture_overhead, "run_round", run_round)
    (tmp_path / "shards").mkdir()
    finished, unfinished = tmp_path / "shards/a.safetensors", tmp_path / "shards/b.partial"
    for file in (finished, unfinished):
        file.touch()
    arguments = argparse.Namespace(output=tmp_path, prompts=2, length=3, return_hidden_states_prompts=1)
    load = capture_overhead.Load("", arguments, vocab_size=100)
    monkeypatch.setattr(capture_overhead, "returned_elements", lambda url, vocab_size: 7)
    for kind in (OFF, ON, LISTS):
        load.round(kind, 5, times=2)
    off, on, lists = sent
    assert off[0] == on[0]
    assert [len(prompt) for prompt in off[0]] == [3, 3, 3, 3]
    assert off[1:] == ("off-5-2-0", 2, None, {})
    assert on[1:] == ("hs-on-5-2-0", 2, tmp_path, {})
    fields = {"return_hidden_states": True, "max_new_tokens": 1, "least_bytes": 2 * 7 * 3}
    assert lists[1:] == ("return_hidden_states-5-2-0", 1, None, fields)
    assert (finished.exists(), unfinished.exists()) == (False, True)
