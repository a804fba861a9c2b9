"""The layout of a file that ``torch.load`` reads, as ``torch.save`` itself makes it, with room for the states."""

import struct
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor

from sglang_hs_capture.export.layout import FileLayout, Region, StatesOf

_ENTRY = b"PK\x01\x02"
_DESCRIPTOR = b"PK\x07\x08"
_CHANGED = "torch.save lays out its files in another way than this release was written for"


class _Recorder:
    """A file for ``torch.save`` that keeps what is written, and the gaps that are left for tensors."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, bytes]] = []
        self.gaps: list[tuple[int, int]] = []
        self._end = 0

    def write(self, data: bytes) -> int:
        self.pieces.append((self._end, bytes(data)))
        self._end += len(data)
        return len(data)

    def seek(self, offset: int, whence: int) -> int:
        assert whence == 1, "torch.save leaves gaps forwards only"
        self.gaps.append((self._end, offset))
        self._end += offset
        return self._end

    def tell(self) -> int:
        return self._end

    def flush(self) -> None:
        """Nothing is held back."""


def torch_layout(content: Mapping[str, Any], dtype: torch.dtype) -> FileLayout:
    """Lay out a dictionary of tensors, lists of tensors, strings and truth values.

    Args:
        content: ``StatesOf`` for a tensor of states in ``dtype``, an array for any other tensor.
    """
    tensors: list[tuple[Any, Tensor]] = []

    def stand_in(value: Any) -> Any:
        if isinstance(value, list):
            return [stand_in(item) for item in value]
        if isinstance(value, StatesOf):
            # Never touched, so that it takes no memory.
            tensors.append((value, torch.empty(value.shape, dtype=dtype)))
        elif isinstance(value, np.ndarray):
            tensors.append((value, torch.from_numpy(value)))
        else:
            return value
        return tensors[-1][1]

    file = _Recorder()
    with torch.serialization.skip_data():
        torch.save({name: stand_in(value) for name, value in content.items()}, cast("IO[bytes]", file))
    if [size for _, size in file.gaps] != [tensor.nbytes for _, tensor in tensors]:
        raise RuntimeError(_CHANGED)
    arrays: list[tuple[int, bytes]] = []
    regions: list[Region] = []
    sums: list[int | None] = []
    for (offset, _), (value, tensor) in zip(file.gaps, tensors, strict=True):
        if isinstance(value, StatesOf):
            regions.append(Region(offset, value.first, value.last))
            sums.append(None)
        else:
            arrays.append((offset, tensor.numpy().tobytes()))
            sums.append(zlib.crc32(arrays[-1][1]))
    return FileLayout([], regions, partial(_seal, file, arrays, sums))


def _seal(
    file: _Recorder, arrays: list[tuple[int, bytes]], sums: list[int | None], of_states: Sequence[int]
) -> list[tuple[int, bytes]]:
    """All but the states, with the tensors' checksums: behind each, and in the directory at the end of a zip file."""
    missing = iter(of_states)
    sealed = [struct.pack("<I", next(missing) if known is None else known) for known in sums]
    pieces = {start: bytearray(data) for start, data in file.pieces}
    for (offset, size), crc in zip(file.gaps, sealed, strict=True):
        descriptor = pieces.get(offset + size, bytearray())
        if not descriptor.startswith(_DESCRIPTOR):
            raise RuntimeError(_CHANGED)
        descriptor[4:8] = crc
    directory = next(piece for piece in pieces.values() if piece.startswith(_ENTRY))
    place = found = 0
    while directory.startswith(_ENTRY, place):
        name, *more = struct.unpack_from("<HHH", directory, place + 28)
        record = directory[place + 46 : place + 46 + name].partition(b"/data/")[2]
        if record:
            directory[place + 16 : place + 20] = sealed[int(record)]
            found += 1
        place += 46 + name + sum(more)
    if found != len(sealed):
        raise RuntimeError(_CHANGED)
    return _joined([*arrays, *((start, bytes(data)) for start, data in pieces.items())])


def _joined(pieces: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """The same bytes in as few pieces as there are gaps between them."""
    joined: list[tuple[int, list[bytes]]] = []
    end = -1
    for offset, data in sorted(pieces):
        if offset != end:
            joined.append((offset, []))
        joined[-1][1].append(data)
        end = offset + len(data)
    return [(offset, b"".join(parts)) for offset, parts in joined]
