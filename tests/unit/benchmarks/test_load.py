"""Rounds of prompts: what is sent, how much at a time, what is timed, and what counts as a failure."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from benchmarks import load
from benchmarks.load import (
    Timing,
    random_prompts,
    returned_elements,
    run_round,
    server_flags,
    server_memory,
    stable_seed,
)
from sglang_hs_capture.store.writer import StoreWriter
from tests.unit.toy_store import open_store, put_sample

PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
RIDS = ["hs-a", "hs-b", "hs-c", "hs-d"]
STAGES = {"dp0-pp0": ("boundary:1",), "dp0-pp1": ("final:pre_norm",)}


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[list[StoreWriter]]:
    """The stores of a pipeline's two stages."""
    stores = [open_store(tmp_path, writer, columns=columns) for writer, columns in STAGES.items()]
    yield stores
    for store in stores:
        store.close()


def acknowledge(store: StoreWriter, rid: str) -> None:
    put_sample(store, rid, PROMPTS[RIDS.index(rid)])
    store.commit()


class AnsweringServer:
    """Answers /generate on a thread of its own; keeps the requests, and how many it had at the same time at most."""

    def __init__(self) -> None:
        self.requests: list[dict] = []
        self.most = self.now = 0
        self.generated: int | None = None
        self.states: list[list[list[float]]] = []
        self.status = 200
        self.on_answer = lambda rid: None
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "AnsweringServer":
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/server_info", self._info)
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.03)
        self.now -= 1
        self.on_answer(body.get("rid"))
        asked = body["sampling_params"]["max_new_tokens"]
        generated = asked if self.generated is None else self.generated
        info = {"completion_tokens": generated, "hidden_states": self.states}
        return web.json_response({"meta_info": info}, status=self.status)

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"internal_states": [{"memory_usage": {"weight": 1.5}}]})


@pytest.fixture
def server() -> Iterator[AnsweringServer]:
    with AnsweringServer() as running:
        yield running


def test_a_round_sends_everything_at_once_and_is_timed_to_the_last_answer(server):
    timing = run_round(server.url, PROMPTS, RIDS, return_hidden_states=True)
    assert server.most == len(PROMPTS)
    assert sorted((r["rid"], r["input_ids"]) for r in server.requests) == list(zip(RIDS, PROMPTS, strict=True))
    assert all(r["return_hidden_states"] and r["sampling_params"]["ignore_eos"] for r in server.requests)
    assert (timing.tokens, timing.generated, timing.acknowledged_s) == (10, 0, None)
    assert timing.answered_s >= 0.03


def test_no_more_than_asked_for_are_in_flight(server):
    timing = run_round(server.url, PROMPTS, RIDS, in_flight=1)
    assert server.most == 1
    assert timing.answered_s >= 4 * 0.03


def test_generated_tokens_are_counted_and_an_answer_cut_short_is_an_error(server):
    assert run_round(server.url, PROMPTS, RIDS, max_new_tokens=5).generated == 20
    server.generated = 4
    with pytest.raises(RuntimeError, match="expected 5 generated tokens, the server generated 4"):
        run_round(server.url, PROMPTS, RIDS, max_new_tokens=5)


def test_lists_are_measured_only_where_states_are_returned(server):
    fields = {"max_new_tokens": 1, "return_hidden_states": True}
    with pytest.raises(RuntimeError, match="expected an answer of at least 1000 bytes"):
        run_round(server.url, PROMPTS, RIDS, least_bytes=1000, **fields)
    with pytest.raises(RuntimeError, match=r"expected states of 16 tokens, got \[\]"):
        returned_elements(server.url, 100)
    server.states = [[[0.5, 1.25, 2.0]] * 10, [[0.5, 1.25, 2.0]] * 6]
    assert returned_elements(server.url, 100) == 3
    assert server.requests[-1]["sampling_params"]["max_new_tokens"] == 1
    assert run_round(server.url, PROMPTS, RIDS, least_bytes=100, **fields).tokens == 10
    server.states[1].pop()
    with pytest.raises(RuntimeError, match=r"expected states of 16 tokens, got \[10, 5\]"):
        returned_elements(server.url, 100)


def test_a_refused_request_is_an_error(server):
    server.status = 503
    with pytest.raises(RuntimeError, match="HTTP 503"):
        run_round(server.url, PROMPTS, RIDS)


def test_a_server_that_goes_away_is_an_error(server):
    with pytest.raises(RuntimeError, match=r"http://127.0.0.1:1: .*; see the server's log"):
        run_round("http://127.0.0.1:1", PROMPTS, RIDS)


def test_a_round_with_capture_ends_with_the_last_acknowledgement(server, stages, tmp_path):
    def write(rid: str) -> None:
        for store in stages:
            acknowledge(store, rid)

    def answered(rid: str) -> None:
        # The last one comes late, after everything has been answered.
        if rid == RIDS[-1]:
            threading.Timer(0.3, write, (rid,)).start()
        else:
            write(rid)

    server.on_answer = answered
    timing = run_round(server.url, PROMPTS, RIDS, dataset=tmp_path)
    assert timing.acknowledged_s >= timing.answered_s + 0.2
    assert timing.acknowledged_rate == 10 / timing.acknowledged_s < timing.rate


def test_every_stage_of_a_pipeline_has_to_acknowledge(server, stages, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "SILENCE_TIMEOUT_S", 0.2)
    server.on_answer = lambda rid: acknowledge(stages[0], rid)
    with pytest.raises(RuntimeError, match="4 samples are missing"):
        run_round(server.url, PROMPTS, RIDS, dataset=tmp_path)


def test_a_failed_capture_is_an_error(server, stages, tmp_path):
    def fail(rid: str) -> None:
        stages[0].add_failure(rid, "incomplete", "cut short")
        stages[0].commit()

    server.on_answer = fail
    with pytest.raises(RuntimeError, match="capture failed"):
        run_round(server.url, PROMPTS, RIDS, dataset=tmp_path)


def test_a_capture_that_falls_silent_is_an_error(server, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "SILENCE_TIMEOUT_S", 0.1)
    with pytest.raises(RuntimeError, match=r"4 samples are missing, and none was acknowledged for 0\.1 s"):
        run_round(server.url, PROMPTS, RIDS, dataset=tmp_path)


def test_rates():
    timing = Timing(tokens=100, generated=50, answered_s=2.0, acknowledged_s=4.0)
    assert (timing.rate, timing.acknowledged_rate, timing.generated_rate) == (50.0, 25.0, 25.0)
    with pytest.raises(ValueError, match="nothing was captured"):
        _ = Timing(100, 0, 2.0, None).acknowledged_rate


def test_seeds_are_the_same_in_every_process():
    program = "from benchmarks.load import stable_seed; print(stable_seed('on', 3))"
    seeds = {
        int(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout) for _ in range(2)
    }
    assert seeds == {stable_seed("on", 3)}
    assert stable_seed("on", 3) != stable_seed("off", 3)
    assert random_prompts(2, 5, 100, stable_seed("on", 3)) == random_prompts(2, 5, 100, stable_seed("on", 3))


def test_upstream_is_served_without_the_plugin():
    flags, environment = server_flags(None, cpu=False)
    assert environment == {}
    assert "--json-model-override-args" not in flags
    captured, environment = server_flags({"output_dir": "/d"}, cpu=True)
    assert environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "sglang_hs_capture.models"
    assert captured[: len(flags)] == flags
    assert json.loads(captured[-1]) == {"hs_capture": {"output_dir": "/d"}}


def test_the_server_says_what_memory_it_uses(server):
    assert server_memory(server.url) == {"weight": 1.5}


@pytest.mark.parametrize(
    ("visible", "script", "bytes_used"),
    [
        (None, "echo 100; echo 20", 120 * 2**20),
        (None, "exit 9", None),
        ("1", 'case "$*" in *--id=1) echo 20;; *) echo 100; echo 20;; esac', 20 * 2**20),
    ],
)
def test_device_memory_is_of_all_gpus_that_may_be_used(tmp_path, monkeypatch, visible, script, bytes_used):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert load.device_memory() == bytes_used


def test_host_memory_is_that_of_all_processes_of_a_server_with_shared_pages_once():
    """Two processes that share 64 MiB, the second of them forked after the pages were touched."""
    program = (
        "import mmap, os, sys; ring = mmap.mmap(-1, 2**26); ring.write(b'x' * 2**26); child = os.fork();"
        "child or ring.seek(0); child or ring.read(); print(flush=True) if child == 0 else None; sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        process.stdout.readline()
        measured = load.host_memory(process.pid)
        process.stdin.close()
    assert 2**26 < measured < 2 * 2**26


def test_a_server_does_not_outlive_a_benchmark_that_is_killed(tmp_path):
    program = (
        "import sys; from pathlib import Path; from benchmarks import load\n"
        "sys.executable = sys.argv[1]\n"
        "with load.served(Path('model'), Path(sys.argv[2]), [], {}): pass\n"
    )
    # In the place of SGLang something that says who it is, and never ends; it is a child of the one that is run first.
    fake = tmp_path / "python"
    fake.write_text(
        f'#!/bin/sh\nif [ "$2" = sglang_hs_capture.driver.child ]; then exec {sys.executable} "$@"; fi\n'
        f"echo $$ > {tmp_path}/pid\nexec sleep 1000\n"
    )
    fake.chmod(0o755)
    root, log = Path(load.__file__).parents[1], tmp_path / "log"
    log.write_text("of the server before\n")
    benchmark = subprocess.Popen([sys.executable, "-c", program, str(fake), str(log)], cwd=root)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        server = int((tmp_path / "pid").read_text())
    finally:
        benchmark.kill()
        benchmark.wait()
    while Path(f"/proc/{server}").exists() and "sleep" in Path(f"/proc/{server}/cmdline").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert log.read_text().startswith("of the server before\n"), "a failure of one server is looked for in all logs"
