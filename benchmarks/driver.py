"""What ``hs-capture run`` itself takes: many servers that are played compute nothing and acknowledge all prompts.

The servers, all in one process, answer at once and write a real dataset of tiny states, a commit five times a second,
each under a replica's number. What is left is the driver's own work: reading the input, choosing servers, HTTP, the
ledger, reading the journals. Its processor time for a prompt says how many prompts a second it could send if the
servers were fast enough; by the clock the played servers may be the slower part, and are where they share its cores.

    python -m benchmarks.driver --servers 1 8 64
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import write_json
from tests.unit.fake_server import FakeServer

VOCAB_SIZE = 163840
COMMIT_INTERVAL_S = 0.2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompts", type=int, default=4000)
    parser.add_argument("--length", type=int, default=2048, help="tokens a prompt")
    parser.add_argument("--rounds", type=int, default=3, help="runs with each number of servers")
    parser.add_argument("--label", default="", help="becomes part of the result's file name")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--play", type=Path, help=argparse.SUPPRESS)  # be the servers, of a dataset here
    return parser.parse_args()


class PlayedServer(FakeServer):
    """Takes every prompt, and acknowledges it at the next commit, as a real one does, and not at once."""

    shard_bytes = 2**30

    def __init__(self, directory: Path, replica: int) -> None:
        super().__init__(directory, writer=f"dp{replica}-pp0")
        self.record.session_id = os.urandom(16).hex()
        self.record.max_prompt_tokens = 131072

    def capture(self, rid: str, ids: list[int]) -> None:
        self.keep(rid, ids)


async def play(directory: Path, count: int) -> None:
    """Be so many servers; their URLs are the only line of the output."""
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(PlayedServer(directory, replica)) for replica in range(count)]
        print(json.dumps([server.url for server in servers]), flush=True)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), COMMIT_INTERVAL_S)
            for server in servers:
                server.store.commit()


@contextlib.contextmanager
def played(directory: Path, count: int) -> Iterator[list[str]]:
    """So many servers of one dataset, in one process of their own; gives their URLs."""
    command = [sys.executable, "-m", "benchmarks.driver", "--play", str(directory), "--servers", str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()


def write_prompts(path: Path, arguments: argparse.Namespace) -> None:
    """Random token ids, no two prompts with a prefix in common."""
    choose = random.Random(0)
    with path.open("w") as file:
        for number in range(arguments.prompts):
            ids = choose.choices(range(1, VOCAB_SIZE), k=arguments.length)
            file.write(json.dumps({"id": f"sample-{number}", "input_ids": ids}) + "\n")


def measure(data: Path, output: Path, count: int) -> dict[str, float]:
    """One run with so many servers: its wall and processor time, with the start of Python, and the most memory held.

    Raises:
        RuntimeError: the run did not end well, or not with all samples.
    """
    with played(output, count) as urls:
        summary = output.with_suffix(".json")
        command = [sys.executable, "-m", "sglang_hs_capture.cli.main", "run", "--data", str(data)]
        command += [word for url in urls for word in ("--server", url)]
        command += ["--output", str(output), "--json-summary", str(summary)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        said = process.stdout.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"hs-capture run with {count} servers ended with {process.returncode}:\n{said[-4000:]}")
    found = json.loads(summary.read_text())
    return {
        "wall_s": found["seconds"],
        "processor_s": usage.ru_utime + usage.ru_stime,
        "max_rss_bytes": usage.ru_maxrss * 1024,
    }


def main() -> None:
    arguments = parse_arguments()
    if arguments.play:
        asyncio.run(play(arguments.play, arguments.servers[0]))
        return
    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary, "data.jsonl")
        write_prompts(data, arguments)
        for number in range(arguments.rounds):
            for count in arguments.servers:
                run = measure(data, Path(temporary, f"states-{count}-{number}"), count)
                runs.setdefault(str(count), []).append(run)
                each = 1000 * run["processor_s"] / arguments.prompts
                rate = arguments.prompts / run["wall_s"]
                print(f"{count:4} servers: {rate:8.0f} prompts/s, {each:6.2f} ms of processor time each", flush=True)
    name = "driver" + (f"-{arguments.label}" if arguments.label else "")
    write_json(arguments.results, name, "driver", arguments, load_average=os.getloadavg(), runs=runs)


if __name__ == "__main__":
    main()
