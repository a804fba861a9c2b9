"""Shards written side by side, hard pressed: no room, no threads, failures in the middle, and random orders."""

import gc
import mmap
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faulty_disk import GatedOS, disk, open_files
from toy_store import make_info, open_store, put_sample, queue_sample, scales_of, states_of, until

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.errors import DiskFullError
from sglang_hs_capture.staging.ring import Consumer, Producer, RingMemory
from sglang_hs_capture.store import disk as disk_module
from sglang_hs_capture.store.hashing import prefix_hashes
from sglang_hs_capture.store.merge import merge
from sglang_hs_capture.store.recovery import recover_dataset
from sglang_hs_capture.store.schema import DatasetInfo, Extent
from sglang_hs_capture.store.writer import StoreWriter
from sglang_hs_capture.verify.check import CheckSettings, CheckView, check_dataset

ROW_BYTES = 12


def nothing() -> None:
    """A release that nobody waits for."""


def store_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hs-capture-store")]


def tokens_of(rid: str) -> list[int]:
    return [int(token) for token in rid.split("/")[1].split(".")]


def read_all(directory: Path) -> set[str]:
    """The samples of a dataset, each compared byte for byte with what was captured."""
    dataset = HiddenStateDataset(directory, raw=True)
    found = set()
    for item in dataset:
        tokens = tokens_of(item["id"])
        hashes = prefix_hashes(np.array(tokens), 0, 0)
        states = torch.cat([column.view(torch.uint8) for column in item["hidden_states"]], dim=1).numpy()
        assert item["input_ids"].tolist() == tokens
        assert np.array_equal(states, states_of(hashes, 2, dataset.info.column_bytes))
        if dataset.info.scaled:
            assert np.array_equal(np.stack(item["scales"], axis=1), scales_of(hashes))
        found.add(item["id"])
    return found


def check_sound(directory: Path) -> None:
    """``verify`` finds nothing wrong."""
    result = check_dataset(directory, CheckSettings(threads=1), CheckView())
    assert result.sound, [str(finding) for finding in result.findings.listed()]


class NappingOS:
    """A disk that takes its time, each call another, with calls side by side."""

    def __init__(self, seed: int, longest_s: float) -> None:
        self._rng, self._longest_s = random.Random(seed), longest_s

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _nap(self) -> None:
        time.sleep(self._rng.random() * self._longest_s)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self._nap()
        return os.pwritev(fd, views, offset)

    def fsync(self, fd: int) -> None:
        self._nap()
        os.fsync(fd)


class Settings:
    """A random store: of one dtype or the other, with shards of few rows or of many, few lanes or many."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.info: DatasetInfo = make_info(dtype=self.rng.choice(("bfloat16", "float8_e4m3")))
        row = 2 * self.info.column_bytes
        # One row is more than the first of these sizes.
        self.shard_bytes = self.rng.choice((1, 2 * row, 17 * row, 1000 * row))
        self.lanes = self.rng.choice((2, 4, 64))

    def open(self, directory: Path) -> StoreWriter:
        return open_store(
            directory, info=self.info, shard_bytes=self.shard_bytes, spill_bytes=0, max_open_shards=self.lanes
        )


def capture(directory: Path, seed: int, report: Callable[[list[str]], object], rounds: int) -> tuple[StoreWriter, int]:
    """Store prompts in random parts, some of which share prefixes, and commit now and then; the store, and how many.

    The memory of rows is overwritten as soon as it is given back.
    """
    settings = Settings(seed)
    rng, store = settings.rng, settings.open(directory)
    known: deque[tuple[list[int], list[Extent]]] = deque(maxlen=20)
    for number in range(rounds):
        shared, lent = rng.choice(known) if known and rng.random() < 0.4 else ([], [])
        start = rng.randint(0, len(shared))
        tokens = shared[:start] + [rng.randrange(10_000) for _ in range(rng.randint(1, rng.choice((3, 30))))]
        extents = first_rows(lent, start)
        hashes = prefix_hashes(np.array(tokens), 0, 0)
        while start < len(tokens):
            end = rng.randint(start + 1, len(tokens))
            extents += queue_rows(store, tokens, hashes, start, end)
            start = end
        store.add_sample(f"{number}/" + ".".join(map(str, tokens)), len(tokens), extents, int(hashes[-1]))
        known.append((tokens, extents))
        what = rng.random()
        if what < 0.2:
            store.begin_commit()
        elif what < 0.25:
            report([record.rid for record in store.commit()])
        elif what < 0.5:
            report([record.rid for record in store.acknowledged()])
    report([record.rid for record in store.close()])
    return store, rounds


def first_rows(extents: Sequence[Extent], count: int) -> list[Extent]:
    """The extents of the first so many of some rows."""
    first = []
    for extent in extents:
        taken = min(extent.count, count)
        if taken:
            first.append(Extent(extent.shard, extent.start, taken))
        count -= taken
    return first


def queue_rows(store: StoreWriter, tokens: list[int], hashes: np.ndarray, start: int, end: int) -> list[Extent]:
    """Queue some of a prompt's rows, in memory that is overwritten and unmapped once it is given back."""
    part = slice(start, end)
    content = states_of(hashes[part], 2, store.info.column_bytes).tobytes()
    memory = mmap.mmap(-1, len(content))
    memory[:] = content

    def release() -> None:
        memory[:] = b"\xa5" * len(content)

    scales = scales_of(hashes[part]) if store.info.scaled else None
    return store.append(
        memoryview(memory), np.array(tokens[part]), np.arange(start, end), hashes[part], release, scales
    )


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is such a thing: the disk's own speed at ``fsync`` is not under test."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as name:
        yield Path(name)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_order_all_is_stored_and_nothing_is_left_behind(directory: Path, seed: int) -> None:
    acknowledged: list[str] = []
    with disk(NappingOS(seed, random.Random(seed).choice((0, 0.0005, 0.002)))):  # type: ignore[arg-type]
        store, count = capture(directory / "data", seed, acknowledged.extend, 80)
    assert len(list(store._lanes)) > 1
    assert [lane.appender.backlog for lane in store._lanes] == [0] * len(list(store._lanes))
    assert len(acknowledged) == len(set(acknowledged)) == count
    assert store_threads() == []
    assert open_files(directory) == []
    assert {path.suffix for path in (directory / "data" / "shards").iterdir()} == {".safetensors"}
    assert read_all(directory / "data") == set(acknowledged)
    check_sound(directory / "data")


def capture_killed(directory: Path, seed: int) -> set[str]:
    """What a process acknowledged before it was killed at a random moment, once it had several shards open."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with disk(NappingOS(seed, 0.002)):  # type: ignore[arg-type]
                capture(directory, seed, lambda rids: os.write(writing, "".join(f"{r}\n" for r in rids).encode()), 400)
        finally:
            os._exit(1)
    os.close(writing)
    until(lambda: len(list(directory.glob("shards/*.partial"))) > 1)
    time.sleep(random.Random(seed).uniform(0, 0.25))
    os.kill(child, signal.SIGKILL)
    with open(reading, encoding="utf-8") as pipe:
        acknowledged = set(pipe.read().split("\n")[:-1])
    os.waitpid(child, 0)
    return acknowledged


def test_killed_at_any_moment_verify_finds_nothing_wrong(directory: Path) -> None:
    """Before and after what was left is recovered from, and in what it is merged into."""
    several = 0
    for seed in range(8):
        target = directory / str(seed)
        acknowledged = capture_killed(target, seed)
        before = read_all(target)
        assert acknowledged <= before
        several += len(list(target.glob("shards/*.partial"))) > 1
        check_sound(target)
        recover_dataset(target)
        assert read_all(target) == before
        check_sound(target)
        merge(directory / "merged", [target])
        assert read_all(directory / "merged") == before
        check_sound(directory / "merged")
        shutil.rmtree(directory / "merged")
    assert several


def test_the_threads_of_all_lanes_of_a_dropped_store_end(tmp_path: Path) -> None:
    store = open_store(tmp_path, shard_bytes=10**6, spill_bytes=0, max_open_shards=3)
    with disk(GatedOS("pwritev", ".partial")) as held:
        for number in range(3):
            queue_sample(store, f"s{number}", [number], nothing)
        assert len(store_threads()) == 7
        del store
        gc.collect()
        held.gate.set()
        until(lambda: not store_threads())


def test_a_release_that_fails_while_another_lane_writes_ends_the_store_and_holds_nothing_back(tmp_path: Path) -> None:
    store = open_store(tmp_path, shard_bytes=10**6, spill_bytes=0, max_open_shards=3)
    released: list[str] = []

    def broken() -> None:
        raise RuntimeError("no such slot")

    with disk(GatedOS("pwritev", "000000.partial")) as held:
        queue_sample(store, "0/1", [1], lambda: released.append("held"))
        assert held.reached.wait(60)
        queue_sample(store, "1/2", [2], broken)
        until(lambda: store._disk.failed)
        held.gate.set()
        with pytest.raises(RuntimeError, match="no such slot"):
            store.commit()
        assert store.close() == []
    assert released == ["held"]
    assert [lane.appender.backlog for lane in store._lanes] == [0, 0]
    assert store_threads() == []
    assert open_files(tmp_path) == []
    store = open_store(tmp_path)
    put_sample(store, "2/3", [3])
    store.close()
    assert read_all(tmp_path) == {"2/3"}


@pytest.mark.parametrize("call", ["commit", "close"])
def test_who_is_interrupted_while_waiting_can_close(tmp_path: Path, call: str) -> None:
    store = open_store(tmp_path, shard_bytes=10**6, spill_bytes=0, max_open_shards=3)
    with disk(GatedOS("pwritev", ".partial")) as held:
        for number in range(4):
            queue_sample(store, f"{number}/{number}", [number], nothing)
        assert held.reached.wait(60)
        main = threading.main_thread().ident
        assert main is not None
        calling = threading.Event()

        def interrupt_and_go_on() -> None:
            assert calling.wait(60)
            time.sleep(0.2)
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.2)
            held.gate.set()

        def interrupted() -> None:
            calling.set()
            getattr(store, call)()

        threading.Thread(target=interrupt_and_go_on).start()
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        store.close()
    assert store_threads() == []
    assert open_files(tmp_path) == []
    assert read_all(tmp_path) == {f"{number}/{number}" for number in range(4)}
    check_sound(tmp_path)


def test_a_piece_of_the_ring_is_never_given_out_again_while_a_lane_reads_it() -> None:
    """Pieces are done with in any order, by several threads, each of which looks whether its piece was overwritten."""
    memory = RingMemory.create(2**16, 24)
    producer, consumer = Producer(memory, check_consumer=nothing), Consumer(memory)
    rng = random.Random(1)
    overwritten: list[bytes] = []
    users: list[threading.Thread] = []

    def use(done: Callable[[], None], data: memoryview, filled: bytes, nap_s: float) -> None:
        time.sleep(nap_s)
        if bytes(data) != filled:
            overwritten.append(filled)
        done()

    for number in range(600):
        span = producer.reserve(rng.randint(1, 800) * 24, 24)
        data, filled = consumer.data(span), bytes([number % 251]) * span.nbytes
        data[:] = filled
        lease = consumer.lease(span)
        for _ in range(rng.randint(0, 2)):
            users.append(threading.Thread(target=use, args=(lease.share(), data, filled, rng.random() / 500)))
            users[-1].start()
        lease.done()
    for user in users:
        user.join()
    assert overwritten == []
    assert not consumer._leases


class FewBytesFree(GatedOS):
    """A file system of which so many bytes are free, less those of states written; each first write is held up."""

    def __init__(self, room: int) -> None:
        super().__init__("pwritev", ".partial")
        self.room = room
        self.waiting = 0

    def statvfs(self, path: Path) -> Any:
        return type("Room", (), {"f_bavail": self.room, "f_frsize": 1})

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self.waiting += 1
        assert self.gate.wait(60)
        written = os.pwritev(fd, views, offset)
        with self._lock:
            self.room -= written
        return written


@pytest.mark.parametrize("lanes", [1, 4])
def test_the_floor_holds_however_many_lanes_write_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lanes: int
) -> None:
    """Each of the writes fits, and they do not fit together."""
    monkeypatch.setattr(disk_module, "_SPACE_CHECK_BYTES", 1)
    floor = 1000
    store = open_store(tmp_path, shard_bytes=10**6, spill_bytes=0, max_open_shards=lanes, min_free_bytes=0)
    store._disk._min_free_bytes = floor
    told: list[str] = []
    with disk(FewBytesFree(floor + 5 * ROW_BYTES)) as few:
        for number in range(lanes):
            try:
                queue_sample(store, f"s{number}", [number, 1], nothing)
            except DiskFullError as error:
                told.append(str(error))
        until(lambda: few.waiting == min(lanes, 2) and (lanes == 1 or store._disk.full))
        few.gate.set()
        try:
            kept = store.commit()
        except DiskFullError as error:
            told.append(str(error))
            kept = store.acknowledged()
        assert len(kept) == min(lanes, 2)
        assert few.room >= floor
        store.close()
    assert all("1060 bytes are free and 1000 must stay free (min_free_bytes) when 72 more" in text for text in told)
    assert bool(told) == (lanes > 1)


@pytest.mark.parametrize("which", ["store-write", "store-hash"])
def test_a_process_that_may_start_no_more_threads_goes_on_with_the_lanes_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    store = open_store(tmp_path, shard_bytes=10**6, spill_bytes=0, max_open_shards=4)
    start = threading.Thread.start
    refused = Counter[str]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name.endswith(which):
            refused[which] += 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with disk(GatedOS("pwritev", ".partial")) as held:
        for number in range(5):
            queue_sample(store, f"s{number}", [number], nothing)
        # It is not tried again at each append.
        assert refused[which] == 1
        assert len(store_threads()) == 3
        held.gate.set()
        assert len(store.commit()) == 5
    store.close()
    assert store_threads() == []
