"""Faults between the model's process and the writing process: both are real, the model is a toy."""

import os
import random
import signal
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import torch

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.store.session import read_sessions
from tests.faults.account import Fault, Outcome
from tests.faults.child import Acknowledgements, child, clock_that_runs_backwards, environment, wait_for
from tests.unit.toy_model import ToyModel

Prompts = dict[str, list[int]]
COUNT = 60
PAUSE_S = 0.01
SHIM = Path(__file__).with_name("shim")


def make_prompts(seed: int) -> Prompts:
    """Prompts of up to 300 tokens: a shard takes 512 rows, the ring twice as many pieces."""
    choose = random.Random(seed)
    return {f"hs-{n}": [choose.randrange(1, 9999) for _ in range(choose.randint(1, 300))] for n in range(COUNT)}


def read_all(directory: Path, prompts: Prompts) -> tuple[set[str], int]:
    """The samples that a dataset gives, and how many of them are not what the model computed."""
    wrong = 0
    dataset = HiddenStateDataset(directory)
    for item in dataset:  # type: ignore[attr-defined]
        prompt = prompts[item["id"]]
        states = torch.stack(item["hidden_states"], dim=1)
        wrong += item["input_ids"].tolist() != prompt or not torch.equal(states, ToyModel.states(prompt))
    return {sample.id for sample in dataset.samples}, wrong


def command(directory: Path, seed: int, rids: Iterable[str], pause_s: float = PAUSE_S) -> list[object]:
    return ["-m", "tests.faults.toy_capture", directory, seed, ",".join(rids), pause_s]


def go_on(directory: Path, number: int, acknowledged: set[str], message: str = "") -> Outcome:
    """Read what is there, start a process for the rest, and read all of it."""
    prompts, log = make_prompts(number), directory.parent / "again.log"
    before, wrong_before = read_all(directory, prompts)
    begin = time.monotonic()
    recover_s = None
    acknowledgements = Acknowledgements(directory)
    there = len(acknowledgements.poll())
    missing = [rid for rid in prompts if rid not in before]
    with child(command(directory, number, missing, 0.0), log) as process:
        if missing:
            wait_for(lambda: len(acknowledgements.poll()) > there, "an acknowledgement", process, log)
            recover_s = time.monotonic() - begin
        if process.wait(120):
            raise AssertionError(log.read_text())
    after, wrong_after = read_all(directory, prompts)
    if after != prompts.keys():
        raise AssertionError(f"captured again, and not there: {sorted(prompts.keys() - after)}")
    lost = (acknowledged - before) | (before - after)
    return Outcome(len(acknowledged), len(lost), max(wrong_before, wrong_after), recover_s, message)


def killed(folder: Path, number: int, *, model: bool, writer: bool) -> Outcome:
    """SIGKILL of the model's process, of the writing process or of both, at a random moment."""
    directory, log, choose = folder / "dataset", folder / "capture.log", random.Random(number)
    acknowledgements = Acknowledgements(directory)
    count = choose.randrange(COUNT - 20)
    with child(command(directory, number, make_prompts(number)), log) as process:
        wait_for(lambda: len(acknowledgements.poll()) >= count, f"{count} acknowledgements", process, log)
        time.sleep(choose.random() * 0.03)
        pid = writing_process(process.pid)
        for victim in [process.pid] * model + [pid] * writer:
            os.kill(victim, signal.SIGKILL)
        if not model and process.wait(120):
            raise AssertionError(f"the model did not live on: {log.read_text()}")
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the end of the writing process")
    (session,) = read_sessions(directory)
    return go_on(directory, number, set(acknowledgements.poll()), session.error or "")


def writing_process(parent: int) -> int:
    """The child of a process that writes."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    (pid,) = (int(pid) for pid in children if b"sglang_hs_capture.writing" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return pid


def hung_disk(folder: Path, number: int) -> Outcome:
    """The disk hangs until the ring is full and the forward waits, and then goes on."""
    directory, log, gate = folder / "dataset", folder / "capture.log", folder / "hung"
    acknowledgements, choose = Acknowledgements(directory), random.Random(number)
    path = os.pathsep.join([str(SHIM), environment()["PYTHONPATH"]])
    prompts = make_prompts(number)
    with child(command(directory, number, prompts, 0.0), log, PYTHONPATH=path, HS_FAULT_HANG=str(gate)) as process:
        count = choose.randrange(1, 10)
        wait_for(lambda: len(acknowledgements.poll()) >= count, f"{count} acknowledgements", process, log)
        gate.touch()
        time.sleep(1.0)
        before = len(acknowledgements.poll())
        time.sleep(0.3)
        if len(acknowledgements.poll()) != before or process.poll() is not None:
            raise AssertionError("the capture did not wait for the disk")
        begin = time.monotonic()
        gate.unlink()
        wait_for(lambda: len(acknowledgements.poll()) > before, "an acknowledgement", process, log)
        recover_s = time.monotonic() - begin
        if process.wait(120):
            raise AssertionError(log.read_text())
    (session,) = read_sessions(directory)
    after, wrong = read_all(directory, prompts)
    lost = prompts.keys() - after
    waited = "ring full" if session.counters.blocked_s > 0.1 else ""
    return Outcome(len(acknowledgements.poll()), len(lost), wrong, recover_s, waited)


def clock_backwards(folder: Path, number: int) -> Outcome:
    """Both processes see a wall clock that runs backwards, an hour at each look."""
    directory, log, prompts = folder / "dataset", folder / "capture.log", make_prompts(number)
    acknowledgements = Acknowledgements(directory)
    half = list(prompts)[: COUNT // 2]
    with child(command(directory, number, half), log, LD_PRELOAD=clock_that_runs_backwards()) as process:
        if process.wait(120):
            raise AssertionError(log.read_text())
    (session,) = read_sessions(directory)
    if session.updated_at > (datetime.now(UTC) - timedelta(hours=1)).isoformat():
        raise AssertionError("the clock did not run backwards")
    acknowledged = set(acknowledgements.poll())
    if acknowledged != set(half):
        raise AssertionError(f"not captured: {set(half) - acknowledged}")
    return go_on(directory, number, acknowledged, session.error or "")


FAULTS = [
    Fault("SIGKILL of the model's process", "process", 15, partial(killed, model=True, writer=False)),
    Fault("SIGKILL of the writing process", "process", 15, partial(killed, model=False, writer=True)),
    Fault("SIGKILL of both at once", "process", 15, partial(killed, model=True, writer=True)),
    Fault("a disk that hangs for a while", "process", 10, hung_disk),
    Fault("a clock that runs backwards", "process", 10, clock_backwards),
]
