"""The benchmark of the driver: its played servers take a real run, and all of it is in their dataset."""

import argparse

from benchmarks import driver
from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.store.session import read_sessions


def test_a_real_run_is_measured_against_played_servers(tmp_path):
    data, output = tmp_path / "data.jsonl", tmp_path / "states"
    driver.write_prompts(data, argparse.Namespace(prompts=30, length=40))
    found = driver.measure(data, output, 3)
    assert found.keys() == {"wall_s", "processor_s", "max_rss_bytes"}
    assert min(found.values()) > 0
    captured = HiddenStateDataset(output)
    assert sorted(sample.id for sample in captured.samples) == sorted(f"sample-{n}" for n in range(30))
    assert {sample.length for sample in captured.samples} == {40}
    assert sorted(record.writer for record in read_sessions(output)) == ["dp0-pp0", "dp1-pp0", "dp2-pp0"]
