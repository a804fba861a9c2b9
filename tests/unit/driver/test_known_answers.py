"""The engine's own log-probabilities, asked for along with the first prompts of a run and kept in the dataset."""

import asyncio

import pytest
from fake_server import FakeServer, Lines, make_sample, predictions

from sglang_hs_capture.driver import delivery
from sglang_hs_capture.driver.client import _prediction
from sglang_hs_capture.driver.delivery import DeliverySettings
from sglang_hs_capture.driver.intake import OnBadInput
from sglang_hs_capture.driver.known_answers import POSITIONS
from sglang_hs_capture.driver.run import CaptureRun, RunSettings
from sglang_hs_capture.driver.summary import Summary
from sglang_hs_capture.driver.target import RunningServers
from sglang_hs_capture.store.index import load_index
from sglang_hs_capture.store.known_answers import KNOWN_ANSWERS_FILE, load_known_answers
from sglang_hs_capture.store.schema import sample_key

NAMES = [f"s{number}" for number in range(12)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(delivery, "RESEND_PAUSE_S", 0.01)


def run(directory, names=NAMES, behave=lambda number, rid: "ok", length=5, **settings) -> tuple[Summary, FakeServer]:
    async def main() -> tuple[Summary, FakeServer]:
        async with FakeServer(directory, behave) as server:
            target = RunningServers([server.url], directory, expected=lambda info: [], api_key=None, grace_s=2.0)
            samples = [make_sample(name, length, line) for line, name in enumerate(names, start=1)]
            tries = DeliverySettings(ack_timeout_s=0.5, grace_s=2.0)
            capture = CaptureRun(target, samples, RunSettings(directory, delivery=tries, **settings), Lines())
            return await asyncio.wait_for(capture.run(), 30), server

    return asyncio.run(main())


def test_the_first_prompts_are_answered_and_all_are_captured(tmp_path):
    summary, server = run(tmp_path, known_answers=3)
    assert (summary.captured, summary.known_answers, len(server.requests)) == (12, 3, 12)
    assert "Kept the engine's own log-probabilities of 3 prompts." in summary.lines()
    answers = {answer.id: answer for answer in load_known_answers(tmp_path)}
    assert len(answers) == 3
    for sample in load_index(tmp_path).samples:
        if sample.id in answers:
            answer, tokens = answers[sample.id], make_sample(sample.id, 5).input_ids.tolist()
            assert (answer.length, answer.end_hash, answer.start) == (5, sample.end_hash, 0)
            assert answer.logprobs == tuple(-token / 8 for token in tokens[1:])
            assert answer.top == tuple(token + 1 for token in tokens[1:])


def test_of_a_long_prompt_the_end_is_asked_for(tmp_path):
    run(tmp_path, names=["long"], length=90)
    (answer,) = load_known_answers(tmp_path)
    assert (answer.length, answer.start, len(answer.logprobs), POSITIONS) == (90, 57, 32, 32)


def test_nothing_is_asked_where_none_are_wanted_or_possible(tmp_path):
    run(tmp_path, known_answers=0)
    run(tmp_path, names=["x"], length=1)
    assert not (tmp_path / KNOWN_ANSWERS_FILE).exists()
    assert len(load_index(tmp_path).samples) == 13


def test_each_run_adds_its_own_and_a_torn_line_is_cut(tmp_path):
    run(tmp_path, names=NAMES[:3])
    with (tmp_path / KNOWN_ANSWERS_FILE).open("ab") as file:
        file.write(b'{"t":"answer","id":"s')
    assert len(load_known_answers(tmp_path)) == 3
    summary, _ = run(tmp_path)
    assert (summary.already, summary.known_answers) == (3, 8)
    assert len(load_known_answers(tmp_path)) == 11


def test_a_server_that_refuses_log_probabilities_captures_nevertheless(tmp_path):
    summary, server = run(tmp_path, behave=lambda number, rid: "no_logprobs")
    assert (summary.captured, summary.known_answers, summary.resent, summary.skipped) == (12, 0, 0, [])
    assert len(server.requests) <= 12 + 8
    assert not (tmp_path / KNOWN_ANSWERS_FILE).exists()


def test_a_prompt_that_is_refused_leaves_its_place_to_another(tmp_path):
    bad = sample_key("s0")
    summary, _ = run(
        tmp_path, behave=lambda _, rid: "refuse" if bad in rid else "ok", on_bad_input=OnBadInput.SKIP, known_answers=12
    )
    assert (summary.captured, summary.known_answers, len(summary.skipped)) == (11, 11, 1)
    assert "s0" not in {answer.id for answer in load_known_answers(tmp_path)}


def test_a_sample_that_is_sent_again_is_captured_without_an_answer(tmp_path):
    """What the engine said of an attempt whose states were not stored is no answer to those that were."""
    key = sample_key("s1")
    summary, _ = run(tmp_path, behave=lambda _, rid: "failed" if f"{key}-0-" in rid else "ok", known_answers=12)
    assert (summary.captured, summary.resent, summary.known_answers) == (12, 1, 11)
    assert "s1" not in {answer.id for answer in load_known_answers(tmp_path)}


def test_replies_without_or_with_too_few_predictions_are_none():
    whole = predictions([7, 8, 9])
    assert _prediction(whole, 2) == ((-1.0, -1.125), (9, 10))
    assert _prediction(whole, 3) is None
    assert _prediction({}, 2) is None
    assert _prediction({**whole, "input_top_logprobs": None}, 2) is None
    whole["input_token_logprobs"][1][0] = float("nan")
    assert _prediction(whole, 2) == ((None, -1.125), (9, 10))
