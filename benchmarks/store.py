"""``StoreWriter`` against the disk itself, and against one file for each sample.

All write the same bytes from the same page-aligned ring in host memory, in turn, several rounds, every other one in
the opposite order:

    store       ``StoreWriter`` with ``release``: a commit is begun each interval, all is acknowledged at the end; with
                each number of shards that may be written side by side
    raw         one file, one ``pwrite`` for each piece, ``fsync`` each interval and at the end
    torch.save  a file for each sample of 2048 tokens, each with an ``fsync``

Store and raw run in each mode: direct writes go past the page cache, where the file system has that, and buffered ones
through it. The time goes from the first write to when everything is durable.

    python -m benchmarks.store --directory /data/store-benchmark --results benchmarks/results
"""

import argparse
import mmap
import os
import queue
import random
import shutil
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import write_json
from sglang_hs_capture.store.hashing import prefix_hashes
from sglang_hs_capture.store.schema import DatasetInfo
from sglang_hs_capture.store.writer import SPILL_SHARE, StoreWriter

HIDDEN, COLUMNS = 7168, ("boundary:3", "boundary:31", "boundary:59", "final:pre_norm")
INFO = DatasetInfo(
    boundaries=(3, 31, 59),
    columns=COLUMNS,
    num_layers=61,
    hidden_size=HIDDEN,
    dtype="bfloat16",
    model_path="none",
    architecture="none",
    config_hash="0",
    final_norm_eps=1e-6,
    created_at="none",
    sglang_version="none",
)
MODES = ("direct", "buffered")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="where the files go; emptied")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--label", default="", help="becomes part of the result's file name")
    parser.add_argument("--gigabytes", type=float, default=8, help="states a round, rounded up to whole samples")
    parser.add_argument("--ring-gigabytes", type=float, default=0.5)
    parser.add_argument("--shard-gigabytes", type=float, default=4)
    parser.add_argument("--slot-rows", type=int, default=1170, help="rows of a ring slot, the largest piece")
    parser.add_argument("--tokens", type=int, default=2048, help="of a sample")
    parser.add_argument("--commit-interval", type=float, default=0.2, help="seconds")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--open-shards", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--no-torch-save", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


class Work:
    """The bytes of a round: samples, cut into pieces that lie in the slots of a ring."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.tokens = arguments.tokens
        self.samples = -(-int(arguments.gigabytes * 1e9) // (arguments.tokens * INFO.row_bytes))
        self.nbytes = self.samples * arguments.tokens * INFO.row_bytes
        self.interval = arguments.commit_interval
        self.shard_bytes = int(arguments.shard_gigabytes * 1e9)
        self.slot_rows = arguments.slot_rows
        self.slots = max(4, int(arguments.ring_gigabytes * 1e9) // (self.slot_rows * INFO.row_bytes))
        slot_bytes = -(-self.slot_rows * INFO.row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._slot_bytes = slot_bytes
        self.ring = memoryview(mmap.mmap(-1, self.slots * slot_bytes))
        noise = random.Random(0).randbytes(1 << 20)
        for start in range(0, len(self.ring), len(noise)):
            part = self.ring[start : start + len(noise)]
            part[:] = noise[: len(part)]
        self.ids = np.arange(self.tokens, dtype=np.int64)
        self.hashes = prefix_hashes(self.ids, 0, 0)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """First and last row, exclusive, of each piece of a sample."""
        for start in range(0, self.tokens, self.slot_rows):
            yield start, min(start + self.slot_rows, self.tokens)

    def rows(self, slot: int, count: int) -> memoryview:
        """The first rows of a slot: uint8 [count * row_bytes]."""
        start = slot * self._slot_bytes
        return self.ring[start : start + count * INFO.row_bytes]


def write_store(directory: Path, work: Work, direct: bool, open_shards: int) -> dict[str, float]:
    """One round of ``StoreWriter``; seconds, and what the store's threads say of theirs."""
    store = StoreWriter.open(
        directory,
        "dp0-pp0",
        INFO,
        session_id="s",
        shard_bytes=work.shard_bytes,
        min_free_bytes=0,
        direct=direct,
        max_open_shards=open_shards,
        spill_bytes=len(work.ring) // SPILL_SHARE,
    )
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for slot in range(work.slots):
        free.put(slot)
    acknowledged = 0
    ring_full = 0.0
    started = committed = time.perf_counter()
    for number in range(work.samples):
        extents = []
        for first, last in work.pieces():
            before = time.perf_counter()
            slot = free.get()
            ring_full += time.perf_counter() - before
            run = slice(first, last)
            rows = work.rows(slot, last - first)
            extents += store.append(rows, work.ids[run], work.ids[run], work.hashes[run], partial(free.put, slot))
        store.add_sample(f"hs-{number}", work.tokens, extents, int(work.hashes[-1]))
        if time.perf_counter() - committed >= work.interval:
            committed = time.perf_counter()
            store.begin_commit()
            acknowledged += len(store.acknowledged())
    acknowledged += len(store.close())
    seconds = time.perf_counter() - started
    if acknowledged != work.samples:
        raise RuntimeError(f"expected {work.samples} samples to be acknowledged, got {acknowledged}")
    return {"seconds": seconds, "ring_full_s": ring_full, "write_s": store.write_s, "sync_s": store.sync_s}


def write_raw(directory: Path, work: Work, direct: bool) -> dict[str, float]:
    """One round of plain writes of the same pieces to one file."""
    directory.mkdir(parents=True)
    fd = os.open(directory / "raw", os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o666)
    slot = end = 0
    started = synced = time.perf_counter()
    for _ in range(work.samples):
        for first, last in work.pieces():
            rows = work.rows(slot, last - first)
            while rows:
                written = os.pwrite(fd, rows, end)
                rows, end = rows[written:], end + written
            slot = (slot + 1) % work.slots
        if time.perf_counter() - synced >= work.interval:
            synced = time.perf_counter()
            os.fsync(fd)
    os.fsync(fd)
    os.close(fd)
    return {"seconds": time.perf_counter() - started}


def write_torch(directory: Path, work: Work) -> dict[str, float]:
    """One round of a pickle for each sample."""
    import torch

    directory.mkdir(parents=True)
    sample_bytes = work.tokens * INFO.row_bytes
    places = len(work.ring) // sample_bytes
    if not places:
        raise SystemExit(f"--ring-gigabytes: expected room for a sample of {sample_bytes} bytes; raise it")
    states = torch.frombuffer(work.ring, dtype=torch.bfloat16, count=places * sample_bytes // 2)
    states = states.view(places, len(COLUMNS), work.tokens, HIDDEN)
    ids = torch.from_numpy(work.ids)
    started = time.perf_counter()
    for number in range(work.samples):
        columns = [column.clone() for column in states[number % places]]  # a view would save the whole ring
        with (directory / f"{number}.pt").open("wb") as file:
            torch.save({"input_ids": ids, "hidden_states": columns}, file)
            file.flush()
            os.fsync(file.fileno())
    return {"seconds": time.perf_counter() - started}


def takes_direct_writes(directory: Path) -> bool:
    """Whether the file system of a folder has writes past the page cache."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "direct"
    path.touch()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
        try:
            os.pwrite(fd, mmap.mmap(-1, mmap.PAGESIZE), 0)
        finally:
            os.close(fd)
    except OSError:
        return False
    finally:
        path.unlink()
    return True


def measure(arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """All rounds by kind, such as ``store, direct``; kinds take turns, every other round in the opposite order."""
    work = Work(arguments)
    kinds: dict[str, Any] = {}
    for mode in arguments.modes:
        if mode == "direct" and not takes_direct_writes(arguments.directory):
            print(f"{arguments.directory}: no direct writes here")
            continue
        for count in arguments.open_shards:
            name = f"store, {mode}, {count} open"
            kinds[name] = partial(write_store, direct=mode == "direct", open_shards=count)
        kinds[f"raw, {mode}"] = partial(write_raw, direct=mode == "direct")
    if not arguments.no_torch_save:
        kinds["torch.save"] = write_torch
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for number in range(arguments.rounds):
        # Whoever comes behind another finds memory for the page cache that the system has just had in hand.
        for kind, write in list(kinds.items())[:: -1 if number % 2 else 1]:
            shutil.rmtree(arguments.directory, ignore_errors=True)
            os.sync()
            cpu = time.process_time()
            found = write(arguments.directory / "data", work)
            found["cpu_s"] = time.process_time() - cpu
            found["GB/s"] = work.nbytes / 1e9 / found["seconds"]
            rounds[kind].append(found)
    shutil.rmtree(arguments.directory, ignore_errors=True)
    return rounds


def summarise(rounds: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Median and spread of each kind's rate, and of the store's share of the raw rate of the same round."""
    summary = {}
    for kind, found in rounds.items():
        rates = [one["GB/s"] for one in found]
        summary[kind] = {"median": statistics.median(rates), "least": min(rates), "most": max(rates)}
        mode = kind.removeprefix("store, ").partition(",")[0]
        raw = rounds.get(f"raw, {mode}") if kind.startswith("store, ") else None
        if raw is not None:
            shares = [one["GB/s"] / other["GB/s"] for one, other in zip(found, raw, strict=True)]
            summary[kind] |= {"of raw": statistics.median(shares)}
    return summary


def main() -> None:
    arguments = parse_arguments()
    rounds = measure(arguments)
    summary = summarise(rounds)
    name = "-".join(part for part in ("store", arguments.label) if part)
    write_json(arguments.results, name, "store", arguments, **{"GB/s": summary, "rounds": rounds})
    print("| what | GB/s, median | least to most | of raw |\n|---|---|---|---|")
    for kind, rate in summary.items():
        share = f"{rate['of raw']:.2f}" if "of raw" in rate else ""
        print(f"| {kind} | {rate['median']:.2f} | {rate['least']:.2f} to {rate['most']:.2f} | {share} |")


if __name__ == "__main__":
    main()
