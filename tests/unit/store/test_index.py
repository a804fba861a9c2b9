"""The index joins journals and ledger: what counts as a sample, and what does not."""

from pathlib import Path

import pytest
from toy_store import append_tokens, make_info, open_store, put_sample

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.errors import CorruptionError, StoreError
from sglang_hs_capture.store.hashing import end_hash
from sglang_hs_capture.store.index import load_index
from sglang_hs_capture.store.requests import DroppedRecord, RequestLedger, RequestRecord
from sglang_hs_capture.store.schema import Extent, make_rid, sample_key

PROMPTS = {"a": [1, 2, 3], "b": [4, 5], "c": [6], "d": [7, 8]}


def rid(sample_id: str, attempt: int = 0) -> str:
    return make_rid("hs-", sample_key(sample_id), attempt, end_hash(PROMPTS[sample_id]))


def ask(directory: Path, *ids: str, dropped: tuple[str, ...] = ()) -> None:
    """Write a ledger that asks for these samples, in this order."""
    with RequestLedger.open(directory) as ledger:
        for number, sample_id in enumerate(ids):
            tokens = PROMPTS[sample_id]
            mask = (1, len(tokens) - 1)
            ledger.append(
                RequestRecord(sample_id, sample_key(sample_id), len(tokens), end_hash(tokens), mask, f"f:{number}")
            )
        for sample_id in dropped:
            ledger.append(DroppedRecord(sample_id, "f:0", "failed 3 times"))


def test_order_masks_and_what_is_pending(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ask(tmp_path, "c", "a", "b", "d", dropped=("d", "too long"))
    put_sample(store, "by hand", [9, 9])
    put_sample(store, rid("a"), PROMPTS["a"])
    put_sample(store, "hs-another", [9])
    put_sample(store, rid("c", 2), PROMPTS["c"])
    store.close()
    index = load_index(tmp_path)
    assert [sample.id for sample in index.samples] == ["c", "a", "by hand", "hs-another"]
    assert [sample.rid for sample in index.samples] == [rid("c", 2), rid("a"), "by hand", "hs-another"]
    assert [sample.loss_mask_rle for sample in index.samples] == [(1, 0), (1, 2), None, None]
    assert [sample.source for sample in index.samples] == ["f:0", "f:1", None, None]
    assert index.pending == ("b",)
    assert [record.id for record in index.dropped] == ["d", "too long"]
    assert list(index.requested) == ["c", "a", "b", "d"]
    assert index.samples[1].extents == (Extent(0, 2, 3),)
    assert index.samples[1].writer == "dp0-pp0"


def test_a_sample_acknowledged_twice_counts_once_and_the_first_one(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ask(tmp_path, "a")
    put_sample(store, rid("a", 0), PROMPTS["a"])
    put_sample(store, "by hand", [9])
    store.commit()
    put_sample(store, rid("a", 1), PROMPTS["a"])
    put_sample(store, "by hand", [9])
    store.close()
    other = open_store(tmp_path, "dp1-pp0")
    put_sample(other, rid("a", 0), PROMPTS["a"])
    other.close()
    assert [(s.id, s.rid, s.extents) for s in load_index(tmp_path).samples] == [
        ("a", rid("a", 0), (Extent(0, 0, 3),)),
        ("by hand", "by hand", (Extent(0, 3, 1),)),
    ]


@pytest.mark.parametrize("tokens", [[1, 2, 4], [1, 2]])
def test_a_sample_of_other_tokens_is_not_the_sample(tmp_path: Path, tokens: list[int]) -> None:
    store = open_store(tmp_path)
    ask(tmp_path, "a")
    put_sample(store, rid("a"), tokens)
    store.commit()
    index = load_index(tmp_path)
    assert index.samples == ()
    assert [(entry.id, entry.rid) for entry in index.mismatched] == [("a", rid("a"))]
    assert index.pending == ("a",)
    put_sample(store, rid("a", 1), PROMPTS["a"])
    store.close()
    assert [entry.rid for entry in load_index(tmp_path).samples] == [rid("a", 1)]


def test_failures_are_forgotten_once_the_sample_is_there(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ask(tmp_path, "a", "b", dropped=("b",))
    store.add_failure(rid("a", 0), "incomplete", "row 1")
    store.add_failure(rid("b", 0), "non_finite", "row 0")
    store.add_failure("by hand", "zero_row", "row 2")
    put_sample(store, rid("a", 1), PROMPTS["a"])
    store.close()
    index = load_index(tmp_path)
    assert [(f.id, f.rid, f.writer, f.reason, f.detail) for f in index.failed] == [
        ("b", rid("b", 0), "dp0-pp0", "non_finite", "row 0"),
        ("by hand", "by hand", "dp0-pp0", "zero_row", "row 2"),
    ]
    assert [record.id for record in index.dropped] == ["b"]


def put_stages(directory: Path, *stages: tuple[str, tuple[str, ...]]) -> None:
    """Capture samples a and b, b without the last stage."""
    stores = [open_store(directory, name, columns=columns) for name, columns in stages]
    for store in stores:
        if store is stores[0]:
            append_tokens(store, [77])
        put_sample(store, rid("a"), PROMPTS["a"])
    for store in stores[:-1]:
        put_sample(store, rid("b"), PROMPTS["b"])
    for store in stores:
        store.close()


def test_pipeline_stages_are_joined(tmp_path: Path) -> None:
    put_stages(tmp_path, ("dp0-pp0", ("boundary:1",)), ("dp0-pp1", ("final:pre_norm",)))
    ask(tmp_path, "a", "b")
    index = load_index(tmp_path)
    assert [sample.id for sample in index.samples] == ["a"]
    assert [(part.writer, part.columns, part.extents) for part in index.samples[0].parts] == [
        ("dp0-pp0", ("boundary:1",), (Extent(0, 1, 3),)),
        ("dp0-pp1", ("final:pre_norm",), (Extent(0, 0, 3),)),
    ]
    assert index.pending == ("b",)


def test_stages_that_saw_other_tokens_are_not_joined(tmp_path: Path) -> None:
    for writer, column, tokens in (("dp0-pp0", "boundary:1", [1, 2]), ("dp0-pp1", "final:pre_norm", [1, 3])):
        store = open_store(tmp_path, writer, columns=(column,))
        put_sample(store, "x", tokens)
        store.close()
    assert load_index(tmp_path).samples == ()


def test_shards_are_listed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_sample(store, "a", [1, 2, 3, 4, 5, 6])
    store.commit()
    append_tokens(store, [7])
    index = load_index(tmp_path)
    assert [(e.writer, e.shard, e.state.rows, e.state.finished) for e in index.shards] == [
        ("dp0-pp0", 0, 5, True),
        ("dp0-pp0", 1, 1, False),
    ]
    assert index.info == make_info()
    store.close()


def test_a_damaged_session_record_hides_no_sample(tmp_path: Path) -> None:
    """``verify`` calls it a warning: whoever reads samples has no use for it."""
    store = open_store(tmp_path)
    put_sample(store, "a", [1, 2])
    store.close()
    (tmp_path / "session-dp0-pp0.json").write_text("{")
    assert [sample.id for sample in load_index(tmp_path).samples] == ["a"]


def test_a_folder_without_a_dataset_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"expected a dataset, but there is no dataset.json"):
        load_index(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "dataset.json").write_text(text)
        with pytest.raises(StoreError, match="restore it from a copy"):
            load_index(tmp_path)


def test_a_missing_or_cut_shard_is_told_at_once(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_sample(store, "hs-1", [1, 2, 3])
    store.close()
    (shard,) = (tmp_path / "shards").iterdir()
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(CorruptionError, match=r"expected at least .* restore it from a copy"):
        load_index(tmp_path)
    shard.unlink()
    with pytest.raises(CorruptionError, match="3 rows in this shard, and it is not there"):
        load_index(tmp_path)
    shard.write_bytes(whole)
    assert len(load_index(tmp_path).samples) == 1


def test_a_sample_that_the_ledger_has_lost_is_not_taken_for_one_sent_by_hand(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ask(tmp_path, "a", "b")
    put_sample(store, rid("a"), PROMPTS["a"])
    put_sample(store, "hs-by-hand", [9])
    store.close()
    assert len(load_index(tmp_path).samples) == 2
    ledger = tmp_path / "requests.jsonl"
    ledger.write_text(ledger.read_text().splitlines(keepends=True)[1])
    index = load_index(tmp_path)
    assert [sample.id for sample in index.samples] == ["hs-by-hand"]
    assert [sample.rid for sample in index.unclaimed] == [rid("a")]
    with pytest.warns(UserWarning, match="1 captured samples are left out"):
        assert len(HiddenStateDataset(tmp_path)) == 1


def test_a_shard_that_cannot_be_looked_at_is_told_with_its_reason(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_sample(store, "r", [1, 2])
    store.close()
    (shard,) = (tmp_path / "shards").iterdir()
    shard.unlink()
    shard.symlink_to(shard.name)
    with pytest.raises(StoreError, match=f"{shard}: could not look at: Too many levels of symbolic links"):
        load_index(tmp_path)
