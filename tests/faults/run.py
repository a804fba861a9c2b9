"""Faults around ``hs-capture run``: the command is the real one, the server is played and writes a real dataset."""

import json
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.driver.server import free_port
from tests.faults.account import Fault, Outcome
from tests.faults.child import Acknowledgements, child, clock_that_runs_backwards, wait_for

COUNT = 150
CLI = ["-m", "sglang_hs_capture.cli.main"]


def make_prompts(seed: int) -> dict[str, list[int]]:
    """Prompts of up to 40 tokens."""
    choose = random.Random(seed)
    return {f"s{n}": [choose.randrange(1, 9999) for _ in range(choose.randint(1, 40))] for n in range(COUNT)}


class Scene:
    """One dataset with its input, a played server, and runs against it."""

    def __init__(self, folder: Path, number: int) -> None:
        self.dataset, self.prompts, self.choose = folder / "dataset", make_prompts(number), random.Random(number)
        self._folder, self._port = folder, free_port()
        self._acknowledgements = Acknowledgements(self.dataset)
        self.data = folder / "data.jsonl"
        self.data.write_text("".join(json.dumps({"id": i, "input_ids": t}) + "\n" for i, t in self.prompts.items()))
        self.dataset.mkdir()

    @contextmanager
    def server(self, pause_s: float = 0.004) -> Iterator["subprocess.Popen[bytes]"]:
        """A server that listens, and takes so long for each prompt."""
        log = self._folder / "server.log"
        words = ["-m", "tests.faults.played_server", self.dataset, self._port, pause_s]
        with child(words, log) as process:
            wait_for(self._listens, "the server", process, log)
            yield process

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    @contextmanager
    def run(self, name: str = "run", **more: str) -> Iterator["subprocess.Popen[bytes]"]:
        """``hs-capture run`` against the server."""
        words: list[Any] = [*CLI, "run", "--server", f"http://127.0.0.1:{self._port}", "--data", self.data]
        words += ["--output", self.dataset, "--max-in-flight", 8, "--json-summary", self._folder / f"{name}.json"]
        with child(words, self._folder / f"{name}.log", **more) as process:
            yield process

    def said(self, name: str = "run") -> str:
        """What a run said last."""
        return (self._folder / f"{name}.log").read_text().splitlines()[-1].replace(str(self._folder), "")

    def acknowledged(self) -> set[str]:
        return set(self._acknowledgements.poll())

    def wait_for_some(self, process: "subprocess.Popen[bytes]") -> None:
        """Wait for a random part of the work."""
        count = self.choose.randrange(COUNT - 40)
        wait_for(lambda: len(self.acknowledged()) >= count, f"{count} samples", process, self._folder / "run.log")
        time.sleep(self.choose.random() * 0.05)

    def wait_for_more(self, process: "subprocess.Popen[bytes]", name: str) -> float:
        """Seconds to the next acknowledgement."""
        before, begin = len(self.acknowledged()), time.monotonic()
        wait_for(lambda: len(self.acknowledged()) > before, "a sample", process, self._folder / f"{name}.log")
        return time.monotonic() - begin

    def end(self, process: "subprocess.Popen[bytes]", name: str) -> None:
        if process.wait(120):
            raise AssertionError((self._folder / f"{name}.log").read_text())

    def outcome(self, acknowledged: set[str], recover_s: float | None, message: str = "") -> Outcome:
        """What the dataset gives at the end, in which nothing must be missing or there twice."""
        dataset = HiddenStateDataset(self.dataset)
        given = {sample.id: sample for sample in dataset.samples}
        if given.keys() != self.prompts.keys():
            raise AssertionError(f"not captured: {sorted(self.prompts.keys() - given.keys())}")
        wrong = sum(
            item["input_ids"].tolist() != self.prompts[item["id"]]
            for item in dataset  # type: ignore[attr-defined]
        )
        lost = acknowledged - self.acknowledged()
        return Outcome(len(acknowledged), len(lost), wrong, recover_s, message)


def driver_killed(folder: Path, number: int) -> Outcome:
    """SIGKILL of the driver, whose requests the server loses in the middle; the same command goes on."""
    scene = Scene(folder, number)
    with scene.server():
        with scene.run() as process:
            scene.wait_for_some(process)
            process.send_signal(signal.SIGKILL)
            process.wait()
        time.sleep(0.1)
        acknowledged = set(scene.acknowledged())
        with scene.run("again") as process:
            recover_s = scene.wait_for_more(process, "again")
            scene.end(process, "again")
    return scene.outcome(acknowledged, recover_s)


def server_restarted(folder: Path, number: int) -> Outcome:
    """SIGKILL of the server, which is started again by hand; the run goes on."""
    scene = Scene(folder, number)
    with scene.run() as process:
        with scene.server() as server:
            scene.wait_for_some(process)
            server.send_signal(signal.SIGKILL)
            server.wait()
        acknowledged = set(scene.acknowledged())
        time.sleep(scene.choose.random())
        begin = time.monotonic()
        with scene.server():
            scene.wait_for_more(process, "run")
            recover_s = time.monotonic() - begin
            scene.end(process, "run")
    return scene.outcome(acknowledged, recover_s)


def two_runs(folder: Path, number: int) -> Outcome:
    """A second run on the same dataset, which is refused; the first one goes on."""
    scene = Scene(folder, number)
    # Slow enough for a second run to start while the first one works.
    with scene.server(pause_s=0.1), scene.run() as process:
        scene.wait_for_more(process, "run")
        with scene.run("second") as second:
            if second.wait(60) != 4:
                raise AssertionError(f"the second run ended with {second.returncode}: {scene.said('second')}")
        acknowledged, message = set(scene.acknowledged()), scene.said("second")
        scene.end(process, "run")
    return scene.outcome(acknowledged, None, message.replace(str(process.pid), "N"))


def clock_backwards(folder: Path, number: int) -> Outcome:
    """The driver sees a wall clock that runs backwards, an hour at each look."""
    scene = Scene(folder, number)
    with scene.server(), scene.run(LD_PRELOAD=clock_that_runs_backwards()) as process:
        scene.wait_for_some(process)
        acknowledged = set(scene.acknowledged())
        scene.end(process, "run")
    return scene.outcome(acknowledged, None)


FAULTS = [
    Fault("SIGKILL of the driver, whose server sees the client go", "run", 15, driver_killed),
    Fault("SIGKILL of a server that is started again by hand", "run", 15, server_restarted),
    Fault("two runs on one dataset at once", "run", 10, two_runs),
    Fault("a clock that runs backwards", "run", 5, clock_backwards),
]
