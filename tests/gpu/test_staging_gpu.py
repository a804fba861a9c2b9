"""The data path on a GPU: the ring and its doorbell under load, read by another process."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from sglang_hs_capture.kernels.pack import pack_state  # noqa: E402
from sglang_hs_capture.staging.copier import Staging  # noqa: E402
from sglang_hs_capture.staging.ring import Producer, RingMemory  # noqa: E402

HIDDEN, COLUMNS = 7168, 4
ROW_BYTES = COLUMNS * HIDDEN * 2
ROOT = Path(__file__).parents[2]

# Takes pieces as soon as the doorbell rings, keeps each state's ends, and overwrites what it read. At first
# it is slow, so that the ring fills; later the device is, so that the doorbell is waited for.
READER = """
import sys, time
import numpy as np
from sglang_hs_capture.staging.ring import Consumer, RingMemory, Span
memory = RingMemory.attach(int(sys.argv[1]))
consumer, kept, waits = Consumer(memory), [], 0
for count, line in enumerate(sys.stdin):
    number, offset, nbytes, end = map(int, line.split())
    span = Span(offset, nbytes, end)
    while not consumer.is_ready(number):
        waits += 1
    lease = consumer.lease(span)
    data = np.frombuffer(consumer.data(span), dtype=np.int16).reshape(-1, 4, 7168)
    kept.append(np.concatenate([data[:, :, :16], data[:, :, -16:]], axis=2))
    data[:] = 0x5A5A
    if count < 100 and count % 7 == 0:
        time.sleep(0.05)
    lease.done()
np.save(sys.argv[2], np.concatenate(kept))
print(waits)
"""


def test_nothing_is_lost_or_mixed_up_with_a_slow_reader_and_busy_compute(tmp_path):
    """Batches of many sizes, matmuls beside, a ring that fills: every row arrives once, whole and right."""
    memory = RingMemory.create(2**27, ROW_BYTES)
    staging = Staging(
        torch.device("cuda"), 512, COLUMNS, HIDDEN, torch.bfloat16, Producer(memory, check_consumer=lambda: None)
    )
    kept_file, expected = tmp_path / "kept.npy", []
    busy = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(memory.fd), str(kept_file)],
        pass_fds=[memory.fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    ) as reader:
        for number in range(200):
            early = number < 100
            n_rows = (number * 97) % (1500 if early else 90) + 1
            state = torch.randn(n_rows + 3, HIDDEN, device="cuda", dtype=torch.bfloat16)
            rows = torch.randperm(n_rows + 3, device="cuda")[:n_rows]
            staged = staging.begin(n_rows)
            parts = []
            for column in range(COLUMNS):
                parts.append(torch.cat([state[rows, :16], state[rows, -16:]], dim=1))
                pack_state(state, rows, staged.states, staged.absmax, column)
                # The model changes a state in place as soon as the tap has returned.
                state.mul_(-1.5)
                for _ in range(1 if early else 20):
                    busy = busy @ busy.T * 1e-4
            expected.append(torch.stack(parts, dim=1))
            for piece in staging.send(staged.states):
                reader.stdin.write(f"{piece.number} {piece.span.offset} {piece.span.nbytes} {piece.span.end}\n")
                reader.stdin.flush()
            staging.sent()
        reader.stdin.close()
        waits = int(reader.stdout.read())
    assert reader.returncode == 0
    received = torch.from_numpy(np.load(kept_file)).view(torch.bfloat16)
    assert torch.equal(received, torch.cat(expected).cpu())
    assert memory.blocked_s > 0, "the ring never filled"
    assert waits > 0, "the reader never had to wait for the device"
