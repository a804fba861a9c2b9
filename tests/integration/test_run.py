"""``hs-capture`` on the real engine: the demo, runs that are interrupted in every way, and servers started by hand."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import sglang_hs_capture
from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.layers import Final
from sglang_hs_capture.store.session import read_sessions
from sglang_hs_capture.verify.parity import reference_states
from tests.integration.conftest import StartServer

pytestmark = pytest.mark.engine

TIMEOUT_S = 420
CHUNK = 64
TOLERANCE = 1e-5
PACKAGE = Path(sglang_hs_capture.__file__).parent
COMMAND = [sys.executable, "-m", "sglang_hs_capture.cli.main"]
SGLANG_FLAGS = ["--", "--chunked-prefill-size", str(CHUNK)]
LENGTHS = [1, 20, 63, 64, 65, 130, 200, 90, 33, 5]


def environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "2", **os.environ, "CUDA_VISIBLE_DEVICES": ""}


def call(*words: Any, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run one command to its end; a package in ``cwd`` takes the place of the installed one."""
    command = [*COMMAND, *map(str, words)]
    return subprocess.run(
        command, env=environment(), cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@contextmanager
def begun(*words: Any) -> Iterator[subprocess.Popen[str]]:
    """Begin one command, and kill it if it has not ended."""
    command = [*COMMAND, *map(str, words)]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def acknowledged(dataset: Path) -> list[str]:
    """Request ids that the journal acknowledges."""
    journal = dataset / "journal-dp0-pp0.jsonl"
    if not journal.exists():
        return []
    lines = [line for line in journal.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [record["rid"] for record in map(json.loads, lines) if record["t"] == "sample"]


def wait_for_samples(process: subprocess.Popen[str], dataset: Path, count: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while len(acknowledged(dataset)) < count:
        assert process.poll() is None, f"the run ended early:\n{process.stdout.read() if process.stdout else ''}"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_until_gone(pid: int, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.1)


def tokens(index: int) -> list[int]:
    choose = random.Random(index)
    return [choose.randrange(5, 2000) for _ in range(LENGTHS[index % len(LENGTHS)] + index // len(LENGTHS))]


def row(index: int) -> str:
    ids = tokens(index)
    return json.dumps({"id": f"sample-{index}", "input_ids": ids, "loss_mask": [(i + 1) % 2 for i in range(len(ids))]})


@pytest.fixture(scope="module")
def interrupted(deepseek_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One dataset, by five runs: stopped by a bad line, killed, ended by SIGTERM, finished, and left alone."""
    base = tmp_path_factory.mktemp("interrupted")
    data, dataset = base / "data.jsonl", base / "dataset"
    lines = [row(i) for i in range(60)]
    lines[4:4] = ["{not json"]
    lines[20:20] = [json.dumps({"id": "empty", "messages": []}), json.dumps({"id": "sample-0", "input_ids": [1]})]
    lines[30:30] = [json.dumps({"id": "odd", "messages": [{"role": "robot", "content": "x"}]})]
    lines[40:40] = [json.dumps({"id": "long", "input_ids": [7] * 20000})]
    data.write_text("\n".join(lines) + "\n")
    words = ["run", "--model", deepseek_checkpoint, "--data", data, "--output", dataset, "--dtype", "float32"]
    words += ["--min-free-gb", "0", "--layers", "0,4,7", "--final", "both", "--shard-gb", "0.001"]
    skip = [*words, "--on-bad-input", "skip", *SGLANG_FLAGS]
    found: dict[str, Any] = {"dataset": dataset, "words": words, "data": data, "skip": skip}

    found["stopped"] = call(*words, *SGLANG_FLAGS)
    found["after_stop"] = acknowledged(dataset)

    seed = random.SystemRandom().randrange(2**32)
    print(f"the moment of the kill follows from the seed {seed}")
    with begun(*skip) as process:
        wait_for_samples(process, dataset, 4 + random.Random(seed).randrange(1, 12))
        time.sleep(random.Random(seed).random() * 0.5)
        (session,) = read_sessions(dataset)
        process.send_signal(signal.SIGKILL)
        wait_until_gone(session.pid)
    found["after_kill"] = acknowledged(dataset)

    with begun(*skip) as process:
        wait_for_samples(process, dataset, len(found["after_kill"]) + 5)
        process.send_signal(signal.SIGTERM)
        found["terminated"] = process.communicate(timeout=TIMEOUT_S)[0]
        found["terminated_code"] = process.returncode
    found["after_term"] = acknowledged(dataset)

    found["finished"] = call(*skip[:-3], "--json-summary", base / "summary.json", *SGLANG_FLAGS)
    found["summary"] = json.loads((base / "summary.json").read_text())
    return found


def test_a_bad_line_stops_the_run_and_what_came_before_is_kept(interrupted):
    stopped = interrupted["stopped"]
    assert stopped.returncode == 5
    assert stopped.stderr.splitlines()[-1].startswith(f"error: {interrupted['data']}:5: not JSON")
    assert len(interrupted["after_stop"]) == 4


def test_sigterm_ends_in_order(interrupted):
    assert interrupted["terminated_code"] == 143
    assert "ended by SIGTERM; all acknowledged samples are safe" in interrupted["terminated"]
    assert not list((interrupted["dataset"] / "shards").glob("*.partial"))
    assert len(interrupted["after_term"]) >= len(interrupted["after_kill"]) + 5


def test_the_last_run_finishes_with_exactly_what_was_asked_for(interrupted):
    finished, summary = interrupted["finished"], interrupted["summary"]
    assert finished.returncode == 0, finished.stderr
    assert summary["already"] == len(interrupted["after_term"])
    assert summary["already"] + summary["captured"] == 60
    assert len(acknowledged(interrupted["dataset"])) == 60, "no sample was captured twice"
    dataset = HiddenStateDataset(interrupted["dataset"])
    assert [sample.id for sample in dataset.samples] == [f"sample-{i}" for i in range(60)]


def test_bad_lines_are_listed_with_file_and_line(interrupted):
    reasons = {problem["source"].rpartition(":")[2]: problem["reason"] for problem in interrupted["summary"]["skipped"]}
    assert set(reasons) == {"5", "21", "22", "31", "41"}
    assert "not JSON" in reasons["5"]
    assert "sample-0" in reasons["22"]
    assert "robot" in reasons["31"]
    assert "20000 tokens" in reasons["41"]


def test_every_sample_is_right_after_all_that(interrupted, deepseek_checkpoint):
    dataset = HiddenStateDataset(interrupted["dataset"])
    for index in range(60):
        sample = dataset[index]
        assert sample["input_ids"].tolist() == tokens(index)
        assert sample["loss_mask"].tolist() == [(i + 1) % 2 for i in range(len(tokens(index)))]
    for index in range(0, 60, 7):
        sample = dataset[index]
        expected = reference_states(deepseek_checkpoint, sample["input_ids"], (0, 4, 7), Final.BOTH)
        for got, reference in zip(sample["hidden_states"], expected, strict=True):
            assert ((got - reference).norm(dim=1) / reference.norm(dim=1)).max() <= TOLERANCE


def test_a_run_with_nothing_left_to_do_starts_no_engine(interrupted):
    done = call(*interrupted["skip"])
    assert done.returncode == 0
    assert "Nothing left to do: all 60 samples" in done.stdout
    assert "Starting SGLang" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layers", "1,4,7"], "boundaries: [0, 4, 7] there, [1, 4, 7] now"),
        (["--dtype", "bfloat16"], "dtype: float32 there, bfloat16 now"),
        (["--final", "pre_norm"], "columns"),
    ],
)
def test_another_capture_into_the_same_dataset_is_refused_before_the_engine_starts(interrupted, words, said):
    done = call(*interrupted["words"], *words)
    assert done.returncode == 4
    assert said in done.stderr
    assert "Starting SGLang" not in done.stderr


def test_another_model_into_the_same_dataset_is_refused(interrupted, kimi_checkpoint):
    done = call(*interrupted["words"], "--model", kimi_checkpoint)
    assert done.returncode == 4
    assert "config_hash" in done.stderr


def test_a_plugin_that_does_not_import_is_told_within_seconds(deepseek_checkpoint, tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "sglang_hs_capture", ignore=shutil.ignore_patterns("__pycache__"))
    broken = tmp_path / "sglang_hs_capture" / "models" / "deepseek.py"
    broken.write_text("import a_module_that_is_not_there\n" + broken.read_text())
    data = tmp_path / "data.jsonl"
    data.write_text(row(0) + "\n")
    words = ["run", "--model", deepseek_checkpoint, "--data", data, "--output", tmp_path / "out", "--min-free-gb", "0"]
    done = call(*words, cwd=tmp_path)
    assert done.returncode == 6
    assert "No module named 'a_module_that_is_not_there'" in done.stderr.splitlines()[-1]
    assert "sglang_hs_capture.models.deepseek" in done.stderr
    assert "Starting SGLang" not in done.stderr


def test_the_engines_own_refusal_is_told(deepseek_checkpoint, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(row(0) + "\n")
    words = ["run", "--model", deepseek_checkpoint, "--data", data, "--output", tmp_path / "out", "--min-free-gb", "0"]
    done = call(*words, "--", "--enable-mixed-chunk")
    assert done.returncode == 3
    assert "remove --enable-mixed-chunk" in done.stderr.splitlines()[-1]
    done = call(*words, "--", "--no-such-flag")
    assert done.returncode == 6
    assert "--no-such-flag" in done.stderr.splitlines()[-1]


def test_a_prepared_model_captures_by_hand_and_for_a_driver(start_server: StartServer, kimi_checkpoint, tmp_path):
    prepared, dataset = tmp_path / "prepared", tmp_path / "dataset"
    options = ["--output", dataset, "--dtype", "float32", "--ring-gb", "0.01", "--min-free-gb", "0"]
    made = call("prepare", kimi_checkpoint, prepared, *options)
    assert made.returncode == 0, made.stderr
    flags = ["--model-impl", "sglang", "--disable-prefill-cuda-graph", *SGLANG_FLAGS[1:]]
    server = start_server(
        prepared, *flags, "--skip-tokenizer-init", env={"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_hs_capture.models"}
    )
    (session,) = read_sessions(dataset)
    assert session.architecture_class == "sglang_hs_capture.models.kimi_k25.KimiK25Capture"
    server.generate(tokens(5), rid="hs-1")

    data = tmp_path / "data.jsonl"
    conversation = {
        "id": "talk",
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}],
    }
    data.write_text("\n".join([row(6), json.dumps(conversation)]) + "\n")
    words = ["run", "--server", server.url, "--data", data, "--output", dataset]
    done = call(*words)
    assert done.returncode == 0, done.stderr
    captured = {item["id"]: item for item in HiddenStateDataset(dataset)}  # type: ignore[attr-defined]
    assert set(captured) == {"hs-1", "sample-6", "talk"}
    assert captured["hs-1"]["input_ids"].tolist() == tokens(5)
    assert 0 < int(captured["talk"]["loss_mask"].sum()) < len(captured["talk"]["loss_mask"])
    for item in captured.values():
        expected = reference_states(kimi_checkpoint, item["input_ids"], (3, 5, 6), Final.PRE_NORM)
        for got, reference in zip(item["hidden_states"], expected, strict=True):
            assert torch.linalg.vector_norm(got - reference) <= TOLERANCE * torch.linalg.vector_norm(reference)

    data.write_text(row(8) + "\n")
    refused = call(*words, "--layers", "1,2,3")
    assert refused.returncode == 4
    assert "captures differently: boundaries: [3, 5, 6] there, [1, 2, 3] now" in refused.stderr
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    wrong = call("run", "--server", server.url, "--data", data, "--output", elsewhere, "--tokenizer", kimi_checkpoint)
    assert wrong.returncode == 6
    assert f"captures into {dataset}, not into --output {elsewhere}" in wrong.stderr


def test_the_demo_shows_that_states_are_right_and_goes_on_where_it_was(tmp_path):
    output = tmp_path / "demo"
    done = call("demo", "--output", output)
    assert done.returncode == 0, done.stderr
    assert "Running on the CPU platform" in done.stderr
    assert "All captured states agree with transformers to 1e-05." in done.stdout
    assert "log-probabilities follow from the final states" in done.stdout
    assert '"eagle_aux_hidden_state_layer_ids": [3, 5, 6]' in done.stdout
    again = call("demo", "--output", output)
    assert again.returncode == 0, again.stderr
    assert "Nothing left to do" in again.stdout
    assert "Starting SGLang" not in again.stderr
    shown = json.loads(call("inspect", output / "dataset", "--json").stdout)
    assert shown["samples"] == shown["requests"]["asked"] > 40
    assert shown["rows"] <= shown["tokens"]
    asked = shown["requests"].pop("asked")
    assert asked == shown["samples"]
    assert set(shown["requests"].values()) == {0}
    assert shown["shards"]["unfinished"] == 0
    assert shown["sessions"][0]["state"] == "closed"
