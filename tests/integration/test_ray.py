"""Two engines on a Ray cluster of one machine, one of them lost in the middle and replaced."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.layers import Final
from sglang_hs_capture.store.session import read_session, read_sessions, session_path
from sglang_hs_capture.verify.parity import reference_states
from tests.integration.conftest import free_port

pytest.importorskip("ray", reason="Ray is not installed: pip install 'sglang-hs-capture[ray]'")
pytestmark = [pytest.mark.engine, pytest.mark.slow]

SAMPLES = 400
BOUNDARIES = (0, 4, 7)
COMMAND = [sys.executable, "-m", "sglang_hs_capture.cli.main"]
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def prompts() -> dict[str, list[int]]:
    choose = random.Random(5)
    return {f"s{n}": [choose.randrange(5, 2000) for _ in range(choose.randrange(60, 250))] for n in range(SAMPLES)}


@contextmanager
def ray_node(log: Path, *words: str) -> Iterator[None]:
    """A node of a cluster, on this machine."""
    program = "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; main()"
    words = ("start", "--block", "--disable-usage-stats", f"--object-store-memory={100 * 2**20}", *words)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 120
        while "will now block forever" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
        for child in children:
            if child.is_running():
                child.kill()


@contextmanager
def ray_cluster(*cpus: int) -> Iterator[str]:
    """A cluster of this machine alone, a node for each number of CPUs; its address."""
    # Paths of sockets are short, those of tests are not.
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    address = f"127.0.0.1:{free_port()}"
    port = address.rpartition(":")[2]
    head = ["--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false"]
    try:
        with ExitStack() as nodes:
            nodes.enter_context(ray_node(folder / "out-0", *head, f"--num-cpus={cpus[0]}"))
            for number, count in enumerate(cpus[1:], start=1):
                words = [f"--address={address}", f"--num-cpus={count}"]
                nodes.enter_context(ray_node(folder / f"out-{number}", *words))
            yield address
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def acknowledged(dataset: Path, replica: int) -> int:
    journal = dataset / f"journal-dp{replica}-pp0.jsonl"
    return journal.read_text().count('"t":"sample"') if journal.exists() else 0


def actor_of(dataset: Path, replica: int) -> psutil.Process:
    """The process of the actor that keeps an engine."""
    record = read_session(session_path(dataset, f"dp{replica}-pp0"))
    assert record is not None
    return next(parent for parent in psutil.Process(record.pid).parents() if parent.name().startswith("ray::"))


def test_an_engine_that_is_lost_is_replaced_and_costs_nothing(deepseek_checkpoint: Path, tmp_path: Path):
    data, dataset, asked = tmp_path / "data.jsonl", tmp_path / "dataset", prompts()
    data.write_text("".join(json.dumps({"id": name, "input_ids": ids}) + "\n" for name, ids in asked.items()))
    words = ["run", "--ray", "--ray-engines", "2", "--model", deepseek_checkpoint, "--data", data, "--output", dataset]
    words += ["--dtype", "float32", "--layers", ",".join(map(str, BOUNDARIES)), "--min-free-gb", "0"]
    words += ["--ring-gb", "0.02", "--max-in-flight", "4"]
    with ray_cluster(2) as address:
        words += ["--ray-address", address, "--", "--chunked-prefill-size", "64"]
        with subprocess.Popen(
            [*COMMAND, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
        ) as run:
            try:
                deadline = time.monotonic() + 600
                while min(acknowledged(dataset, 0), acknowledged(dataset, 1)) < 10:
                    assert run.poll() is None, run.stdout.read()
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                actor_of(dataset, 0).kill()
                said = run.communicate(timeout=600)[0]
            finally:
                run.kill()
    assert run.returncode == 0, said
    assert "Lost" in said
    got = HiddenStateDataset(dataset)
    assert sorted(sample.id for sample in got.samples) == sorted(asked)
    assert {sample.parts[0].writer for sample in got.samples} >= {"dp0-pp0", "dp1-pp0"}
    assert {record.state for record in read_sessions(dataset)} == {"closed"}
    assert not list((dataset / "shards").glob("*.partial"))
    check_states(got, asked, deepseek_checkpoint, every=20)


def check_states(got: HiddenStateDataset, asked: dict[str, list[int]], model: Path, every: int) -> None:
    """Some of the samples have the states of ``transformers``."""
    for number in range(0, len(got), every):
        sample, entry = got[number], got.samples[number]
        assert sample["input_ids"].tolist() == asked[entry.id]
        expected = reference_states(model, asked[entry.id], BOUNDARIES, Final.PRE_NORM)
        for state, reference in zip(sample["hidden_states"], expected, strict=True):
            assert float(((state - reference).norm(dim=1) / reference.norm(dim=1)).max()) <= 1e-5, entry.id


def test_an_engine_may_have_several_nodes(deepseek_checkpoint: Path, tmp_path: Path):
    data, dataset = tmp_path / "data.jsonl", tmp_path / "dataset"
    asked = dict(list(prompts().items())[:20])
    data.write_text("".join(json.dumps({"id": name, "input_ids": ids}) + "\n" for name, ids in asked.items()))
    words = ["run", "--ray", "--ray-engines", "1", "--ray-nodes", "2", "--model", deepseek_checkpoint, "--data", data]
    words += ["--output", dataset, "--dtype", "float32", "--layers", ",".join(map(str, BOUNDARIES))]
    words += ["--min-free-gb", "0", "--ring-gb", "0.02"]
    with ray_cluster(1, 1) as address:
        words += ["--ray-address", address, "--", "--chunked-prefill-size", "64", "--tp-size", "2"]
        done = subprocess.run(
            [*COMMAND, *map(str, words)], capture_output=True, text=True, env=ENVIRONMENT, timeout=600, check=False
        )
    logs = {log.name: log.read_text()[-2000:] for log in dataset.glob("server-dp0-node*.log")}
    assert done.returncode == 0, (done.stdout + done.stderr, logs)
    assert len(logs) == 2
    got = HiddenStateDataset(dataset)
    assert sorted(sample.id for sample in got.samples) == sorted(asked)
    check_states(got, asked, deepseek_checkpoint, every=5)
