"""The file of a shard's states while it is written: large writes, through the page cache or past it."""

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sglang_hs_capture.store import fs

PAGE = 4096
_CALL_BYTES = 64 << 20
_CALL_VIEWS = 512
_BOUNCE_BYTES = 8 << 20
_WRITE_BACK_BYTES = 8 << 20


class StateFile:
    """A file that grows at its end. Failures come as ``OSError``.

    It is written in one way from its first byte to its last, so that no cached page ever hides a block that was written
    past the cache. Only a file system that refuses a direct write, or takes less than a page of it, turns it to the
    other way, at a whole page, behind what was written.

    Attributes:
        end: where the next byte goes; all before it is written.
        direct: whether writes go past the page cache.
    """

    def __init__(self, path: Path, start: int, *, direct: bool) -> None:
        """Create the file.

        Args:
            start: where the first byte goes; a multiple of ``PAGE``.
            direct: write past the page cache, where the file system has that. What is appended must then come in
                multiples of ``PAGE`` bytes; memory that does not begin at a multiple of it is copied first.
        """
        self.path = path
        self.end = start
        self.direct = False
        self._bounce: mmap.mmap | None = None
        self._written_back = start
        # An open that is refused for O_DIRECT leaves the file behind, so it is created without.
        self._fds = [fs.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)]
        if direct:
            self._open_direct()

    def append(self, views: Sequence[memoryview]) -> None:
        """Write bytes at the end; after a failure ``end`` tells how far it came."""
        left = [view for view in views if view.nbytes]
        while left:
            call = self._next_call(left)
            try:
                written = fs.pwritev(self._fds[-1], call, self.end)
            except OSError as error:
                if not self.direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self._leave_direct()
                continue
            if self.direct:
                # What follows must begin at a whole page again.
                written -= written % PAGE
                if not written:
                    # What is in the way, such as the end of the room, is told when the rest is written the other way.
                    self._leave_direct()
                    continue
            self.end += written
            _drop(left, written)
        if not self.direct and self.end - self._written_back >= _WRITE_BACK_BYTES:
            fs.start_write_back(self._fds[-1], self._written_back, self.end - self._written_back)
            self._written_back = self.end

    def sync(self) -> None:
        """Make everything written so far durable; for any thread."""
        fs.fsync(self._fds[-1])

    def close(self) -> None:
        """Close the file, as it is."""
        while self._fds:
            os.close(self._fds.pop())

    def _open_direct(self) -> None:
        try:
            self._fds.append(fs.open_file(self.path, os.O_WRONLY | os.O_DIRECT))
            self.direct = True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise

    def _leave_direct(self) -> None:
        # The other descriptor stays open: another thread may be in ``sync`` on it.
        self._fds.reverse()
        self.direct = False

    def _next_call(self, left: Sequence[memoryview]) -> list[memoryview]:
        """The views of the next write: as many as one call takes, aligned where they have to be."""
        if self.direct and not _aligned(left[0]):
            return [self._bounced(left[0][:_BOUNCE_BYTES])]
        call: list[memoryview] = []
        room = _CALL_BYTES
        for view in left[:_CALL_VIEWS]:
            if not room or (self.direct and not _aligned(view)):
                break
            call.append(view[:room])
            room -= len(call[-1])
        return call

    def _bounced(self, view: memoryview) -> memoryview:
        if self._bounce is None:
            self._bounce = mmap.mmap(-1, _BOUNCE_BYTES)
        copy = np.frombuffer(self._bounce, np.uint8, len(view))
        # NumPy lets go of the GIL; assigning to a memoryview does not.
        np.copyto(copy, np.frombuffer(view, np.uint8))
        return copy.data


def _aligned(view: memoryview) -> bool:
    return int(np.frombuffer(view, np.uint8).ctypes.data) % PAGE == 0


def _drop(views: list[memoryview], size: int) -> None:
    """Take the first ``size`` bytes off."""
    while size:
        taken = min(size, len(views[0]))
        views[0] = views[0][taken:]
        size -= taken
        if not views[0]:
            del views[0]
