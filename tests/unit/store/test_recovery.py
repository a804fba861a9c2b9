"""What recovery refuses: bytes that the journal calls durable and that are not there, or that it does not know."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from faulty_disk import close_all_below
from safetensors import safe_open
from toy_store import append_tokens, make_info, open_store, put_sample, scales_of

from sglang_hs_capture.errors import CorruptionError, DatasetLockedError, StoreError
from sglang_hs_capture.store.hashing import prefix_hashes
from sglang_hs_capture.store.journal import encode_line
from sglang_hs_capture.store.jsonfile import write_object
from sglang_hs_capture.store.recovery import recover_dataset
from sglang_hs_capture.store.replay import replay_journal
from sglang_hs_capture.store.shard import ShardPaths


@pytest.fixture
def abandoned(tmp_path: Path) -> Path:
    """A dataset whose writer died with three durable rows in its second shard, and two more behind them."""
    directory = tmp_path / "data"
    store = open_store(directory)
    put_sample(store, "first", [1, 2, 3, 4, 5])
    put_sample(store, "second", [6, 7, 8])
    store.commit()
    append_tokens(store, [9, 9])
    close_all_below(directory)
    return directory


def test_rows_behind_the_durable_ones_are_cut(abandoned: Path) -> None:
    recover_dataset(abandoned)
    recover_dataset(abandoned)
    shards = replay_journal(abandoned, "dp0-pp0").shards
    assert [(number, state.rows, state.finished) for number, state in shards.items()] == [(0, 5, True), (1, 3, True)]


def test_scales_of_the_durable_rows_are_recovered(tmp_path: Path) -> None:
    store = open_store(tmp_path, info=make_info(dtype="float8_e4m3"))
    put_sample(store, "first", [1, 2, 3])
    store.commit()
    append_tokens(store, [9])
    close_all_below(tmp_path)
    recover_dataset(tmp_path)
    with safe_open(ShardPaths.of(tmp_path, "dp0-pp0", 0).finished, framework="np") as file:
        assert np.array_equal(file.get_tensor("scales"), scales_of(prefix_hashes(np.array([1, 2, 3]), 0, 0)))


def test_a_cut_token_file_is_told_with_the_size_of_its_records(tmp_path: Path) -> None:
    store = open_store(tmp_path, info=make_info(dtype="float8_e4m3"))
    put_sample(store, "first", [1, 2, 3])
    store.commit()
    close_all_below(tmp_path)
    path = ShardPaths.of(tmp_path, "dp0-pp0", 0).tokens
    path.write_bytes(path.read_bytes()[:95])
    with pytest.raises(CorruptionError, match=r"ends at byte 95, 1 bytes too early; .* 3 durable rows of 32 bytes"):
        recover_dataset(tmp_path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


@pytest.mark.parametrize(
    ("suffix", "damage", "message"),
    [
        (
            ".partial",
            lambda path: path.write_bytes(path.read_bytes()[:4131]),
            "the journal has 3 durable rows, 4132 bytes",
        ),
        (".partial", Path.unlink, "the journal has 3 durable rows and there is no such shard"),
        (".rows", lambda path: path.write_bytes(path.read_bytes()[:71]), "the file ends at byte 71"),
        (".rows", Path.unlink, "No such file"),
    ],
)
def test_durable_rows_that_are_gone_are_told(
    abandoned: Path, suffix: str, damage: Callable[[Path], None], message: str
) -> None:
    path = abandoned / "shards" / f"dp0-pp0-000001{suffix}"
    damage(path)
    with pytest.raises(StoreError, match=message):
        recover_dataset(abandoned)
    with pytest.raises(StoreError, match=message):
        open_store(abandoned)


def test_renamed_shard_is_checked_before_the_journal_calls_it_finished(abandoned: Path) -> None:
    recover_dataset(abandoned)
    journal = abandoned / "journal-dp0-pp0.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]))
    recover_dataset(abandoned)
    assert journal.read_bytes() == b"".join(lines)
    journal.write_bytes(b"".join(lines[:-1]))
    cut(ShardPaths.of(abandoned, "dp0-pp0", 1).finished)
    with pytest.raises(CorruptionError, match="expected 4208 bytes for 3 rows; the file has 4178"):
        recover_dataset(abandoned)


def test_renamed_shard_with_other_rows_is_refused(abandoned: Path) -> None:
    recover_dataset(abandoned)
    journal = abandoned / "journal-dp0-pp0.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if b'"shard":1' in line and b'"t":"rows"' in line)
    rows = {"t": "rows", "shard": 1, "start": 0, "count": 2, "xxh3": "00"}
    journal.write_bytes(b"".join(lines[:start]) + encode_line(rows))
    with pytest.raises(CorruptionError, match="the journal has 2 durable rows; the shard has 3"):
        recover_dataset(abandoned)


def test_finished_shard_that_no_journal_knows_is_refused(abandoned: Path) -> None:
    recover_dataset(abandoned)
    (abandoned / "journal-dp0-pp0.jsonl").unlink()
    with pytest.raises(CorruptionError, match="a finished shard whose rows the journal does not know"):
        open_store(abandoned)


def test_other_writers_files_are_left_alone(abandoned: Path) -> None:
    store = open_store(abandoned, "dp0-pp0-x")
    put_sample(store, "x", [1])
    store.commit()
    before = {p.name for p in (abandoned / "shards").iterdir()}
    open_store(abandoned).close()
    after = {p.name for p in (abandoned / "shards").iterdir()}
    assert {name for name in before if "-x-" in name} == {name for name in after if "-x-" in name}
    store.close()


def test_a_dataset_that_is_being_written_is_not_recovered(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(DatasetLockedError):
        recover_dataset(tmp_path, lock_timeout_s=0)
    store.close()


def test_changed_description_is_told_when_the_header_no_longer_fits(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_sample(store, "a", [1])
    store.commit()
    close_all_below(tmp_path)
    write_object(tmp_path / "dataset.json", make_info(model_path="/models/" + "x" * 9000).to_json())
    with pytest.raises(CorruptionError, match=r"dataset.json was changed since"):
        open_store(tmp_path)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"t": "rows", "shard": 1, "start": 4, "count": 1, "xxh3": "0"}, "the shard's next row is 3"),
        ({"t": "rows", "shard": 0, "start": 5, "count": 1, "xxh3": "0"}, "the shard is finished"),
        ({"t": "rows", "shard": 9, "start": 0, "count": 1, "xxh3": "0"}, "there is no shard 9"),
        ({"t": "rows", "shard": 1}, "KeyError"),
        ({"t": "shard", "shard": 1, "data_offset": 4096, "columns": ["boundary:1"]}, "the shard is there already"),
        ({"t": "finished", "shard": 1, "rows": 4}, "the shard has 3 rows"),
        ({"t": "journal", "version": 1, "writer": "dp7-pp0"}, "it belongs to the writer 'dp7-pp0'"),
        (
            {"t": "sample", "rid": "x", "length": 0, "extents": [], "end_hash": "0", "session": ""},
            "the sample is empty",
        ),
        (
            {"t": "sample", "rid": "x", "length": 3, "extents": [[1, 0, 2]], "end_hash": "0", "session": ""},
            "do not add up",
        ),
        (
            {"t": "sample", "rid": "x", "length": 2, "extents": [[1, 2, 2]], "end_hash": "0", "session": ""},
            "3 durable rows",
        ),
        (
            {"t": "sample", "rid": "x", "length": 1, "extents": [[1, 0]], "end_hash": "0", "session": ""},
            "not enough values",
        ),
    ],
)
def test_records_that_contradict_earlier_ones_are_told_with_their_line(
    abandoned: Path, record: dict, message: str
) -> None:
    journal = abandoned / "journal-dp0-pp0.jsonl"
    count = journal.read_bytes().count(b"\n")
    with journal.open("ab") as file:
        file.write(encode_line(record))
    with pytest.raises(CorruptionError, match=rf"journal-dp0-pp0.jsonl, line {count + 1}: .*{message}"):
        open_store(abandoned)


def test_newer_journals_are_refused_and_unknown_records_passed_over(abandoned: Path) -> None:
    journal = abandoned / "journal-dp0-pp0.jsonl"
    with journal.open("ab") as file:
        file.write(encode_line({"t": "of a later release"}))
    recover_dataset(abandoned)
    with journal.open("ab") as file:
        file.write(encode_line({"t": "journal", "version": 2, "writer": "dp0-pp0"}))
    with pytest.raises(StoreError, match=r"journal-dp0-pp0\.jsonl, line \d+: the journal has version 2, .* upgrade"):
        open_store(abandoned)


def test_samples_across_shards_of_different_columns_are_refused(tmp_path: Path) -> None:
    open_and_close(tmp_path, ("boundary:1",))
    open_and_close(tmp_path, None)
    sample = {"t": "sample", "rid": "x", "length": 2, "extents": [[0, 0, 1], [1, 0, 1]], "end_hash": "0", "session": ""}
    with (tmp_path / "journal-dp0-pp0.jsonl").open("ab") as file:
        file.write(encode_line(sample))
    with pytest.raises(CorruptionError, match="different columns"):
        replay_journal(tmp_path, "dp0-pp0")


def open_and_close(directory: Path, columns: tuple[str, ...] | None) -> None:
    """A session of one row."""
    store = open_store(directory, info=make_info(), columns=columns, shard_bytes=100)
    put_sample(store, "a", [1])
    store.close()
