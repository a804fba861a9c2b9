"""The slot table: a prefix is found where it was stored, and never where a slot holds something else."""

import numpy as np
import pytest

from sglang_hs_capture.store.hashing import end_hash, prefix_hashes
from sglang_hs_capture.store.schema import Extent
from sglang_hs_capture.writing.slots import Prefix, SlotTable


def record(table, tokens, slots, extents, *, start=0, base=0, owner=1, proven=True) -> int:
    ids = np.array(tokens, dtype=np.int64)
    hashes = prefix_hashes(ids, start, base)
    table.record(np.array(slots), extents, ids, np.arange(start, start + len(ids)), hashes, owner)
    if proven:
        table.prove(np.array(slots), owner)
    return int(hashes[-1])


def find(table: SlotTable, slots: list[int], asker: int = 99, own_only: bool = False) -> Prefix | str:
    return table.lookup(np.array(slots, dtype=np.int64), asker, own_only=own_only)


def test_no_prefix_is_an_empty_chain():
    assert find(SlotTable(), []) == Prefix((), 0)


def test_chunks_join_into_one_prefix_with_the_whole_hash():
    table = SlotTable()
    tokens = [5, 9, 5, 7, 1]
    base = record(table, tokens[:3], [10, 11, 40], [Extent(0, 100, 3)])
    record(table, tokens[3:], [7, 8], [Extent(0, 103, 1), Extent(1, 0, 1)], start=3, base=base)
    found = find(table, [10, 11, 40, 7, 8])
    assert found == Prefix((Extent(0, 100, 4), Extent(1, 0, 1)), end_hash(tokens))


def test_a_shared_prefix_is_found_from_any_request():
    table = SlotTable()
    record(table, [1, 2, 3, 4], [3, 4, 5, 6], [Extent(2, 50, 4)])
    assert find(table, [3, 4]) == Prefix((Extent(2, 50, 2),), end_hash([1, 2]))


@pytest.mark.parametrize(
    ("slots", "reason"),
    [
        ([1, 2, 3, 999], "1 of 4 prefix rows were never captured"),
        ([1, 2, 3, 9], "1 of 4 prefix rows were never captured"),
        ([2, 1, 3, 4], "other positions"),
        ([2, 3, 4], "other positions"),
    ],
)
def test_what_is_not_a_chain_is_refused(slots, reason):
    table = SlotTable()
    record(table, [1, 2, 3, 4], [1, 2, 3, 4], [Extent(0, 0, 4)])
    record(table, [8], [20], [Extent(0, 9, 1)])
    assert reason in find(table, slots)


def test_a_slot_rewritten_by_another_prompt_breaks_the_chain():
    table = SlotTable()
    record(table, [1, 2, 3, 4], [1, 2, 3, 4], [Extent(0, 0, 4)])
    record(table, [1, 9, 3], [11, 2, 13], [Extent(0, 4, 3)])
    assert "another prompt" in find(table, [1, 2, 3, 4])
    assert isinstance(find(table, [11, 2, 13]), Prefix)


def test_a_forgotten_slot_is_unknown():
    table = SlotTable()
    record(table, [1, 2], [1, 2], [Extent(0, 0, 2)])
    table.forget(np.array([2, 5000]))
    assert "never captured" in find(table, [1, 2])
    assert isinstance(find(table, [1]), Prefix)


def test_memory_is_bounded_by_the_highest_slot():
    table = SlotTable()
    for start in range(0, 1000, 10):
        record(table, list(range(10)), list(range(start, start + 10)), [Extent(0, start, 10)])
    assert table.nbytes <= 2 * 1000 * 40


def test_rows_that_are_only_claimed_name_their_lender():
    table = SlotTable()
    base = record(table, [1, 2], [1, 2], [Extent(0, 0, 2)], owner=7, proven=False)
    record(table, [3], [3], [Extent(0, 2, 1)], start=2, base=base, owner=8, proven=False)
    assert find(table, [1, 2, 3], asker=8).lenders == {7}
    assert find(table, [1, 2, 3], asker=9).lenders == {7, 8}
    table.prove(np.array([1, 2]), 7)
    assert find(table, [1, 2, 3], asker=8).lenders == frozenset()


def test_a_request_by_hand_takes_its_own_rows_only():
    table = SlotTable()
    base = record(table, [1, 2], [1, 2], [Extent(0, 0, 2)], owner=7)
    record(table, [3], [3], [Extent(0, 2, 1)], start=2, base=base, owner=8, proven=False)
    assert "sent by hand" in find(table, [1, 2, 3], asker=8, own_only=True)
    record(table, [1, 2], [4, 5], [Extent(0, 3, 2)], owner=8, proven=False)
    assert isinstance(find(table, [4, 5, 3], asker=8, own_only=True), Prefix)


def test_proving_and_forgetting_leave_rows_of_others_alone():
    table = SlotTable()
    record(table, [1, 2, 3], [1, 2, 3], [Extent(0, 0, 3)], owner=7, proven=False)
    record(table, [1, 2], [1, 2], [Extent(0, 9, 2)], owner=8, proven=False)
    table.prove(np.array([1, 2, 3]), 7)
    assert find(table, [1, 2]).lenders == {8}
    table.forget_of(np.array([1, 2, 3]), 7)
    assert isinstance(find(table, [1, 2], asker=8), Prefix)
