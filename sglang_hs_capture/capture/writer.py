"""The model process's side of the writing process: started, spoken to, and missed when it is gone."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path

import sglang_hs_capture
from sglang_hs_capture.errors import EngineError, HsCaptureError
from sglang_hs_capture.staging.ring import RingMemory
from sglang_hs_capture.writing.messages import Channel, Failure, Message, Opened, Setup, Stop, error_of

logger = logging.getLogger(__name__)

WRITING_MODULE = "sglang_hs_capture.writing"


def _module_path() -> str:
    """Where this process finds its modules, so that the writing process finds the same ones in the same order."""
    root = str(Path(sglang_hs_capture.__file__).parents[1])
    # Last: it may be a folder of packages that has no place before the standard library.
    paths = [*sys.path, *os.environ.get("PYTHONPATH", "").split(os.pathsep), root]
    return os.pathsep.join(dict.fromkeys(os.path.abspath(path) for path in paths if path))


class Writer:
    """A writing process of our own."""

    def __init__(self, memory: RingMemory, setup: Setup, on_end: Callable[[HsCaptureError], None]) -> None:
        """Start it and wait until it has opened the dataset.

        Args:
            memory: the ring, which it inherits.
            setup: what it is to open.
            on_end: called, from a thread of its own, if it ends before it was told to.

        Raises:
            HsCaptureError: it could not open the dataset; of the class it named.
            EngineError: it did not start.
        """
        try:
            ours, theirs = Pipe()
            with theirs:
                self._process = subprocess.Popen(
                    # -P: a file in the working directory must not take the place of a module.
                    [sys.executable, "-P", "-m", WRITING_MODULE, str(memory.fd), str(theirs.fileno())],
                    pass_fds=(memory.fd, theirs.fileno()),
                    env={**os.environ, "PYTHONPATH": _module_path()},
                    stdin=subprocess.DEVNULL,
                )
        except OSError as error:
            raise EngineError(
                f"expected to start a writing process with {sys.executable!r}: {error}; raise the limit it names, or "
                "start the server with a Python that can start another"
            ) from error
        self._channel = Channel(ours)
        self._stopping = False
        self._await_opening(setup)
        self._on_end = on_end
        threading.Thread(target=self._watch, name="hs-capture-watch", daemon=True).start()

    def _await_opening(self, setup: Setup) -> None:
        try:
            self._channel.send(setup)
            answer = self._channel.receive(None)
        except (EOFError, OSError):
            raise self._ended() from None
        if isinstance(answer, Failure):
            self._process.wait()
            raise error_of(answer)
        if not isinstance(answer, Opened):
            raise EngineError(f"the writing process: expected it to open the dataset, got {answer!r}")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, message: Message) -> None:
        """Tell it something.

        Raises:
            EngineError: it has ended.
        """
        try:
            self._channel.send(message)
        except OSError:
            raise self._ended() from None

    def check(self) -> None:
        """See that it is there.

        Raises:
            EngineError: it has ended.
        """
        if self._process.poll() is not None:
            raise self._ended()

    def stop(self, timeout_s: float) -> None:
        """Have it store what was sent and end; after ``timeout_s`` it is killed, and loses what it had not stored."""
        self._stopping = True
        with suppress(OSError):
            self._channel.send(Stop())
        self._channel.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.error(
                "hs_capture: the writing process did not end within %.0f s, and is killed: what it had not "
                "acknowledged is lost; is the disk slow, or hung?",
                timeout_s,
            )
            self._process.kill()
            self._process.wait()

    def _watch(self) -> None:
        self._process.wait()
        if not self._stopping:
            self._on_end(self._ended())

    def _ended(self) -> EngineError:
        status = self._process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return EngineError(
            f"the writing process {how}; see the server's log, and the system's for lack of memory; all acknowledged "
            "samples are safe, start the server again to go on"
        )
