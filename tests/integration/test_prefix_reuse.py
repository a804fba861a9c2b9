"""Prefix reuse on the real engine: whatever happens to the cache, an acknowledged row is the one its prompt needs."""

import json
import os
import random
import subprocess
import sys
import threading
import urllib.error
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.store.index import load_index
from sglang_hs_capture.store.session import read_sessions
from tests.integration.conftest import Server, StartServer

pytestmark = pytest.mark.engine

CHUNK = 64
TOLERANCE = 1e-5
VOCAB = 2000


def flags(output: Path, *more: str) -> list[str]:
    capture = {"output_dir": str(output), "layers": [1, 4, 7], "dtype": "float32"}
    capture |= {"ring_bytes": 2**22, "shard_bytes": 2**21, "min_free_bytes": 0, "commit_interval_s": 0.05}
    return [
        *("--model-impl", "sglang", "--disable-prefill-cuda-graph", "--skip-tokenizer-init"),
        *("--chunked-prefill-size", str(CHUNK), "--json-model-override-args", json.dumps({"hs_capture": capture})),
        *more,
    ]


ENVIRONMENT = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_hs_capture.models"}


def run(server: Server, data: Path, output: Path, *more: str) -> dict[str, Any]:
    """``hs-capture run`` on a running server; returns its summary."""
    summary = data.with_suffix(f".{output.name}.json")
    command = [sys.executable, "-m", "sglang_hs_capture.cli.main", "run", "--server", server.url, "--data", str(data)]
    command += ["--output", str(output), "--json-summary", str(summary), *more]
    ended = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(summary.read_text())
    return found


def write(file: Path, prompts: dict[str, list[int]]) -> Path:
    file.write_text("".join(json.dumps({"id": name, "input_ids": ids}) + "\n" for name, ids in prompts.items()))
    return file


def random_tree(count: int, seed: int) -> dict[str, list[int]]:
    """Prompts that branch off each other at random places: shared prefixes of every length, also whole prompts."""
    generator = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(count):
        stem = generator.choice(prompts) if prompts and generator.random() < 0.8 else []
        stem = stem[: generator.randrange(len(stem) + 1)]
        tail = [generator.randrange(5, VOCAB) for _ in range(generator.choice([0, 1, 5, 20, 63, 64, 65, 130]))]
        prompts.append((stem + tail)[:400] or [generator.randrange(5, VOCAB)])
    return {f"p{index}": ids for index, ids in enumerate(prompts)}


class Noise:
    """Other users of the same cache: requests that are not captured, that generate, and that are aborted."""

    def __init__(self, server: Server, prompts: list[list[int]]) -> None:
        self._server, self._prompts = server, prompts
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(seed,)) for seed in range(2)]
        self.sent = 0

    def __enter__(self) -> "Noise":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _work(self, seed: int) -> None:
        generator = random.Random(seed)
        number = 0
        while not self._stop.is_set():
            number += 1
            ids = generator.choice(self._prompts)
            ids = ids[: generator.randrange(1, len(ids) + 1)]
            kind = generator.choice(["generate", "generate", "prefill", "by-hand", "abort"])
            rid = f"hs-hand-{seed}-{number}" if kind in ("by-hand", "abort") else f"other-{seed}-{number}"
            new = generator.randrange(1, 9) if kind == "generate" else 40 if kind == "abort" else 0
            timer = threading.Timer(0.1, self._server.post_text, ["/abort_request", {"rid": rid}])
            if kind == "abort":
                timer.start()
            # An aborted request may be answered with an error.
            with suppress(*([urllib.error.HTTPError] if kind == "abort" else [])):
                self._server.generate(ids, rid=rid, max_new_tokens=new)
            self.sent += 1
            self._stop.wait(0.05)


def largest_error(one: Path, other: Path, names: set[str]) -> float:
    """The largest relative error of any row of any state between two datasets, over the samples ``names``."""
    left, right = HiddenStateDataset(one), HiddenStateDataset(other)
    places = {sample.id: index for index, sample in enumerate(right.samples)}
    worst, seen = 0.0, set()
    for index, sample in enumerate(left.samples):
        if sample.id not in names:
            continue
        a, b = left[index], right[places[sample.id]]
        assert a["input_ids"].tolist() == b["input_ids"].tolist()
        seen.add(sample.id)
        for x, y in zip(a["hidden_states"], b["hidden_states"], strict=True):
            worst = max(worst, float(((x - y).norm(dim=1) / y.norm(dim=1)).max()))
    assert seen == names, names - seen
    return worst


@pytest.mark.parametrize(
    ("count", "more"),
    [
        (200, ()),
        pytest.param(60, ("--page-size", "16"), marks=pytest.mark.slow),
        pytest.param(30, ("--page-size", "64"), marks=pytest.mark.slow),
    ],
)
def test_a_random_tree_of_prompts_equals_the_capture_without_a_cache(
    start_server: StartServer, deepseek_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, count, more
):
    base = tmp_path_factory.mktemp("tree")
    prompts = random_tree(count, seed=count)
    data = write(base / "prompts.jsonl", prompts)
    small = ("--max-total-tokens", "2048", "--max-running-requests", "12")
    cached = start_server(deepseek_checkpoint, *flags(base / "cached", *small, *more), env=ENVIRONMENT)
    with Noise(cached, list(prompts.values())) as noise:
        summary = run(cached, data, base / "cached")
    assert noise.sent > 10
    assert (summary["captured"], summary["dropped"], summary["skipped"]) == (count, [], [])
    plain = start_server(deepseek_checkpoint, *flags(base / "plain", "--disable-radix-cache"), env=ENVIRONMENT)
    assert run(plain, data, base / "plain")["captured"] == count
    assert largest_error(base / "cached", base / "plain", set(prompts)) <= TOLERANCE
    for sample in HiddenStateDataset(base / "cached").samples:
        # What was sent by hand beside is right or absent: it has no other sample's rows in it.
        assert sample.id in prompts or sample.rid.startswith("hs-hand-")
    (session,) = read_sessions(base / "cached")
    assert session.prefix_cache
    assert session.counters.slot_table_bytes <= 2 * 40 * 2200


def test_a_shared_prefix_is_computed_and_stored_once(start_server, deepseek_checkpoint, tmp_path_factory):
    base = tmp_path_factory.mktemp("shared")
    generator = random.Random(3)
    system = [generator.randrange(5, VOCAB) for _ in range(384)]
    prompts = {f"p{i}": system + [generator.randrange(5, VOCAB) for _ in range(128)] for i in range(64)}
    unique = len(system) + 64 * 128
    server = start_server(deepseek_checkpoint, *flags(base / "dataset"), env=ENVIRONMENT)
    summary = run(server, write(base / "prompts.jsonl", prompts), base / "dataset")
    assert summary["captured"] == 64
    index = load_index(base / "dataset")
    rows = sum(entry.state.rows for entry in index.shards)
    # Tails that begin with the same token by chance share that row as well.
    assert 0.99 * unique <= rows <= 1.05 * unique
    assert sum(sample.length for sample in index.samples) == 64 * 512


def test_a_slot_that_decode_rewrote_is_noticed_and_the_sample_captured_again(
    start_server, deepseek_checkpoint, tmp_path_factory
):
    base = tmp_path_factory.mktemp("stale")
    generator = random.Random(4)
    stem = [generator.randrange(5, VOCAB) for _ in range(40)]
    old = [*stem, *(generator.randrange(5, VOCAB) for _ in range(300))]
    server = start_server(deepseek_checkpoint, *flags(base / "dataset"), env=ENVIRONMENT)
    # A flush frees all slots, and they are given out again from the first one: the second time, the stem comes to lie
    # where the old prompt's stem lay, and decode writes where its other rows were.
    server.flush_cache()
    server.generate(old, rid="hs-old")
    server.flush_cache()
    answer = server.generate(stem, rid="other", max_new_tokens=20)["output_ids"]
    new = {"new": [*stem, *answer[:15], *(generator.randrange(5, VOCAB) for _ in range(10))]}
    # A prompt that the engine is asked about is computed anew from there on, and meets no stale slot.
    data = write(base / "new.jsonl", new)
    summary = run(server, data, base / "dataset", "--known-answers", "0")
    assert (summary["captured"], summary["resent"]) == (1, 1)
    records = map(json.loads, (base / "dataset" / "journal-dp0-pp0.jsonl").read_text().splitlines())
    details = [record["detail"] for record in records if record["t"] == "failed"]
    assert len(details) == 1
    assert "another prompt" in details[0]
    plain = start_server(deepseek_checkpoint, *flags(base / "plain", "--disable-radix-cache"), env=ENVIRONMENT)
    run(plain, data, base / "plain")
    assert largest_error(base / "dataset", base / "plain", {"new"}) <= TOLERANCE


@pytest.mark.slow
def test_a_later_run_goes_on_with_an_empty_cache_and_links_nothing_wrongly(
    start_server, deepseek_checkpoint, tmp_path_factory
):
    base = tmp_path_factory.mktemp("extended")
    prompts = random_tree(40, seed=9)
    names = list(prompts)
    first = {name: prompts[name] for name in names[:20]}
    for part in (first, prompts):
        server = start_server(deepseek_checkpoint, *flags(base / "dataset"), env=ENVIRONMENT)
        summary = run(server, write(base / f"{len(part)}.jsonl", part), base / "dataset")
        assert summary["captured"] == 20
        server.end()
    plain = start_server(deepseek_checkpoint, *flags(base / "plain", "--disable-radix-cache"), env=ENVIRONMENT)
    run(plain, base / "40.jsonl", base / "plain")
    assert largest_error(base / "dataset", base / "plain", set(prompts)) <= TOLERANCE
