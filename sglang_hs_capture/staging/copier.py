"""Packed rows from a device buffer into the ring, on a side stream, without a wait on the scheduler's thread."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sglang_hs_capture.errors import ConfigError
from sglang_hs_capture.staging.doorbell import CudaDoorbell, Doorbell, HostDoorbell
from sglang_hs_capture.staging.ring import Producer, RingMemory, Span

_BUFFERS = 2


@dataclass(frozen=True)
class Piece:
    """A part of what was sent, on its way into ``span``; there once the ring's ``ready`` word is ``number`` or more."""

    number: int
    span: Span


@dataclass(frozen=True)
class Staged:
    """Room for one batch's rows on the device: states ``[T, C, H]``, absmax float32 ``[T, C]``."""

    states: torch.Tensor
    absmax: torch.Tensor


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
        producer: Producer,
    ) -> None:
        """Allocate buffers of ``rows`` rows each on ``device``, and pin the ring for a CUDA device.

        Raises:
            ConfigError: the driver cannot pin so much memory.
            EngineError: the driver is too old.
        """
        self._device, self._producer = device, producer
        self._shape, self._dtype = (n_columns, hidden), dtype
        self._buffers = [self._allocate(rows) for _ in range(_BUFFERS)]
        self._turn = 0
        self._numbers = 0
        memory = producer.memory
        self._arena = torch.from_numpy(memory.arena)
        self._stream: torch.cuda.Stream | None = None
        self._doorbell: Doorbell = HostDoorbell(memory)
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._doorbell = self._pin(memory)
        self._copied: list[torch.cuda.Event | None] = [None] * _BUFFERS

    def _pin(self, memory: RingMemory) -> Doorbell:
        cudart, address, nbytes = torch.cuda.cudart(), memory.words.ctypes.data, memory.words.nbytes + memory.capacity
        result = int(cudart.cudaHostRegister(address, nbytes, 0))
        if result != 0:
            raise ConfigError(
                f"ring_bytes: the driver could not pin {nbytes} bytes of host memory (error {result}); lower "
                "ring_bytes, or raise the limit on locked memory (ulimit -l)"
            )
        # Unpinned before the memory goes back to the system: its address would stay registered.
        weakref.finalize(self, cudart.cudaHostUnregister, address)
        return CudaDoorbell(address + memory.ready_offset)

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

    def send(self, source: torch.Tensor) -> Iterator[Piece]:
        """Start copying a tensor into the ring, piece by piece, waiting for room as need be.

        The caller hands on each piece before it takes the next: a batch may be larger than the whole ring.

        Args:
            source: contiguous ``[n, ...]`` on the device, written by the current stream; a piece has whole entries of
                its first axis.

        Raises:
            RingClosedError: capture has stopped.
        """
        if source.numel() == 0:
            return
        flat = source.contiguous().view(source.shape[0], -1).view(torch.uint8)
        unit = flat.shape[1]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        first = 0
        while first < flat.shape[0]:
            span = self._producer.reserve((flat.shape[0] - first) * unit, unit)
            count = span.nbytes // unit
            target = self._arena[span.offset : span.offset + span.nbytes].view(count, unit)
            yield self._copy(flat[first : first + count], target, span)
            first += count

    def sent(self) -> None:
        """All rows of the last ``begin`` have been sent: its buffer is free once they are copied."""
        if self._stream is not None:
            copied = torch.cuda.Event()
            copied.record(self._stream)
            self._copied[self._turn] = copied

    def _copy(self, source: torch.Tensor, target: torch.Tensor, span: Span) -> Piece:
        self._numbers += 1
        if self._stream is None:
            target.copy_(source)
        else:
            with torch.cuda.stream(self._stream):
                target.copy_(source, non_blocking=True)
            source.record_stream(self._stream)
        self._doorbell.ring(self._numbers, self._stream)
        return Piece(self._numbers, span)
