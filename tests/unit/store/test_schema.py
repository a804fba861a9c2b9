"""Names, extents, run lengths and the dataset's identity."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_store import make_info

from sglang_hs_capture.errors import CorruptionError, StoreError
from sglang_hs_capture.store.schema import (
    DatasetInfo,
    Extent,
    RowsRecord,
    SampleRecord,
    check_writer,
    extents_from_rows,
    make_rid,
    merge_extents,
    parse_rid,
    rle_decode,
    rle_encode,
    sample_key,
)


@given(st.lists(st.integers(0, 1), max_size=200))
def test_run_lengths_decode_to_the_mask(mask: list[int]) -> None:
    runs = rle_encode(mask)
    assert rle_decode(runs).tolist() == mask
    assert rle_decode(runs).dtype == np.int64
    assert all(run > 0 for run in runs[1:])
    assert runs[:1] == [0] or mask[:1] != [1]


def test_run_lengths_begin_with_zeros() -> None:
    assert rle_encode([0, 0, 1, 1, 1, 0]) == [2, 3, 1]
    assert rle_encode([1, 0]) == [0, 1, 1]
    assert rle_encode(np.array([True, True])) == [0, 2]


@pytest.mark.parametrize("mask", [[0, 2], [-1], [[0, 1]]])
def test_run_lengths_refuse_what_is_no_mask(mask: list) -> None:
    with pytest.raises(ValueError, match="zeros and ones"):
        rle_encode(mask)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=50))
def test_extents_name_the_rows_in_order(rows: list[tuple[int, int]]) -> None:
    places = np.array(rows, np.int64).reshape(-1, 2)
    extents = extents_from_rows(places[:, 0], places[:, 1])
    assert [(e.shard, e.start + i) for e in extents for i in range(e.count)] == rows
    assert merge_extents(Extent(shard, row, 1) for shard, row in rows) == extents
    assert merge_extents(extents) == extents


@pytest.mark.parametrize("sample_id", ["a", "conversation/../1", "\ud800", "é" * 500, ""])
def test_request_ids_keep_prefix_key_and_attempt(sample_id: str) -> None:
    key = sample_key(sample_id)
    assert len(key) == 24
    assert parse_rid(make_rid("hs-1-", key, 12, 2**63 + 5)) == ("hs-1-", key, 12, 2**63 + 5)


def test_key_is_the_documented_one() -> None:
    assert sample_key("conversation-1") == "7b86bf06a59811a29dc4187c"


@pytest.mark.parametrize(
    "rid",
    ["hs-by-hand", "hs-0123456789abcdef01234567", "hs-0123456789ABCDEF01234567-0", "hs-0123456789abcdef01234567-0", ""],
)
def test_request_ids_by_hand_are_not_taken_apart(rid: str) -> None:
    assert parse_rid(rid) is None


@pytest.mark.parametrize("name", ["", "../x", "dp0/pp0", "dp0.pp0", "dp0--pp0", "DP0", "-dp0"])
def test_writers_names_are_safe_in_paths(name: str) -> None:
    with pytest.raises(ValueError, match="writer"):
        check_writer(name)


def test_identity_survives_json() -> None:
    info = make_info()
    again = DatasetInfo.from_json(json.loads(json.dumps(info.to_json())), "here")
    assert again == info
    assert (again.column_bytes, again.row_bytes) == (6, 12)


def test_float8_has_scales_and_half_the_bytes() -> None:
    info = make_info(dtype="float8_e4m3", hidden_size=7168, columns=("a", "b", "c", "d"))
    assert (info.scaled, info.row_bytes, info.scale_bytes) == (True, 28_672, 4)
    assert (make_info().scaled, make_info().scale_bytes) == (False, 0)


@pytest.mark.parametrize("scales", [None, 2**64 - 1])
def test_rows_survive_json(scales: int | None) -> None:
    record = RowsRecord(3, 4, 5, 6, scales)
    assert ("scales_xxh3" in record.to_json()) is (scales is not None)
    assert RowsRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_identity_of_a_newer_version_is_refused() -> None:
    with pytest.raises(StoreError, match=r"here: written in version 2 .* upgrade"):
        DatasetInfo.from_json({**make_info().to_json(), "version": 2}, "here")
    with pytest.raises(StoreError, match="expected the format"):
        DatasetInfo.from_json({}, "here")
    old = {name: value for name, value in make_info().to_json().items() if name not in ("dtype", "config_hash")}
    with pytest.raises(CorruptionError, match="here: the fields dtype, config_hash are missing"):
        DatasetInfo.from_json(old, "here")


@pytest.mark.parametrize("changes", [{"dtype": "int8"}, {"columns": ()}, {"hidden_size": 0}])
def test_identity_without_rows_is_refused(changes: dict) -> None:
    with pytest.raises(StoreError):
        make_info(**changes)


def test_samples_survive_json() -> None:
    record = SampleRecord("rid \ud800", 3, (Extent(0, 1, 2), Extent(1, 0, 1)), 2**64 - 1, "session")
    assert SampleRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
