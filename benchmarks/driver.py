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
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from benchmarks.report import write_json
from sglang_hs_capture.store.hashing import end_hash, prefix_hashes
from sglang_hs_capture.store.identity import model_identity
from sglang_hs_capture.store.schema import DatasetInfo
from sglang_hs_capture.store.session import SessionRecord, write_session
from sglang_hs_capture.store.writer import StoreWriter

VOCAB_SIZE = 163840
COMMIT_INTERVAL_S = 0.2
INFO = DatasetInfo(
    boundaries=(1,),
    columns=("boundary:1", "final:pre_norm"),
    num_layers=4,
    hidden_size=2,
    dtype="bfloat16",
    model_path="/models/played",
    architecture="DeepseekV3ForCausalLM",
    config_hash="0" * 64,
    final_norm_eps=1e-6,
    created_at="2026-01-01T00:00:00.000Z",
    sglang_version="0.5.23",
)


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


class PlayedServer:
    """Takes every prompt, and stores and acknowledges it at the next commit."""

    def __init__(self, directory: Path, replica: int) -> None:
        self._directory, self._replica = directory, replica
        self._record = SessionRecord(
            writer=f"dp{replica}-pp0",
            session_id=os.urandom(16).hex(),
            pid=os.getpid(),
            host=socket.gethostname(),
            state="ready",
            rid_prefix="hs-",
            max_prompt_tokens=131072,
            model=model_identity(INFO),
        )
        self._store = StoreWriter.open(
            directory,
            self._record.writer,
            INFO,
            session_id=self._record.session_id,
            shard_bytes=2**30,
            min_free_bytes=0,
        )
        write_session(directory, self._record)

    async def start(self) -> str:
        """Listen on a free port; the URL."""
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/server_info", self._info)
        app.router.add_post("/generate", self._generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    def commit(self) -> None:
        self._store.commit()

    def close(self) -> None:
        self._store.close()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _info(self, _: web.Request) -> web.Response:
        overrides = {"hs_capture": {"output_dir": str(self._directory), "replica": self._replica}}
        return web.json_response({"json_model_override_args": json.dumps(overrides), "dp_size": 1})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokens = np.array(body["input_ids"], dtype=np.int64)
        states = np.zeros(len(tokens) * INFO.row_bytes, dtype=np.uint8)
        extents = self._store.append(states, tokens, np.arange(len(tokens)), prefix_hashes(tokens, 0, 0))
        self._store.add_sample(body["rid"], len(tokens), extents, end_hash(tokens))
        return web.json_response({"output_ids": [], "meta_info": {"prompt_tokens": len(tokens)}})


async def play(directory: Path, count: int) -> None:
    """Be so many servers; their URLs are the only line of the output."""
    servers = [PlayedServer(directory, replica) for replica in range(count)]
    print(json.dumps([await server.start() for server in servers]), flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    while not ended.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), COMMIT_INTERVAL_S)
        for server in servers:
            server.commit()
    for server in servers:
        server.close()


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
