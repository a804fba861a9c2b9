"""Prompts that the model answers anew before they are captured: once each, kept, and captured with their answers."""

import asyncio
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_server import FakeServer, Lines

from sglang_hs_capture.data.prompts import Prompt
from sglang_hs_capture.data.records import InputProblem, Sample
from sglang_hs_capture.driver import client, regenerate
from sglang_hs_capture.driver.answers import ANSWERS_FILE, Answers
from sglang_hs_capture.driver.delivery import DeliverySettings
from sglang_hs_capture.driver.intake import OnBadInput
from sglang_hs_capture.driver.regenerate import AnswerSettings, Regeneration
from sglang_hs_capture.driver.run import CaptureRun, RunSettings
from sglang_hs_capture.driver.source import Source
from sglang_hs_capture.driver.summary import Summary
from sglang_hs_capture.driver.target import RunningServers
from sglang_hs_capture.errors import ConfigError, CorruptionError
from sglang_hs_capture.reader.dataset import HiddenStateDataset
from sglang_hs_capture.store.requests import RequestLedger

DELIVERY = DeliverySettings(attempts=3, ack_timeout_s=30, grace_s=2.0)
SETTINGS = AnswerSettings(max_new_tokens=6, temperature=0.5, top_p=0.9)
PROMPTS = {f"p{length}": list(range(1, length + 1)) for length in range(2, 10)}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(regenerate, "RESEND_PAUSE_S", 0.01)
    monkeypatch.setattr(client, "RETRY_PAUSE_S", 0.01)


def prompt(name: str, ids: Iterable[int]) -> Prompt:
    return Prompt(name, f"data.jsonl:{name}", np.array(list(ids), dtype=np.int64), frozenset({99}))


def expected(ids: list[int], limit: int = SETTINGS.max_new_tokens) -> list[int]:
    """What the fake server answers to these tokens."""
    return ids[::-1][:limit] if len(ids) >= limit else [*ids[::-1], 99]


def run(
    directory: Path,
    prompts: Iterable[Prompt | InputProblem],
    behave: Callable[[int, str], str] = lambda number, rid: "ok",
    settings: AnswerSettings = SETTINGS,
    max_length: int | None = None,
    **more: Any,
) -> tuple[Summary, FakeServer]:
    """One run that answers and captures."""

    async def main() -> tuple[Summary, FakeServer]:
        async with FakeServer(directory, behave) as server:
            chosen = RunSettings(directory, delivery=DELIVERY, **more)
            again = Regeneration(prompts, directory, settings, max_length=max_length, max_prompts=4, delivery=DELIVERY)
            target = RunningServers([server.url], directory, lambda info: [], None, 2.0)
            capture = CaptureRun(target, answered(directory), chosen, Lines(), again)
            return await asyncio.wait_for(capture.run(), 60), server

    return asyncio.run(main())


def answered(directory: Path) -> Iterable[Sample | InputProblem]:
    yield from Source([directory / ANSWERS_FILE], "").samples(max_length=None, vocab_size=None)


def all_prompts() -> list[Prompt]:
    return [prompt(name, ids) for name, ids in PROMPTS.items()]


def test_prompts_are_captured_with_what_the_model_answered(tmp_path):
    summary, server = run(tmp_path, all_prompts())
    assert (summary.answered, summary.captured, summary.exit_code) == (8, 8, 0)
    assert "Answered 8 prompts anew before." in summary.lines()
    items = {item["id"]: item for item in HiddenStateDataset(tmp_path)}
    assert set(items) == set(PROMPTS)
    for name, ids in PROMPTS.items():
        assert items[name]["input_ids"].tolist() == ids + expected(ids)
        assert items[name]["loss_mask"].tolist() == [0] * len(ids) + [1] * len(expected(ids))
    assert all(not body["rid"].startswith("hs-") for body in server.generated)
    sampling = {"max_new_tokens": 6, "temperature": 0.5, "top_p": 0.9, "stop_token_ids": [99]}
    assert all(body["sampling_params"] == sampling for body in server.generated)
    assert server.flushes == 2, "asked again after it refused, and not after it agreed"


def test_a_second_run_answers_nothing_and_captures_nothing(tmp_path):
    run(tmp_path, all_prompts())
    summary, server = run(tmp_path, all_prompts())
    assert server.requests == []
    assert (summary.answered, summary.captured, summary.already) == (0, 0, 8)


def test_a_run_goes_on_where_another_was_ended(tmp_path):
    """Answers that are there are captured as they are, also when the run that made them captured nothing."""
    run(tmp_path, all_prompts()[:3])
    answers = Answers(tmp_path, SETTINGS.to_json())
    answers.append(all_prompts()[3], [7, 7, 7], "stop")
    answers.sync()
    answers.close()
    with (tmp_path / ANSWERS_FILE).open("ab") as file:
        file.write(b'{"t":"answer","id":"torn')
    summary, server = run(tmp_path, all_prompts())
    assert (summary.answered, summary.captured, summary.already) == (4, 5, 3)
    assert len(server.generated) == 4
    items = {item["id"]: item["input_ids"].tolist() for item in HiddenStateDataset(tmp_path)}
    assert items["p5"] == [*PROMPTS["p5"], 7, 7, 7]
    assert set(items) == set(PROMPTS)


def test_only_the_answers_of_this_runs_input_are_captured(tmp_path):
    with RequestLedger.open(tmp_path):
        pass
    answers = Answers(tmp_path, SETTINGS.to_json())
    for each in all_prompts():
        answers.append(each, [7], "stop")
    answers.sync()
    answers.close()
    summary, _ = run(tmp_path, all_prompts()[:2])
    assert (summary.answered, summary.captured) == (0, 2)


def test_what_was_captured_with_other_answers_is_told_before_the_model_answers(tmp_path):
    run(tmp_path, all_prompts()[:3])
    (tmp_path / ANSWERS_FILE).rename(tmp_path / "of-another-run.jsonl")
    summary, server = run(tmp_path, all_prompts())
    assert server.requests == []
    assert "the id 'p2' was captured already, with the answer in" in summary.ended
    assert "choose another --output" in summary.ended
    summary, server = run(tmp_path, all_prompts(), on_bad_input=OnBadInput.SKIP)
    assert (summary.answered, summary.captured, len(summary.skipped)) == (5, 5, 3)


def test_failures_are_tried_again_and_then_left_out(tmp_path):
    refused = {"count": 0}

    def behave(number: int, rid: str) -> str:
        if number == 0:
            return "error"
        if number == 1:
            return "cut"
        if number == 2 and not refused["count"]:
            refused["count"] += 1
            return "refuse"
        return "abort" if number == 3 and not rid.startswith("hs-") else "ok"

    summary, _ = run(tmp_path, all_prompts(), behave, on_bad_input=OnBadInput.SKIP)
    assert (summary.answered, summary.captured, len(summary.skipped)) == (7, 7, 1)
    assert "the server refuses this prompt: HTTP 400" in summary.skipped[0].reason


def test_a_prompt_that_is_never_answered_stops_the_run_by_default(tmp_path):
    summary, _ = run(tmp_path, all_prompts()[:1], lambda number, rid: "error")
    assert summary.exit_code == 5
    assert "data.jsonl:p2: not answered in 3 attempts; the last one: HTTP 500: out of luck" in summary.ended


def test_answers_end_where_the_capture_does(tmp_path):
    """The fake server captures prompts of at most 100 tokens."""
    long, too_long = prompt("long", range(1, 98)), prompt("too-long", range(1, 101))
    summary, _ = run(tmp_path, [long, too_long], on_bad_input=OnBadInput.SKIP)
    (item,) = HiddenStateDataset(tmp_path)  # type: ignore[misc]
    assert item["input_ids"].tolist() == [*range(1, 98), 97, 96, 95]
    assert [problem.reason for problem in summary.skipped] == [
        "prompt of 100 tokens leaves no room for an answer within 100"
    ]
    summary, _ = run(tmp_path, [prompt("b", range(1, 10))], max_length=11)
    assert {item["id"]: len(item["input_ids"]) for item in HiddenStateDataset(tmp_path)}["b"] == 11


def test_bad_lines_and_repeated_ids_are_told(tmp_path):
    given = [InputProblem("data.jsonl:1", "not JSON"), *all_prompts()[:2], all_prompts()[0]]
    summary, _ = run(tmp_path, given, on_bad_input=OnBadInput.SKIP)
    assert [problem.reason for problem in summary.skipped] == ["not JSON", "an earlier line has the same id, 'p2'"]
    assert summary.captured == 2


def test_a_repeated_id_is_told_however_much_is_answered_already(tmp_path):
    given = [*all_prompts()[:2], prompt("p2", [7, 8, 9])]
    for captured in (2, 0):
        summary, _ = run(tmp_path, given, on_bad_input=OnBadInput.SKIP)
        assert [problem.reason for problem in summary.skipped] == ["an earlier line has the same id, 'p2'"]
        assert (summary.captured, summary.ended) == (captured, "")


def test_answers_of_other_settings_or_to_other_prompts_are_not_mixed_in(tmp_path):
    run(tmp_path, all_prompts())
    summary, _ = run(tmp_path, all_prompts(), settings=AnswerSettings(max_new_tokens=6, temperature=0.0))
    assert summary.exit_code == ConfigError.exit_code
    assert "'temperature': 0.5" in summary.ended
    summary, _ = run(tmp_path, [prompt("p2", [5, 6, 7])])
    assert summary.exit_code == ConfigError.exit_code
    assert "answers another prompt under the id 'p2'" in summary.ended


def test_a_damaged_line_is_told(tmp_path):
    run(tmp_path, all_prompts()[:2])
    path = tmp_path / ANSWERS_FILE
    path.write_bytes(path.read_bytes().replace(b'"finish":"stop"', b'"finish":"shop"', 1))
    with pytest.raises(CorruptionError, match="line 1: the checksum is wrong"):
        Answers(tmp_path, SETTINGS.to_json())


def test_the_file_is_an_input_of_its_own(tmp_path):
    run(tmp_path, all_prompts()[:2])
    line = json.loads((tmp_path / ANSWERS_FILE).read_text().splitlines()[0])
    assert line["settings"] == {"max_new_tokens": 6, "temperature": 0.5, "top_p": 0.9}
    samples = list(Source([tmp_path / ANSWERS_FILE], "").samples(max_length=None, vocab_size=None))
    assert {sample.id for sample in samples} == {"p2", "p3"}
