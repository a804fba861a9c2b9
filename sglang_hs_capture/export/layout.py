"""Where everything lies in a file of one sample, worked out before its states are read.

A file's content is described with ``StatesOf`` in place of each tensor of states. A layout gives the bytes around
them, and a region for each of them, which is then filled while the states stream by. So a sample of any length takes
little memory.
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_hs_capture.store.schema import SAFETENSORS_DTYPE

PAGE = 4096


@dataclass(frozen=True)
class StatesOf:
    """A tensor of states ``first`` to ``last``, exclusive, of each row, side by side.

    ``shape`` has as many elements as S rows of these states.
    """

    first: int
    last: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """Where such a tensor begins in the file; it lies there row after row."""

    offset: int
    first: int
    last: int


@dataclass(frozen=True)
class FileLayout:
    """A file of one sample.

    Attributes:
        pieces: bytes and where they go.
        regions: where states go.
        seal: where a format has checksums of its states: given the CRC-32 of each region, in order, all further bytes
            and where they go.
    """

    pieces: list[tuple[int, bytes]]
    regions: list[Region]
    seal: Callable[[Sequence[int]], list[tuple[int, bytes]]] | None = None


def safetensors_layout(
    tensors: Mapping[str, StatesOf | NDArray[np.int64]], dtype: torch.dtype, metadata: Mapping[str, str] | None = None
) -> FileLayout:
    """Lay out a safetensors file with one tensor of states, which begins at a whole page.

    Args:
        tensors: those of int64 first, then the one of states, so that each is aligned to its elements.
        dtype: of the states.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    arrays: list[bytes] = []
    end, regions = 0, []
    for name, tensor in tensors.items():
        begin = end
        if isinstance(tensor, StatesOf):
            kind = SAFETENSORS_DTYPE[str(dtype).removeprefix("torch.")]
            regions.append(Region(begin, tensor.first, tensor.last))
            end += int(np.prod(tensor.shape)) * dtype.itemsize
        else:
            kind = "I64"
            arrays.append(tensor.astype("<i8").tobytes())
            end += len(arrays[-1])
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    states_begin = regions[0].offset
    text = text.ljust(len(text) + -(8 + len(text) + states_begin) % PAGE)
    start = 8 + len(text)
    pieces = [(0, struct.pack("<Q", len(text)) + text + b"".join(arrays))]
    regions = [replace(region, offset=start + region.offset) for region in regions]
    return FileLayout(pieces, regions)
