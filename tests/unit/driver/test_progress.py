"""What a run shows while it goes on, and when it has ended."""

import io
import json
import re
from dataclasses import replace

from rich.console import Console

from sglang_hs_capture.data.records import Exclusion, InputProblem
from sglang_hs_capture.driver import progress
from sglang_hs_capture.driver.progress import BarView, LineView, Rates, Snapshot, make_view
from sglang_hs_capture.driver.summary import EXCLUDED_FOR, SHOWN_PROBLEMS, Summary

SNAPSHOT = Snapshot(done=3, in_flight=7, tokens=2000, rows=1234, bytes=2_340_000_000, blocked_s=1.25, disk_wait_s=0.75)
DETAIL = "1,234 rows, 2.34 GB, 0 tok/s, 0.000 GB/s, 7 in flight, ring full 1.2 s, disk wait 0.8 s"


def test_rates_are_those_of_the_last_moments():
    rates = Rates()
    assert rates.update(0.0, 0, 0) == (0.0, 0.0)
    assert rates.update(2.0, 100, 1000) == (50.0, 500.0)
    for second in range(3, 60):
        rates.update(float(second), 100, 1000)
    assert rates.update(60.0, 100, 1000) == (0.0, 0.0)


def test_a_pipe_gets_a_line_now_and_then():
    stream = io.StringIO()
    view = make_view(total=10, stream=stream)
    assert isinstance(view, LineView)
    view.update(SNAPSHOT)
    view.update(SNAPSHOT)
    assert stream.getvalue().splitlines() == [
        f"3 of 10 samples, {DETAIL}",
    ]


def test_an_input_with_more_samples_than_lines_goes_on_beyond_its_total():
    stream, console = io.StringIO(), Console(file=io.StringIO(), force_terminal=True, width=120)
    LineView(stream, total=2).update(SNAPSHOT)
    assert stream.getvalue().startswith("3 of 10 samples"), "the 7 in flight are not done"
    with BarView(console, total=2) as view:
        view.update(SNAPSHOT)
    assert "3/10" in console.file.getvalue()


def test_rates_are_shown_as_they_are_now(monkeypatch):
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    stream = io.StringIO()
    view = LineView(stream, total=None, interval_s=0.0)
    view.update(SNAPSHOT)
    now = 102.0
    view.update(replace(SNAPSHOT, tokens=82_000, rows=61_234, bytes=5_340_000_000, disk_wait_s=1.5))
    assert stream.getvalue().splitlines()[-1] == (
        "3 samples, 61,234 rows, 5.34 GB, 40,000 tok/s, 1.500 GB/s, 7 in flight, ring full 1.2 s, disk wait 1.5 s"
    )


def test_a_terminal_gets_a_bar():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with BarView(console, total=10) as view:
        view.say("[not markup] hello")
        view.update(SNAPSHOT)
    shown = console.file.getvalue()
    assert "[not markup] hello" in shown
    assert "3/10" in shown
    assert DETAIL in shown


def test_what_a_server_says_is_shown_as_text_that_no_terminal_obeys():
    plain, terminal = io.StringIO(), io.StringIO()
    LineView(plain, total=1).say("Lost it (\x1b[2J\udcff).")
    with BarView(Console(file=terminal, force_terminal=True, width=100), total=1) as view:
        view.say("Lost it (\x1b[2J\udcff).")
    assert plain.getvalue() == "Lost it (\\x1b[2J\\udcff).\n"
    assert "Lost it (\\x1b[2J\\udcff)." in terminal.getvalue()


def test_a_narrow_terminal_cuts_nothing_off():
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    with BarView(console, total=10) as view:
        view.update(SNAPSHOT)
    shown = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", console.file.getvalue())
    assert " ".join(shown.split()).endswith(DETAIL)


def test_the_summary_says_what_was_done_in_words():
    summary = Summary("/d", asked=9, captured=4, already=2, tokens=8000, bytes=4 * 10**9, seconds=2.0, blocked_s=0.5)
    summary.skipped = [InputProblem("f:1", "not JSON"), InputProblem("f:2", "not JSON")]
    summary.dropped = [InputProblem("f:3", "non_finite", "x")]
    lines = summary.lines()
    assert lines[0] == "Captured 4 samples (8,000 tokens, 4.00 GB) in 2.0 s, 4,000 tokens/s."
    assert lines[1] == "Looked at 9; 2 were there already; 2 skipped; 1 dropped."
    assert "The model waited 0.5 s for the disk: the ring was full." in lines
    assert lines[-4:] == ["Skipped: f:1: not JSON", "Skipped: f:2: not JSON", "Dropped: f:3: non_finite", "Dataset: /d"]
    again = json.loads(json.dumps(summary.to_json()))
    assert (again["captured"], again["tokens_per_s"], again["dropped"][0]["sample_id"]) == (4, 4000.0, "x")


def test_the_summary_counts_what_the_settings_left_out_by_reason():
    summary = Summary("/d", asked=7, captured=1, seconds=1.0, truncated=2)
    summary.excluded = {Exclusion.TOO_LONG: 1, Exclusion.NO_LOSS: 4}
    assert (
        "Excluded 5 samples: 1 longer than --max-length, 4 without a token to train on (--keep-untrained keeps such)."
        in summary.lines()
    )
    assert "Cut 2 samples to --max-length." in summary.lines()
    assert json.loads(json.dumps(summary.to_json()))["excluded"] == {"too-long": 1, "no-loss": 4}
    assert set(EXCLUDED_FOR) == set(Exclusion)


def test_a_long_list_is_cut():
    summary = Summary("/d", asked=100, seconds=1.0, skipped=[InputProblem(f"f:{i}", "bad") for i in range(100)])
    lines = summary.lines()
    assert sum(line.startswith("Skipped:") for line in lines) == SHOWN_PROBLEMS + 1
    assert "Skipped: and 80 more" in lines


def test_nothing_left_to_do_is_said():
    assert Summary("/d").lines() == ["Nothing to do: the input holds no sample."]
    assert Summary("/d", asked=2, already=2).lines() == ["Nothing left to do: all 2 samples of the input are in /d."]
    excluded = Summary("/d", asked=2, excluded={Exclusion.TOO_LONG: 2})
    assert excluded.lines() == [
        "Nothing to do: every sample of the input is excluded.",
        "Excluded 2 samples: 2 longer than --max-length.",
    ]
    skipped = Summary("/d", asked=2, already=1, skipped=[InputProblem("f:1", "bad")])
    assert skipped.lines() == [
        "Nothing left to do: all 1 sample of the input are in /d, and 1 line skipped.",
        "Skipped: f:1: bad",
    ]
