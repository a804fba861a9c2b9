"""Appends that do not wait for the disk: releases, commits in the background, and disks that fail meanwhile."""

import errno
import gc
import mmap
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import xxhash
from faulty_disk import FailAt, FaultyOS, FullAfter, GatedOS, disk
from toy_store import append_tokens, make_info, open_store, put_sample, queue_sample, states_of, until

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.errors import DiskFullError, StoreError
from sglang_hs_capture.store import states as states_module
from sglang_hs_capture.store.hashing import prefix_hashes
from sglang_hs_capture.store.replay import replay_journal
from sglang_hs_capture.store.states import StateFile
from sglang_hs_capture.store.writer import StoreWriter


class Releases:
    """Remembers in which order, and in which threads, pieces were released."""

    def __init__(self) -> None:
        self.order: list[object] = []
        self.threads: set[str] = set()

    def of(self, name: object) -> Callable[[], None]:
        def release() -> None:
            self.order.append(name)
            self.threads.add(threading.current_thread().name)

        return release


def samples(directory: Path) -> list[str]:
    """The ids of all samples, each read and checked."""
    return [item["id"] for item in HiddenStateDataset(directory)]


def check_checksums(directory: Path) -> None:
    """Each record of rows has the checksum of the bytes that lie there."""
    for number, state in replay_journal(directory, "dp0-pp0").shards.items():
        (path,) = directory.glob(f"shards/dp0-pp0-{number:06d}.[sp]*")
        data = path.read_bytes()[state.record.data_offset :]
        for rows in state.checksums:
            part = data[12 * rows.start : 12 * (rows.start + rows.count)]
            assert rows.xxh3 == xxhash.xxh3_64_intdigest(part)


def test_queued_rows_are_written_hashed_and_released_in_order(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    releases = Releases()
    for number in range(20):
        queue_sample(store, f"s{number}", [number, 2, 3], releases.of(number))
        if number % 3 == 0:
            store.begin_commit()
    acknowledged = [record.rid for record in store.commit()]
    assert releases.order == list(range(20))
    assert releases.threads == {"hs-capture-store-write"}
    assert acknowledged == [f"s{number}" for number in range(20)]
    assert (store.rows, store.bytes) == (60, 720)
    assert store.write_s > 0
    assert store.sync_s > 0
    assert store.close() == []
    assert samples(tmp_path) == acknowledged
    check_checksums(tmp_path)


def test_an_append_across_shards_is_released_once_behind_its_last_row(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    releases = Releases()
    gated = GatedOS("pwritev", "000001.partial")
    with disk(gated):
        queue_sample(store, "long", list(range(12)), releases.of("long"))
        assert gated.reached.wait(60)
        assert releases.order == []
        gated.gate.set()
        store.commit()
    assert releases.order == ["long"]
    store.close()


def test_no_rows_are_released_at_once(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    releases = Releases()
    empty = np.empty(0, np.int64)
    assert store.append(b"", empty, empty, empty.view(np.uint64), releases.of("none")) == []
    assert releases.order == ["none"]
    store.close()


def test_a_slow_disk_holds_up_neither_appends_nor_acknowledged(tmp_path: Path) -> None:
    store = open_store(tmp_path, shard_bytes=10**6)
    releases = Releases()
    with disk(GatedOS("pwritev", ".partial")) as gated:
        queue_sample(store, "s0", [0], releases.of(0))
        assert gated.reached.wait(60)
        for number in range(1, 5):
            queue_sample(store, f"s{number}", [number], releases.of(number))
        store.begin_commit()
        assert store.acknowledged() == []
        assert releases.order == []
        assert store.disk_wait_s == 0
        gated.gate.set()
        assert len(store.commit()) == 5
        assert store.disk_wait_s > 0
    store.close()
    # Tokens and states twice, and the journal: what was queued during the first write was written in one go.
    assert gated.calls.count("pwrite") == 2 + 2 + 1


def test_rows_are_written_while_others_are_made_durable_and_commits_are_joined(tmp_path: Path) -> None:
    store = open_store(tmp_path, shard_bytes=10**6)
    put_sample(store, "first", [1, 2])
    with disk(GatedOS("fsync", ".partial")) as gated:
        store.begin_commit()
        assert gated.reached.wait(60)
        for number in range(4):
            put_sample(store, f"s{number}", [number])
            store.begin_commit()
        assert store.acknowledged() == []
        gated.gate.set()
        assert [record.rid for record in store.commit()] == ["first", "s0", "s1", "s2", "s3"]
    assert gated.calls.count("fsync") == 2 * 3 + 1
    store.close()
    check_checksums(tmp_path)


def test_a_full_shard_is_finished_while_the_next_one_is_filled(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with disk(GatedOS("rename", "000000.partial")) as gated:
        put_sample(store, "a", [1, 2, 3, 4, 5])
        put_sample(store, "b", [6, 7])
        assert gated.reached.wait(60)
        put_sample(store, "c", [8])
        assert [record.rid for record in store.acknowledged()] == ["a"]
        assert len(list(tmp_path.glob("shards/*.partial"))) == 2
        gated.gate.set()
        assert [record.rid for record in store.commit()] == ["b", "c"]
        assert [path.name for path in tmp_path.glob("shards/*.partial")] == ["dp0-pp0-000001.partial"]
    store.close()
    assert samples(tmp_path) == ["a", "b", "c"]


@pytest.mark.parametrize("place", [".partial", ".rows"])
def test_a_disk_that_fills_up_in_the_background_keeps_what_came_before(tmp_path: Path, place: str) -> None:
    store = open_store(tmp_path, shard_bytes=10**6)
    releases = Releases()
    queue_sample(store, "before", [1, 2], releases.of("before"))
    until(lambda: releases.order)
    with disk(FailAt(errno.ENOSPC, "pwrite", place)):
        queue_sample(store, "lost", [3, 4], releases.of("lost"))
        until(lambda: len(releases.order) == 2)
    with pytest.raises(DiskFullError, match="No space left"):
        store.begin_commit()
    with pytest.raises(DiskFullError, match="No space left"):
        queue_sample(store, "after", [5], releases.of("after"))
    store.add_failure("broken", "non_finite", "row 1")
    assert [record.rid for record in store.commit()] == ["before"]
    store.close()
    assert releases.order == ["before", "lost"]
    assert samples(tmp_path) == ["before"]
    replay = replay_journal(tmp_path, "dp0-pp0")
    assert replay.shards[0].rows == 2
    assert [failure.rid for failure in replay.failures] == ["broken"]
    check_checksums(tmp_path)


@pytest.mark.parametrize("room", [0, 11, 12, 24, 35, 36, 59, 60, 71])
def test_of_rows_written_together_those_count_that_fit(tmp_path: Path, room: int) -> None:
    """Six rows in three samples, the second of which spans two shards."""
    store = open_store(tmp_path, shard_bytes=36)
    releases = Releases()
    prompts = {"a": [1, 2], "b": [3, 4], "c": [5, 6]}
    with disk(FullAfter(room)) as full:
        for rid, tokens in prompts.items():
            queue_sample(store, rid, tokens, releases.of(rid))
        full.gate.set()
        with pytest.raises(DiskFullError, match="No space left"):
            store.commit()
        expected = [rid for rid, end in (("a", 24), ("b", 48), ("c", 72)) if end <= room]
        assert [record.rid for record in store.acknowledged()] == expected
        with pytest.raises(DiskFullError):
            append_tokens(store, [7])
        assert store.close() == []
    assert releases.order == list(prompts)
    assert samples(tmp_path) == expected
    assert not list(tmp_path.glob("shards/*.partial"))
    assert not list(tmp_path.glob("shards/*.rows"))
    check_checksums(tmp_path)


def test_close_tells_of_a_full_disk_that_nobody_was_told_of(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    releases = Releases()
    queue_sample(store, "before", [1, 2], releases.of("before"))
    until(lambda: releases.order)
    with disk(FailAt(errno.ENOSPC, "pwrite", ".partial")):
        queue_sample(store, "lost", [3], releases.of("lost"))
        with pytest.raises(DiskFullError, match="No space left"):
            store.close()
    assert [record.rid for record in store.acknowledged()] == ["before"]
    assert store.close() == []
    assert samples(tmp_path) == ["before"]


@pytest.mark.parametrize("call", ["pwrite", "open"])
def test_a_disk_that_breaks_in_the_background_ends_everything(tmp_path: Path, call: str) -> None:
    store = open_store(tmp_path)
    put_sample(store, "kept", [1, 2])
    store.commit()
    releases = Releases()
    with disk(FailAt(errno.EIO, call, "000001.partial")) as broken:
        for number in range(6):
            try:
                queue_sample(store, f"lost {number}", [number, 1, 2], releases.of(number))
            except StoreError:
                break
        with pytest.raises(StoreError, match="Input/output error"):
            store.commit()
        calls = len(broken.calls)
        for again in (store.begin_commit, store.commit, lambda: append_tokens(store, [9])):
            with pytest.raises(StoreError, match="Input/output error"):
                again()
        store.close()
        assert broken.calls[calls:] == []
    assert releases.order == list(range(len(releases.order)))
    assert len(releases.order) >= 2
    assert set(samples(tmp_path)) <= {"kept", "lost 0"}
    open_store(tmp_path).close()
    assert "kept" in samples(tmp_path)


@pytest.mark.parametrize("place", [".partial", ".rows", "journal-", "shards"])
def test_a_failed_sync_in_the_background_is_told_and_never_tried_again(tmp_path: Path, place: str) -> None:
    store = open_store(tmp_path)
    releases = Releases()
    queue_sample(store, "lost", [1, 2], releases.of("lost"))
    with disk(FailAt(errno.EIO, "fsync", place)) as broken:
        store.begin_commit()
        until(lambda: broken.failed)
        told: list[str] = []

        def tell() -> list[str]:
            try:
                assert store.acknowledged() == []
            except StoreError as error:
                told.append(str(error))
            return told

        until(tell)
        assert "Input/output error" in told[0]
        assert store.acknowledged() == []
        calls = len(broken.calls)
        with pytest.raises(StoreError, match="Input/output error"):
            queue_sample(store, "after", [3], releases.of("after"))
        assert store.close() == []
        assert broken.calls[calls:] == []
    assert releases.order == ["lost"]
    open_store(tmp_path).close()
    assert samples(tmp_path) == []


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, DiskFullError), (errno.EIO, StoreError)])
@pytest.mark.parametrize(
    ("call", "place", "skip"),
    [
        ("open", "000001.partial", 0),
        ("open", "000001.rows", 0),
        ("pwrite", "000001.partial", 0),
        ("fsync", "000000.partial", 0),
        ("fsync", "000000.partial", 1),
        ("rename", "000000.partial", 0),
        ("unlink", "000000.rows", 0),
        ("fsync", "shards", 1),
    ],
)
def test_failures_at_a_rollover_lose_nothing_acknowledged(
    tmp_path: Path, code: int, kind: type, call: str, place: str, skip: int
) -> None:
    store = open_store(tmp_path)
    releases = Releases()
    acknowledged: list[str] = []
    queued: list[int] = []

    def capture() -> None:
        for number in range(200):
            queue_sample(store, f"s{number}", [number, 2, 3, 4], releases.of(number))
            queued.append(number)
            store.begin_commit()
            acknowledged.extend(record.rid for record in store.acknowledged())
            time.sleep(0.01)

    with disk(FailAt(code, call, place, skip)) as faulty:
        with pytest.raises(kind, match=os.strerror(code)):
            capture()
        assert faulty.failed
        for finish in (store.close, store.acknowledged):
            try:
                acknowledged += [record.rid for record in finish()]
            except kind:
                continue
    assert releases.order == queued
    assert set(acknowledged) <= set(samples(tmp_path))
    store = open_store(tmp_path)
    put_sample(store, "afterwards", [7, 8])
    store.close()
    assert {*acknowledged, "afterwards"} <= set(samples(tmp_path))
    assert not list(tmp_path.glob("shards/*.partial"))


def test_a_release_that_fails_ends_the_store_and_blocks_nobody(tmp_path: Path) -> None:
    store = open_store(tmp_path)

    def broken() -> None:
        raise RuntimeError("no such slot")

    releases = Releases()
    queue_sample(store, "a", [1], broken)
    until(lambda: store._disk.failed)
    with pytest.raises(RuntimeError, match="no such slot"):
        queue_sample(store, "b", [2], releases.of("b"))
    assert releases.order == []
    with pytest.raises(RuntimeError, match="no such slot"):
        store.commit()
    store.close()


def test_memory_can_be_unmapped_after_its_release(tmp_path: Path) -> None:
    for failing in (False, True):
        store = open_store(tmp_path)
        memory = mmap.mmap(-1, 24)
        released = threading.Event()
        ids = np.array([1, 2])
        with disk(FailAt(errno.ENOSPC, "pwrite", ".partial") if failing else FaultyOS()):
            store.append(memoryview(memory), ids, ids, ids.view(np.uint64), released.set)
            assert released.wait(60)
        until(lambda m=memory: closed(m))
        try:
            store.close()
        except DiskFullError:
            assert failing


def closed(memory: mmap.mmap) -> bool:
    try:
        memory.close()
    except BufferError:
        return False
    return True


def test_a_closed_store_takes_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.close()
    for call in (lambda: append_tokens(store, [1]), store.commit, store.begin_commit):
        with pytest.raises(StoreError, match="the store is closed"):
            call()


def test_threads_of_a_dropped_store_end(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    store = open_store(tmp_path)
    put_sample(store, "a", [1])
    threads = set(threading.enumerate()) - before
    assert len(threads) == 3
    del store
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


PAGE_INFO = {"hidden_size": 1024, "columns": ("boundary:1", "final:pre_norm")}


def page_rows(count: int) -> tuple[mmap.mmap, np.ndarray]:
    """Memory that begins at a page: the states of ``count`` rows of 4096 bytes, behind them room for one more."""
    hashes = prefix_hashes(np.arange(count), 0, 0)
    memory = mmap.mmap(-1, 4096 * (count + 1))
    memory[: 4096 * count] = states_of(hashes, 2, 2048).tobytes()
    return memory, hashes


def store_pages(directory: Path, place: int, direct: bool | None) -> tuple[StoreWriter, bytes]:
    """Store seven rows that begin ``place`` bytes behind a page, three in the first of two appends."""
    memory, hashes = page_rows(7)
    content = memory[: 4096 * 7]
    memory[place : place + len(content)] = content
    view, ids = memoryview(memory)[place : place + len(content)], np.arange(7)
    store = open_store(directory, info=make_info(**PAGE_INFO), shard_bytes=10**6, direct=direct)
    extents = store.append(view[: 3 * 4096], ids[:3], ids[:3], hashes[:3])
    released = threading.Event()
    extents += store.append(view[3 * 4096 :], ids[3:], ids[3:], hashes[3:], released.set)
    store.add_sample("a", 7, extents, int(hashes[-1]))
    assert released.wait(60)
    return store, content


def check_pages(directory: Path, store: StoreWriter, content: bytes) -> None:
    """What was stored can be read before and after the shard is finished."""
    assert [record.rid for record in store.commit()] == ["a"]
    assert (directory / "shards" / "dp0-pp0-000000.partial").read_bytes()[-len(content) :] == content
    store.close()
    finished = (directory / "shards" / "dp0-pp0-000000.safetensors").read_bytes()
    offset = int.from_bytes(finished[:8], "little") + 8
    assert finished[offset : offset + len(content)] == content
    assert samples(directory) == ["a"]


@pytest.mark.parametrize("direct", [None, True, False])
@pytest.mark.parametrize("place", [0, 1, 512])
def test_rows_of_whole_pages_may_lie_anywhere_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int, direct: bool | None
) -> None:
    monkeypatch.setattr(states_module, "_BOUNCE_BYTES", 2 * 4096)
    monkeypatch.setattr(states_module, "_CALL_BYTES", 3 * 4096)
    check_pages(tmp_path, *store_pages(tmp_path, place, direct))


class NoDirectOS(FaultyOS):
    """A file system without direct writes; it says so at the opening of a file, or only when one is written."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late
        self.refused = 0

    def open(self, path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            self.refused += 1
            if not self.late:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.open(path, flags, *mode)

    def pwritev(self, fd: int, views: list[memoryview], offset: int) -> int:
        if self.late and is_direct(fd):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.pwritev(fd, views, offset)


def is_direct(fd: int) -> bool:
    """Whether a file descriptor writes past the page cache."""
    (flags,) = [line for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines() if "flags" in line]
    return bool(int(flags.split()[1], 8) & os.O_DIRECT)


@pytest.mark.parametrize("late", [False, True])
def test_a_file_system_without_direct_writes_is_written_through_the_cache(tmp_path: Path, late: bool) -> None:
    with disk(NoDirectOS(late)) as plain:
        store, content = store_pages(tmp_path, 0, True)
        assert not store._shards[0].direct
        check_pages(tmp_path, store, content)
    assert plain.refused == 1


@pytest.mark.parametrize(("hidden", "direct"), [(1024, True), (1000, False)])
def test_only_shards_whose_rows_are_whole_pages_are_written_directly(tmp_path: Path, hidden: int, direct: bool) -> None:
    (tmp_path / "probe").touch()
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of temporary files has no direct writes")
    store = open_store(tmp_path / "data", info=make_info(**{**PAGE_INFO, "hidden_size": hidden}), direct=True)
    append_tokens(store, [1, 2])
    assert store._shards[0].direct is direct
    store.close()


def test_a_direct_write_that_was_cut_goes_on_at_a_whole_page(tmp_path: Path) -> None:
    class Cut(FaultyOS):
        def pwritev(self, fd: int, views: list[memoryview], offset: int) -> int:
            return os.pwrite(fd, b"".join(views)[:5000], offset) if not is_direct(fd) else self.cut(fd, views, offset)

        def cut(self, fd: int, views: list[memoryview], offset: int) -> int:
            assert offset % 4096 == 0
            assert all(len(view) % 4096 == 0 for view in views)
            return min(5000, os.pwritev(fd, views, offset))

    memory, _ = page_rows(4)
    with disk(Cut()):
        file = StateFile(tmp_path / "file", 4096, direct=True)
        file.append([memoryview(memory)[: 4 * 4096]])
        file.sync()
        file.close()
    assert file.end == 5 * 4096
    assert (tmp_path / "file").read_bytes()[4096:] == memory[: 4 * 4096]


@pytest.mark.parametrize("full", [True, False])
def test_a_direct_write_of_less_than_a_page_leaves_the_reason_to_a_write_through_the_cache(
    tmp_path: Path, full: bool
) -> None:
    class HalfPages(FaultyOS):
        def pwritev(self, fd: int, views: list[memoryview], offset: int) -> int:
            if is_direct(fd):
                return min(os.pwritev(fd, views, offset), 4096 + 512 if offset == 4096 else 512)
            if full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return os.pwritev(fd, views, offset)

    memory, _ = page_rows(3)
    with disk(HalfPages()):
        file = StateFile(tmp_path / "file", 4096, direct=True)
        if not file.direct:
            pytest.skip("the file system of temporary files has no direct writes")
        with pytest.raises(OSError, match="No space left") if full else nullcontext():
            file.append([memoryview(memory)[: 3 * 4096]])
        file.close()
    assert file.end == (2 if full else 4) * 4096
    assert (tmp_path / "file").read_bytes()[4096 : file.end] == memory[: file.end - 4096]
