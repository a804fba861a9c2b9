"""The run's logic against a server that plays SGLang and writes a real dataset."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Lines, make_sample

from sglang_hs_capture.data.records import Excluded, Exclusion, InputProblem
from sglang_hs_capture.driver import client, delivery, pump
from sglang_hs_capture.driver.delivery import DeliverySettings
from sglang_hs_capture.driver.intake import OnBadInput
from sglang_hs_capture.driver.pump import PumpSettings
from sglang_hs_capture.driver.run import CaptureRun, RunSettings
from sglang_hs_capture.driver.summary import Summary
from sglang_hs_capture.driver.target import RunningServers
from sglang_hs_capture.driver.watch import SessionWatch
from sglang_hs_capture.errors import (
    DatasetLockedError,
    DiskFullError,
    EngineError,
    GuardError,
    HsCaptureError,
    StoreError,
)
from sglang_hs_capture.store.index import load_index
from sglang_hs_capture.store.requests import RequestLedger
from sglang_hs_capture.store.schema import sample_key
from sglang_hs_capture.store.session import Counters, read_sessions, write_session

NAMES = [f"s{i}" for i in range(12)]
FAST = DeliverySettings(attempts=3, ack_timeout_s=0.3, grace_s=2.0)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(delivery, "RESEND_PAUSE_S", 0.01)
    monkeypatch.setattr(pump, "WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(pump, "SESSION_INTERVAL_S", 0.02)


def target_for(server: FakeServer, directory: Path) -> RunningServers:
    return RunningServers([server.url], directory, expected=lambda info: [], api_key=None, grace_s=2.0)


def run(
    directory: Path,
    samples: Iterable[Any],
    *,
    behave: Callable[[int, str], str] = lambda number, rid: "ok",
    during: Callable[[FakeServer], Any] | None = None,
    **settings: Any,
) -> tuple[Summary, FakeServer, Lines]:
    """One whole run over ``samples``; ``during`` runs beside it."""
    view = Lines()

    async def main() -> tuple[Summary, FakeServer]:
        async with FakeServer(directory, behave) as server:
            chosen = RunSettings(directory, **{"delivery": FAST, **settings})
            capture = CaptureRun(target_for(server, directory), samples, chosen, view)
            beside = asyncio.ensure_future(during(server)) if during else None
            summary = await asyncio.wait_for(capture.run(), 20)
            if beside:
                await beside
            return summary, server

    summary, server = asyncio.run(main())
    return summary, server, view


def samples(names: Iterable[str] = NAMES) -> list[Any]:
    return [make_sample(name, line=line) for line, name in enumerate(names, start=1)]


def ids(directory: Path) -> list[str]:
    return [sample.id for sample in load_index(directory).samples]


def test_everything_is_captured_once_and_accounted_for(tmp_path):
    summary, server, view = run(tmp_path, samples())
    assert ids(tmp_path) == NAMES
    assert len(server.requests) == len(NAMES)
    assert (summary.asked, summary.captured, summary.already, summary.tokens) == (12, 12, 0, 60)
    assert summary.bytes == 60 * 16
    assert summary.exit_code == 0
    assert view.snapshots[-1].done == 12
    assert summary.blocked_s == 0.0, "what the session did before this run is not this run's"


def test_samples_that_nothing_is_learned_from_are_counted(tmp_path):
    asked = samples(["a", "b", "c"])
    asked[1].loss_mask[:] = 0
    summary, _, _ = run(tmp_path, asked)
    assert (summary.captured, summary.zero_masks) == (3, 1)
    assert any(line.startswith("warning: 1 captured sample with a loss mask of zeros") for line in summary.lines())


def test_the_progress_shows_what_the_writers_count(tmp_path):
    async def count(server):
        while not server.requests:
            await asyncio.sleep(0.01)
        server.record.counters = Counters(rows=1060, bytes=960, blocked_s=5.25, disk_wait_s=0.5)
        write_session(tmp_path, server.record)

    # A sample that is not acknowledged keeps the run going until the counters have been read.
    _, _, view = run(tmp_path, samples(), behave=lambda number, rid: "lost" if number == 0 else "ok", during=count)
    last = view.snapshots[-1]
    assert (last.done, last.rows, last.bytes, last.blocked_s, last.disk_wait_s) == (12, 60, 960, 0.25, 0.5)


def test_a_server_that_dies_in_the_middle_is_told_with_what_to_do(tmp_path):
    class Dying(RunningServers):
        """Dies when some of its samples are acknowledged."""

        def check_alive(self) -> None:
            if len(ids(tmp_path)) >= 3:
                raise EngineError("the server was killed by SIGKILL")

    async def main() -> Summary:
        # The fourth sample never comes, so that the run is there to see the server die.
        async with FakeServer(tmp_path, lambda number, rid: "ok" if number < 3 else "silent") as server:
            target = Dying([server.url], tmp_path, lambda info: [], None, 2.0)
            patient = RunSettings(tmp_path, delivery=replace(FAST, ack_timeout_s=20.0))
            return await asyncio.wait_for(CaptureRun(target, samples(), patient, Lines()).run(), 20)

    summary = asyncio.run(main())
    expected = "the server was killed by SIGKILL; all acknowledged samples are safe, run again to go on"
    assert (summary.exit_code, summary.ended) == (6, expected)


def test_a_second_run_has_nothing_to_do_and_asks_no_server(tmp_path):
    run(tmp_path, samples())
    summary, server, _ = run(tmp_path, samples())
    assert server.requests == []
    assert (summary.asked, summary.captured, summary.already) == (12, 0, 12)
    assert summary.lines()[0].startswith("Nothing left to do: all 12 samples")


def test_what_is_missing_is_captured_by_the_next_run(tmp_path):
    run(tmp_path, samples(NAMES[:5]))
    summary, server, _ = run(tmp_path, samples())
    assert (summary.captured, summary.already) == (7, 5)
    assert ids(tmp_path) == NAMES
    assert {rid[3:27] for rid in server.requests} == {sample_key(name) for name in NAMES[5:]}


def test_a_sample_asked_for_and_never_captured_is_sent_again(tmp_path):
    run(tmp_path, samples(["a"]), behave=lambda n, rid: "silent", delivery=replace(FAST, attempts=1))
    assert [record.id for record in load_index(tmp_path).dropped] == ["a"]
    summary, _, _ = run(tmp_path, samples(["a"]))
    assert summary.captured == 1
    assert load_index(tmp_path).dropped == ()


def test_states_of_other_tokens_are_not_taken_for_the_samples(tmp_path):
    summary, server, _ = run(tmp_path, samples(["a"]), behave=lambda n, rid: "mismatch" if n == 0 else "ok")
    assert (summary.captured, summary.resent) == (1, 1)
    assert [rid[27:30] for rid in server.requests] == ["-0-", "-1-"]
    index = load_index(tmp_path)
    assert [sample.rid for sample in index.samples] == [server.requests[1]]
    assert len(index.mismatched) == 1


@pytest.mark.parametrize("action", ["failed", "silent", "error"])
def test_a_failure_is_tried_again(tmp_path, action):
    summary, server, _ = run(tmp_path, samples(["a", "b"]), behave=lambda n, rid: action if n == 0 else "ok")
    assert (summary.captured, summary.resent, summary.exit_code) == (2, 1, 0)
    assert len(server.requests) == 3


def test_a_late_acknowledgement_of_an_earlier_attempt_counts(tmp_path):
    summary, server, _ = run(tmp_path, samples(["a"]), behave=lambda n, rid: "late" if n == 0 else "silent")
    assert (summary.captured, summary.exit_code) == (1, 0)
    assert [sample.rid for sample in load_index(tmp_path).samples] == [server.requests[0]]


@pytest.mark.parametrize(
    ("action", "said"), [("silent", "no acknowledgement"), ("failed", "non_finite"), ("mismatch", "other tokens")]
)
def test_a_sample_that_is_never_captured_is_dropped_with_its_reason(tmp_path, action, said):
    bad = sample_key("b")
    summary, server, _ = run(
        tmp_path,
        samples(["a", "b", "c"]),
        behave=lambda n, rid: action if bad in rid else "ok",
        on_bad_input=OnBadInput.SKIP,
    )
    assert (summary.captured, len(summary.dropped), summary.exit_code) == (2, 1, 0)
    assert said in summary.dropped[0].reason
    assert sum(bad in rid for rid in server.requests) == 3
    assert [(record.id, record.source) for record in load_index(tmp_path).dropped] == [("b", "data.jsonl:2")]


def test_a_dropped_sample_stops_the_run_unless_such_are_skipped(tmp_path):
    bad = sample_key("b")
    summary, _, _ = run(tmp_path, samples(["a", "b"]), behave=lambda n, rid: "failed" if bad in rid else "ok")
    assert (summary.captured, summary.exit_code) == (1, 6)
    assert "data.jsonl:2" in summary.ended


def test_samples_that_all_fail_end_the_run(tmp_path):
    many = samples([f"s{i}" for i in range(64)])
    summary, server, _ = run(
        tmp_path,
        many,
        behave=lambda n, rid: "failed",
        on_bad_input=OnBadInput.SKIP,
        delivery=replace(FAST, attempts=1),
        pump=PumpSettings(max_prompts=4),
    )
    assert summary.exit_code == 6
    assert "16 samples in a row" in summary.ended
    assert len(server.requests) < 32


def test_a_prompt_the_server_refuses_is_bad_input(tmp_path):
    bad = sample_key("b")

    def behave(number: int, rid: str) -> str:
        return "refuse" if bad in rid else "ok"

    summary, server, _ = run(
        tmp_path, samples(["a", "b", "c"]), behave=behave, on_bad_input=OnBadInput.SKIP, known_answers=0
    )
    assert (summary.captured, summary.exit_code) == (2, 0)
    assert "HTTP 400: The input is not to my liking." in str(summary.skipped[0])
    assert sum(bad in rid for rid in server.requests) == 1, "it is not sent again"
    summary, _, _ = run(tmp_path, samples(["a", "b", "c"]), behave=behave)
    assert summary.exit_code == 5
    assert "data.jsonl:2" in summary.ended


def test_a_bad_line_stops_the_run_and_what_came_before_it_is_kept(tmp_path):
    lines = [*samples(["a", "b"]), InputProblem("data.jsonl:3", "not JSON"), make_sample("c", line=4)]
    summary, _, _ = run(tmp_path, lines)
    assert summary.exit_code == 5
    assert summary.ended.startswith("data.jsonl:3: not JSON")
    assert ids(tmp_path) == ["a", "b"]


def test_a_bad_line_is_skipped_and_counted(tmp_path):
    lines = [*samples(["a"]), InputProblem("data.jsonl:2", "not JSON"), make_sample("c", line=3)]
    summary, _, _ = run(tmp_path, lines, on_bad_input=OnBadInput.SKIP)
    assert (summary.exit_code, summary.captured, len(summary.skipped)) == (0, 2, 1)
    assert "Skipped: data.jsonl:2: not JSON" in summary.lines()
    assert ids(tmp_path) == ["a", "c"]


def test_a_bad_first_line_is_told_before_any_server_is_asked(tmp_path):
    class Unreachable(RunningServers):
        async def open(self, say: Any) -> Any:
            raise AssertionError("the server was asked")

    target = Unreachable("http://127.0.0.1:9", tmp_path, expected=lambda info: [], api_key=None, grace_s=0)
    capture_of = [InputProblem("data.jsonl:1", "not JSON"), make_sample("a")]
    summary = asyncio.run(run_with(target, capture_of, tmp_path))
    assert summary.exit_code == 5


async def run_with(target: RunningServers, lines: list[Any], directory: Path) -> Summary:
    return await CaptureRun(target, lines, RunSettings(directory), Lines()).run()


def test_a_prompt_that_is_too_long_for_the_server_is_bad_input(tmp_path):
    lines = [make_sample("a"), make_sample("b", length=101, line=2)]
    summary, server, _ = run(tmp_path, lines, on_bad_input=OnBadInput.SKIP)
    assert (summary.captured, len(server.requests)) == (1, 1)
    assert "the server's longest prompt, 100" in str(summary.skipped[0])


def test_what_the_settings_leave_out_is_counted_and_stops_nothing(tmp_path):
    left_out = [Excluded("data.jsonl:2", Exclusion.TOO_LONG, "b"), Excluded("data.jsonl:3", Exclusion.NO_LOSS, "c")]
    lines = [replace(make_sample("a"), cut=7), *left_out, make_sample("d", line=4)]
    summary, _, view = run(tmp_path, lines)
    assert (summary.exit_code, summary.asked, summary.captured, summary.truncated) == (0, 4, 2, 1)
    assert summary.excluded == {"too-long": 1, "no-loss": 1}
    assert view.snapshots[-1].done == 4
    assert ids(tmp_path) == ["a", "d"]
    again, server, _ = run(tmp_path, lines)
    assert (server.requests, again.already, again.truncated) == ([], 2, 1)


def test_an_id_captured_from_other_tokens_is_bad_input(tmp_path):
    run(tmp_path, samples(["a"]))
    changed = make_sample("a", length=6)
    summary, server, _ = run(tmp_path, [changed], on_bad_input=OnBadInput.SKIP)
    assert server.requests == []
    assert "captured from other tokens (5 from data.jsonl:1, now 6)" in str(summary.skipped[0])


def test_a_changed_loss_mask_is_brought_up_to_date_without_capturing_again(tmp_path):
    run(tmp_path, samples(["a"]))
    sample = make_sample("a")
    sample.loss_mask[:] = 1
    summary, server, _ = run(tmp_path, [sample])
    assert (server.requests, summary.remasked, summary.already) == ([], 1, 1)
    assert load_index(tmp_path).samples[0].loss_mask_rle == (0, 5)


def test_the_limit_counts_what_is_looked_at(tmp_path):
    run(tmp_path, samples(), limit=3)
    assert ids(tmp_path) == NAMES[:3]
    summary, server, _ = run(tmp_path, samples(), limit=3)
    assert server.requests == []
    assert summary.already == 3


def test_no_more_is_in_flight_than_allowed(tmp_path):
    _, _, view = run(tmp_path, samples(), behave=lambda n, rid: "late", pump=PumpSettings(max_prompts=2))
    assert max(snapshot.in_flight for snapshot in view.snapshots) <= 2
    other = tmp_path / "tokens"
    other.mkdir()
    _, _, view = run(other, samples(), pump=PumpSettings(max_tokens=11))
    assert max(snapshot.in_flight for snapshot in view.snapshots) <= 2
    assert ids(other) == NAMES


def test_what_is_done_is_not_in_flight_any_more(tmp_path):
    """Together they are never more than there are, so that the total that is shown keeps still."""
    _, _, view = run(tmp_path, samples(), pump=PumpSettings(max_prompts=4))
    assert max(snapshot.done + snapshot.in_flight for snapshot in view.snapshots) <= len(NAMES)
    assert min(snapshot.in_flight for snapshot in view.snapshots) == 0


def test_capture_that_stopped_ends_the_run_and_keeps_what_was_acknowledged(tmp_path):
    async def during(server: FakeServer) -> None:
        while len(server.requests) < len(NAMES):
            await asyncio.sleep(0.01)
        server.stop_capture("/data: no space: less than 2.0 GB free", "DiskFullError")

    summary, _, _ = run(
        tmp_path,
        samples(),
        behave=lambda n, rid: "ok" if n < 3 else "silent",
        during=during,
        delivery=replace(FAST, ack_timeout_s=30),
    )
    assert summary.exit_code == 4
    assert "less than 2.0 GB free" in summary.ended
    assert "all acknowledged samples are safe" in summary.ended
    assert summary.captured == 3
    assert len(ids(tmp_path)) == 3


@pytest.mark.parametrize(
    ("kind", "raised", "code"),
    [
        ("DiskFullError", DiskFullError, 4),
        ("GuardError", GuardError, 3),
        ("EngineError", EngineError, 6),
        (None, StoreError, 4),
        ("LaterError", StoreError, 4),
    ],
)
def test_capture_that_stopped_is_told_by_the_class_of_its_reason(tmp_path, kind, raised, code):
    server = FakeServer(tmp_path)
    server.stop_capture("there is room for doubt", kind)
    watch = SessionWatch(tmp_path, read_sessions(tmp_path))
    (error,) = watch.stops().values()
    assert "capture has stopped: there is room for doubt" in str(error)
    assert type(error) is raised
    assert error.exit_code == code


def test_a_connection_that_breaks_once_costs_one_attempt(tmp_path):
    summary, server, _ = run(tmp_path, samples(["a", "b"]), behave=lambda n, rid: "cut" if n == 0 else "ok")
    assert (summary.captured, summary.exit_code) == (2, 0)
    assert len(server.requests) == 3


def test_a_server_that_comes_back_within_the_grace_is_used_again(tmp_path):
    async def during(server: FakeServer) -> None:
        while not server.requests:
            await asyncio.sleep(0.01)
        await server.go_away()
        await asyncio.sleep(0.5)
        await server.come_back()

    summary, _, _ = run(tmp_path, samples(["a"]), behave=lambda n, rid: "cut" if n == 0 else "ok", during=during)
    assert (summary.captured, summary.exit_code) == (1, 0)


def test_a_server_that_stays_away_ends_the_run(tmp_path):
    async def during(server: FakeServer) -> None:
        while not server.requests:
            await asyncio.sleep(0.01)
        await server.go_away()

    summary, _, _ = run(
        tmp_path,
        samples(["a"]),
        behave=lambda n, rid: "cut",
        during=during,
        delivery=replace(FAST, grace_s=0.3),
    )
    assert summary.exit_code == 6
    assert "did not come back" in summary.ended


def test_a_server_on_which_nothing_moves_ends_the_run(tmp_path):
    summary, _, _ = run(
        tmp_path,
        samples(["a"]),
        behave=lambda n, rid: "silent",
        delivery=replace(FAST, ack_timeout_s=30),
        pump=PumpSettings(stall_timeout_s=0.3),
    )
    assert summary.exit_code == 6
    assert "the server hangs" in summary.ended


@pytest.mark.parametrize("caught", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_what_is_in_flight_finish(tmp_path, caught):
    async def during(server: FakeServer) -> None:
        while len(server.requests) < 2:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), caught)
        await asyncio.sleep(0.2)
        for rid in server.requests:
            server.capture(rid, make_sample(names[rid[3:27]]).input_ids.tolist())

    names = {sample_key(name): name for name in NAMES}
    summary, server, view = run(
        tmp_path,
        samples(),
        behave=lambda n, rid: "silent",
        during=during,
        delivery=replace(FAST, ack_timeout_s=30),
        pump=PumpSettings(max_prompts=2),
    )
    assert summary.exit_code == 128 + caught
    assert (summary.captured, len(server.requests)) == (2, 2)
    assert ids(tmp_path) == NAMES[:2]
    assert any(caught.name in line for line in view.said)


def test_a_signal_waits_no_longer_than_the_limit(tmp_path):
    async def during(server: FakeServer) -> None:
        while not server.requests:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    summary, _, _ = run(
        tmp_path,
        samples(["a"]),
        behave=lambda n, rid: "silent",
        during=during,
        delivery=replace(FAST, ack_timeout_s=30),
        pump=PumpSettings(drain_timeout_s=0.2),
    )
    assert (summary.captured, summary.exit_code) == (0, 143)


def test_two_runs_on_one_dataset_are_refused(tmp_path):
    with RequestLedger.open(tmp_path), pytest.raises(DatasetLockedError, match=str(os.getpid())):
        run(tmp_path, samples())


def test_records_left_by_earlier_runs_are_not_taken_for_this_ones(tmp_path):
    run(tmp_path, samples(["a"]), behave=lambda n, rid: "failed", delivery=replace(FAST, attempts=1))
    summary, server, _ = run(tmp_path, samples(["a"]))
    assert (summary.captured, summary.resent, len(server.requests)) == (1, 0, 1)


def test_an_unforeseen_error_keeps_its_traceback(tmp_path):
    def lines() -> Any:
        yield make_sample("a")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(tmp_path, lines())


def test_a_server_that_captures_elsewhere_is_told(tmp_path):
    other = tmp_path / "other"
    other.mkdir()

    async def main() -> Summary:
        async with FakeServer(tmp_path) as server:
            return await run_with(target_for(server, other), samples(["a"]), other)

    summary = asyncio.run(main())
    assert summary.exit_code == HsCaptureError.exit_code + 5
    assert f"captures into {tmp_path}, not into --output {other}" in summary.ended


def test_a_full_queue_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "RETRY_PAUSE_S", 0.01)
    summary, server, _ = run(tmp_path, samples(["a"]), behave=lambda n, rid: "busy" if n < 5 else "ok")
    assert (summary.captured, summary.resent, len(server.requests)) == (1, 0, 6)


IMPATIENT = """
import asyncio, sys
from pathlib import Path
from fake_server import FakeServer, Lines, make_sample
from sglang_hs_capture.driver.run import CaptureRun, RunSettings
from sglang_hs_capture.driver.target import RunningServers

class Target(RunningServers):
    def kill(self):
        (directory / "killed").touch()

directory = Path(sys.argv[1])

async def main():
    async with FakeServer(directory, lambda number, rid: "silent") as server:
        target = Target([server.url], directory, expected=lambda info: [], api_key=None, grace_s=2.0)
        view = Lines()
        view.say = lambda text: print(text, flush=True)
        view.update = lambda snapshot: print("in flight", flush=True) if snapshot.in_flight else None
        await CaptureRun(target, [make_sample("a")], RunSettings(directory), view).run()

asyncio.run(main())
"""


def test_a_second_signal_ends_at_once_and_kills_the_server(tmp_path):
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", IMPATIENT, str(tmp_path)]
    with subprocess.Popen(command, env=path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            next(line for line in process.stdout if line == "in flight\n")
            process.send_signal(signal.SIGINT)
            next(line for line in process.stdout if line.startswith("SIGINT: finishing"))
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=10) == 130
        finally:
            process.kill()
    assert (tmp_path / "killed").exists()
