"""Two servers of one dataset on the real engine, one of them killed in the middle and started again."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.layers import Final
from sglang_hs_capture.store.session import read_sessions
from sglang_hs_capture.verify.parity import reference_states
from tests.integration.conftest import running_server

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CHUNK, SAMPLES = 64, 600
BOUNDARIES = (0, 4, 7)
COMMAND = [sys.executable, "-m", "sglang_hs_capture.cli.main"]


def prompts() -> dict[str, list[int]]:
    """Twenty trees of prompts."""
    choose = random.Random(3)
    roots = [[choose.randrange(5, 2000) for _ in range(100 + n)] for n in range(20)]
    return {
        f"s{n}": roots[n % 20] + [choose.randrange(5, 2000) for _ in range(choose.randrange(1, 150))]
        for n in range(SAMPLES)
    }


def flags(dataset: Path, replica: int) -> list[str]:
    capture = {"output_dir": str(dataset), "layers": BOUNDARIES, "final": "pre_norm", "dtype": "float32"}
    capture |= {"min_free_bytes": 0, "ring_bytes": 2**24, "replica": replica}
    return [
        *("--model-impl", "sglang", "--disable-prefill-cuda-graph", "--skip-tokenizer-init"),
        *("--chunked-prefill-size", str(CHUNK), "--json-model-override-args", json.dumps({"hs_capture": capture})),
    ]


def acknowledged(dataset: Path, replica: int) -> int:
    journal = dataset / f"journal-dp{replica}-pp0.jsonl"
    return journal.read_text().count('"t":"sample"') if journal.exists() else 0


def wait_for(run: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Wait for something to happen while the run goes on."""
    deadline = time.monotonic() + 240
    while not condition():
        assert run.poll() is None, run.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_that_is_killed_and_started_again_costs_nothing(deepseek_checkpoint: Path, tmp_path: Path):
    data, dataset, urls = tmp_path / "data.jsonl", tmp_path / "dataset", tmp_path / "servers.txt"
    asked = prompts()
    data.write_text("".join(json.dumps({"id": name, "input_ids": ids}) + "\n" for name, ids in asked.items()))
    env = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_hs_capture.models", "OMP_NUM_THREADS": "1"}
    with running_server(deepseek_checkpoint, tmp_path / "a.log", *flags(dataset, 0), env=env) as first:
        port = int(first.url.rpartition(":")[2])
        with running_server(deepseek_checkpoint, tmp_path / "b.log", *flags(dataset, 1), env=env) as second:
            urls.write_text(f"{first.url}\n{second.url}\n")
            words = ["run", "--server", urls, "--data", data, "--output", dataset, "--max-in-flight", "16"]
            with subprocess.Popen(
                [*COMMAND, *map(str, words)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            ) as run:
                try:
                    wait_for(run, lambda: min(acknowledged(dataset, 0), acknowledged(dataset, 1)) >= 10)
                    os.killpg(first.process.pid, signal.SIGKILL)
                    went_on = acknowledged(dataset, 1)
                    wait_for(run, lambda: acknowledged(dataset, 1) >= went_on + 10)
                    before = acknowledged(dataset, 0)
                    # So that there is work left when the server is back, however long its start takes.
                    run.send_signal(signal.SIGSTOP)
                    again = flags(dataset, 0)
                    with running_server(deepseek_checkpoint, tmp_path / "c.log", *again, env=env, port=port):
                        run.send_signal(signal.SIGCONT)
                        said = run.communicate(timeout=240)[0]
                finally:
                    run.kill()
    assert run.returncode == 0, said
    got = HiddenStateDataset(dataset)
    assert sorted(sample.id for sample in got.samples) == sorted(asked)
    assert {sample.parts[0].writer for sample in got.samples} == {"dp0-pp0", "dp1-pp0"}
    assert before >= 10
    assert acknowledged(dataset, 0) > before, "the server that came back had nothing to do"
    assert f"Lost {first.url}" in said
    assert f"{first.url} is back." in said
    assert {record.writer for record in read_sessions(dataset)} == {"dp0-pp0", "dp1-pp0"}
    for number in range(0, len(got), 30):
        sample, entry = got[number], got.samples[number]
        assert sample["input_ids"].tolist() == asked[entry.id]
        expected = reference_states(deepseek_checkpoint, asked[entry.id], BOUNDARIES, Final.PRE_NORM)
        for state, reference in zip(sample["hidden_states"], expected, strict=True):
            assert float(((state - reference).norm(dim=1) / reference.norm(dim=1)).max()) <= 1e-5, entry.id
