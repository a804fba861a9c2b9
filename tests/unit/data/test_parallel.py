"""Several processes that tokenise: the same samples in the same order, errors passed on, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from chat_templates import QWEN3, assistant, make_tokenizer, user
from toy_preparer import FailingIn, Pids, ToyPreparer

from sglang_hs_capture.data import parallel
from sglang_hs_capture.data.parallel import PooledPreparer
from sglang_hs_capture.data.records import Conversation, InputProblem, Sample
from sglang_hs_capture.driver.source import Source
from sglang_hs_capture.errors import InputError


@pytest.fixture
def at_once(monkeypatch):
    """The first process is waited for, so that all after the first conversation is done by processes."""
    monkeypatch.setattr(
        parallel._Pool, "is_ready", lambda self: bool(wait(self._first, return_when=FIRST_COMPLETED).done)
    )


def conversation(number, *answers):
    turns = [message for answer in answers for message in (user(f"question {number}"), assistant(answer))]
    return Conversation(str(number), f"f:{number}", turns)


def records(count):
    """Conversations, some of which cannot be used, with rows tokenised before and problems between them."""
    for number in range(count):
        if number % 7 == 3:
            yield Sample(str(number), f"f:{number}", np.array([number]), np.array([1], np.uint8))
        elif number % 11 == 5:
            yield InputProblem(f"f:{number}", "wrong")
        else:
            yield conversation(number, "bad" if number % 13 == 6 else "answer" * (number % 5))


def plain(pairs):
    return [
        (
            record.source,
            str(done) if isinstance(done, InputProblem) else (done.input_ids.tolist(), list(done.loss_mask)),
        )
        for record, prepared in pairs
        for done in prepared
    ]


def test_processes_give_what_one_gives_in_the_same_order(at_once, monkeypatch):
    monkeypatch.setattr(parallel, "BATCH_CONVERSATIONS", 4)
    monkeypatch.setattr(parallel, "BATCH_RECORDS", 6)
    alone = plain(PooledPreparer(ToyPreparer).prepare_all(records(300)))
    assert plain(PooledPreparer(ToyPreparer, workers=2, start_after_s=0).prepare_all(records(300))) == alone
    assert list(dict.fromkeys(source for source, _ in alone)) == [f"f:{number}" for number in range(300)]
    assert len(alone) > 300
    assert {outcome.partition(": ")[2] for _, outcome in alone if isinstance(outcome, str)} == {"wrong", "a bad answer"}


def test_all_but_the_beginning_is_done_by_processes(at_once):
    preparer = PooledPreparer(Pids, workers=2, start_after_s=0)
    pids = [int(done.reason) for _, [done] in preparer.prepare_all(conversation(n, "x") for n in range(500))]
    assert pids[0] == os.getpid()
    assert os.getpid() not in pids[1:]
    assert isinstance(preparer.loaded, Pids)


def test_until_a_process_is_ready_this_one_goes_on(monkeypatch):
    ready = iter([False, False, True])
    monkeypatch.setattr(parallel._Pool, "is_ready", lambda _: next(ready))
    done = PooledPreparer(Pids, workers=2, start_after_s=0).prepare_all(conversation(n, "x") for n in range(50))
    pids = [int(problem.reason) for _, [problem] in done]
    assert [pid == os.getpid() for pid in pids] == [True] * 3 + [False] * 47


def test_no_process_is_started_for_a_small_input_or_rows_tokenised_before(monkeypatch):
    monkeypatch.setattr(parallel, "_Pool", None)
    tokenised = (record for record in records(1000) if not isinstance(record, Conversation))
    preparer = PooledPreparer(ToyPreparer, workers=8, start_after_s=0)
    assert len(list(preparer.prepare_all(tokenised))) > 100
    assert preparer.loaded is None
    assert len(list(PooledPreparer(ToyPreparer, workers=8, start_after_s=1e9).prepare_all(records(20)))) == 20
    assert len(list(PooledPreparer(ToyPreparer, start_after_s=0).prepare_all(records(20)))) == 20


def test_what_is_read_ahead_is_bounded(at_once, monkeypatch):
    monkeypatch.setattr(parallel, "BATCH_CONVERSATIONS", 2)
    pulled = []

    def source():
        for number in range(10_000):
            pulled.append(number)
            yield conversation(number, "x")

    done = PooledPreparer(ToyPreparer, workers=2, start_after_s=0).prepare_all(source())
    for given in range(50):
        next(done)
        assert len(pulled) <= given + 2 + 2 * (2 * parallel.BATCHES_A_WORKER + 1)
    done.close()


def test_long_conversations_make_small_batches():
    long = Conversation("x", "f:1", [user("x" * parallel.BATCH_CHARACTERS)])
    short = Conversation("y", "f:2", [user("x"), {**assistant(""), "reasoning_content": "z" * 100}])
    assert [len(batch) for batch in parallel._batches([long, long, *[short] * 40])] == [1, 1, 32, 8]


def test_what_stops_every_conversation_is_passed_on(tmp_path, at_once):
    file = tmp_path / "tokenizer"
    file.touch()
    preparer = PooledPreparer(partial(FailingIn, file), workers=2, start_after_s=0)
    preparer.prepare(conversation(0, "x"))  # here it was made before the file is gone
    file.unlink()
    with pytest.raises(InputError, match="the tokenizer cannot be loaded"):
        list(preparer.prepare_all(records(100)))


def test_a_process_that_ends_by_itself_is_an_error(at_once):
    preparer = PooledPreparer(ToyPreparer, workers=2, start_after_s=0)
    answers = ["x"] * 100 + ["die"] + ["x"] * 1000
    with pytest.raises(InputError, match="a process that tokenises ended by itself"):
        list(preparer.prepare_all(conversation(n, answer) for n, answer in enumerate(answers)))


@pytest.mark.parametrize("kill", [True, False])
def test_processes_outlive_signals_but_not_their_parent(tmp_path, kill):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time\n"
        "from sglang_hs_capture.data.parallel import _Pool\n"
        "from sglang_hs_capture.data.samples import SamplePreparer\n"
        "if __name__ == '__main__':\n"
        "    pool = _Pool(SamplePreparer, 2)\n"
        "    print(*pool._executor._processes, flush=True)\n"
        "    sys.stdin.readline()\n"
        "    [future.result() for future in pool._first]\n"
        "    print('done', flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    parent = subprocess.Popen([sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        for pid in pids:  # while they are starting
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(pid, number)
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "done\n"
        if kill:
            parent.kill()
    finally:
        parent.communicate("\n")
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_real_tokenizer_in_processes(tmp_path, at_once):
    make_tokenizer(QWEN3, eos="<|im_end|>").save_pretrained(tmp_path)
    load = Source([], str(tmp_path))._load
    alone = plain(PooledPreparer(load).prepare_all(records(100)))
    assert plain(PooledPreparer(load, workers=2, start_after_s=0).prepare_all(records(100))) == alone
