"""What a capturing process tells the world: its session record."""

import threading
import time
from dataclasses import replace
from pathlib import Path

from sglang_hs_capture.errors import DiskFullError, HsCaptureError, kind_of
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.session import (
    Counters,
    SessionRecord,
    State,
    is_running,
    read_session,
    session_path,
    write_session,
)
from sglang_hs_capture.writing.messages import failure_of

_REPORT_INTERVAL_S = 1.0
# Given up when the disk is full, so that the record that says so has room.
_RESERVE_BYTES = 2**16


class SessionReporter:
    """Keeps one writer's session record up to date, from any thread.

    Once it is ``ready``, counters are written by a thread of its own: on a busy disk that takes seconds, in which the
    writing process has to go on reading what the model's process tells it.
    """

    def __init__(self, directory: Path, record: SessionRecord) -> None:
        """Take over a record; nothing is written yet."""
        self._directory, self._record = directory, record
        self._reserve = directory / f"reserve-{record.writer}"
        # Held for as long as it takes to write the record, in the order of its changes; and only to change it.
        self._writing, self._lock = threading.RLock(), threading.Lock()
        self._due = threading.Event()
        self._failure: Exception | None = None
        self._written_at = 0.0

    @property
    def writer(self) -> str:
        """The writer's name."""
        return self._record.writer

    @property
    def session_id(self) -> str:
        """This session's id, new with each start."""
        return self._record.session_id

    def ready(self) -> None:
        """The handshake: capture is set up in this process."""
        with fs.io_errors(self._reserve, "write"):
            fs.replace_file(self._reserve, bytes(_RESERVE_BYTES))
        self._change("ready")
        threading.Thread(target=self._write_progress, name="hs-capture-report", daemon=True).start()

    def refused(self, error: HsCaptureError) -> None:
        """Say why the model was not built; a live session of another process is left to stand."""
        other = read_session(session_path(self._directory, self.writer))
        if other is None or other.state != "ready" or not self._is_of_another_process(other):
            self._change("refused", str(error), kind_of(error))

    def stopped(self, error: Exception, counters: Counters) -> None:
        """Say why capture has ended while the server lives on, and how far it came."""
        with self._lock:
            self._record.counters = counters
        failure = failure_of(error)
        self._change("stopped", failure.text, failure.kind)

    def closed(self) -> None:
        """Capture ended in order; the reason of an earlier stop stays."""
        if self._record.state == "ready":
            self._change("closed")

    def progress(self, counters: Counters, *, now: bool) -> None:
        """Have the counters brought up to date on disk, at most once a second unless ``now``; does not wait for it.

        Raises:
            StoreError: they could not be written the last time.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        with self._lock:
            changed = counters != self._record.counters
            self._record.counters = counters
            if (now and changed) or time.monotonic() - self._written_at >= _REPORT_INTERVAL_S:
                self._due.set()

    def _write_progress(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            with self._writing:
                if self._record.state != "ready":
                    return
                try:
                    self._write()
                except Exception as error:
                    self._failure = error

    def _is_of_another_process(self, other: SessionRecord) -> bool:
        # This process's own id in an older record is that of a dead process, as in a restarted container.
        own = (self._record.host, self._record.pid)
        return (other.host, other.pid) != own and is_running(other) is not False

    def _change(self, state: State, error: str = "", kind: str | None = None) -> None:
        with self._writing:
            with self._lock:
                self._record.state = state
                self._record.error = " ".join(error.split()) or None
                self._record.error_kind = kind
            self._write()
            if state != "ready":
                self._due.set()  # the thread ends

    def _write(self) -> None:
        with self._lock:
            record = replace(self._record)
        try:
            write_session(self._directory, record)
        except DiskFullError:
            self._reserve.unlink(missing_ok=True)
            write_session(self._directory, record)
        self._written_at = time.monotonic()
