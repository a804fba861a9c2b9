"""Tiny checkpoints, and real SGLang servers on the CPU platform as child processes."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

START_TIMEOUT_S = 180
LOG_TAIL_LINES = 60


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """POST JSON and return the JSON answer; an HTTP error status raises ``urllib.error.HTTPError``."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    def generate(self, input_ids: list[int], max_new_tokens: int = 0, **fields: Any) -> Any:
        """One greedy ``/generate`` request."""
        sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
        return self.post("/generate", {"input_ids": input_ids, "sampling_params": sampling, **fields})

    def wait_healthy(self, path: str) -> None:
        """Ask until the server says that it is well; on a busy machine its own check may come too late at first."""
        self._until_accepted(urllib.request.Request(self.url + path))

    def flush_cache(self) -> None:
        """Empty the prefix cache. Refused for a moment after an answer, while its request is still taken off."""
        self._until_accepted(urllib.request.Request(self.url + "/flush_cache", b""))

    def _until_accepted(self, request: urllib.request.Request, patience_s: float = 60) -> None:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60):
                    return
            except urllib.error.HTTPError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.5)

    def post_text(self, path: str, body: dict[str, Any]) -> None:
        """POST JSON where the answer is not JSON."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60):
            pass

    def end(self) -> None:
        """End the server now."""
        _end_group(self.process)

    def log_tail(self) -> str:
        """The end of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


def free_port() -> int:
    """A TCP port of 127.0.0.1 on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def quiet_port() -> int:
    """A TCP port that nothing listens on, with none of those near it ever given out by the system.

    With several data-parallel ranks SGLang takes ports near its own, which it does not choose again if one is in use.
    """
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def running_server(
    model: Path, log: Path, *flags: str, env: dict[str, str] | None = None, port: int | None = None
) -> Iterator[Server]:
    """Start ``sglang.launch_server`` on the CPU platform, wait until it answers, and end its process group on exit."""
    port = port or free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *flags]
    platform = {"SGLANG_PLATFORM": "hs_capture_cpu", "CUDA_VISIBLE_DEVICES": ""}
    environment = {"OMP_NUM_THREADS": "2", **os.environ, **platform, **(env or {})}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    server = Server(f"http://127.0.0.1:{port}", log, process)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        _end_group(process)


def _wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            pytest.fail(f"the server ended with status {server.process.returncode}:\n{server.log_tail()}")
        try:
            with urllib.request.urlopen(server.url + "/health", timeout=10):
                return
        except OSError:  # refused while the port is closed, status 503 while the engine warms up
            time.sleep(0.25)
    pytest.fail(f"the server did not answer within {START_TIMEOUT_S} s:\n{server.log_tail()}")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    # At once: SGLang takes up to ten seconds to end in order, and no test of this helper's needs it to.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


StartServer = Callable[..., Server]


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[StartServer]:
    """A function ``(model, *flags, env=None) -> Server``; its servers live until the module's tests are done."""
    with ExitStack() as stack:

        def start(model: Path, *flags: str, env: dict[str, str] | None = None) -> Server:
            log = tmp_path_factory.mktemp("server") / "server.log"
            request.config.stash.setdefault(LOGS, []).append(log)
            return stack.enter_context(running_server(model, log, *flags, env=env))

        yield start
    request.config.stash[LOGS] = []


LOGS = pytest.StashKey[list[Path]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show the end of the running servers' logs with a failure."""
    report = yield
    if report.failed:
        for log in item.config.stash.get(LOGS, []):
            lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            report.sections.append((f"end of {log}", "\n".join(lines)))
    return report


@pytest.fixture(scope="session")
def kimi_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Kimi-K2.5 in float32."""
    from sglang_hs_capture.demo.checkpoint import make_kimi_k25

    return make_kimi_k25(tmp_path_factory.mktemp("models") / "kimi-k2.5")


@pytest.fixture(scope="session")
def deepseek_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V3 in float32."""
    from sglang_hs_capture.demo.checkpoint import make_deepseek_v3

    return make_deepseek_v3(tmp_path_factory.mktemp("models") / "deepseek-v3")
