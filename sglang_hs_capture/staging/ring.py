"""A bounded ring of host memory between two processes: full means the producer waits, never that a row is dropped.

The memory is one anonymous file that both processes map. Its first page holds the words through which they agree:

| word | written by | meaning |
|---|---|---|
| ``ready`` | the device, in stream order; the producer where there is no device | number of the last piece copied |
| ``released`` | the consumer | position up to which the arena may be used again |
| ``closed`` | the consumer | 1: nothing more is taken |
| ``blocked`` | the producer | nanoseconds it has waited for room |

Positions count bytes from the start of the stream and are never wrapped; the place of a position in the arena is its
rest modulo the capacity. There is one producer and one consumer, and pieces are released in the order of their
reservation, so that no lock is shared between the processes.
"""

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sglang_hs_capture.errors import ConfigError, HsCaptureError
from sglang_hs_capture.staging.memory import available_bytes

PAGE = 4096
_TARGET_PIECE_BYTES = 64 * 2**20
_MIN_PIECES = 4
# Words written by different processes are two cache lines apart.
_STRIDE = 16
_READY, _RELEASED, _CLOSED, _BLOCKED = (n * _STRIDE for n in range(4))
_POLL_S = 2e-4


class RingClosedError(HsCaptureError):
    """The consumer takes nothing more: capture has stopped."""


@dataclass(frozen=True)
class Span:
    """A reserved part of the arena.

    Attributes:
        offset: where it begins in the arena, in bytes; page-aligned.
        nbytes: its length.
        end: the position up to which the ring is free once it is released.
    """

    offset: int
    nbytes: int
    end: int


class RingMemory:
    """The mapping that producer and consumer share.

    Attributes:
        fd: the anonymous file's descriptor, to be inherited by the other process.
        capacity: bytes of the arena.
        words: int64, the control words.
        arena: uint8 ``[capacity]``.
    """

    def __init__(self, fd: int, capacity: int) -> None:
        """Map ``fd``, which has a page of control words and ``capacity`` bytes behind it."""
        self.fd, self.capacity = fd, capacity
        mapping = mmap.mmap(fd, PAGE + capacity)
        self.words = np.frombuffer(mapping, dtype=np.int64, count=PAGE // 8)
        self.arena = np.frombuffer(mapping, dtype=np.uint8, offset=PAGE)

    @classmethod
    def create(cls, total_bytes: int, row_bytes: int) -> "RingMemory":
        """Make the memory for a ring.

        Raises:
            ConfigError: ``total_bytes`` holds fewer than four rows, or is more memory than the system can spare.
        """
        capacity = total_bytes // PAGE * PAGE
        if capacity // _MIN_PIECES < row_bytes + PAGE:
            raise ConfigError(
                f"ring_bytes: expected room for at least {_MIN_PIECES} rows of {row_bytes} bytes, each on pages of its "
                f"own, got {total_bytes}; raise it"
            )
        # Asked before, since the pages come one by one as they are used, and the last of them from other processes.
        available = available_bytes()
        if capacity > available:
            raise ConfigError(
                f"ring_bytes: expected at most the {available} bytes of memory that are available to this process and "
                f"its control group, got {total_bytes}; lower ring_bytes"
            )
        try:
            fd = os.memfd_create("hs-capture-ring", os.MFD_CLOEXEC)
            try:
                os.ftruncate(fd, PAGE + capacity)
                return cls(fd, capacity)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise ConfigError(
                f"ring_bytes: could not get {PAGE + capacity} bytes of shared memory: {error}; lower ring_bytes, or "
                "raise the limit in the way (ulimit -v, -f, -n)"
            ) from error

    @classmethod
    def attach(cls, fd: int) -> "RingMemory":
        """Map the memory that another process has made."""
        return cls(fd, os.fstat(fd).st_size - PAGE)

    @property
    def closed(self) -> bool:
        """Whether the consumer takes nothing more."""
        return bool(self.words[_CLOSED])

    @property
    def blocked_s(self) -> float:
        """Seconds that the producer has waited for room, in all."""
        return int(self.words[_BLOCKED]) / 1e9

    @property
    def ready_offset(self) -> int:
        """Where the ``ready`` word lies in the mapping, in bytes: what a device writes to."""
        return _READY * 8

    def set_ready(self, number: int) -> None:
        """Say that the pieces up to ``number`` have been copied; for copies made by the processor itself."""
        self.words[_READY] = number


class Producer:
    """Reserves room in the ring, on the one thread that produces.

    Attributes:
        memory: the ring.
        piece_bytes: the most that is reserved at once.
    """

    def __init__(self, memory: RingMemory, *, check_consumer: Callable[[], None]) -> None:
        """Take the producing side.

        Args:
            memory: the ring.
            check_consumer: called now and then while waiting; raises if nobody will ever release anything.
        """
        self.memory, self._check = memory, check_consumer
        self._head = 0
        self.piece_bytes = min(_TARGET_PIECE_BYTES, memory.capacity // _MIN_PIECES) // PAGE * PAGE

    def reserve(self, most: int, unit: int) -> Span:
        """Reserve room for at most ``most`` bytes, waiting for it if need be.

        Args:
            most: what is left to be stored; above zero, a multiple of ``unit``.
            unit: the room is a multiple of this, such as a row; at most ``piece_bytes``.

        Raises:
            RingClosedError: the ring is closed.
            HsCaptureError: whatever ``check_consumer`` raises.
        """
        memory = self.memory
        wanted = min(most, self.piece_bytes // unit * unit)
        offset = self._head % memory.capacity
        tail = memory.capacity - offset
        if tail < wanted:
            # A piece does not wrap. A short tail is left out, a longer one gets a shorter piece.
            short = tail // unit * unit
            if short * 4 < wanted:
                self._head, offset = self._head + tail, 0
            else:
                wanted = short
        end = self._head + -(-wanted // PAGE) * PAGE
        self._wait_for(end - memory.capacity)
        self._head = end
        return Span(offset, wanted, end)

    def _wait_for(self, released: int) -> None:
        words = self.memory.words
        if not words[_CLOSED] and words[_RELEASED] >= released:
            return
        started = time.monotonic_ns()
        before, turn = int(words[_BLOCKED]), 0
        try:
            while not words[_CLOSED] and words[_RELEASED] < released:
                turn += 1
                if turn % 256 == 0:
                    self._check()
                time.sleep(_POLL_S)
                words[_BLOCKED] = before + time.monotonic_ns() - started
        finally:
            words[_BLOCKED] = before + time.monotonic_ns() - started
        if words[_CLOSED]:
            raise RingClosedError("the ring is closed: capture has stopped")


class Consumer:
    """Reads pieces and gives their room back, in the order in which they were leased."""

    def __init__(self, memory: RingMemory) -> None:
        self._memory = memory
        self._leases: deque[Lease] = deque()
        self._lock = threading.Lock()

    def is_ready(self, number: int) -> bool:
        """Whether piece ``number`` has been copied."""
        if self._memory.words[_READY] < number:
            return False
        # Taking a lock keeps the reads that follow behind the one above, on any processor.
        with self._lock:
            return True

    def data(self, span: Span) -> memoryview:
        """The bytes of a span: uint8 ``[nbytes]``."""
        return self._memory.arena[span.offset : span.offset + span.nbytes].data

    def lease(self, span: Span) -> "Lease":
        """Take a piece; its room is given back when the lease is done, and those before it are."""
        lease = Lease(self, span.end)
        with self._lock:
            self._leases.append(lease)
        return lease

    def close(self) -> None:
        """Take nothing more: whoever waits for room, or asks for it later, gets an error."""
        self._memory.words[_CLOSED] = 1

    def _release(self, lease: "Lease") -> None:
        with self._lock:
            lease.users -= 1
            while self._leases and not self._leases[0].users:
                self._memory.words[_RELEASED] = self._leases.popleft().end


class Lease:
    """A piece in use, by the one who took it and by those it was shared with."""

    def __init__(self, consumer: Consumer, end: int) -> None:
        self._consumer, self.end, self.users = consumer, end, 1

    def share(self) -> Callable[[], None]:
        """Add a user; returns what this user calls, once, from any thread, when it is done."""
        with self._consumer._lock:
            self.users += 1
        return self.done

    def done(self) -> None:
        """One user is done with the piece."""
        self._consumer._release(self)
