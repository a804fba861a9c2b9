"""The model process's side of the writing process: started, spoken to, and missed when it is gone."""

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
        ours, theirs = Pipe()
        root = str(Path(sglang_hs_capture.__file__).parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "sglang_hs_capture.writing", str(memory.fd), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=(memory.fd, theirs.fileno()),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
            )
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
