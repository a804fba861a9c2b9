"""A disk that really fills up, under the real engine: the run says so, keeps what it has, and later goes on."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.store.session import read_sessions

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB in memory."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], check=False)
    if mount.returncode:
        pytest.skip("mounting a file system needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_ends_the_run_clearly_and_nothing_is_lost(small_disk: Path, deepseek_checkpoint: Path, tmp_path):
    prompts = {f"p{n}": [random.Random(n).randrange(5, 2000) for _ in range(64)] for n in range(90)}
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"id": name, "input_ids": ids}) + "\n" for name, ids in prompts.items()))
    output = small_disk / "dataset"
    command = [sys.executable, "-m", "sglang_hs_capture.cli.main", "run", "--model", str(deepseek_checkpoint)]
    command += ["--data", str(data), "--output", str(output), "--dtype", "float32", "--min-free-gb", "0"]
    command += ["--", "--chunked-prefill-size", "64"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}

    full = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert full.returncode == 4, full.stdout + full.stderr
    assert "free some space" in full.stderr
    (session,) = read_sessions(output)
    assert session.state == "stopped"
    kept = {sample.id for sample in HiddenStateDataset(output).samples}
    assert 0 < len(kept) < len(prompts)

    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    more = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert more.returncode == 0, more.stdout + more.stderr
    dataset = HiddenStateDataset(output)
    assert sorted(sample.id for sample in dataset.samples) == sorted(prompts)
    for sample in dataset:
        assert sample["input_ids"].tolist() == prompts[sample["id"]]
