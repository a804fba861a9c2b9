"""The full-size benchmark: which servers it starts, and that one that fails does not end the others."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import full_size
from benchmarks.report import Report


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(full_size, "machine", lambda: {"gpu": "none", "sglang": "0", "date": "today"})


def report(label: str, rate: float) -> Report:
    series = {"capture off": [100.0], "capture on, by answers": [99.0]}
    series |= {"sustained, capture off": [100.0], "sustained, capture on, by answers": [rate]}
    return Report(
        "capture_overhead",
        label,
        "tokens/s",
        {"gpu": "none", "sglang": "0", "date": "today"},
        {},
        series,
        figures={"ring full": 0.5},
    )


WATCHDOG = ("--watchdog-timeout", "1800")


def run(monkeypatch, tmp_path: Path, *words: str) -> tuple[int, dict]:
    monkeypatch.setattr("sys.argv", ["full_size", "--results", str(tmp_path / "results"), *words])
    with pytest.raises(SystemExit) as ended:
        full_size.main()
    summaries = list((tmp_path / "results").glob("full_size-summary-*.json"))
    return ended.value.code, json.loads(summaries[0].read_text()) if summaries else {}


def test_every_layout_is_measured_at_every_place_with_the_whole_shape(monkeypatch, tmp_path):
    served = []

    def measure_servers(arguments: argparse.Namespace, model: Path, label: str) -> Report:
        config = json.loads((model / "config.json").read_text())
        lists = arguments.return_hidden_states_prompts
        served.append((label, arguments.output, arguments.sglang, arguments.skip_upstream, lists))
        assert (config["num_hidden_layers"], config["n_routed_experts"]) == (61, 384)
        assert config["quantization_config"]["quant_method"] == "compressed-tensors"
        return report(label, 98.0)

    monkeypatch.setattr(full_size, "measure_servers", measure_servers)
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    code, summary = run(monkeypatch, tmp_path, "--output", f"memory={memory}", "--output", f"disk={disk}")
    assert code == 0
    assert [label for label, *_ in served] == [
        f"8gpus-{name}-{place}" for name in ("tp", "dp-attention-ep", "pp-tp") for place in ("memory", "disk")
    ]
    flags = ["--tp-size", "8", "--chunked-prefill-size", "8192", "--mem-fraction-static", "0.85", *WATCHDOG]
    assert served[0][1:] == (memory, flags, True, 2)
    # SGLang divides a chunk among the ranks of DP attention.
    assert served[2][2][-6:-4] == ["--chunked-prefill-size", "65536"]
    assert served[5][4] == 0
    assert served[5][2][:4] == ["--pp-size", "2", "--tp-size", "4"]
    row = summary["layouts"]["tp, memory"]
    assert (row["off"], row["on"], row["lists"], row["ring full"]) == (100.0, 99.0, None, 0.5)
    assert row["sustained on / off"] == 0.98
    assert len(list((tmp_path / "results").glob("full_size-8gpus-*.json"))) == 6


def test_a_layout_that_fails_is_named_and_the_others_are_measured(monkeypatch, tmp_path):
    def measure_servers(arguments: argparse.Namespace, model: Path, label: str) -> Report:
        arguments.output.mkdir()
        if "tp-" in label:
            raise RuntimeError("the server did not become healthy")
        return report(label, 98.0)

    monkeypatch.setattr(full_size, "measure_servers", measure_servers)
    words = ("--gpus", "2", "--layouts", "tp,dp-attention", "--output", f"memory={tmp_path / 'memory'}")
    code, summary = run(monkeypatch, tmp_path, *words)
    assert code == 1
    assert summary["layouts"]["tp, memory"]["error"] == "the server did not become healthy"
    assert summary["layouts"]["dp-attention, memory"]["off"] == 100.0
    assert not (tmp_path / "memory").exists(), "states of one layout are in the way of the next"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "3", "--output", "a=/b"), "expected an even number from 2 up, got 3"),
        (("--layouts", "tp,ep", "--output", "a=/b"), "expected some of tp, dp-attention-ep, pp-tp, .*; got ep"),
        (("--output", "/b"), "expected NAME=DIR, got /b"),
        (("--output", "a=/b", "--output", "a=/c"), "expected each name once"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_is_served(monkeypatch, tmp_path, words, message):
    monkeypatch.setattr("sys.argv", ["full_size", *words])
    with pytest.raises(SystemExit, match=message):
        full_size.main()
