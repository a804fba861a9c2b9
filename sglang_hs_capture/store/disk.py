"""How a writer's disk fares: the time it takes, the room it has left, and which failures end what."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sglang_hs_capture.errors import DiskFullError, StoreError
from sglang_hs_capture.store import fs

_SPACE_CHECK_BYTES = 64 << 20


class DiskHealth:
    """Remembers the first failure of a writer's disk.

    A full disk ends appending: what was written before can still be made durable. Any other failure, and a full disk
    in a ``lasting`` step, ends everything: nobody can say what became of the pages.

    Attributes:
        wait_s: seconds spent in all steps.
        full: why nothing more may be appended.
        failed: why nothing more may be written at all.
    """

    def __init__(self, directory: Path, min_free_bytes: int) -> None:
        self._directory = directory
        self._min_free_bytes = min_free_bytes
        self._unchecked_bytes = 0
        self.wait_s = 0.0
        self.full: StoreError | None = None
        self.failed: StoreError | None = None

    @contextmanager
    def step(self, path: Path, action: str, *, lasting: bool) -> Iterator[None]:
        """Time a step on ``path`` and name its failure.

        Raises:
            DiskFullError, StoreError: the step failed; remembered.
        """
        begin = time.perf_counter()
        try:
            with fs.io_errors(path, action):
                yield
        except StoreError as error:
            if isinstance(error, DiskFullError) and not lasting:
                self.full = error
            else:
                self.failed = error
            raise
        finally:
            self.wait_s += time.perf_counter() - begin

    def require_open(self) -> None:
        """Refuse anything after a failure that ended everything.

        Raises:
            StoreError: of the failure's class and text.
        """
        if self.failed is not None:
            raise type(self.failed)(str(self.failed)) from self.failed

    def require_room(self) -> None:
        """Refuse to append after any failure.

        Raises:
            DiskFullError, StoreError: of the failure's class and text.
        """
        self.require_open()
        if self.full is not None:
            raise type(self.full)(str(self.full)) from self.full

    def check_space(self, size: int) -> None:
        """Refuse to write ``size`` bytes if that would leave less room than the floor.

        The file system is asked only when much was written since the last time, or ``forget_space`` was called.

        Raises:
            DiskFullError: as said.
        """
        self._unchecked_bytes -= size
        if self._unchecked_bytes > 0:
            return
        self._unchecked_bytes = _SPACE_CHECK_BYTES
        free = fs.free_bytes(self._directory)
        if free - size < self._min_free_bytes:
            raise DiskFullError(
                f"{self._directory}: {free} bytes are free and {self._min_free_bytes} must stay free (min_free_bytes); "
                "free some space or lower it, then run again: all acknowledged samples are safe"
            )

    def forget_space(self) -> None:
        """Ask the file system at the next check: others write to it, too."""
        self._unchecked_bytes = 0
