"""What the soak reads of processes, and how it tells a series that grows from one that does not."""

import os
import subprocess
import sys
import time

import pytest

from benchmarks.soak import child_of, open_files, process_memory, process_seconds, slope_per_thousand, table, trends


def looks(count=60):
    """A scheduler that takes 4 MiB more for each thousand samples, and 20 ms of CPU for each sample."""
    return [
        {
            "answer, ms": 5.0,
            "seconds": 2.0 * n,
            "samples": 100 * n,
            "scheduler, own MiB": 800 + 0.4 * n,
            "scheduler, CPU s": 2.0 * n,
        }
        for n in range(count)
    ]


def test_growth_is_found_and_told_from_what_stays():
    found = trends(looks())
    assert found["scheduler, own MiB"]["per 1000 samples"] == pytest.approx(4.0)
    assert found["answer, ms"]["per 1000 samples"] == pytest.approx(0.0, abs=1e-9)
    assert found["samples/s"]["median"] == 50.0
    assert found["scheduler, CPU ms for a sample"]["median"] == pytest.approx(20.0)
    assert "scheduler, CPU s" not in found
    first, last = found["scheduler, own MiB"]["first tenth"], found["scheduler, own MiB"]["last tenth"]
    assert 800 < first < last
    assert "| answer, ms | 5.0 | 5.0 | 5.0 | 0.0000 |" in table(found)


def test_too_few_looks_say_nothing():
    with pytest.raises(RuntimeError, match="expected 10 looks"):
        trends(looks(8))


def test_slopes_are_for_a_thousand_samples():
    assert slope_per_thousand([0, 1000, 2000], [1.0, 3.0, 5.0]) == pytest.approx(2.0)


def test_a_process_can_be_read():
    memory = process_memory(os.getpid())
    assert memory["own"] > 1
    assert memory["shared"] >= 0
    assert open_files(os.getpid()) >= 3
    assert process_seconds(os.getpid()) > 0


def test_a_process_is_found_below_another_by_its_command_line():
    # As SGLang does: the process that was started starts the one looked for.
    inner = "import sys; sys.stdin.read()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}, 'soak::looked-for-1'])"
    with subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE) as process:
        deadline = time.monotonic() + 20
        found = None
        while found is None and time.monotonic() < deadline:
            try:
                found = child_of(os.getpid(), b"soak::looked-for")
            except RuntimeError:
                time.sleep(0.05)
        assert found not in (None, process.pid)
        assert child_of(process.pid, b"soak::looked-for") == found
        process.stdin.close()
    with pytest.raises(RuntimeError, match="no child with soak::looked-for"):
        child_of(os.getpid(), b"soak::looked-for")
