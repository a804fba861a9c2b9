"""A server to measure, and load for it: many prompts in flight, timed from the first request to the last answer."""

import asyncio
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import aiohttp

from sglang_hs_capture.store.journal import JournalTail

START_TIMEOUT_S = 420.0


@dataclass(frozen=True)
class Timing:
    """One measured round: seconds to the last answer and, where samples were captured, to the last acknowledgement."""

    tokens: int
    answered_s: float
    acknowledged_s: float | None

    @property
    def rate(self) -> float:
        """Prompt tokens per second, by answers."""
        return self.tokens / self.answered_s


@contextmanager
def served(model: Path, log: Path, flags: Sequence[str], environment: dict[str, str]) -> Iterator[str]:
    """Run ``sglang.launch_server`` and give its URL once it is healthy.

    Raises:
        RuntimeError: it ended, or did not become healthy; with the end of its log.
    """
    port = 30000 + os.getpid() % 10000
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment}, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        asyncio.run(_healthy(url, process, log))
        yield url
    finally:
        for signum in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, signum)
                process.wait(20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


async def _healthy(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                async with session.get(url + "/health", timeout=aiohttp.ClientTimeout(30)) as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(0.5)
    raise RuntimeError("the server did not become healthy:\n" + "\n".join(log.read_text().splitlines()[-40:]))


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """``count`` prompts of ``length`` random tokens."""
    generator = random.Random(seed)
    return [[generator.randrange(10, vocab_size) for _ in range(length)] for _ in range(count)]


def run_round(
    url: str,
    prompts: list[list[int]],
    rids: list[str],
    *,
    max_new_tokens: int = 0,
    journal: Path | None = None,
    **fields: Any,
) -> Timing:
    """Send all prompts at once and time the answers; with ``journal``, also wait until all are acknowledged there."""
    return asyncio.run(_round(url, prompts, rids, max_new_tokens, journal, fields))


async def _round(
    url: str,
    prompts: list[list[int]],
    rids: list[str],
    max_new_tokens: int,
    journal: Path | None,
    fields: dict[str, Any],
) -> Timing:
    tail = JournalTail(journal) if journal is not None else None
    if tail is not None:
        tail.poll()
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
    bodies = [
        json.dumps({"rid": rid, "input_ids": ids, "sampling_params": sampling, **fields}).encode()
        for rid, ids in zip(rids, prompts, strict=True)
    ]
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout, read_bufsize=2**24
    ) as session:

        async def send(body: bytes) -> None:
            async with session.post(
                url + "/generate", data=body, headers={"Content-Type": "application/json"}
            ) as answer:
                content = await answer.read()
                if answer.status != 200:
                    raise RuntimeError(f"HTTP {answer.status}: {content[:500]!r}")

        started = time.monotonic()
        await asyncio.gather(*map(send, bodies))
        answered = time.monotonic() - started
    return Timing(sum(map(len, prompts)), answered, None if tail is None else await _acknowledged(tail, rids, started))


async def _acknowledged(tail: JournalTail, rids: list[str], started: float, timeout_s: float = 120) -> float:
    missing = set(rids)
    while missing:
        for record in tail.poll():
            if record["t"] == "failed" and record["rid"] in missing:
                raise RuntimeError(f"capture failed: {record}")
            if record["t"] == "sample":
                missing.discard(record["rid"])
        if time.monotonic() - started > timeout_s:
            raise RuntimeError(f"{len(missing)} samples were not acknowledged within {timeout_s} s")
        await asyncio.sleep(0.005)
    return time.monotonic() - started


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        # Benchmarks of a part run without SGLang.
        return "none"


def machine() -> dict[str, str]:
    """Hardware, versions and the time, for every result file."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "gpu": gpu,
        "cpu": platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "sglang": _version("sglang"),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
