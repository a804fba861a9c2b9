"""A server to measure, and load for it: many prompts in flight, timed from the first request to the last answer."""

import asyncio
import contextlib
import itertools
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import aiohttp

from sglang_hs_capture.driver.watch import JournalWatch
from sglang_hs_capture.store.schema import FailureRecord

START_TIMEOUT_S = 420.0
# Without any acknowledgement for so long, a round has failed.
SILENCE_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Timing:
    """One measured round: seconds to the last answer and, where samples were captured, to the last acknowledgement.

    ``tokens`` are those of the prompts, ``generated`` those of the answers.
    """

    tokens: int
    generated: int
    answered_s: float
    acknowledged_s: float | None

    @property
    def rate(self) -> float:
        """Prompt tokens per second, by answers."""
        return self.tokens / self.answered_s

    @property
    def acknowledged_rate(self) -> float:
        """Prompt tokens per second, until the last sample was on disk and acknowledged.

        Raises:
            ValueError: nothing was captured in this round.
        """
        if self.acknowledged_s is None:
            raise ValueError("nothing was captured in this round, so nothing was acknowledged")
        return self.tokens / self.acknowledged_s

    @property
    def generated_rate(self) -> float:
        """Generated tokens per second, by answers."""
        return self.generated / self.answered_s


def server_flags(capture: dict[str, Any] | None, *, cpu: bool) -> tuple[list[str], dict[str, str]]:
    """Flags and environment of a server that does a benchmark's work, up to the weights.

    Args:
        capture: the capture's settings; None serves SGLang's own class, without the plugin.
        cpu: run on the CPU platform.
    """
    flags = ["--model-impl", "sglang", "--skip-tokenizer-init", "--disable-radix-cache", "--disable-prefill-cuda-graph"]
    # The benchmarks warm up themselves, and with DP attention the CPU platform cannot decode, as SGLang's warm-up does.
    flags += ["--skip-server-warmup"]
    environment = {"SGLANG_PLATFORM": "hs_capture_cpu"} if cpu else {}
    if capture is not None:
        flags += ["--json-model-override-args", json.dumps({"hs_capture": capture})]
        environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "sglang_hs_capture.models"
    return flags, environment


_servers = itertools.count()


@contextlib.contextmanager
def served(model: Path, log: Path, flags: Sequence[str], environment: dict[str, str]) -> Iterator[str]:
    """Run ``sglang.launch_server`` and give its URL once it is healthy; its output is appended to ``log``.

    Raises:
        RuntimeError: it ended, or did not become healthy; with the end of its log.
    """
    port = 30000 + (os.getpid() * 16 + next(_servers)) % 10000
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port), *flags]
    # If this process ends, by whatever signal, the server must not stay on the GPU.
    command = [sys.executable, "-m", "sglang_hs_capture.driver.child", str(os.getpid()), *command]
    with log.open("ab") as output:
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


def stable_seed(*parts: object) -> int:
    """A seed that is the same in every process, unlike ``hash``, which is salted for strings."""
    return zlib.crc32(repr(parts).encode())


def text_config(model: Path) -> dict[str, Any]:
    """The language model's part of a model directory's config."""
    config = json.loads((model / "config.json").read_text())
    return {**config, **config.get("text_config", {})}


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
    in_flight: int | None = None,
    dataset: Path | None = None,
    least_bytes: int = 0,
    **fields: Any,
) -> Timing:
    """Send prompts, time the answers, and with ``dataset`` also wait until all are acknowledged there.

    Args:
        url: the server's.
        prompts: token ids.
        rids: the prompts' request ids.
        max_new_tokens: tokens to generate for each prompt, whatever they are.
        in_flight: most prompts sent and not yet answered; all at once by default.
        dataset: the directory to which the server captures; with a pipeline every stage has to acknowledge.
        least_bytes: an answer is at least so long; such answers are not parsed, which would take longer than to send
            them.
        fields: further fields of each request.

    Raises:
        RuntimeError: a request or a capture failed, or an answer has another length than ``max_new_tokens`` or
            ``least_bytes`` say.
    """
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
    bodies = [
        json.dumps({"rid": rid, "input_ids": ids, "sampling_params": sampling, **fields}).encode()
        for rid, ids in zip(rids, prompts, strict=True)
    ]

    def check(content: bytes) -> None:
        if len(content) < least_bytes:
            raise RuntimeError(f"expected an answer of at least {least_bytes} bytes: {content[:500]!r}")
        if max_new_tokens and not least_bytes:
            _check_length(content, max_new_tokens)

    answered, acknowledged = asyncio.run(_round(url, bodies, rids, in_flight or len(prompts), dataset, check))
    return Timing(sum(map(len, prompts)), max_new_tokens * len(prompts), answered, acknowledged)


async def _round(
    url: str,
    bodies: list[bytes],
    rids: list[str],
    in_flight: int,
    dataset: Path | None,
    check: Callable[[bytes], None],
) -> tuple[float, float | None]:
    """Seconds until the last answer, and until the last acknowledgement if there is a dataset."""
    watch = JournalWatch(dataset) if dataset is not None else None
    if watch is not None:
        watch.poll()
    timeout = aiohttp.ClientTimeout(total=None)
    window = asyncio.Semaphore(in_flight)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout, read_bufsize=2**24
    ) as session:

        async def send(body: bytes) -> None:
            headers = {"Content-Type": "application/json"}
            try:
                async with window, session.post(url + "/generate", data=body, headers=headers) as answer:
                    content = await answer.read()
            except aiohttp.ClientError as error:
                raise RuntimeError(f"{url}: {type(error).__name__}: {error}; see the server's log") from error
            if answer.status != 200:
                raise RuntimeError(f"HTTP {answer.status}: {content[:500]!r}")
            check(content)

        started = time.monotonic()
        await asyncio.gather(*map(send, bodies))
        answered = time.monotonic() - started
    return answered, None if watch is None else await _acknowledged(watch, rids, started)


def returned_elements(url: str, vocab_size: int) -> int:
    """How many numbers ``return_hidden_states`` returns for each token of a prompt: those of all its states together.

    Raises:
        RuntimeError: not every token has as many.
    """
    (prompt,) = random_prompts(1, 16, vocab_size, seed=16)
    # Where nothing is generated SGLang computes the lists and leaves them out of its answer (0.5.23).
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}, "return_hidden_states": True}
    request = urllib.request.Request(
        url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=START_TIMEOUT_S) as answer:
        parts = json.load(answer)["meta_info"]["hidden_states"]
    widths = {len(row) for part in parts for row in part}
    if sum(map(len, parts)) != len(prompt) or len(widths) != 1:
        raise RuntimeError(
            f"expected states of {len(prompt)} tokens, got {[len(part) for part in parts]} of widths {sorted(widths)}"
        )
    return widths.pop()


def _check_length(content: bytes, expected: int) -> None:
    """A server that stops early would seem to be fast."""
    generated = json.loads(content)["meta_info"]["completion_tokens"]
    if generated != expected:
        raise RuntimeError(f"expected {expected} generated tokens, the server generated {generated}")


async def _acknowledged(watch: JournalWatch, rids: list[str], started: float) -> float:
    missing, heard = set(rids), time.monotonic()
    while missing:
        before = len(missing)
        for record in watch.poll():
            if not isinstance(record, FailureRecord):
                missing.discard(record.rid)
            elif record.rid in missing:
                raise RuntimeError(f"capture failed: {record}")
        if len(missing) < before:
            heard = time.monotonic()
        if time.monotonic() - heard > SILENCE_TIMEOUT_S:
            raise RuntimeError(
                f"{len(missing)} samples are missing, and none was acknowledged for {SILENCE_TIMEOUT_S} s"
            )
        await asyncio.sleep(0.005)
    return time.monotonic() - started


def device_memory() -> int | None:
    """Bytes of GPU memory in use, by all processes on all GPUs that CUDA may use here together; None without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")  # what other programs hold on the others is none of ours
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return sum(map(int, done.stdout.split())) * 2**20 if done.returncode == 0 else None


def host_memory(pid: int) -> int | None:
    """Bytes of host memory of all processes that were started with ``pid``, in the same POSIX session.

    Pages that several of them share, such as the pinned ring, are counted once (``Pss``). None where the kernel does
    not tell.
    """
    total, session = 0, os.getsid(pid)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) == session:
                found = re.search(r"^Pss:\s+(\d+) kB", (process / "smaps_rollup").read_text(), re.MULTILINE)
                total += 1024 * int(found[1]) if found else 0
        except (ProcessLookupError, FileNotFoundError):
            continue  # it ended
        except OSError:
            return None
    return total


def server_memory(url: str) -> dict[str, Any]:
    """What the server itself says of its memory: GiB of weights and KV cache, and tokens that the cache holds."""
    with urllib.request.urlopen(url + "/server_info", timeout=60) as answer:
        memory = json.load(answer)["internal_states"][0]["memory_usage"]
    return dict(memory)


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        # Benchmarks of a part run without SGLang.
        return "none"


def machine() -> dict[str, str]:
    """Hardware, versions and the time, for every result file."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    gpu = ", ".join(f"{gpus.count(name)} x {name}" if gpus.count(name) > 1 else name for name in dict.fromkeys(gpus))
    return {
        "gpu": gpu or "none",
        "cpu": _cpu_name(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "sglang": _version("sglang"),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
