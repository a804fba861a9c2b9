"""The ring: bounded, blocking, never handing out a slot twice."""

import itertools
import threading
import time

import pytest
import torch

from sglang_hs_capture.errors import ConfigError
from sglang_hs_capture.staging.copier import Staging
from sglang_hs_capture.staging.ring import HostRing, RingClosedError


def test_slots_are_page_aligned_disjoint_and_exact():
    ring = HostRing(2**20, 24, pinned=False)
    views = [ring.rows(slot, ring.slot_rows) for slot in range(ring.n_slots)]
    starts = [view.data_ptr() - views[0].data_ptr() for view in views]
    assert all(start % 4096 == 0 for start in starts)
    assert all(b - a >= ring.slot_rows * 24 for a, b in itertools.pairwise(starts))
    assert ring.nbytes <= 2**20 + ring.n_slots * 4096


def test_too_small_a_ring_is_refused_with_numbers():
    with pytest.raises(ConfigError, match="4 rows of 1000 bytes, got 3999"):
        HostRing(3999, 1000, pinned=False)


def test_a_full_ring_blocks_until_a_release_and_counts_the_time():
    ring = HostRing(2**16, 64, pinned=False)
    slots = [ring.acquire() for _ in range(ring.n_slots)]
    assert len(set(slots)) == ring.n_slots
    assert ring.blocked_s == 0.0
    timer = threading.Timer(0.2, ring.release, [slots[2]])
    timer.start()
    assert ring.acquire() == slots[2]
    assert 0.1 < ring.blocked_s < 5.0


def test_closing_wakes_who_waits():
    ring = HostRing(2**16, 64, pinned=False)
    for _ in range(ring.n_slots):
        ring.acquire()
    threading.Timer(0.1, ring.close).start()
    with pytest.raises(RingClosedError):
        ring.acquire()
    ring.release(0)
    with pytest.raises(RingClosedError):
        ring.acquire()


def test_a_batch_larger_than_the_ring_goes_through_in_order():
    row_shape, n_rows = (2, 8), 5000
    ring = HostRing(2**16, 2 * 8 * 4, pinned=False)
    staging = Staging(torch.device("cpu"), 16, *row_shape, torch.float32, ring)
    staged = staging.begin(n_rows)
    staged.states.copy_(torch.arange(n_rows * 16, dtype=torch.float32).view(n_rows, 2, 8))
    assert n_rows > ring.n_slots * ring.slot_rows
    got = torch.empty(n_rows, 2, 8)
    for piece in staging.drain(staged):
        piece.wait()
        got[piece.start : piece.start + piece.count] = (
            ring.rows(piece.slot, piece.count).view(torch.float32).view(-1, 2, 8).clone()
        )
        ring.release(piece.slot)
    assert torch.equal(got, staged.states)
    assert ring.free_slots == ring.n_slots


def test_buffers_take_turns():
    ring = HostRing(2**16, 32, pinned=False)
    staging = Staging(torch.device("cpu"), 4, 1, 8, torch.float32, ring, buffers=2)
    first, second, third = (staging.begin(4).states.data_ptr() for _ in range(3))
    assert first != second
    assert first == third


def test_many_producers_and_a_consumer_never_share_a_slot():
    ring = HostRing(2**16, 64, pinned=False)
    owners: dict[int, int] = {}
    lock, errors = threading.Lock(), []

    def work(name: int) -> None:
        for _ in range(200):
            slot = ring.acquire()
            with lock:
                if slot in owners:
                    errors.append((slot, owners[slot], name))
                owners[slot] = name
            time.sleep(0)
            with lock:
                del owners[slot]
            ring.release(slot)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert ring.free_slots == ring.n_slots
