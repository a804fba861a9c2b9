"""A server of one's own: its readiness, its end, and that it is never left behind; here it is a small script."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from sglang_hs_capture.config import CaptureConfig
from sglang_hs_capture.driver import server as server_module
from sglang_hs_capture.driver.client import ServerClient
from sglang_hs_capture.driver.launch import LaunchPlan
from sglang_hs_capture.driver.server import ManagedServer, free_port
from sglang_hs_capture.errors import DatasetMismatchError, EngineError, GuardError
from sglang_hs_capture.store.session import write_session

# Plays SGLang: writes a session record if told to, serves /health, and may die before.
SCRIPT = """
import http.server, os, signal, subprocess, sys
from pathlib import Path
from sglang_hs_capture.store.session import SessionRecord, write_session

directory, port, mode = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if mode == "dies":
    raise SystemExit("Traceback:\\nRuntimeError: no memory for the weights")
if mode == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if mode != "builtin":
    record = SessionRecord(writer="dp0-pp0", session_id="1", pid=os.getpid(), host="h", run_id="r1", state="ready")
    if mode.startswith("refused"):
        record.state, record.error = "refused", "mixed chunks; remove --enable-mixed-chunk"
        record.error_kind = mode.partition(":")[2] or None
    write_session(directory, record)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "builtin":
    print("[t] Ignore import error when loading sglang_hs_capture.models.deepseek: No module named 'gone'", flush=True)
(directory / "child").write_text(str(subprocess.Popen(["sleep", "600"]).pid))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def make_server(directory: Path, mode: str) -> ManagedServer:
    port = free_port()
    plan = LaunchPlan(
        command=(sys.executable, "-c", SCRIPT, str(directory), str(port), mode),
        environment={},
        host="127.0.0.1",
        port=port,
        api_key=None,
        capture=CaptureConfig(output_dir=str(directory), run_id="r1"),
    )
    return ManagedServer(plan, directory)


async def start_and_stop(server: ManagedServer, timeout_s: float = 30.0) -> list[str]:
    client = ServerClient(server.plan.url)
    try:
        server.start()
        return [record.state for record in await server.wait_ready(client, timeout_s)]
    finally:
        await client.close()
        await server.stop()


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while not gone(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def test_a_server_that_captures_is_ready_and_leaves_nothing_behind(tmp_path):
    assert asyncio.run(start_and_stop(make_server(tmp_path, "captures"))) == ["ready"]
    wait_gone(int((tmp_path / "child").read_text()))


def test_a_server_that_does_not_heed_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "STOP_GRACE_S", 0.5)
    assert asyncio.run(start_and_stop(make_server(tmp_path, "stubborn"))) == ["ready"]
    wait_gone(int((tmp_path / "child").read_text()))


@pytest.mark.parametrize(
    ("mode", "error", "said"),
    [
        ("dies", EngineError, "RuntimeError: no memory for the weights"),
        ("killed", EngineError, "killed by SIGKILL"),
        ("refused:GuardError", GuardError, "the server refused to capture: mixed chunks"),
        ("refused:DatasetMismatchError", DatasetMismatchError, "the server refused to capture: mixed chunks"),
        ("refused", GuardError, "the server refused to capture: mixed chunks"),
        (
            "builtin",
            EngineError,
            "SGLang is serving the built-in class; the capture package did not load: Ignore import",
        ),
    ],
)
def test_a_server_that_will_not_capture_is_told_at_once(tmp_path, mode, error, said):
    with pytest.raises(error, match=said) as caught:
        asyncio.run(start_and_stop(make_server(tmp_path, mode)))
    if error is EngineError:
        assert str(tmp_path / "server.log") in str(caught.value)


def test_records_of_another_run_do_not_count(tmp_path):
    asyncio.run(start_and_stop(make_server(tmp_path, "captures")))
    server = make_server(tmp_path, "builtin")
    (record,) = server.sessions()
    record.run_id = "r0"
    write_session(tmp_path, record)
    with pytest.raises(EngineError, match="did not load"):
        asyncio.run(start_and_stop(server))


def test_a_server_that_takes_too_long_is_given_up(tmp_path):
    plan = make_server(tmp_path, "captures").plan
    slow = LaunchPlan(("sleep", "600"), {}, plan.host, plan.port, None, plan.capture)
    with pytest.raises(EngineError, match="was not up after 1 s"):
        asyncio.run(start_and_stop(ManagedServer(slow, tmp_path), timeout_s=1))


def test_the_server_dies_with_a_driver_that_is_killed(tmp_path):
    driver = textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_server import make_server
        server = make_server(Path({str(tmp_path)!r}), "captures")
        server.start()
        print(server._process.pid, flush=True)
        time.sleep(600)
    """)
    with subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server_pid = int(process.stdout.readline())
        deadline = time.monotonic() + 30
        while not (tmp_path / "child").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        child = int((tmp_path / "child").read_text())
        process.send_signal(signal.SIGKILL)
    wait_gone(server_pid)
    os.kill(child, signal.SIGKILL)  # SGLang's own children watch their parent; this one does not


def test_nothing_stays_behind_when_the_parent_is_killed_while_the_server_starts(tmp_path):
    """The command starts a process that does not follow its parent, as SGLang's do not at first."""
    pids = tmp_path / "pids"
    command = f"sleep 300 & echo $! >> {pids}; echo $$ >> {pids}; wait"
    program = textwrap.dedent(
        f"""
        import os, subprocess, sys, time
        subprocess.Popen(
            [sys.executable, "-m", "sglang_hs_capture.driver.child", str(os.getpid()), "bash", "-c", {command!r}],
            start_new_session=True,
        )
        time.sleep(300)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 30
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    for pid in pids.read_text().split():
        while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            assert time.monotonic() < deadline, f"process {pid} was left behind"
            time.sleep(0.05)
