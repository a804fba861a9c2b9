"""Several writers of one server on the real engine: the stages of a pipeline, and data-parallel replicas."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.cli.known_answers import check_known_answers
from sglang_hs_capture.driver.run import KNOWN_ANSWERS
from sglang_hs_capture.layers import Final
from sglang_hs_capture.store.identity import read_info
from sglang_hs_capture.store.session import read_sessions
from sglang_hs_capture.verify.parity import reference_states
from tests.integration.conftest import quiet_port

pytestmark = pytest.mark.engine

CHUNK = 64
TOLERANCE = 1e-5
BOUNDARIES = (0, 3, 4, 7)
COMMAND = [sys.executable, "-m", "sglang_hs_capture.cli.main"]


def prompts() -> dict[str, list[int]]:
    """Of every length around the chunk, some with a prefix in common, some longer than three chunks."""
    choose = random.Random(7)

    def tokens(n: int) -> list[int]:
        return [choose.randrange(5, 2000) for _ in range(n)]

    shared = tokens(100)
    found = {f"alone-{n}": tokens(n) for n in (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)}
    return found | {f"shared-{n}": shared[:n] + tokens(20 + n) for n in (30, 64, 80, 100)}


def run(model: Path, tmp_path: Path, *sglang: str) -> Path:
    """Capture the prompts by ``hs-capture run``; the dataset."""
    data, dataset = tmp_path / "data.jsonl", tmp_path / "dataset"
    data.write_text("".join(json.dumps({"id": name, "input_ids": ids}) + "\n" for name, ids in prompts().items()))
    words = ["run", "--model", model, "--data", data, "--output", dataset, "--dtype", "float32"]
    words += ["--min-free-gb", "0", "--layers", ",".join(map(str, BOUNDARIES)), "--final", "both"]
    words += ["--", *sglang, "--chunked-prefill-size", str(CHUNK)]
    done = subprocess.run(
        [*COMMAND, *map(str, words)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
        capture_output=True,
        text=True,
        timeout=420,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dataset


def check_states(dataset: Path, model: Path, asked: dict[str, list[int]] | None = None) -> HiddenStateDataset:
    """Every prompt is there once, and its states are those of ``transformers``."""
    got, asked = HiddenStateDataset(dataset), asked or prompts()
    assert sorted(sample.id for sample in got.samples) == sorted(asked)
    for number, entry in enumerate(got.samples):
        sample = got[number]
        assert sample["input_ids"].tolist() == asked[entry.id]
        expected = reference_states(model, asked[entry.id], BOUNDARIES, Final.BOTH)
        for state, reference in zip(sample["hidden_states"], expected, strict=True):
            error = (state - reference).norm(dim=1) / reference.norm(dim=1)
            assert float(torch.max(error)) <= TOLERANCE, entry.id
    return got


def check_answers(dataset: Path, model: Path, prompts: int) -> None:
    """The final states lead to what the engine itself predicted, wherever the last stage stored them."""
    found = check_known_answers(dataset, str(model), read_info(dataset), 100, None)
    assert found.problems() == []
    assert (found.prompts, found.unusable) == (prompts, 0)
    assert [column.column for column in found.columns] == ["final:pre_norm", "final:post_norm"]


def inspect(dataset: Path) -> dict[str, Any]:
    done = subprocess.run([*COMMAND, "inspect", str(dataset), "--json"], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("checkpoint", ["deepseek_checkpoint", pytest.param("kimi_checkpoint", marks=pytest.mark.slow)])
def test_stages_of_a_pipeline_store_their_own_columns_and_samples_are_whole(
    request: pytest.FixtureRequest, checkpoint: str, tmp_path: Path
):
    model = request.getfixturevalue(checkpoint)
    dataset = run(model, tmp_path, "--pp-size", "2")
    assert {record.writer: record.columns for record in read_sessions(dataset)} == {
        "dp0-pp0": ["boundary:0", "boundary:3"],
        "dp0-pp1": ["boundary:4", "boundary:7", "final:pre_norm", "final:post_norm"],
    }
    got = check_states(dataset, model)
    check_answers(dataset, model, KNOWN_ANSWERS)
    assert all(len(sample.parts) == 2 for sample in got.samples)
    weight, _ = got.final_norm()
    assert weight.numel() == got[0]["hidden_states"][0].shape[1]
    account = inspect(dataset)
    unique = {tuple(ids[:n]) for ids in prompts().values() for n in range(1, len(ids) + 1)}
    assert account["samples"] == len(prompts())
    assert account["rows"] == len(unique), "each prefix is computed and stored once, at both stages"
    assert account["bytes"] == account["rows"] * 6 * 192 * 4


DP_ATTENTION = ("--tp-size", "2", "--enable-dp-attention", "--dp-size", "2")


def test_ranks_of_dp_attention_store_the_rows_of_their_own_requests(deepseek_checkpoint: Path, tmp_path: Path):
    """Their batches are as long as the longest one's, and some ranks idle: nothing of that is stored."""
    dataset = run(deepseek_checkpoint, tmp_path, *DP_ATTENTION, "--port", str(quiet_port()))
    sessions = read_sessions(dataset)
    assert [record.writer for record in sessions] == ["dp0-pp0", "dp1-pp0"]
    assert all(record.counters.samples > 0 for record in sessions), "one of the ranks had nothing to do"
    got = check_states(dataset, deepseek_checkpoint)
    account = inspect(dataset)
    assert account["samples"] == len(prompts())
    # A prefix may be computed once for each rank, and a row belongs to a sample.
    assert account["rows"] <= sum(map(len, prompts().values()))
    assert account["rows_without_sample"] == 0
    assert all(len(sample.parts) == 1 for sample in got.samples)


@pytest.mark.slow
def test_replicas_of_one_server_write_apart_into_one_dataset(deepseek_checkpoint: Path, tmp_path: Path):
    dataset = run(deepseek_checkpoint, tmp_path, "--dp-size", "2", "--port", str(quiet_port()))
    sessions = read_sessions(dataset)
    assert [record.writer for record in sessions] == ["dp0-pp0", "dp1-pp0"]
    assert all(record.counters.samples > 0 for record in sessions), "one of the replicas had nothing to do"
    check_states(dataset, deepseek_checkpoint)
    check_answers(dataset, deepseek_checkpoint, len(prompts()) - 1)  # nothing is predicted from the prompt of one token
    assert inspect(dataset)["samples"] == len(prompts())
