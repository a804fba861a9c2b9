"""``hs-capture verify`` on what the real engine captured: the demo's dataset, sound, and with faults planted in it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from benchmarks.planted_faults import FAULTS, Reference, faults_table, flip_bits, take_samples
from benchmarks.planted_faults import plant as plant_fault
from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.cli.demo import conversations
from sglang_hs_capture.store.index import load_index
from sglang_hs_capture.store.journal import decode_line, encode_line

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TIMEOUT_S = 560
COMMAND = [sys.executable, "-m", "sglang_hs_capture.cli.main"]
# As the demo starts it, but with chunks of another size, so that the second capture is not the first one again.
SGLANG_FLAGS = ["--", "--dtype", "float32", "--chunked-prefill-size", "256"]


def call(*words: Any) -> subprocess.CompletedProcess[str]:
    environment = {"OMP_NUM_THREADS": "2", **os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*COMMAND, *map(str, words)], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("demo") / "output"
    done = call("demo", "--output", output)
    assert done.returncode == 0, done.stderr
    return output


def captured(model: Path, output: Path, *words: Any, dtype: str = "float32") -> Path:
    """Ten of the demo's conversations, captured in one dtype, one after the other; the dataset."""
    options = ["--model", model, "--data", conversations(), "--output", output, "--limit", 10, "--dtype", dtype]
    options += ["--max-in-flight", 1, "--device", "cpu", "--min-free-gb", 0, *words]
    done = call("run", *options, "--", "--dtype", dtype, "--chunked-prefill-size", "64")
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(scope="module")
def small(kimi_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured(kimi_checkpoint, tmp_path_factory.mktemp("small") / "dataset")


def plant(dataset: Path, change: Callable[[np.ndarray], None]) -> None:
    """Change the states of the demo's one shard and bring the journal's checksums up to date: no checksum finds it.

    ``change`` is given float32 [rows, columns, hidden_size].
    """
    index = load_index(dataset)
    ((shard,), (path,)) = index.shards, sorted((dataset / "shards").glob("*.safetensors"))
    begin, size = shard.state.record.data_offset, shard.state.rows * index.info.row_bytes
    content = bytearray(path.read_bytes())
    shape = (shard.state.rows, len(index.info.columns), index.info.hidden_size)
    states = np.frombuffer(content, "<f4", size // 4, begin).reshape(shape)
    change(states)
    path.write_bytes(content)
    journal = dataset / f"journal-{shard.writer}.jsonl"
    lines = []
    for record in map(decode_line, journal.read_bytes().splitlines(keepends=True)):
        if record["t"] == "rows":
            rows = states[record["start"] : record["start"] + record["count"]]
            record = {**record, "xxh3": xxhash.xxh3_64_hexdigest(rows.tobytes())}  # noqa: PLW2901
        lines.append(encode_line(record))
    journal.write_bytes(b"".join(lines))


def test_the_demos_dataset_comes_out_the_same_again(demo, tmp_path):
    report = tmp_path / "report.html"
    words = ["verify", demo / "dataset", "--against-model", demo / "model", "--prompts", 6, "--json"]
    done = call(*words, "--report", report, "--reference", "transformers", *SGLANG_FLAGS)
    assert done.returncode == 0, done.stdout + done.stderr
    account = json.loads(done.stdout)
    print(json.dumps({name: account[name] for name in ("recapture", "reference")}, indent=2))
    assert (account["sound"], account["errors"], account["warnings"]) == (True, 0, 0)
    assert account["rows_checked"] == account["rows"] > 10000
    for name in ("recapture", "reference"):
        assert account[name]["samples"] == 6
        assert all(0 < column["row"] < 1e-4 for column in account[name]["columns"])
    assert report.read_text().count("<svg") == 12


def test_faults_that_no_checksum_finds_are_found_by_a_second_capture(demo, tmp_path):
    """One layer's states in the place of the next one's, for one sample; another sample's last row zeroed all but."""
    dataset = Path(shutil.copytree(demo / "dataset", tmp_path / "dataset"))
    samples = load_index(dataset).samples
    own = [sample for sample in samples if sample.extents[-1].count > 8]
    layer, row = own[0], own[-1]

    def change(states: np.ndarray) -> None:
        for _, start, count in layer.extents:
            states[start : start + count, 1] = states[start : start + count, 2] * np.float32(0.9)
        _, start, count = row.extents[-1]
        states[start + count - 1, 3] *= np.float32(0.01)

    plant(dataset, change)
    assert call("verify", dataset).returncode == 0
    words = ["verify", dataset, "--against-model", demo / "model", "--prompts", len(samples), "--json"]
    done = call(*words, *SGLANG_FLAGS)
    assert done.returncode == 4, done.stdout + done.stderr
    found = [
        (finding["kind"], finding["column"], finding["sample"], finding["position"])
        for finding in json.loads(done.stdout)["findings"]
    ]
    columns = load_index(dataset).info.columns
    assert ("recapture", columns[1], layer.id, None) in found
    assert ("recapture", columns[3], row.id, row.length - 1) in found
    assert {column for _, column, _, _ in found} == {columns[1], columns[3]}


def test_the_states_of_prompts_that_the_engine_is_asked_about_are_the_same(kimi_checkpoint, small, tmp_path):
    """Nothing is lost, nothing is stored twice, and every row is what it is without a question."""
    plain = captured(kimi_checkpoint, tmp_path / "dataset", "--known-answers", 0)
    assert not (plain / "known_answers.jsonl").exists()
    assert len((small / "known_answers.jsonl").read_text().splitlines()) == 8
    asked, unasked = HiddenStateDataset(small), HiddenStateDataset(plain)
    assert [sample.id for sample in asked.samples] == [sample.id for sample in unasked.samples]
    worst = 0.0
    for one, other in zip((asked[n] for n in range(10)), (unasked[n] for n in range(10)), strict=True):
        assert one["input_ids"].tolist() == other["input_ids"].tolist()
        for mine, theirs in zip(one["hidden_states"], other["hidden_states"], strict=True):
            worst = max(worst, float(((mine - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max()))
    rows = [sum(entry.state.rows for entry in load_index(dataset).shards) for dataset in (small, plain)]
    print(f"largest relative difference {worst:.2e}; rows {rows}")
    assert worst < 1e-5
    assert rows[0] >= rows[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_final_states_lead_to_the_engines_own_answers(kimi_checkpoint, small, tmp_path, dtype):
    dataset = small
    if dtype == "bfloat16":
        dataset = captured(kimi_checkpoint, tmp_path / "dataset", "--final", "both", dtype=dtype)
    done = call("verify", dataset, "--known-answer", "--computed-in", dtype, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    account = json.loads(done.stdout)
    print(json.dumps(account["known_answer"], indent=2))
    assert account["counts"] == {"poor-target": 1}, "the demo's weights are random"
    assert account["known_answer"]["prompts"] == 8
    for column in account["known_answer"]["columns"]:
        assert column["typical"] < 0.5
        assert column["rare"] < 1.5
        assert column["top"] == 1


def test_every_planted_fault_is_found_by_one_of_the_checks(kimi_checkpoint, small, tmp_path):
    reference, dataset = Reference(kimi_checkpoint), tmp_path / "dataset"
    take_samples(small, 10, dataset)
    assert not plant_fault(dataset, kimi_checkpoint, reference, None).found
    outcomes = {name: plant_fault(dataset, kimi_checkpoint, reference, fault) for name, fault in FAULTS.items()}
    print("\n".join(faults_table(outcomes)))
    assert [name for name, outcome in outcomes.items() if not outcome.found] == []
    shifted = outcomes["one boundary shifted by one layer"]
    assert (shifted.structure, shifted.known_answer, len(shifted.reference or ())) == ([], [], 1)
    for name in ("post-norm stored as pre-norm", "final state of the layer before the last"):
        assert outcomes[name].known_answer == ["final:pre_norm"], name
    flips = flip_bits(Path(shutil.copytree(small, tmp_path / "flipped")), 200)
    assert [missed for outcome in flips.values() for missed in outcome.missed] == []
