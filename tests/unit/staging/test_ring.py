"""The ring: bounded, blocking, in order, and nothing of it given out twice."""

import errno
import itertools
import os
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from sglang_hs_capture.errors import ConfigError, EngineError
from sglang_hs_capture.staging.copier import Staging
from sglang_hs_capture.staging.ring import PAGE, Consumer, Producer, RingClosedError, RingMemory


def make(total: int = 2**20, row_bytes: int = 24) -> tuple[RingMemory, Producer, Consumer]:
    memory = RingMemory.create(total, row_bytes)
    return memory, Producer(memory, check_consumer=lambda: None), Consumer(memory)


def test_spans_are_page_aligned_disjoint_and_whole_rows():
    memory, producer, _ = make(2**20)
    spans = [producer.reserve(10**9, 24) for _ in range(4)]
    assert memory.capacity <= 2**20
    for span in spans:
        assert span.offset % PAGE == 0
        assert span.nbytes % 24 == 0
        assert (memory.arena[span.offset :].ctypes.data) % PAGE == 0
    assert all(b.offset >= a.offset + a.nbytes for a, b in itertools.pairwise(spans))
    assert sum(span.nbytes for span in spans) > 0.9 * memory.capacity


@pytest.mark.parametrize(("total", "row"), [(3999, 1000), (2**20, 2**18 - 100)])
def test_too_small_a_ring_is_refused_with_numbers(total, row):
    with pytest.raises(ConfigError, match=f"4 rows of {row} bytes.*got {total}; raise it"):
        RingMemory.create(total, row)


def test_more_memory_than_there_is_is_refused():
    with pytest.raises(ConfigError, match=r"memory that are available to .* got 4611686018427387904; lower"):
        RingMemory.create(2**62, 24)


def test_a_limit_of_the_process_is_named(monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = os.listdir("/proc/self/fd")
    for name in ("ftruncate", "memfd_create"):
        monkeypatch.setattr(f"sglang_hs_capture.staging.ring.os.{name}", refuse)
        with pytest.raises(ConfigError, match=r"bytes of shared memory: .* Too many open files; lower ring_bytes"):
            RingMemory.create(2**20, 24)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_full_ring_blocks_until_a_release_and_counts_the_time():
    memory, producer, consumer = make(2**16)
    leases = [consumer.lease(producer.reserve(10**9, 24)) for _ in range(4)]
    assert memory.blocked_s == 0.0
    threading.Timer(0.2, leases[0].done).start()
    span = producer.reserve(10**9, 24)
    assert span.offset == 0
    assert 0.1 < memory.blocked_s < 5.0


def test_time_blocked_can_be_read_while_it_passes():
    memory, producer, consumer = make(2**16)
    leases = [consumer.lease(producer.reserve(10**9, 24)) for _ in range(4)]
    waiting = threading.Thread(target=producer.reserve, args=(10**9, 24))
    waiting.start()
    time.sleep(0.15)
    assert memory.blocked_s > 0.05
    leases[0].done()
    waiting.join(10)


def test_closing_wakes_who_waits():
    memory, producer, consumer = make(2**16)
    for _ in range(4):
        producer.reserve(10**9, 24)
    threading.Timer(0.1, consumer.close).start()
    with pytest.raises(RingClosedError):
        producer.reserve(24, 24)
    assert memory.closed
    with pytest.raises(RingClosedError):
        producer.reserve(24, 24)


def test_a_consumer_that_is_gone_is_noticed_while_waiting():
    def gone() -> None:
        raise EngineError("the writing process ended")

    memory = RingMemory.create(2**16, 24)
    producer = Producer(memory, check_consumer=gone)
    for _ in range(4):
        producer.reserve(10**9, 24)
    with pytest.raises(EngineError, match="ended"):
        producer.reserve(24, 24)


def test_room_comes_back_in_order_whoever_is_done_first():
    _, producer, consumer = make(2**16)
    first, second, third = (consumer.lease(producer.reserve(10**9, 24)) for _ in range(3))
    shared = first.share()
    second.done()
    third.done()
    first.done()
    producer.reserve(10**9, 24)
    blocked = threading.Thread(target=producer.reserve, args=(10**9, 24), daemon=True)
    blocked.start()
    blocked.join(0.1)
    assert blocked.is_alive(), "the first piece is still in use by another"
    shared()
    blocked.join(10)
    assert not blocked.is_alive()


@pytest.mark.parametrize("seed", range(5))
def test_spans_never_overlap_what_is_not_released(seed):
    generator = random.Random(seed)
    memory, producer, consumer = make(2**17, 1000)
    held: list = []
    used = np.zeros(memory.capacity, dtype=bool)
    for _ in range(2000):
        unit = generator.choice([8, 24, 1000])
        size = generator.randrange(1, 40) * unit
        while sum(-(-s.nbytes // PAGE) * PAGE for s, _ in held) > memory.capacity // 3:
            span, lease = held.pop(0)
            used[span.offset : span.offset + span.nbytes] = False
            lease.done()
        span = producer.reserve(size, unit)
        assert 0 < span.nbytes <= size
        assert span.nbytes % unit == 0
        assert span.offset + span.nbytes <= memory.capacity
        assert not used[span.offset : span.offset + span.nbytes].any()
        used[span.offset : span.offset + span.nbytes] = True
        held.append((span, consumer.lease(span)))
    assert memory.blocked_s == 0.0


def test_a_batch_larger_than_the_ring_goes_through_in_order():
    n_rows = 5000
    memory, producer, consumer = make(2**16, 64)
    staging = Staging(torch.device("cpu"), 16, 2, 8, torch.float32, producer)
    staged = staging.begin(n_rows)
    staged.states.copy_(torch.arange(n_rows * 16, dtype=torch.float32).view(n_rows, 2, 8))
    assert n_rows * 64 > memory.capacity
    got = []
    for piece in staging.send(staged.states):
        assert consumer.is_ready(piece.number)
        assert not consumer.is_ready(piece.number + 1)
        lease = consumer.lease(piece.span)
        got.append(bytes(consumer.data(piece.span)))
        consumer.data(piece.span)[:] = b"\xab" * piece.span.nbytes
        lease.done()
    assert b"".join(got) == staged.states.numpy().tobytes()


def test_what_is_sent_may_be_a_view_and_may_be_empty():
    _, producer, consumer = make()
    staging = Staging(torch.device("cpu"), 4, 1, 8, torch.float32, producer)
    matrix = torch.arange(12.0).view(3, 4)
    (piece,) = staging.send(matrix.T)
    assert bytes(consumer.data(piece.span)) == matrix.T.contiguous().numpy().tobytes()
    assert list(staging.send(torch.empty(0, 3))) == []


def test_buffers_take_turns():
    _, producer, _ = make()
    staging = Staging(torch.device("cpu"), 4, 1, 8, torch.float32, producer)
    first, second, third = (staging.begin(4).states.data_ptr() for _ in range(3))
    assert first != second
    assert first == third


CONSUMER = """
import sys
from sglang_hs_capture.staging.ring import Consumer, RingMemory, Span
memory = RingMemory.attach(int(sys.argv[1]))
consumer = Consumer(memory)
for line in sys.stdin:
    number, offset, nbytes, end, value = map(int, line.split())
    while not consumer.is_ready(number):
        pass
    lease = consumer.lease(Span(offset, nbytes, end))
    data = bytes(consumer.data(Span(offset, nbytes, end)))
    assert data == bytes([value]) * nbytes, (number, data[:10], value)
    consumer.data(Span(offset, nbytes, end))[:] = bytes(nbytes)
    lease.done()
print("all right")
"""


def test_another_process_sees_every_byte_and_gives_room_back():
    memory, producer, _ = make(2**16)
    staging = Staging(torch.device("cpu"), 4, 1, 8, torch.float32, producer)
    with subprocess.Popen(
        [sys.executable, "-c", CONSUMER, str(memory.fd)],
        pass_fds=[memory.fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        for value in range(1, 200):
            for piece in staging.send(torch.full((997 * value % 7000 + 1,), value, dtype=torch.uint8)):
                span = piece.span
                process.stdin.write(f"{piece.number} {span.offset} {span.nbytes} {span.end} {value}\n")
                process.stdin.flush()
        process.stdin.close()
        assert process.stdout.read().strip() == "all right"
    assert process.returncode == 0
