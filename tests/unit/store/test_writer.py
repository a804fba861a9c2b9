"""Appending, committing, the lock, and disks that fail in every place."""

import errno
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from faulty_disk import FailAt, FaultyOS, ShortWrites, disk
from toy_store import append_tokens, make_info, open_store, put_sample

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.errors import DatasetLockedError, DatasetMismatchError, DiskFullError, StoreError
from sglang_hs_capture.store.index import load_index
from sglang_hs_capture.store.replay import replay_journal
from sglang_hs_capture.store.schema import Extent
from sglang_hs_capture.store.writer import StoreWriter


def samples(directory: Path) -> list[str]:
    """The ids of all samples, each read and checked."""
    return [item["id"] for item in HiddenStateDataset(directory)]


def test_rows_fill_shards_and_extents_span_them(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert put_sample(store, "a", [1, 2, 3]) == [Extent(0, 0, 3)]
    assert put_sample(store, "b", list(range(9))) == [Extent(0, 3, 2), Extent(1, 0, 5), Extent(2, 0, 2)]
    assert [record.rid for record in store.commit()] == ["a", "b"]
    assert store.commit() == []
    assert (store.rows, store.bytes, store.row_bytes) == (12, 144, 12)
    assert store.disk_wait_s > 0
    assert store.close() == []
    assert store.close() == []
    assert samples(tmp_path) == ["a", "b"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "dataset.json",
        "journal-dp0-pp0.jsonl",
        "lock-dataset",
        "lock-dp0-pp0",
        "shards",
    ]


def test_a_row_larger_than_a_shard_gets_one(tmp_path: Path) -> None:
    store = open_store(tmp_path, shard_bytes=1)
    assert put_sample(store, "a", [1, 2]) == [Extent(0, 0, 1), Extent(1, 0, 1)]
    store.close()
    assert samples(tmp_path) == ["a"]


def test_samples_committed_by_a_full_shard_are_returned_by_the_next_commit(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_sample(store, "a", [1, 2, 3, 4, 5])
    put_sample(store, "b", [6])
    deadline = time.monotonic() + 30
    while [sample.rid for sample in load_index(tmp_path).samples] != ["a"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [record.rid for record in store.commit()] == ["a", "b"]
    put_sample(store, "c", [7])
    assert [record.rid for record in store.close()] == ["c"]


def test_journal_is_in_the_documented_order(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_sample(store, "a", [1, 2, 3])
    store.add_failure("b", "non_finite", "row 1")
    store.commit()
    store.close()
    replay = replay_journal(tmp_path, "dp0-pp0")
    lines = (tmp_path / "journal-dp0-pp0.jsonl").read_text().splitlines()
    assert [line.split('"')[3] for line in lines] == ["journal", "shard", "rows", "sample", "failed", "finished"]
    assert (replay.failures[0].rid, replay.failures[0].reason, replay.failures[0].detail) == (
        "b",
        "non_finite",
        "row 1",
    )


def test_nothing_is_left_of_a_session_without_rows(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    store = open_store(tmp_path)
    store.append(b"", np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint64))
    store.close()
    assert list((tmp_path / "shards").iterdir()) == []


def test_numbers_go_on_and_old_rows_stay(tmp_path: Path) -> None:
    for session in range(3):
        store = open_store(tmp_path, session_id=f"s{session}")
        assert put_sample(store, f"r{session}", [session, 1])[0].shard == session
        store.close()
    assert samples(tmp_path) == ["r0", "r1", "r2"]


def test_sizes_must_agree(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    one, hashes = np.array([1]), np.array([1], np.uint64)
    with pytest.raises(ValueError, match="expected 1 of 12 bytes; got 11 bytes"):
        store.append(bytes(11), one, one, hashes)
    with pytest.raises(ValueError, match="got 1, 2 and 1"):
        store.append(bytes(12), one, np.array([1, 2]), hashes)
    assert store.rows == 0
    store.close()


@pytest.mark.parametrize(
    ("dtype", "scales", "message"),
    [
        ("float8_e4m3", None, r"expected float32 \[1, 2\] for rows of float8_e4m3; got none"),
        ("float8_e4m3", np.ones((1, 2)), r"expected float32 \[1, 2\] .* got float64 \[1, 2\]"),
        ("float8_e4m3", np.ones((1, 3), np.float32), r"got float32 \[1, 3\]"),
        ("float8_e4m3", np.ones((2, 2), np.float32), r"got float32 \[2, 2\]"),
        ("bfloat16", np.ones((1, 2), np.float32), r"expected none for rows of bfloat16; got float32 \[1, 2\]"),
    ],
)
def test_scales_must_be_those_of_the_rows(tmp_path: Path, dtype: str, scales: np.ndarray | None, message: str) -> None:
    store = open_store(tmp_path, info=make_info(dtype=dtype))
    one, hashes = np.array([1]), np.array([1], np.uint64)
    with pytest.raises(ValueError, match=message):
        store.append(bytes(store.row_bytes), one, one, hashes, None, scales)
    assert store.rows == 0
    store.close()


@pytest.mark.parametrize(
    ("length", "extents"),
    [
        (0, []),
        (3, [Extent(0, 0, 2)]),
        (2, [Extent(0, 2, 2)]),
        (2, [Extent(0, -1, 2)]),
        (1, [Extent(1, 0, 1)]),
        (0, [Extent(0, 0, 0)]),
        (1, [Extent(0, 0, 2), Extent(0, 2, -1)]),
    ],
)
def test_samples_must_name_rows_that_were_appended(tmp_path: Path, length: int, extents: list[Extent]) -> None:
    store = open_store(tmp_path)
    append_tokens(store, [1, 2, 3])
    with pytest.raises(ValueError, match="sample 'x'"):
        store.add_sample("x", length, extents, 0)
    store.close()


def test_samples_cannot_name_rows_of_an_earlier_session(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_sample(store, "a", [1])
    store.close()
    store = open_store(tmp_path)
    with pytest.raises(ValueError, match="since the store was opened"):
        store.add_sample("x", 1, [Extent(0, 0, 1)], 0)
    store.close()


def test_extents_are_joined_in_the_journal(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first, _ = append_tokens(store, [1, 2])
    second, end_hash = append_tokens(store, [1, 2, 3], start=2)
    store.add_sample("a", 3, first + second, end_hash)
    assert store.commit()[0].extents == (Extent(0, 0, 3),)
    store.close()


def test_buffers_of_all_kinds_are_taken_and_short_writes_continued(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ids, hashes = np.array([1, 2]), np.array([1, 2], np.uint64)
    with disk(ShortWrites()):
        for rows in (
            bytes(24),
            bytearray(24),
            memoryview(bytes(24)),
            np.zeros(24, np.uint8),
            np.zeros((2, 12), np.uint8),
        ):
            store.append(rows, ids, ids, hashes)
    store.close()
    assert replay_journal(tmp_path, "dp0-pp0").shards[0].rows == 5


def test_appending_lets_other_threads_run(tmp_path: Path) -> None:
    store = open_store(tmp_path, shard_bytes=1 << 30, info=make_info(hidden_size=1 << 20))
    states, one = bytearray(store.row_bytes * 16), np.zeros(16, np.int64)
    ticks = 0
    done = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0)

    thread = threading.Thread(target=tick)
    switch = sys.getswitchinterval()
    sys.setswitchinterval(60)  # only a released GIL lets the other thread run
    try:
        thread.start()
        ticks = 0
        store.append(states, one, one, one.view(np.uint64))
        during = ticks
    finally:
        sys.setswitchinterval(switch)
        done.set()
        thread.join()
    store.close()
    assert during > 10


def test_second_writer_is_refused_by_pid(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path; from toy_store import open_store;"
        "store = open_store(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parents[1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(DatasetLockedError, match=rf"process {other.pid} is writing here"):
            open_store(tmp_path)
        open_store(tmp_path, "dp1-pp0").close()
        timer = threading.Timer(0.3, other.kill)
        timer.start()
        open_store(tmp_path, lock_timeout_s=30).close()
        timer.join()


def test_lock_is_let_go_when_opening_fails(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    with pytest.raises(DatasetMismatchError):
        open_store(tmp_path, info=make_info(dtype="float16"))
    open_store(tmp_path).close()


@pytest.mark.parametrize(
    "changes",
    [
        {"boundaries": (2,)},
        {"columns": ("boundary:1", "final:post_norm")},
        {"num_layers": 5},
        {"hidden_size": 6},
        {"dtype": "float16"},
        {"config_hash": "decaf"},
    ],
)
def test_another_model_or_setting_is_refused(tmp_path: Path, changes: dict) -> None:
    open_store(tmp_path).close()
    ((name, value),) = changes.items()
    shown = list(value) if isinstance(value, tuple) else value
    with pytest.raises(DatasetMismatchError) as caught:
        open_store(tmp_path, info=make_info(**changes))
    assert f"({name}: " in str(caught.value)
    assert f"{shown} now" in str(caught.value)
    assert "choose another --output" in str(caught.value)


def test_a_moved_model_and_other_versions_are_the_same_dataset(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    other = make_info(model_path="/elsewhere", sglang_version="0.5.17", created_at="later", architecture="Other")
    store = open_store(tmp_path, info=other)
    assert store.info == make_info()
    store.close()


def test_columns_must_be_the_datasets(tmp_path: Path) -> None:
    for columns in ((), ("boundary:9",)):
        with pytest.raises(DatasetMismatchError, match="columns: expected some of"):
            StoreWriter.open(
                tmp_path, "w", make_info(), session_id="s", shard_bytes=1, min_free_bytes=0, columns=columns
            )


def test_what_cannot_be_created_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"could not create the dataset: Not a directory"):
        open_store(tmp_path / "file" / "data")
    with pytest.raises(ValueError, match="writer"):
        open_store(tmp_path, "../dp0")


FULL_PLACES = [
    ("pwrite", ".partial"),
    ("pwrite", ".rows"),
    ("open", ".partial"),
    ("open", ".rows"),
    ("fsync", ".partial"),
    ("fsync", ".rows"),
    ("pwrite", "journal-"),
    ("fsync", "journal-"),
]


def put_until_it_fails(store: StoreWriter, acknowledged: list[str]) -> None:
    """Capture samples of four rows."""
    for number in range(10):
        put_sample(store, f"s{number}", [number, 2, 3, 4])
        acknowledged += [record.rid for record in store.commit()]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize(("call", "place"), FULL_PLACES)
@pytest.mark.parametrize("skip", [0, 1, 2])
def test_failing_disk_keeps_what_was_acknowledged(tmp_path: Path, code: int, call: str, place: str, skip: int) -> None:
    store = open_store(tmp_path)
    put_sample(store, "before", [1, 2, 3])
    acknowledged = [record.rid for record in store.commit()]
    with disk(FailAt(code, call, place, skip)) as faulty:
        kind = StoreError if code == errno.EIO else DiskFullError
        with pytest.raises(kind, match=os.strerror(code)) as caught:
            put_until_it_fails(store, acknowledged)
        assert faulty.failed
        assert type(caught.value) is kind
        with pytest.raises(kind):
            put_sample(store, "after", [9])
        assert set(acknowledged) <= set(samples(tmp_path))
        with suppress(kind):
            acknowledged += [record.rid for record in store.commit()]
        acknowledged += [record.rid for record in store.close()]
    assert set(acknowledged) <= set(samples(tmp_path))
    store = open_store(tmp_path)
    put_sample(store, "afterwards", [7, 8])
    store.close()
    assert {*acknowledged, "afterwards"} <= set(samples(tmp_path))
    assert not list((tmp_path / "shards").glob("*.partial"))


@pytest.mark.parametrize("place", [".partial", ".rows"])
def test_full_disk_in_an_append_still_commits_what_was_appended_before(tmp_path: Path, place: str) -> None:
    store = open_store(tmp_path)
    put_sample(store, "before", [1, 2])
    with disk(FailAt(errno.ENOSPC, "pwrite", place)), pytest.raises(DiskFullError):
        append_tokens(store, [3, 4])
    with pytest.raises(DiskFullError):
        append_tokens(store, [3, 4])
    assert [record.rid for record in store.commit()] == ["before"]
    store.close()
    assert samples(tmp_path) == ["before"]
    assert replay_journal(tmp_path, "dp0-pp0").shards[0].rows == 2


@pytest.mark.parametrize("place", [".partial", ".rows", "journal-"])
def test_failed_fsync_is_never_tried_again(tmp_path: Path, place: str) -> None:
    store = open_store(tmp_path)
    put_sample(store, "before", [1, 2])
    store.commit()
    put_sample(store, "lost", [3])
    counting = FailAt(errno.EIO, "fsync", place)
    with disk(counting):
        with pytest.raises(StoreError, match="Input/output error"):
            store.commit()
        calls = len(counting.calls)
        with pytest.raises(StoreError, match="Input/output error"):
            store.commit()
        with pytest.raises(StoreError, match="Input/output error"):
            append_tokens(store, [5])
        assert store.close() == []
        assert counting.calls[calls:] == []
    assert samples(tmp_path) == ["before"]
    open_store(tmp_path).close()
    assert samples(tmp_path) == ["before"]
    assert replay_journal(tmp_path, "dp0-pp0").shards[0].rows == 2


@pytest.mark.parametrize(
    ("call", "place", "skip"), [("pwrite", ".partial", 3), ("fsync", ".partial", 1), ("rename", "", 0)]
)
def test_failure_in_finishing_is_recovered(tmp_path: Path, call: str, place: str, skip: int) -> None:
    store = open_store(tmp_path)
    put_sample(store, "a", [1, 2, 3])
    with (
        disk(FailAt(errno.ENOSPC, call, place, skip)) as faulty,
        pytest.raises(DiskFullError, match="could not finish"),
    ):
        store.close()
    assert faulty.failed
    assert samples(tmp_path) == ["a"]
    open_store(tmp_path).close()
    assert samples(tmp_path) == ["a"]


class LittleSpace(FaultyOS):
    """A file system with a given number of free bytes."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self.free = free
        self.asked = 0

    def statvfs(self, path: Path) -> os.statvfs_result:
        self.asked += 1
        real = list(os.statvfs(path))
        real[1], real[4] = 1, self.free  # f_frsize, f_bavail
        return os.statvfs_result(real)


def test_floor_of_free_space(tmp_path: Path) -> None:
    with disk(LittleSpace(1000)) as little:
        with pytest.raises(DiskFullError, match="1000 bytes are free and 1001 must stay free"):
            open_store(tmp_path, min_free_bytes=1001)
        store = open_store(tmp_path, min_free_bytes=900)
        put_sample(store, "a", [1, 2])
        store.commit()
        put_sample(store, "b", [3])
        little.free = 910
        put_sample(store, "c", [4])
        assert [record.rid for record in store.commit()] == ["b", "c"]
        with pytest.raises(DiskFullError, match="910 bytes are free and 900 must stay free"):
            put_sample(store, "d", [5])
        little.free = 10**9
        with pytest.raises(DiskFullError, match="910 bytes are free"):
            put_sample(store, "d", [5])
        assert store.commit() == []
        store.close()
    assert samples(tmp_path) == ["a", "b", "c"]


def test_a_file_system_that_does_not_tell_its_free_space_is_named(tmp_path: Path) -> None:
    class Silent(FaultyOS):
        def statvfs(self, path: Path) -> os.statvfs_result:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with disk(Silent()), pytest.raises(StoreError, match=f"{tmp_path}: could not ask for free space: Input/output"):
        open_store(tmp_path)
    open_store(tmp_path).close()


def test_free_space_is_not_asked_for_at_each_append(tmp_path: Path) -> None:
    with disk(LittleSpace(10**12)) as little:
        store = open_store(tmp_path, shard_bytes=10**9)
        little.asked = 0
        for _ in range(100):
            append_tokens(store, [1])
        assert little.asked == 0
        store.commit()
        append_tokens(store, [1])
        assert little.asked == 1
        many = np.zeros((64 << 20) // 12 + 1, np.int64)
        store.append(bytearray(12 * len(many)), many, many, many.view(np.uint64))
        assert little.asked == 2
        store.close()
