"""Shards written side by side: when another one is begun, and that nothing but the speed depends on it."""

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faulty_disk import FullAfter, GatedOS, disk, path_of
from toy_store import append_tokens, open_store, put_sample, queue_sample, states_of, until

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.errors import DiskFullError, StoreError
from sglang_hs_capture.store.hashing import prefix_hashes
from sglang_hs_capture.store.replay import replay_journal
from sglang_hs_capture.store.schema import Extent

ROW_BYTES = 12


def shards_of(extents: Sequence[Extent]) -> list[int]:
    return [extent.shard for extent in extents]


def nothing() -> None:
    """A release that nobody waits for."""


def read_all(directory: Path) -> dict[str, list[int]]:
    """The tokens of each sample of a dataset, whose states are those that the tokens stand for."""
    found = {}
    for item in HiddenStateDataset(directory, raw=True):
        tokens = item["input_ids"].tolist()
        states = torch.cat(item["hidden_states"], dim=1).view(torch.uint8).numpy()
        assert np.array_equal(states, states_of(prefix_hashes(np.array(tokens), 0, 0)))
        found[item["id"]] = tokens
    return found


def test_a_store_that_keeps_up_fills_one_shard_after_the_other(tmp_path: Path) -> None:
    store = open_store(tmp_path, spill_bytes=0, max_open_shards=4)
    placed = [shards_of(put_sample(store, f"s{number}", [number, 1, 2])) for number in range(4)]
    assert placed == [[0], [0, 1], [1], [1, 2]]
    assert len(list(store._lanes)) == 1
    store.close()
    assert read_all(tmp_path) == {f"s{number}": [number, 1, 2] for number in range(4)}


def test_another_shard_is_begun_while_more_than_the_limit_waits(tmp_path: Path) -> None:
    prompts = {f"s{number}": [number, 7] for number in range(8)}
    store = open_store(tmp_path, shard_bytes=10**6, spill_bytes=3 * ROW_BYTES, max_open_shards=3)
    with disk(GatedOS("pwritev", "0.partial")) as held:
        placed = [shards_of(queue_sample(store, rid, tokens, nothing)) for rid, tokens in prompts.items()]
        assert held.reached.wait(60)
        # Two rows are within the limit of three and four are not. The third shard is the last that may be begun;
        # meanwhile the second has been written, as nothing holds it up, or has as little to do as any.
        assert placed[:3] == [[0], [0], [1]]
        held.gate.set()
        assert {record.rid for record in store.commit()} == set(prompts)
    store.close()
    assert {shard for shards in placed for shard in shards} <= {0, 1, 2}
    assert read_all(tmp_path) == prompts
    shards = replay_journal(tmp_path, "dp0-pp0").shards
    assert all(state.finished for state in shards.values())
    assert sum(state.rows for state in shards.values()) == 16


def test_a_shard_that_is_held_up_holds_up_no_other_and_no_release(tmp_path: Path) -> None:
    released: list[str] = []
    store = open_store(tmp_path, shard_bytes=10**6, spill_bytes=0, max_open_shards=2)
    with disk(GatedOS("pwritev", "000000.partial")) as held:
        queue_sample(store, "held", [1], lambda: released.append("held"))
        assert held.reached.wait(60)
        for number in range(5):
            # Each waits until it is written, in the second shard.
            assert shards_of(append_tokens(store, [2, number])[0]) == [1]
        queue_sample(store, "free", [3, 4], lambda: released.append("free"))
        until(lambda: released)
        assert released == ["free"]
        # A commit covers both, and so it waits for the one that is held.
        store.begin_commit()
        assert store.acknowledged() == []
        held.gate.set()
        assert [record.rid for record in store.commit()] == ["held", "free"]
    assert released == ["free", "held"]
    store.close()
    assert read_all(tmp_path) == {"held": [1], "free": [3, 4]}


def test_a_sample_may_lie_in_shards_that_are_written_side_by_side(tmp_path: Path) -> None:
    tokens = list(range(12))
    hashes = prefix_hashes(np.array(tokens), 0, 0)
    states = states_of(hashes)
    store = open_store(tmp_path, shard_bytes=10**6, spill_bytes=0, max_open_shards=4)
    extents: list[Extent] = []
    with disk(GatedOS("pwritev", ".partial")) as held:
        for start in range(0, 12, 3):
            part = slice(start, start + 3)
            rows = np.ascontiguousarray(states[part])
            extents += store.append(rows, np.array(tokens[part]), np.arange(start, start + 3), hashes[part], nothing)
        assert shards_of(extents) == [0, 1, 2, 3]
        store.add_sample("spread", 12, extents, int(hashes[-1]))
        held.gate.set()
        assert [record.rid for record in store.commit()] == ["spread"]
    store.close()
    assert read_all(tmp_path) == {"spread": tokens}


def test_with_all_held_up_rows_go_where_least_waits(tmp_path: Path) -> None:
    store = open_store(tmp_path, shard_bytes=10**6, spill_bytes=0, max_open_shards=2)
    with disk(GatedOS("pwritev", ".partial")) as held:
        assert shards_of(queue_sample(store, "long", [1, 2, 3], nothing)) == [0]
        assert shards_of(queue_sample(store, "short", [4], nothing)) == [1]
        assert shards_of(queue_sample(store, "next", [5], nothing)) == [1]
        assert shards_of(queue_sample(store, "last", [6, 7], nothing)) == [1]
        assert shards_of(queue_sample(store, "behind", [8], nothing)) == [0]
        held.gate.set()
        assert len(store.commit()) == 5
    store.close()


def test_a_full_disk_loses_nothing_acknowledged_and_refuses_the_rest(tmp_path: Path) -> None:
    """Whichever shard notices first, no sample of which a row is missing is acknowledged."""
    store = open_store(tmp_path, shard_bytes=10**6, spill_bytes=0, max_open_shards=3)
    put_sample(store, "before", [9, 9])
    assert [record.rid for record in store.commit()] == ["before"]
    prompts = {f"s{number}": [number, 1, 2] for number in range(9)}
    with disk(FullAfter(5 * 3 * ROW_BYTES + 7)) as full:
        for rid, tokens in prompts.items():
            queue_sample(store, rid, tokens, nothing)
        full.gate.set()
        with pytest.raises(DiskFullError):
            store.commit()
        kept = {record.rid for record in store.acknowledged()}
        assert 1 <= len(kept) <= 5
    with pytest.raises(DiskFullError):
        append_tokens(store, [1])
    store.close()
    assert read_all(tmp_path) == {"before": [9, 9]} | {rid: prompts[rid] for rid in kept}
    store = open_store(tmp_path)
    put_sample(store, "after", [8])
    store.close()
    assert read_all(tmp_path).keys() == {"before", "after"} | kept


class SecondBreaks(GatedOS):
    """Holds up the first shard, and fails at the second one's first write."""

    def __init__(self) -> None:
        super().__init__("pwritev", "000000.partial")

    def before(self, step: int, name: str, args: tuple[Any, ...]) -> None:
        if name == "pwrite" and "000001.partial" in path_of(args[0]):
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_broken_disk_ends_all_lanes_and_opening_again_goes_on(tmp_path: Path) -> None:
    store = open_store(tmp_path, shard_bytes=10**6, spill_bytes=0, max_open_shards=3)
    put_sample(store, "before", [9, 9])
    store.commit()
    released: list[str] = []
    with disk(SecondBreaks()) as broken:
        queue_sample(store, "held", [1], lambda: released.append("held"))
        assert broken.reached.wait(60)
        queue_sample(store, "lost", [2], lambda: released.append("lost"))
        broken.gate.set()
        with pytest.raises(StoreError, match=r"000001\.partial: could not write"):
            store.commit()
        with pytest.raises(StoreError, match=r"000001\.partial: could not write"):
            append_tokens(store, [3])
        assert store.close() == []
    # The memory is given back all the same: nobody would ever ask for it again.
    assert sorted(released) == ["held", "lost"]
    assert read_all(tmp_path) == {"before": [9, 9]}
    store = open_store(tmp_path)
    put_sample(store, "after", [8])
    store.close()
    assert read_all(tmp_path) == {"before": [9, 9], "after": [8]}


@pytest.mark.parametrize(("most", "expected"), [(1, {0}), (2, {0, 1})])
def test_no_more_shards_than_asked_for(tmp_path: Path, most: int, expected: set[int]) -> None:
    store = open_store(tmp_path, shard_bytes=10**6, spill_bytes=0, max_open_shards=most)
    with disk(GatedOS("pwritev", ".partial")) as held:
        placed = [shards_of(queue_sample(store, f"s{number}", [number], nothing))[0] for number in range(6)]
        held.gate.set()
        assert len(store.commit()) == 6
    assert set(placed) == expected
    store.close()


def test_what_lanes_do_at_the_same_time_counts_once(tmp_path: Path) -> None:
    store = open_store(tmp_path, shard_bytes=10**6, spill_bytes=0, max_open_shards=3)
    with disk(GatedOS("pwritev", ".partial")) as held:
        begun = time.perf_counter()
        for number in range(3):
            queue_sample(store, f"s{number}", [number], nothing)
        assert held.reached.wait(60)
        time.sleep(0.2)
        # Also while it goes on: with several lanes there may be no moment in which none of them writes.
        assert 0.1 < store.write_s < time.perf_counter() - begun
        held.gate.set()
        store.commit()
        assert store.write_s < time.perf_counter() - begun
    store.close()
