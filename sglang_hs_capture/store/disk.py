"""How a writer's disk fares: the time it takes, the room it has left, and which failures end what."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NoReturn

from sglang_hs_capture.errors import DiskFullError, StoreError
from sglang_hs_capture.store import fs

_SPACE_CHECK_BYTES = 64 << 20

Work = Literal["write", "sync"]


class _Busy:
    """The time in which at least one thread does something; what several do at once counts once."""

    def __init__(self) -> None:
        self._threads = 0
        self._since = 0.0
        self._before = 0.0

    def begin(self) -> None:
        if not self._threads:
            self._since = time.perf_counter()
        self._threads += 1

    def end(self) -> None:
        self._threads -= 1
        if not self._threads:
            self._before += time.perf_counter() - self._since

    def seconds(self) -> float:
        return self._before + (time.perf_counter() - self._since if self._threads else 0.0)


class DiskHealth:
    """Remembers the first failure of a writer's disk, for the threads that use it and for the one they work for.

    A full disk ends appending: what was written before can still be made durable. Any other failure, and a full disk
    in a ``lasting`` step, ends everything: nobody can say what became of the pages. From then on no step is begun.

    Attributes:
        changed: notified when rows or a commit are done with, and at a failure.
        full: why nothing more may be appended.
        failed: why nothing more may be written at all; anything but a ``StoreError`` is a mistake in this project.
        wait_s: seconds that the writer's owner has waited for its threads.
    """

    def __init__(self, directory: Path, min_free_bytes: int) -> None:
        self._directory = directory
        self._min_free_bytes = min_free_bytes
        self._unchecked_bytes = 0
        self._busy: dict[Work, _Busy] = {"write": _Busy(), "sync": _Busy()}
        self._under_way_bytes = 0
        self._untold = False
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self._conditions = [self.changed]
        self.full: BaseException | None = None
        self.failed: BaseException | None = None
        self.wait_s = 0.0

    def condition(self) -> threading.Condition:
        """A further condition under the lock of ``changed``, for one thread's work; also notified at a failure."""
        condition = threading.Condition(self._lock)
        self._conditions.append(condition)
        return condition

    @contextmanager
    def step(self, path: Path, action: str, work: Work, *, lasting: bool) -> Iterator[None]:
        """Time a step on ``path`` as one of its kind of work, and name its failure.

        Raises:
            DiskFullError, StoreError: the step failed, which is remembered, or is not begun after a final failure.
        """
        self.require_open()
        with self._lock:
            self._busy[work].begin()
        try:
            with fs.io_errors(path, action):
                yield
        except BaseException as error:
            self.fail(error, final=lasting or not isinstance(error, DiskFullError))
            raise
        finally:
            with self._lock:
                self._busy[work].end()

    def seconds(self, work: Work) -> float:
        """Seconds in which a step of a kind of work was under way, in one thread or in several."""
        with self._lock:
            return self._busy[work].seconds()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as the owner's waiting."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.wait_s += time.perf_counter() - begin

    def fail(self, error: BaseException, *, final: bool = True) -> None:
        """Remember a failure and wake all threads; of failures that end the same, the first one counts."""
        with self.changed:
            if self.failed is None and (final or self.full is None):
                if final:
                    self.failed = error
                else:
                    self.full = error
                self._untold = True
            for condition in self._conditions:
                condition.notify_all()

    def fail_unless_remembered(self, error: BaseException) -> None:
        """Remember what ended a thread's work: a step has remembered its own failure, all else is a mistake."""
        if not isinstance(error, StoreError):
            self.fail(error)

    def require_open(self) -> None:
        """Keep a thread from touching the disk after a failure that ended everything.

        Raises:
            DiskFullError, StoreError: of the failure's class and text.
        """
        if self.failed is not None:
            _raise_again(self.failed)

    def refuse_all(self) -> None:
        """Tell the owner, each time, of a failure that ended everything.

        Raises:
            DiskFullError, StoreError: of the failure's class and text.
        """
        if self.failed is not None:
            self._untold = False
            _raise_again(self.failed)

    def refuse_rows(self) -> None:
        """Tell the owner, each time, of any failure: no rows are taken after it.

        Raises:
            DiskFullError, StoreError: of the failure's class and text.
        """
        self.refuse_all()
        if self.full is not None:
            self._untold = False
            _raise_again(self.full)

    def tell(self) -> None:
        """Tell the owner of a failure, if it has not been told of it.

        Raises:
            DiskFullError, StoreError: of the failure's class and text.
        """
        if self._untold:
            self.refuse_rows()

    @contextmanager
    def room_for(self, size: int) -> Iterator[None]:
        """Refuse to write ``size`` bytes, as is done inside, if that would leave less room than the floor.

        What others are writing meanwhile counts as yet to be written, so that writes which fit one by one, and not
        together, do not all pass; what has been written of it counts twice. The file system is asked only when much
        was written since the last time, or ``forget_space`` was called.

        Raises:
            DiskFullError: as said.
        """
        try:
            self._check_space(size)
            yield
        finally:
            with self.changed:
                self._under_way_bytes -= size

    def check_space(self) -> None:
        """See that there is at least as much room as the floor.

        Raises:
            DiskFullError: there is less.
            StoreError: the file system does not say.
        """
        with fs.io_errors(self._directory, "ask for free space"):
            self._check_space(0)

    def _check_space(self, size: int) -> None:
        with self.changed:
            # Before the file system is asked: a write that ends in between must not be missing from both.
            self._under_way_bytes += size
            under_way = self._under_way_bytes
            self._unchecked_bytes -= size
            if self._unchecked_bytes > 0:
                return
            self._unchecked_bytes = _SPACE_CHECK_BYTES
        free = fs.free_bytes(self._directory)
        if free - under_way < self._min_free_bytes:
            more = f" when {under_way} more are written" if under_way else ""
            raise DiskFullError(
                f"{self._directory}: {free} bytes are free and {self._min_free_bytes} must stay free (min_free_bytes)"
                f"{more}; free some space or lower it, then run again: all acknowledged samples are safe"
            )

    def forget_space(self) -> None:
        """Ask the file system at the next check: others write to it, too."""
        with self.changed:
            self._unchecked_bytes = 0


def _raise_again(error: BaseException) -> NoReturn:
    """Raise the same failure for another caller: an exception object that is raised twice gathers both tracebacks."""
    if isinstance(error, StoreError):
        raise type(error)(str(error)) from error
    raise error
