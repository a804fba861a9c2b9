"""Shards written side by side, hard pressed: no room, no threads, failures in the middle, and random orders."""

import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from faulty_disk import GatedOS, disk
from toy_store import open_store, queue_sample, until

from sglang_hs_capture.errors import DiskFullError
from sglang_hs_capture.store import disk as disk_module

ROW_BYTES = 12


def nothing() -> None:
    """A release that nobody waits for."""


def store_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hs-capture-store")]


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
