"""Capture in the real engine on a GPU, real layer shapes, against plain forward hooks in the same forward."""

import json
import os
import random
import time
from pathlib import Path

import pytest
import torch

from benchmarks.load import run_round, served
from benchmarks.shapes import Shape, write_model
from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.float8 import FLOAT8_MAX
from sglang_hs_capture.store.schema import ELEMENT_SIZE
from sglang_hs_capture.store.session import read_sessions
from tests.recorded import recorded_states

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PACKAGES = Path(__file__).parents[1] / "model_packages"
SLOW_DISK = PACKAGES.with_name("slow_disk")
BOUNDARIES = [0, 2, 3]
VOCAB = 32000


def launch_flags(output: Path, *more: str, **settings: object) -> list[str]:
    capture = {"output_dir": str(output), "layers": BOUNDARIES, "final": "both", "min_free_bytes": 0, **settings}
    return [
        *("--model-impl", "sglang", "--load-format", "dummy", "--skip-tokenizer-init", "--disable-radix-cache"),
        *("--disable-prefill-cuda-graph", "--chunked-prefill-size", "1024", "--mem-fraction-static", "0.6"),
        *("--max-running-requests", "16"),
        *("--json-model-override-args", json.dumps({"hs_capture": capture})),
        *more,
    ]


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3"])
def test_captured_bytes_equal_plain_hooks_under_load(tmp_path, backend, dtype):
    """64 requests of mixed lengths, some of them not captured, all of which go on to decode.

    The disk is slow and the ring small, so that it fills; what is given back is overwritten (``tests/slow_disk``).
    """
    if backend == "flashinfer" and dtype != "bfloat16":
        pytest.skip("the dtype on disk does not depend on the attention backend")
    model = write_model(tmp_path / "model", Shape(layers=4, experts=16, vocab_size=VOCAB))
    output, record = tmp_path / "dataset", tmp_path / "record"
    record.mkdir()
    env = {
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "recording_models",
        "PYTHONPATH": f"{SLOW_DISK}:{PACKAGES}:{os.environ.get('PYTHONPATH', '')}",
        "HS_DISK_BYTES_PER_S": "3e8",
        "HS_RECORD_DIR": str(record),
    }
    row_bytes = (len(BOUNDARIES) + 2) * 7168 * ELEMENT_SIZE[dtype]
    flags = launch_flags(output, "--attention-backend", backend, dtype=dtype, ring_bytes=600 * row_bytes)
    generator = random.Random(1)
    lengths = [1, 2, 1023, 1024, 1025, 3000] + [generator.randrange(1, 700) for _ in range(58)]
    prompts = [[generator.randrange(10, VOCAB) for _ in range(n)] for n in lengths]
    rids = [f"hs-{i}" if i % 8 else f"other-{i}" for i in range(len(prompts))]
    with served(model, tmp_path / "server.log", flags, env) as url:
        # Decode beside prefill, so that both kinds of batch alternate.
        run_round(url, prompts, rids, max_new_tokens=8)
        captured = {rid: ids for rid, ids in zip(rids, prompts, strict=True) if rid.startswith("hs-")}
        deadline = time.monotonic() + 120
        while {s.rid for s in HiddenStateDataset(output).samples} != set(captured):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        (session,) = read_sessions(output)
    assert session.error is None
    assert session.counters.blocked_s > 0, "the ring never filled"
    assert session.counters.ring_bytes <= 600 * row_bytes
    recorded = recorded_states(record)
    dataset = HiddenStateDataset(output, raw=True)
    assert sum(sample.length for sample in dataset.samples) == sum(map(len, captured.values()))
    for number, entry in enumerate(dataset.samples):
        sample = dataset[number]
        assert sample["input_ids"].tolist() == captured[entry.rid]
        for column, (name, state) in enumerate(zip(dataset.columns, sample["hidden_states"], strict=True)):
            reference = recorded[entry.rid, name][: len(captured[entry.rid])].float()
            if dtype == "float8_e4m3":
                scales = sample["scales"][column]
                assert torch.equal(scales, reference.abs().amax(dim=1) / FLOAT8_MAX), (entry.rid, name)
                reference /= scales[:, None]
            # As bytes: float8 has no comparison of its own.
            assert torch.equal(state.view(torch.uint8), reference.to(state.dtype).view(torch.uint8)), (entry.rid, name)
