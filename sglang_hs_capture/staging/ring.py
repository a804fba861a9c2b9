"""A bounded ring of host buffers: full means the producer waits, never that a row is dropped."""

import mmap
import threading
import time
import weakref
from collections import deque

import torch

from sglang_hs_capture.errors import ConfigError, HsCaptureError

_PAGE = 4096
_TARGET_SLOT_BYTES = 64 * 2**20
_MIN_SLOTS = 4


class RingClosedError(HsCaptureError):
    """The ring was closed while or before waiting for a free slot: capture has stopped."""


class HostRing:
    """Equal slots of rows in one host allocation, pinned for a CUDA device.

    The arena is one anonymous mapping registered with the driver: a pinned allocation through the caching allocator
    would be rounded up to the next power of two. A slot is owned by whoever acquired it until it is released.

    Attributes:
        slot_rows: rows that fit one slot.
        n_slots: number of slots.
        nbytes: size of the arena in bytes.
        blocked_s: seconds that ``acquire`` has waited, in all.
    """

    def __init__(self, total_bytes: int, row_bytes: int, *, pinned: bool) -> None:
        """Allocate the ring.

        Raises:
            ConfigError: ``total_bytes`` holds fewer than four rows.
        """
        slot_bytes = min(_TARGET_SLOT_BYTES, total_bytes // _MIN_SLOTS)
        self.slot_rows = slot_bytes // row_bytes
        if self.slot_rows == 0:
            raise ConfigError(
                f"ring_bytes: expected room for at least {_MIN_SLOTS} rows of {row_bytes} bytes, got {total_bytes}; "
                "raise it"
            )
        self._row_bytes = row_bytes
        self._stride = -(-self.slot_rows * row_bytes // _PAGE) * _PAGE
        self.n_slots = max(_MIN_SLOTS, total_bytes // self._stride)
        self.nbytes = self.n_slots * self._stride
        self._mapping = mmap.mmap(-1, self.nbytes)
        self._arena = torch.frombuffer(self._mapping, dtype=torch.uint8)
        if pinned:
            self._pin()
        self.blocked_s = 0.0
        self._free = deque(range(self.n_slots))
        self._changed = threading.Condition()
        self._closed = False

    def _pin(self) -> None:
        cudart, address = torch.cuda.cudart(), self._arena.data_ptr()
        result = int(cudart.cudaHostRegister(address, self.nbytes, 0))
        if result != 0:
            raise ConfigError(
                f"ring_bytes: the driver could not pin {self.nbytes} bytes of host memory (error {result}); lower "
                "ring_bytes, or raise the limit on locked memory (ulimit -l)"
            )
        # Unpinned before the memory goes back to the system: its address would stay registered.
        weakref.finalize(self, cudart.cudaHostUnregister, address)

    def acquire(self) -> int:
        """Take a free slot, waiting for one if need be.

        Raises:
            RingClosedError: the ring is closed.
        """
        with self._changed:
            if not self._free and not self._closed:
                started = time.monotonic()
                self._changed.wait_for(lambda: self._free or self._closed)
                self.blocked_s += time.monotonic() - started
            if self._closed:
                raise RingClosedError("the ring is closed: capture has stopped")
            return self._free.popleft()

    def release(self, slot: int) -> None:
        """Give a slot back."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    def close(self) -> None:
        """Wake whoever waits, with an error; later calls of ``acquire`` fail at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def free_slots(self) -> int:
        """Slots that nobody owns."""
        with self._changed:
            return len(self._free)

    def rows(self, slot: int, count: int) -> torch.Tensor:
        """The first ``count`` rows of a slot as bytes: uint8 ``[count * row_bytes]``."""
        start = slot * self._stride
        return self._arena[start : start + count * self._row_bytes]
