"""The data path on a GPU: the ring under load."""

import threading
import time
from collections import deque

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from sglang_hs_capture.kernels.pack import pack_state  # noqa: E402
from sglang_hs_capture.staging.copier import Staging  # noqa: E402
from sglang_hs_capture.staging.ring import HostRing  # noqa: E402

HIDDEN, COLUMNS = 7168, 4


def test_nothing_is_lost_or_mixed_up_with_a_slow_reader_and_busy_compute():
    """Batches of many sizes, matmuls beside, slots refilled with a sentinel: every row arrives once and right."""
    ring = HostRing(2**27, COLUMNS * HIDDEN * 2, pinned=True)
    staging = Staging(torch.device("cuda"), 512, COLUMNS, HIDDEN, torch.bfloat16, ring)
    queue: deque = deque()
    got: list[torch.Tensor] = []
    done = threading.Event()

    def read() -> None:
        while not (done.is_set() and not queue):
            if not queue:
                time.sleep(0.0005)
                continue
            piece = queue.popleft()
            piece.wait()
            view = ring.rows(piece.slot, piece.count)
            got.append(view.view(torch.bfloat16).view(piece.count, COLUMNS, HIDDEN)[:, :, :16].clone())
            if len(got) % 5 == 0:
                time.sleep(0.01)
            view.fill_(0xAB)
            ring.release(piece.slot)

    reader = threading.Thread(target=read)
    reader.start()
    expected = []
    busy = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for number in range(60):
        n_rows = (number * 97) % 1500 + 1
        state = torch.randn(n_rows + 3, HIDDEN, device="cuda", dtype=torch.bfloat16)
        rows = torch.randperm(n_rows + 3, device="cuda")[:n_rows]
        staged = staging.begin(n_rows)
        for column in range(COLUMNS):
            expected.append((column, state[rows, :16].clone()))
            pack_state(state, rows, staged.states, staged.absmax, column)
            # The model changes a state in place as soon as the tap has returned.
            state.mul_(-1.5)
            busy = busy @ busy.T * 1e-4
        for piece in staging.drain(staged):
            queue.append(piece)
    done.set()
    reader.join(60)
    assert not reader.is_alive()
    assert ring.free_slots == ring.n_slots
    received = torch.cat(got)
    for column in range(COLUMNS):
        sent = torch.cat([part for which, part in expected if which == column]).cpu()
        assert torch.equal(received[:, column], sent)
    assert ring.blocked_s > 0
