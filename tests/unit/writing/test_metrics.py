"""Counters as Prometheus metrics: what is scraped from SGLang's directory is what the processes counted."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from sglang_hs_capture.store.session import Counters
from sglang_hs_capture.writing.metrics import DIRECTORY_VARIABLE, METRICS, CaptureMetrics

# A writing process: takes counters as JSON lines, and says which heavy packages it has come to import.
PROGRAM = """
import json, sys
from sglang_hs_capture.writing.metrics import CaptureMetrics
from sglang_hs_capture.store.session import Counters
metrics = CaptureMetrics.if_enabled(sys.argv[1], "kimi")
for line in sys.stdin:
    metrics.update(Counters(**json.loads(line)))
print([name for name in ("torch", "sglang") if name in sys.modules])
"""


def count(directory: Path, writer: str, *states: Counters) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, writer],
        input="\n".join(json.dumps(asdict(state)) for state in states),
        env={**os.environ, DIRECTORY_VARIABLE: str(directory)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]", "a writing process must stay light"


def scrape(directory: Path, writer: str) -> dict[str, float]:
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(directory))
    labels = {"model_name": "kimi", "writer": writer}
    values = {name: registry.get_sample_value(name, labels) for name, _ in METRICS.values()}
    return {name: value for name, value in values.items() if value is not None}


def test_what_is_scraped_is_what_was_counted(tmp_path):
    first = Counters(rows=10, bytes=1000, samples=1, blocked_s=0.25, disk_wait_s=0.5)
    last = Counters(rows=30, bytes=3000, samples=4, failed=2, incomplete=1, blocked_s=1.5, disk_wait_s=0.75)
    count(tmp_path, "dp0-pp0", first, first, last)
    assert scrape(tmp_path, "dp0-pp0") == {
        "hs_capture_rows_total": 30,
        "hs_capture_bytes_total": 3000,
        "hs_capture_samples_total": 4,
        "hs_capture_failed_total": 2,
        "hs_capture_incomplete_total": 1,
        "hs_capture_ring_blocked_seconds_total": 1.5,
        "hs_capture_disk_wait_seconds_total": 0.75,
    }


def test_writers_are_kept_apart_and_a_restarted_one_counts_on(tmp_path):
    count(tmp_path, "dp0-pp0", Counters(rows=10))
    count(tmp_path, "dp0-pp0", Counters(rows=5), Counters(rows=7))
    count(tmp_path, "dp1-pp0", Counters(rows=100))
    assert scrape(tmp_path, "dp0-pp0")["hs_capture_rows_total"] == 17
    assert scrape(tmp_path, "dp1-pp0")["hs_capture_rows_total"] == 100


def test_metrics_are_there_before_anything_is_counted(tmp_path):
    count(tmp_path, "dp0-pp0")
    assert scrape(tmp_path, "dp0-pp0") == dict.fromkeys((name for name, _ in METRICS.values()), 0)


def test_a_counter_that_fell_neither_fails_nor_counts_twice(tmp_path):
    count(tmp_path, "dp0-pp0", Counters(rows=10), Counters(rows=4), Counters(rows=12))
    assert scrape(tmp_path, "dp0-pp0")["hs_capture_rows_total"] == 12


@pytest.mark.parametrize("directory", [None, "", "missing"])
def test_there_are_none_where_sglang_collects_none(tmp_path, monkeypatch, directory):
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    if directory is not None:
        monkeypatch.setenv(DIRECTORY_VARIABLE, directory and str(tmp_path / directory))
    assert CaptureMetrics.if_enabled("dp0-pp0", "kimi") is None


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "counter_1.db").mkdir()
    program = (
        "import os, sys\nos.getpid = lambda: 1\n"
        "from sglang_hs_capture.writing.metrics import CaptureMetrics\n"
        "print(CaptureMetrics.if_enabled('dp0-pp0', 'kimi'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, DIRECTORY_VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "None"
    assert "no metrics" in done.stderr


def test_every_metric_is_of_a_counter():
    assert set(METRICS) <= set(asdict(Counters()))
