"""A long run of short prompts: do memory, open files, latency and rate stay what they are, or do they creep?

``hs-capture run`` sends the prompts to one server. Beside it, every ``--interval`` seconds, the memory and the open
files of the three processes that must not grow are read from ``/proc``, and one prompt of the script's own is timed up
to its answer and up to its acknowledgement. A line is fitted to each series, without the first fifth of the run, in
which buffers, caches and allocators fill.

With ``--own-class`` the same prompts go to SGLang's own class instead, without the plugin, and the scheduler's process
is looked at after every thousand of them: what it grows by there is not the capture's.

    python -m benchmarks.soak --output /var/tmp/soak --prompts 10000 --cpu
"""

import argparse
import itertools
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.load import SILENCE_TIMEOUT_S, random_prompts, run_round, served, server_flags, text_config
from benchmarks.report import write_json
from sglang_hs_capture.demo.checkpoint import make_deepseek_v3
from sglang_hs_capture.store.journal import JournalTail
from sglang_hs_capture.store.replay import journal_path
from sglang_hs_capture.store.session import read_sessions

MIB = 2**20
WRITER = "dp0-pp0"
# Request ids of the script's own prompts.
OWN = "hs-look-"
WRITING_MODULE = b"sglang_hs_capture.writing"
# What SGLang calls the process of the first scheduler.
SCHEDULER_TITLE = b"sglang::scheduler"
BATCH = 1000
# The first part of the run, in which what is allocated once is allocated.
WARM_UP = 0.2

Look = dict[str, float]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model directory; a tiny DeepSeek-V3 is made by default")
    parser.add_argument("--output", type=Path, required=True, help="where the dataset goes; emptied before the run")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--prompts", type=int, default=10000)
    parser.add_argument("--shortest", type=int, default=8, help="tokens of the shortest prompt")
    parser.add_argument("--longest", type=int, default=64, help="tokens of the longest prompt")
    parser.add_argument("--max-in-flight", type=int, default=64)
    parser.add_argument(
        "--interval", type=float, default=2.0, help="seconds from one look at the processes to the next"
    )
    parser.add_argument("--until", type=float, default=3600.0, help="end the run in order after so many seconds")
    parser.add_argument("--own-class", action="store_true", help="serve SGLang's own class, without the plugin")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU platform")
    return parser.parse_args()


def process_memory(pid: int) -> dict[str, float]:
    """MiB of a process's own memory, and of memory that it shares (the ring), which ``/proc`` counts apart."""
    text = Path(f"/proc/{pid}/status").read_text()
    sizes = {name: int(kib) / 1024 for name, kib in re.findall(r"^(RssAnon|RssShmem):\s+(\d+) kB", text, re.MULTILINE)}
    return {"own": sizes["RssAnon"], "shared": sizes["RssShmem"]}


def process_seconds(pid: int) -> float:
    """CPU seconds of a process so far. Beside the rate of samples they say what others on the machine do not change."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def open_files(pid: int) -> int:
    """How many files a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def process_look(name: str, pid: int) -> Look:
    """What one look at a process tells: its memory, its open files, and its CPU seconds so far."""
    memory = {f"{name}, {kind} MiB": size for kind, size in process_memory(pid).items()}
    return {**memory, f"{name}, open files": open_files(pid), f"{name}, CPU s": process_seconds(pid)}


def child_of(parent: int, word: bytes) -> int:
    """The process among a process's children and theirs that has a word in its command line.

    Raises:
        RuntimeError: there is none.
    """
    parents: dict[int, int] = {}
    found: list[int] = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            words = (status.parent / "cmdline").read_bytes().split(b"\0")
            above = re.search(r"^PPid:\s+(\d+)", status.read_text(), re.MULTILINE)
        except OSError:
            continue
        pid = int(status.parent.name)
        parents[pid] = int(above[1]) if above else 0
        if any(each.startswith(word) for each in words):
            found.append(pid)
    for pid in found:
        if parent in (parents[pid], parents.get(parents[pid])):
            return pid
    raise RuntimeError(f"process {parent} has no child with {word.decode()} in its command line")


def write_prompts(file: Path, arguments: argparse.Namespace, vocab_size: int) -> None:
    """Random prompts of lengths from ``--shortest`` to ``--longest``, one a line."""
    generator = random.Random(6)
    with file.open("w") as lines:
        for index in range(arguments.prompts):
            length = generator.randint(arguments.shortest, arguments.longest)
            (ids,) = random_prompts(1, length, vocab_size, seed=index)
            lines.write(json.dumps({"id": f"soak-{index}", "input_ids": ids}) + "\n")


class Acknowledged:
    """Counts the samples in the journal, and remembers which of the script's own prompts are there."""

    def __init__(self, journal: Path) -> None:
        self._tail = JournalTail(journal)
        self.samples = 0
        self.own: set[str] = set()

    def poll(self) -> None:
        """Read what is new."""
        rids = [record["rid"] for record in self._tail.poll() if record["t"] == "sample"]
        self.samples += len(rids)
        self.own |= {rid for rid in rids if rid.startswith(OWN)}

    def wait_for(self, rid: str) -> None:
        """Wait until one of the script's own prompts is acknowledged.

        Raises:
            RuntimeError: it is not, for a long time.
        """
        deadline = time.monotonic() + SILENCE_TIMEOUT_S
        while rid not in self.own:
            self.poll()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{rid} was not acknowledged within {SILENCE_TIMEOUT_S} s of its answer")
            time.sleep(0.002)


def watch(
    driver: "subprocess.Popen[bytes]", url: str, pids: dict[str, int], vocab_size: int, arguments: argparse.Namespace
) -> list[Look]:
    """Look at the processes until the driver ends; the figures of each look."""
    acknowledged, started = Acknowledged(journal_path(arguments.output, WRITER)), time.monotonic()
    looks: list[Look] = []
    while driver.poll() is None:
        rid = f"{OWN}{len(looks)}"
        prompts = random_prompts(1, arguments.longest, vocab_size, seed=-1 - len(looks))
        begin = time.monotonic()
        look = {"answer, ms": 1e3 * run_round(url, prompts, [rid], extra_key=rid).answered_s}
        acknowledged.wait_for(rid)
        look["acknowledged, ms"] = 1e3 * (time.monotonic() - begin)
        look |= {"seconds": time.monotonic() - started, "samples": acknowledged.samples}
        try:
            for name, pid in pids.items():
                look |= process_look(name, pid)
        except (OSError, KeyError):
            break  # the driver ends
        looks.append(look)
        if look["seconds"] > arguments.until:
            driver.terminate()
        time.sleep(arguments.interval)
    return looks


def slope_per_thousand(samples: Sequence[float], values: Sequence[float]) -> float:
    """The growth of a series for each thousand samples, by least squares."""
    return float(np.polyfit(np.asarray(samples) / 1000, np.asarray(values), 1)[0])


def trends(looks: list[Look]) -> dict[str, dict[str, float]]:
    """For each figure after the warm-up: its median, its first and its last tenth, and its growth.

    Raises:
        RuntimeError: there are too few looks.
    """
    steady = [look for look in looks if look["samples"] >= WARM_UP * looks[-1]["samples"]]
    if len(steady) < 10:
        raise RuntimeError(f"expected 10 looks at the processes after the warm-up, got {len(steady)}: more --prompts")
    for before, after in itertools.pairwise(steady):
        gained = after["samples"] - before["samples"]
        after["samples/s"] = gained / (after["seconds"] - before["seconds"])
        for name in [name for name in after if name.endswith(", CPU s")]:
            spent = after[name] - before[name]
            after[name.replace("CPU s", "CPU ms for a sample")] = 1000 * spent / max(1, gained)
    steady = steady[1:]
    samples = [look["samples"] for look in steady]
    tenth = max(1, len(steady) // 10)
    found = {}
    for name in [name for name in steady[0] if name not in ("seconds", "samples") and not name.endswith("CPU s")]:
        values = [look[name] for look in steady]
        found[name] = {
            "median": statistics.median(values),
            "first tenth": statistics.median(values[:tenth]),
            "last tenth": statistics.median(values[-tenth:]),
            "per 1000 samples": slope_per_thousand(samples, values),
        }
    return dict(sorted(found.items()))


def table(found: dict[str, dict[str, float]]) -> str:
    """The trends as a Markdown table."""
    lines = ["| figure | median | first tenth | last tenth | growth for 1,000 samples |", "|---|---|---|---|---|"]
    for name, row in found.items():
        lines.append(
            f"| {name} | " + " | ".join(f"{value:,.{4 if 'per' in kind else 1}f}" for kind, value in row.items()) + " |"
        )
    return "\n".join(lines) + "\n"


def soak(model: Path, prompts: Path, arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Look]]:
    """Run the capture; the driver's own summary, and the looks at it."""
    capture = {
        "output_dir": str(arguments.output),
        "min_free_bytes": 0,
        "ring_bytes": 64 * MIB,
        "shard_bytes": 64 * MIB,
    }
    flags, environment = server_flags(capture, cpu=arguments.cpu)
    flags.remove("--disable-radix-cache")
    summary = arguments.output.with_suffix(".json")
    command = [sys.executable, "-m", "sglang_hs_capture.cli.main", "run", "--data", prompts]
    command += ["--output", arguments.output, "--max-in-flight", arguments.max_in_flight, "--json-summary", summary]
    vocab_size = int(text_config(model)["vocab_size"])
    with served(model, arguments.output.with_suffix(".log"), flags, environment) as url:
        (session,) = read_sessions(arguments.output)
        with subprocess.Popen([*map(str, command), "--server", url]) as driver:
            pids = {
                "scheduler": session.pid,
                "writing process": child_of(session.pid, WRITING_MODULE),
                "driver": driver.pid,
            }
            looks = watch(driver, url, pids, vocab_size, arguments)
    return json.loads(summary.read_text()), looks


def soak_own_class(model: Path, prompts: Path, arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Look]]:
    """Send the prompts to SGLang's own class; how many and in how many seconds, and the looks at the scheduler."""
    flags, environment = server_flags(None, cpu=arguments.cpu)
    flags.remove("--disable-radix-cache")
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    looks: list[Look] = []
    with served(model, arguments.output.with_suffix(".log"), flags, environment) as url:
        scheduler, started = child_of(os.getpid(), SCHEDULER_TITLE), time.monotonic()
        for batch in (rows[first : first + BATCH] for first in range(0, len(rows), BATCH)):
            ids = [row["id"] for row in batch]
            run_round(url, [row["input_ids"] for row in batch], ids, in_flight=arguments.max_in_flight)
            look = {"seconds": time.monotonic() - started, "samples": BATCH * len(looks) + len(batch)}
            looks.append(look | process_look("scheduler", scheduler))
    return {"captured": 0, "sent": len(rows), "seconds": looks[-1]["seconds"]}, looks


def main() -> None:
    arguments = parse_arguments()
    arguments.output = arguments.output.absolute()
    shutil.rmtree(arguments.output, ignore_errors=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        model = arguments.model or make_deepseek_v3(Path(temporary, "model"))
        prompts = Path(temporary, "prompts.jsonl")
        write_prompts(prompts, arguments, int(text_config(model)["vocab_size"]))
        summary, looks = (soak_own_class if arguments.own_class else soak)(model, prompts, arguments)
    found = trends(looks)
    label = arguments.model.name if arguments.model else "tiny-deepseek-v3"
    name = f"soak-{'own-class-' if arguments.own_class else ''}{label}-sglang{version('sglang')}"
    write_json(arguments.results, name, "soak", arguments, summary=summary, trends=found, looks=looks)
    text = f"{summary.get('sent', summary['captured']):,} prompts in {summary['seconds']:,.0f} s.\n\n{table(found)}"
    (arguments.results / f"{name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
