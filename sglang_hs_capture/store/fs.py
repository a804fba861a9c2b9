"""Every system call of the store that changes a file: short writes, durable names, and how failures are told.

The rest of the store calls the operating system through this module only, so that tests can put a failing, dying or
forgetful disk in its place by replacing ``fs.os``.
"""

import ctypes
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sglang_hs_capture.errors import DiskFullError, StoreError

Buffer = bytes | bytearray | memoryview

_FULL = (errno.ENOSPC, errno.EDQUOT)
_MAKE_ROOM = "free some space or choose another file system"
_ALLOW = "let this user read and write there"
_RAISE_FILES = "raise the limit of open files (ulimit -n)"
# What to do about a failure, at the end of its message.
_REMEDIES = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EFBIG: "raise the limit of a file's size (ulimit -f), or lower --shard-gb",
    errno.EROFS: "make the file system writable",
    errno.EACCES: _ALLOW,
    errno.EPERM: _ALLOW,
    errno.EMFILE: _RAISE_FILES,
    errno.ENFILE: _RAISE_FILES,
}
_SEE_LOG = "see what the system's log says of the disk"
# Another file system, one without links, links forbidden, too many of them.
_NO_LINK = (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EMLINK)
_SYNC_FILE_RANGE_WRITE = 2
# Not in Python's ``os``, and not in every C library.
_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)


@contextmanager
def io_errors(path: Path, action: str) -> Iterator[None]:
    """Turn an ``OSError`` into this project's own, naming the file, what was being done to it, why, and what to do.

    Raises:
        DiskFullError: the file system or a quota is full.
        StoreError: anything else.
    """
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        remedy = _REMEDIES.get(error.errno or 0, _SEE_LOG)
        kind = DiskFullError if error.errno in _FULL else StoreError
        raise kind(
            f"{path}: could not {action}: {reason}; all acknowledged samples are safe; {remedy}, then run again"
        ) from error


def open_file(path: Path, flags: int) -> int:
    """Open a file, close-on-exec, creating it with the process's umask where the flags say so."""
    return os.open(path, flags | os.O_CLOEXEC, 0o666)


def open_to_read(path: Path) -> int:
    """Open a file for reading, close-on-exec; a pipe in its place is refused, and not waited for until somebody writes.

    Raises:
        OSError: it is not there, or is no regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError("it is no regular file")


def read_bytes(path: Path) -> bytes:
    """All of a file; see ``open_to_read``."""
    with os.fdopen(open_to_read(path), "rb") as file:
        return file.read()


def pwrite_all(fd: int, data: Buffer, offset: int) -> None:
    """Write all of ``data`` at ``offset``, however many calls it takes; the GIL is released during each."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(fd, view, offset)
        if not written:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        view = view[written:]
        offset += written


def pwritev(fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Write views one behind the other at ``offset`` in one call, with the GIL released; how many bytes it took."""
    written = os.pwritev(fd, views, offset)
    if not written:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return written


def start_write_back(fd: int, offset: int, size: int) -> None:
    """Have the kernel begin to write cached pages to the disk, without waiting for it: a later ``fsync`` is shorter.

    A hint, so its failures are passed over. It must not wait either: a wait would take the error of a failed
    write-back away from the ``fsync`` that has to report it.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE)


def pread_all(fd: int, view: memoryview, offset: int) -> None:
    """Fill ``view`` from ``offset``.

    Raises:
        EOFError: the file ends before.
    """
    while view:
        count = os.preadv(fd, [view], offset)
        if not count:
            raise EOFError(f"the file ends at byte {offset}, {len(view)} bytes too early")
        view = view[count:]
        offset += count


def fsync(fd: int) -> None:
    """Make a file's content durable. A failure is final: the kernel may have dropped the pages, so never try again."""
    os.fsync(fd)


def fsync_dir(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def truncate(fd: int, length: int) -> None:
    """Cut a file."""
    os.ftruncate(fd, length)


def rename(old: Path, new: Path) -> None:
    """Rename a file within its folder, durably."""
    os.rename(old, new)
    fsync_dir(new.parent)


def rename_all(pairs: Sequence[tuple[Path, Path]]) -> None:
    """Rename files within their file system, in this order, and then make their new names durable."""
    for old, new in pairs:
        os.rename(old, new)
    for folder in dict.fromkeys(new.parent for _, new in pairs):
        fsync_dir(folder)


def link(old: Path, new: Path) -> bool:
    """Give a file a second name, not durable until the folder is; False where the file system cannot."""
    try:
        os.link(old, new)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return False
    return True


def remove(path: Path) -> None:
    """Remove a file if it is there; not durable until the folder is."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def make_dir(path: Path) -> None:
    """Create a folder and its parents where missing, durably."""
    if path.is_dir():
        return
    make_dir(path.parent)
    with suppress(FileExistsError):
        os.mkdir(path)
    fsync_dir(path.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Give a file new content, durably, so that a reader sees the old content or the new and never a mixture."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        try:
            pwrite_all(fd, data, 0)
            fsync(fd)
        finally:
            os.close(fd)
        rename(temporary, path)
    except OSError:
        with suppress(OSError):
            remove(temporary)
        raise


def free_bytes(path: Path) -> int:
    """Bytes that an ordinary user can still write to the file system that holds ``path``."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize
