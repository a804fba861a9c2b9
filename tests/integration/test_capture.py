"""Capture in the real engine, launched by hand: every row equals the reference, and only prompts leave rows."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.layers import Final
from sglang_hs_capture.store.session import read_sessions
from sglang_hs_capture.verify.parity import allowance, reference_states
from tests.integration.conftest import Server, StartServer
from tests.recorded import recorded_states

pytestmark = pytest.mark.engine

CHUNK = 64
BOUNDARIES = (0, 3, 5, 7)
PACKAGES = Path(__file__).parents[1] / "model_packages"
TOLERANCE = 1e-5
SETTINGS = {
    "layers": BOUNDARIES,
    "final": "both",
    "dtype": "float32",
    "ring_bytes": 2**22,
    "shard_bytes": 2**21,
    "min_free_bytes": 0,
    "commit_interval_s": 0.05,
}


def flags(output: Path, *more: str, **settings: Any) -> list[str]:
    override = {"hs_capture": {"output_dir": str(output), **SETTINGS, **settings}}
    return [
        *("--model-impl", "sglang", "--disable-prefill-cuda-graph", "--disable-radix-cache", "--skip-tokenizer-init"),
        *("--chunked-prefill-size", str(CHUNK), "--json-model-override-args", json.dumps(override)),
        *more,
    ]


def environment(package: str = "sglang_hs_capture.models", **more: str) -> dict[str, str]:
    return {"SGLANG_EXTERNAL_MODEL_PACKAGE": package, "PYTHONPATH": str(PACKAGES), **more}


def prompt(length: int, seed: int) -> list[int]:
    return [random.Random(seed * 10007 + length).randrange(5, 2000) for _ in range(length)]


def wait_for(output: Path, rids: set[str], timeout_s: float = 120) -> HiddenStateDataset:
    """The dataset once it holds all of ``rids``."""
    deadline = time.monotonic() + timeout_s
    while True:
        dataset = HiddenStateDataset(output)
        if rids <= {sample.rid for sample in dataset.samples}:
            return dataset
        assert time.monotonic() < deadline, f"missing: {rids - {s.rid for s in dataset.samples}}"
        time.sleep(0.1)


def states_of(output: Path, rids: set[str]) -> dict[str, dict[str, Any]]:
    dataset = wait_for(output, rids)
    return {dataset.samples[i].rid: dataset[i] for i in range(len(dataset)) if dataset.samples[i].rid in rids}


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest ``|got - expected| / |expected|`` of a row."""
    return float(((got - expected).norm(dim=1) / expected.norm(dim=1)).max())


def stored_rows(output: Path) -> int:
    """Rows that the journal declares durable."""
    lines = (output / "journal-dp0-pp0.jsonl").read_text().splitlines()
    return sum(record["count"] for record in map(json.loads, lines) if record["t"] == "rows")


@pytest.fixture(scope="module")
def capture(
    start_server: StartServer, kimi_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Server, Path]:
    """A server of the tiny Kimi-K2.5 that captures, and its dataset; the package also watches SGLang's own modules."""
    output = tmp_path_factory.mktemp("capture") / "dataset"
    watch = output.parent / "watch.json"
    env = environment("watching_models", HS_WATCH_FILE=str(watch))
    return start_server(kimi_checkpoint, *flags(output, "--max-running-requests", "8"), env=env), output


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 1])
def test_states_equal_transformers_at_every_prompt_length(capture, kimi_checkpoint, length):
    server, output = capture
    ids, rid = prompt(length, 1), f"hs-length-{length}"
    server.generate(ids, rid=rid)
    sample = states_of(output, {rid})[rid]
    assert sample["input_ids"].tolist() == ids
    assert sample["loss_mask"].tolist() == [1] * length
    expected = reference_states(kimi_checkpoint, ids, BOUNDARIES, Final.BOTH)
    assert len(sample["hidden_states"]) == len(expected) == len(BOUNDARIES) + 2
    for got, reference in zip(sample["hidden_states"], expected, strict=True):
        assert got.dtype == torch.float32
        assert got.is_contiguous()
        assert relative_error(got, reference) <= TOLERANCE


def test_forty_prompts_in_flight_equal_the_one_by_one_run(capture):
    server, output = capture
    lengths = [1, 2, 3, 5, 17, 40, 63, 64, 65, 100, 127, 128, 129, 191, 192, 200, 256, 300, 31, 9]
    prompts = {f"p{i}": prompt(lengths[i % len(lengths)] + i // len(lengths), 100 + i) for i in range(40)}
    for name, ids in prompts.items():
        server.generate(ids, rid=f"hs-alone-{name}")
    with ThreadPoolExecutor(40) as pool:
        list(pool.map(lambda item: server.generate(item[1], rid=f"hs-flight-{item[0]}"), prompts.items()))
    got = states_of(output, {f"hs-{kind}-{name}" for kind in ("alone", "flight") for name in prompts})
    for name, ids in prompts.items():
        alone, flight = got[f"hs-alone-{name}"], got[f"hs-flight-{name}"]
        assert alone["input_ids"].tolist() == flight["input_ids"].tolist() == ids
        for one, other in zip(alone["hidden_states"], flight["hidden_states"], strict=True):
            assert relative_error(other, one) <= TOLERANCE


def test_decode_health_checks_and_other_requests_leave_no_rows(capture):
    server, output = capture
    server.generate(prompt(20, 7), rid="hs-before")
    wait_for(output, {"hs-before"})
    before = stored_rows(output)
    server.generate(prompt(70, 8), rid="hs-generating", max_new_tokens=12)
    server.generate(prompt(90, 9), rid="other-1", max_new_tokens=4)
    server.generate(prompt(90, 10), max_new_tokens=2)
    server.generate(prompt(9, 11), rid="xhs-3")
    for path in ("/health", "/health_generate"):
        server.wait_healthy(path)
    server.generate(prompt(5, 12), rid="hs-after")
    dataset = wait_for(output, {"hs-generating", "hs-after"})
    assert stored_rows(output) - before == 75
    rids = [sample.rid for sample in dataset.samples]
    assert all(rid.startswith("hs-") for rid in rids)
    generating = dataset[rids.index("hs-generating")]
    assert generating["input_ids"].tolist() == prompt(70, 8)


def test_an_aborted_request_leaves_no_sample_and_disturbs_nobody(capture):
    server, output = capture
    with ThreadPoolExecutor(8) as pool:
        long = pool.submit(server.generate, prompt(4000, 20), rid="hs-aborted", max_new_tokens=64)
        beside = [pool.submit(server.generate, prompt(100 + i, 21), rid=f"hs-beside-{i}") for i in range(4)]
        while not long.done():  # an abort that comes before its request is forgotten
            time.sleep(0.3)
            server.post_text("/abort_request", {"rid": "hs-aborted"})
        finish = long.result()["meta_info"]["finish_reason"]["type"]
        for future in beside:
            future.result()
    got = states_of(output, {f"hs-beside-{i}" for i in range(4)})
    for i in range(4):
        assert got[f"hs-beside-{i}"]["input_ids"].tolist() == prompt(100 + i, 21)
    samples = {s.rid: s.length for s in HiddenStateDataset(output).samples}
    assert finish == "abort"
    assert samples.get("hs-aborted") in (None, 4000)


def test_a_prompt_the_engine_refuses_leaves_no_wrong_sample(capture):
    server, output = capture
    with pytest.raises(Exception, match="HTTP Error 400"):
        server.generate([5] * 16383, rid="hs-too-long")
    server.generate(prompt(6, 30), rid="hs-next")
    dataset = wait_for(output, {"hs-next"})
    assert "hs-too-long" not in {sample.rid for sample in dataset.samples}


def test_the_session_record_is_the_handshake(capture, kimi_checkpoint):
    _, output = capture
    (session,) = read_sessions(output)
    assert session.state == "ready"
    assert session.error is None
    assert session.architecture_class == "watching_models.watched.KimiK25ForConditionalGeneration"
    assert session.model["boundaries"] == list(BOUNDARIES)
    assert session.model["architecture"] == "KimiK25ForConditionalGeneration"
    assert session.chunked_prefill_size == CHUNK
    assert session.counters.rows > 0


def test_nothing_of_sglang_was_replaced_during_the_run(capture):
    _, output = capture
    report = json.loads((output.parent / "watch.json").read_text())
    assert report["prefills"] > 50
    assert report["compared"] > 5000
    assert report["changed"] == []


def test_captured_bytes_equal_plain_forward_hooks(start_server, deepseek_checkpoint, tmp_path_factory):
    """The same states by another way, in the same forward: bit for bit, cast included."""
    output = tmp_path_factory.mktemp("hooks") / "dataset"
    record = output.parent / "record"
    record.mkdir()
    env = environment("recording_models", HS_RECORD_DIR=str(record))
    server = start_server(deepseek_checkpoint, *flags(output, dtype="bfloat16"), env=env)
    prompts = {f"hs-{n}": prompt(n, 40) for n in (1, 30, CHUNK, 150)}
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(server.generate, ids, rid=rid) for rid, ids in prompts.items()]
        jobs += [pool.submit(server.generate, prompt(50, 41), rid="other", max_new_tokens=3)]
        for job in jobs:
            job.result()
    got = states_of(output, set(prompts))
    columns = HiddenStateDataset(output).columns
    recorded = recorded_states(record)
    for rid, sample in got.items():
        for name, state in zip(columns, sample["hidden_states"], strict=True):
            assert state.dtype == torch.bfloat16
            assert torch.equal(state, recorded[rid, name].to(torch.bfloat16)), (rid, name)


@pytest.mark.slow
def test_states_in_float8_lie_within_the_bound_of_those_in_float32(
    capture, start_server, kimi_checkpoint, tmp_path_factory
):
    """The same prompts from a server of each kind, also of several chunks and at once."""
    exact_server, exact_output = capture
    output = tmp_path_factory.mktemp("float8") / "dataset"
    server = start_server(kimi_checkpoint, *flags(output, dtype="float8_e4m3"), env=environment())
    prompts = {f"hs-float8-{n}": prompt(n, 80) for n in (1, 2, CHUNK - 1, CHUNK + 1, 2 * CHUNK, 300)}
    for each in (exact_server, server):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda item, each=each: each.generate(item[1], rid=item[0]), prompts.items()))
    exact, got = states_of(exact_output, set(prompts)), states_of(output, set(prompts))
    raw = {item["id"]: item for item in HiddenStateDataset(output, raw=True)}
    largest = 0.0
    for rid, ids in prompts.items():
        assert got[rid]["input_ids"].tolist() == exact[rid]["input_ids"].tolist() == ids
        assert len(raw[rid]["scales"]) == len(BOUNDARIES) + 2
        columns = zip(exact[rid]["hidden_states"], got[rid]["hidden_states"], strict=True)
        for column, (expected, values) in enumerate(columns):
            assert values.dtype == torch.bfloat16
            share = ((values.float() - expected).abs() / allowance(expected, "float8_e4m3")).max()
            assert share <= 1, (rid, column)
            largest = max(largest, float(share))
            scales = expected.abs().amax(dim=1) / 448
            torch.testing.assert_close(raw[rid]["scales"][column], scales, rtol=1e-4, atol=0)
            assert raw[rid]["hidden_states"][column].float().abs().amax(dim=1).eq(448).all()
    # Rounding is what the difference comes from.
    assert largest > 0.5
    dataset = HiddenStateDataset(output)
    assert dataset.info.row_bytes * 4 == HiddenStateDataset(exact_output).info.row_bytes


def test_tensor_parallel_ranks_capture_once_and_right(start_server, kimi_checkpoint, tmp_path_factory):
    """Two ranks: the states are whole on the one that writes, and the other leaves nothing."""
    output = tmp_path_factory.mktemp("tp") / "dataset"
    env = environment(SGLANG_CPU_OMP_THREADS_BIND="0|1")
    server = start_server(kimi_checkpoint, *flags(output, "--tp-size", "2"), env=env)
    prompts = {f"hs-{n}": prompt(n, 60) for n in (1, CHUNK, CHUNK + 1, 150)}
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda item: server.generate(item[1], rid=item[0]), prompts.items()))
    got = states_of(output, set(prompts))
    for rid, ids in prompts.items():
        expected = reference_states(kimi_checkpoint, ids, BOUNDARIES, Final.BOTH)
        for state, reference in zip(got[rid]["hidden_states"], expected, strict=True):
            assert relative_error(state, reference) <= TOLERANCE
    assert [file.name for file in output.glob("journal-*")] == ["journal-dp0-pp0.jsonl"]
    assert stored_rows(output) == sum(map(len, prompts.values()))


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param("DeepseekV2ForCausalLM", marks=pytest.mark.slow),
        pytest.param("DeepseekV32ForCausalLM", marks=pytest.mark.slow),
        "DeepseekV3Capture",
    ],
)
def test_every_class_captures(start_server, deepseek_checkpoint, tmp_path_factory, architecture):
    """The same weights under each architecture's class: V3.2 without its sparse index, which needs a GPU."""
    model = tmp_path_factory.mktemp(architecture) / "model"
    model.mkdir()
    for file in deepseek_checkpoint.iterdir():
        (model / file.name).symlink_to(file)
    config = json.loads((deepseek_checkpoint / "config.json").read_text())
    names = [architecture, "DeepseekV3ForCausalLM"] if architecture.endswith("Capture") else [architecture]
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps({**config, "architectures": names}))
    output = model.parent / "dataset"
    server = start_server(model, *flags(output), env=environment())
    server.generate(prompt(100, 70), rid="hs-1")
    sample = states_of(output, {"hs-1"})["hs-1"]
    (session,) = read_sessions(output)
    assert session.architecture_class == f"sglang_hs_capture.models.deepseek.{architecture}"
    expected = reference_states(deepseek_checkpoint, prompt(100, 70), BOUNDARIES, Final.BOTH)
    for state, reference in zip(sample["hidden_states"], expected, strict=True):
        assert relative_error(state, reference) <= TOLERANCE


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--enable-hierarchical-cache", "--enable-hierarchical-cache"),
        ("layers", "outside the model"),
    ],
)
def test_a_mode_that_would_corrupt_is_refused_at_start(deepseek_checkpoint, tmp_path, flag, named):
    import os
    import subprocess
    import sys

    settings = {"layers": [3, 99]} if flag == "layers" else {}
    arguments = flags(tmp_path / "dataset", **settings)
    if flag == "--enable-hierarchical-cache":
        arguments.remove("--disable-radix-cache")
    if flag != "layers":
        arguments.append(flag)
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(deepseek_checkpoint), "--port", "0"]
    env = {**os.environ, **environment(), "SGLANG_PLATFORM": "hs_capture_cpu", "OMP_NUM_THREADS": "2"}
    ended = subprocess.run([*command, *arguments], env=env, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode != 0
    (session,) = read_sessions(tmp_path / "dataset")
    assert session.state == "refused"
    assert named in session.error
    assert named in ended.stderr + ended.stdout
