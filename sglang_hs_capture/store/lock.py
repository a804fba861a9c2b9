"""One process at a time: an advisory lock on a file that names its holder."""

import errno
import fcntl
import os
import time
from pathlib import Path

from sglang_hs_capture.errors import DatasetLockedError
from sglang_hs_capture.store import fs

_POLL_S = 0.05


class FileLock:
    """An exclusive ``flock``, held until ``release`` or the end of the process, however it ends.

    The file stays: removing it would let two processes hold locks on two files of one name.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        """Take the lock.

        Args:
            path: the lock's file; created where missing.
            timeout_s: how long to wait for another process, which may be dying, to let go.

        Raises:
            DatasetLockedError: another process holds it; the message names the process if it is known.
            StoreError: the file system refuses the file or the lock.
        """
        self.path = path
        with fs.io_errors(path, "lock"):
            self._fd: int | None = fs.open_file(path, os.O_RDWR | os.O_CREAT)
            try:
                self._acquire(self._fd, time.monotonic() + timeout_s)
                fs.truncate(self._fd, 0)
                fs.pwrite_all(self._fd, f"{os.getpid()}\n".encode(), 0)
            except BaseException:
                self.release()
                raise

    def _acquire(self, fd: int, deadline: float) -> None:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            if time.monotonic() >= deadline:
                holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                raise DatasetLockedError(
                    f"{self.path}: process {holder or 'unknown'} is writing here; "
                    "wait for it, stop it, or choose another --output"
                )
            time.sleep(_POLL_S)

    def release(self) -> None:
        """Let go; a second call does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
