"""Writing files whole or not at all: under a name that counts for nothing, made durable, then renamed."""

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from sglang_hs_capture.export.layout import FileLayout
from sglang_hs_capture.store import fs

_WRITE_BACK_BYTES = 64 << 20


class Batch:
    """Files that are made durable and given their names together: fewer waits for the disk.

    Use it as a context manager. Files that have no name of their own when it is left are removed.
    """

    def __init__(self, unfinished: Path) -> None:
        """Write into the folder ``unfinished``, which is on the same file system as the names to be given."""
        self._unfinished = unfinished
        self._files: list[tuple[Path, Path, int]] = []

    def __enter__(self) -> "Batch":
        return self

    def __exit__(self, *_error: object) -> None:
        for temporary, _path, fd in self._files:
            os.close(fd)
            with suppress(OSError):
                fs.remove(temporary)
        self._files = []

    def write(
        self, path: Path, layout: FileLayout, blocks: Iterator[tuple[int, Tensor]], told: Callable[[int], None]
    ) -> None:
        """Write one file, which gets its name ``path`` with ``commit``.

        Args:
            blocks: the position of a first row and states [n, K, H], contiguous, in the dtype of the layout.
            told: is called with the bytes of each block as it is written.

        Raises:
            DiskFullError, StoreError: the disk refuses.
        """
        temporary = self._unfinished / f"{path.name}.tmp"
        with fs.io_errors(path, "write"):
            fd = fs.open_file(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            self._files.append((temporary, path, fd))
            _fill(fd, layout, blocks, told)

    def commit(self) -> None:
        """Make the files durable and give them their names.

        Raises:
            DiskFullError, StoreError: the disk refuses; none, some or all have their names.
        """
        for _, path, fd in self._files:
            with fs.io_errors(path, "make durable"):
                fs.fsync(fd)
        if self._files:
            with fs.io_errors(self._files[0][1].parent, "name files in"):
                fs.rename_all([(temporary, path) for temporary, path, _ in self._files])
        for _, _, fd in self._files:
            os.close(fd)
        self._files = []


def _fill(fd: int, layout: FileLayout, blocks: Iterator[tuple[int, Tensor]], told: Callable[[int], None]) -> None:
    sums = [0] * len(layout.regions)
    written_back = done = 0
    for start, block in blocks:
        for number, region in enumerate(layout.regions):
            data = memory_of(block[:, region.first : region.last])
            if layout.seal is not None:
                sums[number] = zlib.crc32(data, sums[number])
            fs.pwrite_all(fd, data, region.offset + start * (len(data) // len(block)))
        done += block.nbytes
        told(block.nbytes)
        if done - written_back >= _WRITE_BACK_BYTES:
            fs.start_write_back(fd, 0, 0)
            written_back = done
    for offset, data in [*layout.pieces, *(layout.seal(sums) if layout.seal else ())]:
        fs.pwrite_all(fd, data, offset)
    fs.start_write_back(fd, 0, 0)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, copied only if they do not lie one behind the other."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def write_bytes(unfinished: Path, path: Path, data: bytes) -> None:
    """Give a small file its content in one step, durably; it is written in the folder ``unfinished`` first.

    Raises:
        DiskFullError, StoreError: the disk refuses; the old content is still there.
    """
    temporary = unfinished / f"{path.name}.tmp"
    with fs.io_errors(path, "write"):
        fd = fs.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            fs.pwrite_all(fd, data, 0)
            fs.fsync(fd)
        finally:
            os.close(fd)
        fs.rename_all([(temporary, path)])


def move_into(folder: Path, files: Sequence[Path]) -> None:
    """Make files durable and move them into a folder of the same file system, in this order.

    Raises:
        DiskFullError, StoreError: the disk refuses.
    """
    for file in files:
        with fs.io_errors(folder / file.name, "write"):
            fd = fs.open_file(file, os.O_RDWR)
            try:
                fs.fsync(fd)
            finally:
                os.close(fd)
            fs.rename_all([(file, folder / file.name)])
