"""Processes that faults strike: started in a group of their own, watched through the dataset, and never left behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from sglang_hs_capture.store.journal import JournalTail
from tests.faults.account import NotPossibleError

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300.0


def environment(**more: str) -> dict[str, str]:
    """The environment of a child: the modules that this process found, and no GPU."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **more}


@contextmanager
def child(command: list[Any], log: Path, **more: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start ``python COMMAND...``; what is left of its group at the end is killed."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=environment(**more),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def wait_for(
    done: Callable[[], Any], what: str, process: "subprocess.Popen[bytes] | None" = None, log: Path | None = None
) -> Any:
    """Wait for something true and return it.

    Raises:
        AssertionError: it does not come, or the process ended before.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not (found := done()):
        ended = process is not None and process.poll() is not None and not done()
        if ended or time.monotonic() > deadline:
            raise AssertionError(f"waited in vain for {what}: {log.read_text()[-3000:] if log else ''}")
        time.sleep(0.01)
    return found


class Acknowledgements:
    """The request ids that the journal acknowledges, as whoever follows it learns of them."""

    def __init__(self, directory: Path) -> None:
        self._tail = JournalTail(directory / "journal-dp0-pp0.jsonl")
        self._rids: list[str] = []

    def poll(self) -> list[str]:
        """All so far, in order."""
        self._rids += [record["rid"] for record in self._tail.poll() if record["t"] == "sample"]
        return self._rids


@cache
def clock_that_runs_backwards() -> str:
    """The library to preload.

    Raises:
        NotPossibleError: there is no C compiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise NotPossibleError("a clock that runs backwards needs a C compiler")
    library = Path(mkdtemp(), "backwards.so")
    source = Path(__file__).with_name("backwards.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    return str(library)
