"""A server of one's own: started as a child, known to capture before work is sent, and never left behind."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sglang_hs_capture.driver.client import ServerClient
from sglang_hs_capture.driver.launch import LOOPBACK, LaunchPlan
from sglang_hs_capture.driver.serverlog import cause_of_death, import_warning, read_tail
from sglang_hs_capture.errors import EngineError, GuardError, class_of_kind
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.session import SessionRecord, missing_columns, read_sessions

LOG_FILE = "server.log"
POLL_S = 0.25
# SGLang looks for a requested shutdown every 5 s, then lets its schedulers finish.
STOP_GRACE_S = 30.0
KILL_GRACE_S = 10.0
CHILD = (sys.executable, "-m", "sglang_hs_capture.driver.child")


def free_port() -> int:
    """A TCP port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


class ManagedServer:
    """One server process with all its children, in a process group of its own.

    When this process dies, however it dies, the kernel kills the server, and the server's children follow it as SGLang
    arranges.
    """

    def __init__(self, plan: LaunchPlan, directory: Path, log_name: str = LOG_FILE) -> None:
        """Start nothing yet.

        Args:
            plan: how to start the server; ``plan.capture.run_id`` is what its session records will be known by.
            directory: the dataset, where the log goes as well.
            log_name: the log's name there.
        """
        self.plan = plan
        self.directory = directory
        self.log_path = directory / log_name
        self._log_start = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Launch the process. Call it from the main thread: the server lives as long as the thread that started it.

        Raises:
            StoreError: the log cannot be written.
        """
        with fs.io_errors(self.log_path, "write the server's log"), self.log_path.open("ab") as log:
            log.write(f"\n==== {time.strftime('%Y-%m-%d %H:%M:%S')} {self.plan.shell_line()}\n".encode())
            log.flush()
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [*CHILD, str(os.getpid()), *self.plan.command],
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.plan.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def sessions(self) -> list[SessionRecord]:
        """The session records of this very run."""
        return [record for record in read_sessions(self.directory) if record.run_id == self.plan.capture.run_id]

    def check_alive(self) -> None:
        """Raise if the server has ended.

        Raises:
            HsCaptureError: it refused to capture; with its own reason, and of that error's class; a GuardError where
                the record names no class.
            EngineError: it died otherwise; with what its log says.
        """
        refused = next((record for record in self.sessions() if record.state == "refused"), None)
        if refused:
            kind = class_of_kind(refused.error_kind, GuardError)
            raise kind(f"the server refused to capture: {refused.error or 'no reason given'}")
        code = None if self._process is None else self._process.poll()
        if code is not None:
            cause = cause_of_death(read_tail(self.log_path, self._log_start)) or "its log is empty"
            raise EngineError(f"the server {_ended(code)}: {cause}; all of its output is in {self.log_path}")

    async def wait_ready(self, client: ServerClient, timeout_s: float) -> list[SessionRecord]:
        """Wait until the server answers and has said that it captures.

        Returns:
            Its session records, one per writer.

        Raises:
            HsCaptureError: it refused; see ``check_alive``.
            EngineError: it died, does not capture, or took longer than ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while not await client.healthy():
            self.check_alive()
            if time.monotonic() >= deadline:
                raise EngineError(
                    f"the server was not up after {timeout_s:.0f} s; see {self.log_path}, or raise --start-timeout"
                )
            await asyncio.sleep(POLL_S)
        self.check_alive()
        sessions = self.sessions()
        if not sessions:
            warning = import_warning(read_tail(self.log_path, self._log_start))
            raise EngineError(
                "SGLang is serving the built-in class; the capture package did not load"
                + (f": {warning}" if warning else "")
                + f"; see {self.log_path}"
            )
        if missing := missing_columns(sessions):
            raise EngineError(
                f"the server is up, but no process of it captures {', '.join(missing)}: expected one of each pipeline "
                f"stage that has such layers; see {self.log_path}"
            )
        return sessions

    async def stop(self) -> None:
        """End the server in order: ask it, wait, and kill what is left of its process group."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            await _wait_for(lambda: process.poll() is not None, STOP_GRACE_S)
        self.kill()
        await _wait_for(lambda: process.poll() is not None, KILL_GRACE_S)

    def kill(self) -> None:
        """Kill the whole process group at once."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


async def _wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S / 5)


def _ended(code: int) -> str:
    """Say how a process ended, from its return code."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = " (often the kernel's, when memory runs out)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
