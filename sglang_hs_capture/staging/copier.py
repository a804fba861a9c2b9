"""Packed rows from a device buffer into the ring, on a side stream, without a wait on the scheduler's thread."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from sglang_hs_capture.staging.ring import HostRing


@dataclass(frozen=True)
class Piece:
    """Rows ``[start, start + count)`` of a batch, on their way into ``slot``; there once ``wait`` returns."""

    slot: int
    start: int
    count: int
    wait: Callable[[], None]


@dataclass(frozen=True)
class Staged:
    """Room for one batch's rows on the device: states ``[T, C, H]``, absmax float32 ``[T, C]``."""

    states: torch.Tensor
    absmax: torch.Tensor


def _already() -> None:
    """The wait for something that was copied synchronously."""


class Staging:
    """Device buffers that a forward packs into, and their copy into the ring.

    Buffers take turns, so that the next forward can pack while the last one's rows are still being copied; a buffer is
    packed into again only after its copy, by an order between streams and not by a wait on the host.
    """

    def __init__(
        self,
        device: torch.device,
        rows: int,
        n_columns: int,
        hidden: int,
        dtype: torch.dtype,
        ring: HostRing,
        buffers: int = 2,
    ) -> None:
        """Allocate ``buffers`` buffers of ``rows`` rows each on ``device``."""
        self._device, self._ring = device, ring
        self._shape, self._dtype = (n_columns, hidden), dtype
        self._buffers = [self._allocate(rows) for _ in range(buffers)]
        self._turn = 0
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._copied: list[torch.cuda.Event | None] = [None] * buffers

    def _allocate(self, rows: int) -> Staged:
        # An explicit device: a model is built under a default device.
        return Staged(
            torch.empty((rows, *self._shape), dtype=self._dtype, device=self._device),
            torch.empty((rows, self._shape[0]), dtype=torch.float32, device=self._device),
        )

    def begin(self, rows: int) -> Staged:
        """Room for ``rows`` rows; the current stream may write to it from now on.

        A batch larger than any before makes its buffer grow, and keeps it so.
        """
        self._turn = (self._turn + 1) % len(self._buffers)
        copied = self._copied[self._turn]
        if copied is not None:
            torch.cuda.current_stream(self._device).wait_event(copied)
        if self._buffers[self._turn].states.shape[0] < rows:
            self._buffers[self._turn] = self._allocate(rows)
        buffer = self._buffers[self._turn]
        return Staged(buffer.states[:rows], buffer.absmax[:rows])

    def to_host(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], None]]:
        """Start copying small device tensors to new host tensors; returns these and the wait for them."""
        if self._stream is None:
            return [tensor.clone() for tensor in tensors], _already
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            hosts = []
            for tensor in tensors:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
                host.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
                hosts.append(host)
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
        return hosts, event.synchronize

    def drain(self, staged: Staged) -> Iterator[Piece]:
        """Start copying packed rows into the ring, a slot at a time, waiting for free slots as need be.

        The caller hands on each piece before it takes the next: a batch may be larger than the whole ring.

        Raises:
            RingClosedError: capture has stopped.
        """
        n_rows = staged.states.shape[0]
        flat = staged.states.view(torch.uint8).reshape(n_rows, -1)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for start in range(0, n_rows, self._ring.slot_rows):
            count = min(self._ring.slot_rows, n_rows - start)
            slot = self._ring.acquire()
            target = self._ring.rows(slot, count).view(count, -1)
            yield Piece(slot, start, count, self._copy(flat[start : start + count], target))
        if self._stream is not None:
            copied = torch.cuda.Event()
            copied.record(self._stream)
            self._copied[self._turn] = copied

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        if self._stream is None:
            target.copy_(source)
            return _already
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            source.record_stream(self._stream)
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
        return event.synchronize
