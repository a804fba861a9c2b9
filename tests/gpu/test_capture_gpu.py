"""Capture of a toy decoder on a GPU: nothing on the forward's thread waits for the device."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from tests.unit.capture.test_writing_capture import samples  # noqa: E402
from tests.unit.toy_model import ToyModel  # noqa: E402


def test_no_forward_waits_for_the_device(tmp_path):
    """PyTorch itself raises at whatever would: ``.item()``, ``.cpu()``, copies to or from pageable memory."""
    model = ToyModel(tmp_path, device="cuda")
    prompts = {f"hs-{n}": [n + k for k in range(1, 2 + 37 * n % 200)] for n in range(60)}
    batches = []
    for first in range(0, 60, 3):
        rids = [f"hs-{n}" for n in range(first, first + 3)]
        half = [(rid, prompts[rid], 0, (len(prompts[rid]) + 1) // 2) for rid in rids]
        rest = [(rid, prompts[rid], (len(prompts[rid]) + 1) // 2, len(prompts[rid])) for rid in rids]
        batches += [(*half, ("other", [5] * 9, 0, 9)), (("other-2", [5] * 9, 0, 9), *[p for p in rest if p[2] < p[3]])]
    inputs = [model.prepare(*batch) for batch in batches]
    model.run(*inputs[0])  # compiles the kernel
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for hidden, batch in inputs[1:]:
            model.run(hidden, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    model.close()
    stored = samples(tmp_path)
    assert set(stored) == set(prompts)
    for rid, prompt in prompts.items():
        assert torch.equal(stored[rid], ToyModel.states(prompt)), rid
