"""Faults under the real engine on the CPU platform; states are compared with those of an undisturbed run."""

import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.demo.checkpoint import make_deepseek_v3
from sglang_hs_capture.driver.server import free_port
from sglang_hs_capture.store.session import SessionRecord, read_sessions
from tests.faults.account import Fault, Outcome
from tests.faults.child import Acknowledgements, child, environment, wait_for
from tests.faults.process import SHIM, writing_process

COUNT = 80
CLI = ["-m", "sglang_hs_capture.cli.main"]
SETTINGS = ["--dtype", "float32", "--min-free-gb", "0", "--shard-gb", "0.001"]
SGLANG = ["--", "--chunked-prefill-size", "64"]
TOLERANCE = 1e-5


@cache
def model() -> Path:
    """A tiny DeepSeek-V3, made once."""
    return make_deepseek_v3(Path(tempfile.mkdtemp(), "model"))


@cache
def prompts() -> dict[str, list[int]]:
    """Prompts of 1 to 200 tokens, some of which share a beginning."""
    choose = random.Random(5)
    shared = [choose.randrange(5, 2000) for _ in range(100)]
    lengths = [1, 20, 63, 64, 65, 130, 200, 90, 33, 5]
    return {
        f"p{n}": shared[: 100 * (n % 3 == 0)] + [choose.randrange(5, 2000) for _ in range(lengths[n % 10])]
        for n in range(COUNT)
    }


@cache
def undisturbed() -> dict[str, list[torch.Tensor]]:
    """The states of every prompt, from a run that nothing disturbed."""
    scene = Scene(Path(tempfile.mkdtemp()))
    with scene.run("undisturbed") as process:
        scene.end(process, "undisturbed")
    dataset = HiddenStateDataset(scene.dataset)
    return {item["id"]: item["hidden_states"] for item in dataset}  # type: ignore[attr-defined]


class Scene:
    """One dataset with its input, and runs into it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.dataset, self.port = folder, folder / "dataset", free_port()
        self._acknowledgements = Acknowledgements(self.dataset)
        self._data = folder / "data.jsonl"
        self._data.write_text("".join(json.dumps({"id": i, "input_ids": t}) + "\n" for i, t in prompts().items()))

    def acknowledged(self) -> set[str]:
        return set(self._acknowledgements.poll())

    @contextmanager
    def run(self, name: str, *, own: bool = True, **more: str) -> Iterator["subprocess.Popen[bytes]"]:
        """``hs-capture run`` with a server of its own, or against that of ``serve``."""
        words: list[Any] = [*CLI, "run", "--data", self._data, "--output", self.dataset, "--max-in-flight", 8]
        words += ["--model", model(), *SETTINGS, *SGLANG] if own else ["--server", f"http://127.0.0.1:{self.port}"]
        with child(words, self._log(name), **more) as process:
            yield process

    @contextmanager
    def serve(self, name: str) -> Iterator["subprocess.Popen[bytes]"]:
        """A server started by hand, which listens."""
        words: list[Any] = [*CLI, "serve", "--model", model(), "--output", self.dataset, *SETTINGS]
        words += [*SGLANG, "--port", self.port, "--skip-tokenizer-init"]
        with child(words, self._log(name)) as process:
            wait_for(self._listens, "the server", process, self._log(name))
            yield process

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def wait_for(self, count: int, process: "subprocess.Popen[bytes]", name: str) -> None:
        log = self._log(name)
        wait_for(lambda: len(self.acknowledged()) >= count, f"{count} samples", process, log)

    def end(self, process: "subprocess.Popen[bytes]", name: str, code: int = 0) -> str:
        """Wait for the end of a run, and return the last line that it said."""
        if process.wait(240) != code:
            raise AssertionError(f"ended with {process.returncode}: {self._log(name).read_text()[-4000:]}")
        line = self._log(name).read_text().splitlines()[-1]
        return line.replace(str(self.dataset), "DATASET")

    def session(self) -> SessionRecord:
        (session,) = read_sessions(self.dataset)
        return session

    def go_on(self, message: str, *, own: bool = True) -> Outcome:
        """Read what is there, run the same command again, and compare everything."""
        acknowledged = set(self.acknowledged())
        before, wrong_before = self.read_all()
        begin = time.monotonic()
        with self.run("again", own=own) as process:
            self.wait_for(min(COUNT, len(acknowledged) + 1), process, "again")
            recover_s = time.monotonic() - begin
            self.end(process, "again")
        return self.outcome(len(acknowledged), len(acknowledged) - len(before), wrong_before, recover_s, message)

    def outcome(
        self, acknowledged: int, missing: int, wrong_before: int, recover_s: float | None, said: str
    ) -> Outcome:
        """What the dataset gives at the end."""
        after, wrong = self.read_all()
        if after != prompts().keys():
            raise AssertionError(f"not captured: {sorted(prompts().keys() - after)}")
        return Outcome(acknowledged, missing, max(wrong, wrong_before), recover_s, said)

    def read_all(self) -> tuple[set[str], int]:
        """The samples that the dataset gives, and how many of them are not those of an undisturbed run."""
        wrong = 0
        dataset = HiddenStateDataset(self.dataset)
        for item in dataset:  # type: ignore[attr-defined]
            right = item["input_ids"].tolist() == prompts()[item["id"]]
            for got, reference in zip(item["hidden_states"], undisturbed()[item["id"]], strict=True):
                right = right and bool(((got - reference).norm(dim=1) <= TOLERANCE * reference.norm(dim=1)).all())
            wrong += not right
        return {sample.id for sample in dataset.samples}, wrong


def own_server_killed(folder: Path, number: int, *, victims: tuple[str, ...], code: int | None) -> Outcome:
    """SIGKILL of processes of a run with a server of its own, at a random moment; then the same command again."""
    undisturbed()
    scene, choose = Scene(folder), random.Random(number)
    with scene.run("run") as process:
        scene.wait_for(choose.randrange(1, COUNT // 2), process, "run")
        time.sleep(0.1 * choose.random())
        scheduler = scene.session().pid
        pids = {"driver": process.pid, "scheduler": scheduler, "writer": writing_process(scheduler)}
        for victim in victims:
            os.kill(pids[victim], signal.SIGKILL)
        said = "" if code is None else scene.end(process, "run", code)
        process.wait(240)
        for pid in pids.values():
            wait_for(lambda p=pid: not Path(f"/proc/{p}").exists(), f"the end of process {pid}")
    return scene.go_on(said)


def server_restarted(folder: Path, number: int) -> Outcome:
    """SIGKILL of a server that was started by hand, and is started again; the run goes on, or says what to do."""
    undisturbed()
    scene, choose = Scene(folder), random.Random(number)
    with scene.serve("first") as server, scene.run("run", own=False) as process:
        scene.wait_for(choose.randrange(1, COUNT // 2), process, "run")
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        acknowledged = set(scene.acknowledged())
        begin = time.monotonic()
        with scene.serve("second"):
            scene.wait_for(min(COUNT, len(acknowledged) + 1), process, "run")
            recover_s = time.monotonic() - begin
            scene.end(process, "run")
            missing = len(acknowledged - scene.acknowledged())
            return scene.outcome(len(acknowledged), missing, 0, recover_s, "")


def client_gone(folder: Path, number: int) -> Outcome:
    """SIGKILL of the driver while its requests are at a server that lives on; then the same command again."""
    undisturbed()
    scene, choose = Scene(folder), random.Random(number)
    with scene.serve("serve"):
        with scene.run("run", own=False) as process:
            scene.wait_for(choose.randrange(1, COUNT // 2), process, "run")
            process.send_signal(signal.SIGKILL)
            process.wait()
        time.sleep(1.0)
        return scene.go_on("", own=False)


def hung_disk(folder: Path, number: int) -> Outcome:
    """The disk hangs for three seconds: the run waits, and ends well."""
    undisturbed()
    scene, choose, gate = Scene(folder), random.Random(number), folder / "hung"
    path = os.pathsep.join([str(SHIM), environment()["PYTHONPATH"]])
    with scene.run("run", PYTHONPATH=path, HS_FAULT_HANG=str(gate)) as process:
        scene.wait_for(choose.randrange(1, COUNT // 2), process, "run")
        gate.touch()
        time.sleep(1.0)
        before = len(scene.acknowledged())
        time.sleep(2.0)
        if len(scene.acknowledged()) != before or process.poll() is not None:
            raise AssertionError("the run did not wait for the disk")
        gate.unlink()
        begin = time.monotonic()
        scene.wait_for(min(COUNT, before + 1), process, "run")
        recover_s = time.monotonic() - begin
        scene.end(process, "run")
    return scene.outcome(before, 0, 0, recover_s, "")


ALL = ("driver", "scheduler", "writer")
FAULTS = [
    Fault("SIGKILL of the driver", "engine", 3, partial(own_server_killed, victims=("driver",), code=None)),
    Fault("SIGKILL of SGLang's scheduler", "engine", 3, partial(own_server_killed, victims=("scheduler",), code=6)),
    Fault("SIGKILL of the writing process", "engine", 3, partial(own_server_killed, victims=("writer",), code=6)),
    Fault("SIGKILL of all three", "engine", 3, partial(own_server_killed, victims=ALL, code=None)),
    Fault("SIGKILL of a server that is started again by hand", "engine", 2, server_restarted),
    Fault("an HTTP client that goes away", "engine", 2, client_gone),
    Fault("a disk that hangs for 3 s", "engine", 2, hung_disk),
]
