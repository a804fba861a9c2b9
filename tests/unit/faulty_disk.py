"""Disks that fail: stand-ins for the ``os`` module that the store's ``fs`` calls."""

import errno
import os
import random
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sglang_hs_capture.store import fs

CHANGING = ("open", "pwrite", "pwritev", "fsync", "rename", "link", "unlink", "mkdir", "ftruncate")


class FaultyOS:
    """Counts the calls that change something, and consults ``before`` ahead of each.

    A ``pwritev`` passes for a ``pwrite`` of all its bytes. The store's threads call one after the other.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.steps = 0
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._counted(name, real) if name in CHANGING else real

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args)
            kind, told = name, args
            if name == "pwritev":
                kind, told = "pwrite", (args[0], b"".join(args[1]), args[2])
            with self._lock:
                step, self.steps = self.steps, self.steps + 1
                self.calls.append(kind)
                self.before(step, kind, told)
                result = real(*args)
                self.after(kind, told, result)
                return result

        return call

    def before(self, step: int, name: str, args: tuple[Any, ...]) -> None:
        """Called ahead of each step."""

    def after(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Called behind each step."""


class KillAt(FaultyOS):
    """Ends this process by SIGKILL at a step, writing half of what a write was to write if ``torn``.

    Each ``fsync`` takes ``sync_s`` seconds more than it does, while other threads go on.
    """

    def __init__(self, step: int, torn: bool, sync_s: float = 0.0) -> None:
        super().__init__()
        self.kill_step = step
        self.torn = torn
        self.sync_s = sync_s

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        counted = super()._counted(name, real)

        def call(*args: Any) -> Any:
            if name == "fsync":
                time.sleep(self.sync_s)
            return counted(*args)

        return call

    def before(self, step: int, name: str, args: tuple[Any, ...]) -> None:
        if step == self.kill_step:
            if self.torn and name == "pwrite":
                fd, data, offset = args
                os.pwrite(fd, data[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)


class FailAt(FaultyOS):
    """Fails one call with an error of the operating system, a write after half of its bytes."""

    def __init__(self, code: int, name: str, path_part: str, skip: int = 0) -> None:
        super().__init__()
        self.code, self.name, self.path_part, self.skip = code, name, path_part, skip
        self.failed = False

    def before(self, step: int, name: str, args: tuple[Any, ...]) -> None:
        if self.failed or name != self.name or self.path_part not in path_of(args[0]):
            return
        if self.skip:
            self.skip -= 1
            return
        self.failed = True
        if name == "pwrite":
            fd, data, offset = args
            os.pwrite(fd, data[: len(data) // 2], offset)
        raise OSError(self.code, os.strerror(self.code))


class GatedOS(FaultyOS):
    """Keeps calls of one name, on paths with a part, waiting until ``gate`` is set; all others go on.

    Attributes:
        reached: a call waits, or has waited.
    """

    def __init__(self, name: str, path_part: str) -> None:
        super().__init__()
        self.name, self.path_part = name, path_part
        self.reached, self.gate = threading.Event(), threading.Event()

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        counted = super()._counted(name, real)

        def call(*args: Any) -> Any:
            if name == self.name and self.path_part in path_of(args[0]):
                self.reached.set()
                assert self.gate.wait(60)
            return counted(*args)

        return call


class FullAfter(GatedOS):
    """A disk that takes only so many bytes of states, the last of them in a short write."""

    def __init__(self, room: int) -> None:
        super().__init__("pwritev", ".partial")
        self.room = room

    def pwritev(self, fd: int, views: list[memoryview], offset: int) -> int:
        self.reached.set()
        assert self.gate.wait(60)
        with self._lock:
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = os.pwrite(fd, b"".join(views)[: self.room], offset)
            self.room -= written
            return written


class ShortWrites(FaultyOS):
    """Writes at most three bytes a call, and reads at most two."""

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        if name == "pwrite":
            return lambda fd, data, offset: os.pwrite(fd, data[:3], offset)
        if name == "pwritev":
            return lambda fd, views, offset: os.pwrite(fd, views[0][:3], offset)
        return super()._counted(name, real)

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        return os.preadv(fd, [buffers[0][:2]], offset)


def path_of(target: Any) -> str:
    """The path of a file descriptor or of a path."""
    return os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)


class PowerLossError(BaseException):
    """The power went."""


class ForgetfulOS(FaultyOS):
    """A disk that keeps only what was made durable, when the power goes at a step.

    For each file it knows the content at its last ``fsync``; for each folder the names at its last ``fsync`` and the
    changes since. ``materialise`` writes one of the many states that the disk may be in.
    """

    def __init__(self, root: Path, step: int) -> None:
        super().__init__()
        self.root = root
        self.loss_step = step
        self.content: dict[int, bytes] = {}
        self.names: dict[int, dict[str, int]] = {root.stat().st_ino: {}}
        self.changes: dict[int, list[tuple[str, str, int]]] = {root.stat().st_ino: []}
        self._held: list[int] = []

    def before(self, step: int, name: str, args: tuple[Any, ...]) -> None:
        if step >= self.loss_step:
            raise PowerLossError

    def after(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name == "open":
            # Kept open: the number of a removed file's inode must not be given to another file.
            self._held.append(os.open(args[0], os.O_RDONLY))
        if name == "mkdir":
            self.names[os.stat(args[0]).st_ino] = {}
            self.changes[os.stat(args[0]).st_ino] = []
        if name in ("open", "mkdir"):
            self._changed(Path(args[0]), "", os.stat(args[0]).st_ino)
        elif name == "unlink":
            self._changed(Path(args[0]), "", 0)
        elif name == "rename":
            old, new = Path(args[0]), Path(args[1])
            inode = os.stat(new).st_ino
            if old.parent == new.parent:
                self._changed(new, old.name, inode)
            else:
                # Two folders become durable each for itself.
                self._changed(new, "", inode)
                self._changed(old, "", 0)
        elif name == "fsync":
            self._durable(args[0])

    def _changed(self, path: Path, old: str, inode: int) -> None:
        """Note that a name was given to an inode (none: 0), and taken from another name, in one step."""
        self.changes[path.parent.stat().st_ino].append((path.name, old, inode))

    def _durable(self, fd: int) -> None:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            if status.st_ino in self.names:
                self.names[status.st_ino] = self._listing(status.st_ino, self.changes[status.st_ino])
                self.changes[status.st_ino].clear()
        else:
            self.content[status.st_ino] = Path(path_of(fd)).read_bytes()

    def materialise(self, target: Path, rng: random.Random | None) -> None:
        """Write a state after the loss: with ``rng`` one at random, otherwise only what was made durable."""
        current = {p.stat().st_ino: p.read_bytes() for p in self.root.rglob("*") if p.is_file()}
        self._materialise(self.root.stat().st_ino, target, current, rng)

    def _listing(self, folder: int, changes: list[tuple[str, str, int]]) -> dict[str, int]:
        """The names in a folder after some of the changes since they were durable."""
        names = dict(self.names[folder])
        for name, old, inode in changes:
            if old:
                if old not in names:
                    continue
                del names[old]
            names[name] = inode
        return {name: inode for name, inode in names.items() if inode}

    def _materialise(self, folder: int, target: Path, current: dict[int, bytes], rng: random.Random | None) -> None:
        target.mkdir(parents=True)
        for name, inode in self._listing(folder, _some_of(self.changes[folder], rng) if rng else []).items():
            if inode in self.names:
                self._materialise(inode, target / name, current, rng)
                continue
            durable = self.content.get(inode, b"")
            now = current.get(inode, durable)
            (target / name).write_bytes(_mix(name, durable, now, rng) if rng else durable)


def open_files(directory: Path) -> list[str]:
    """What this process has open below a folder."""
    paths = [path_of(int(fd)) for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
    return [path for path in paths if str(directory) in path]


def join_store_threads() -> None:
    """Wait until the threads of all stores whose disk has failed for good have ended."""
    for thread in threading.enumerate():
        if thread.name.startswith("hs-capture-store"):
            thread.join(30)
            assert not thread.is_alive()


def close_all_below(root: Path) -> None:
    """Close what is open below a folder, and so let go of its locks, on behalf of a store that died."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if Path(path_of(fd).removesuffix(" (deleted)")).is_relative_to(root):
                os.close(fd)


def _some_of(changes: list[tuple[str, str, int]], rng: random.Random) -> list[tuple[str, str, int]]:
    """The first so many changes, or any of them: not every file system keeps them in order."""
    if rng.random() < 0.5:
        return changes[: rng.randint(0, len(changes))]
    return [change for change in changes if rng.random() < 0.5]


def _mix(name: str, durable: bytes, now: bytes, rng: random.Random) -> bytes:
    """A content between the durable and the current one: any blocks, but for a journal, which grows in order."""
    if name.endswith(".jsonl"):
        return now[: rng.randint(len(durable), len(now))] if len(now) >= len(durable) else durable
    size = rng.choice((len(durable), len(now)))
    blocks = []
    for start in range(0, size, 16):
        source = rng.choice((durable, now))
        blocks.append(source[start : start + 16].ljust(min(16, size - start), b"\0"))
    return b"".join(blocks)


@contextmanager
def disk(replacement: FaultyOS) -> Iterator[Any]:
    """Let the store's ``fs`` call ``replacement`` instead of ``os``."""
    real = fs.os
    fs.os = replacement  # type: ignore[assignment]
    try:
        yield replacement
    finally:
        fs.os = real
