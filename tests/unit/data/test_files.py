"""Which files an input stands for: files, folders, patterns, and what a file is by its first bytes."""

import gzip
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sglang_hs_capture.data.conversations import iter_records
from sglang_hs_capture.data.files import count_rows, find_files, read_rows
from sglang_hs_capture.data.records import BadRow, Sample
from sglang_hs_capture.errors import InputError

ROW = b'{"id": "x", "input_ids": [1]}\n'


@pytest.fixture
def make(tmp_path):
    def make_files(*names):
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(ROW)
        return tmp_path

    return make_files


def names(root, files):
    return [file.relative_to(root).as_posix() for file in files]


def test_a_folder_gives_its_known_files_at_any_depth_sorted_by_path(make):
    root = make("b.jsonl", "a/2.ndjson.zst", "a/1.parquet", "a/deep/er/x.jsonl.gz", "c.arrow", "README.md", "d.json")
    make(".hidden/x.jsonl", "a/.x.jsonl", "a/x.jsonl.tmp")
    assert names(root, find_files(root)) == [
        "a/1.parquet",
        "a/2.ndjson.zst",
        "a/deep/er/x.jsonl.gz",
        "b.jsonl",
        "c.arrow",
    ]


def test_folders_that_link_to_each_other_are_read_once(make, tmp_path):
    root = make("data/a.jsonl", "elsewhere/b.jsonl")
    (root / "data" / "link").symlink_to(root / "elsewhere")
    (root / "elsewhere" / "back").symlink_to(root / "data")
    assert names(root, find_files(root / "data")) == ["data/a.jsonl", "data/link/b.jsonl"]


def test_patterns_give_what_matches_sorted(make):
    root = make("b/2.jsonl", "b/1.jsonl", "a/3.jsonl", "a/4.txt")
    assert names(root, find_files(f"{root}/*/*.jsonl")) == ["a/3.jsonl", "b/1.jsonl", "b/2.jsonl"]
    assert names(root, find_files(f"{root}/**/[13].jsonl")) == ["a/3.jsonl", "b/1.jsonl"]
    assert names(root, find_files([f"{root}/?", root / "a" / "4.txt"])) == [
        "a/3.jsonl",
        "b/1.jsonl",
        "b/2.jsonl",
        "a/4.txt",
    ]


def test_a_name_with_the_signs_of_a_pattern_is_a_name_if_there_is_such_a_file(make):
    root = make("part[1].jsonl", "part1.jsonl")
    assert names(root, find_files(root / "part[1].jsonl")) == ["part[1].jsonl"]


def test_what_stands_for_no_file_is_an_error(make, tmp_path):
    with pytest.raises(InputError, match=r"none\.jsonl: no such file or folder"):
        find_files(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match=r"\*\.jsonl: no file or folder matches this pattern"):
        find_files(tmp_path / "*.jsonl")
    make("notes.txt")
    with pytest.raises(InputError, match=r"the folder holds no file whose name ends in \.jsonl, \.jsonl\.gz"):
        find_files(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_an_error(make):
    root = make("a/x.jsonl", "b/x.jsonl")
    (root / "b").chmod(0)
    with pytest.raises(InputError, match="b: cannot be read: Permission denied"):
        find_files(root)


def test_only_the_files_of_a_saved_dataset_are_read(make):
    root = make("data-00000-of-00001.arrow", "cache-123.arrow")
    (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    assert names(root, find_files(root)) == ["data-00000-of-00001.arrow"]
    (root / "state.json").write_text("{}")
    assert names(root, find_files(root)) == ["cache-123.arrow", "data-00000-of-00001.arrow"]


def test_a_missing_file_of_a_saved_dataset_is_an_error(make):
    root = make("x.arrow")
    (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    with pytest.raises(InputError, match=r"data-00000-of-00001\.arrow: cannot be read: No such file"):
        iter_records(root)


def test_a_missing_split_of_a_saved_dataset_is_an_error(make):
    root = make("test/x.arrow", "train/x.arrow")
    (root / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert names(root, find_files(root)) == ["test/x.arrow", "train/x.arrow"]
    (root / "train" / "x.arrow").unlink()
    (root / "train").rmdir()
    with pytest.raises(InputError, match=r"expected the splits train, test, .* got no folder train"):
        find_files(root)
    assert names(root, find_files(root / "test")) == ["test/x.arrow"]
    (root / "dataset_dict.json").write_text("{}")
    assert names(root, find_files(root)) == ["test/x.arrow"]


def test_a_link_that_leads_nowhere_is_an_error_wherever_it_is_found(make):
    root = make("data/a.jsonl")
    (root / "data" / "b.jsonl").symlink_to(root / "gone.jsonl")
    for given in (root / "data", f"{root}/data/*.jsonl", f"{root}/**/*.jsonl", f"{root}/data/b.*"):
        with pytest.raises(InputError, match=r"b\.jsonl: cannot be read: No such file"):
            find_files(given)


@pytest.mark.parametrize(
    ("name", "content"),
    [("x.parquet", b""), ("x.arrow", b""), ("x.parquet", ROW), ("x.arrow", ROW), ("x.jsonl.gz", b""), ("x.zst", b"")],
)
def test_what_is_named_otherwise_than_it_is_is_a_problem_even_when_it_is_empty(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    [(number, row)] = read_rows(tmp_path / name, (), ())
    assert number == 1
    assert isinstance(row, BadRow)
    assert "and is no such file, or only a part of one" in str(row)


def test_an_empty_file_of_lines_has_no_records(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"")
    (tmp_path / "y.jsonl.gz").write_bytes(gzip.compress(b""))
    assert list(iter_records(tmp_path)) == []


def test_a_folder_may_mix_formats_compressions_and_forms(tmp_path):
    message = {"role": "user", "content": "x"}
    (tmp_path / "a.jsonl").write_bytes(ROW)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"id": 2, "conversations": [{"from": "gpt", "value": "y"}]}'))
    (tmp_path / "c.jsonl.zst").write_bytes(pa.compress(b'{"id": 3, "input_ids": [2]}', "zstd", asbytes=True))
    pq.write_table(pa.Table.from_pylist([{"id": 4, "messages": [message]}]), tmp_path / "d.parquet")
    pq.write_table(pa.Table.from_pylist([{"prompt": "x", "response": "y"}]), tmp_path / "e.parquet")
    pq.write_table(pa.Table.from_pylist([{"id": "6", "input_ids": [3], "loss_mask": [0]}]), tmp_path / "f.parquet")
    records = list(iter_records(tmp_path))
    assert [record.id for record in records if not record.id.startswith("sha256-")] == ["x", "2", "3", "4", "6"]
    assert [isinstance(record, Sample) for record in records] == [True, False, True, False, False, True]
    assert records[3].source == f"{tmp_path / 'd.parquet'}:1"


def test_rows_and_lines_are_counted_where_that_is_quick(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(ROW * 3 + ROW.strip())
    pq.write_table(pa.table({"input_ids": [[1]] * 5}), tmp_path / "b.parquet")
    files = find_files(tmp_path)
    assert count_rows(files, 2**20) == 9
    assert count_rows(files, 10) is None
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(ROW))
    assert count_rows(find_files(tmp_path), 2**20) is None
    (tmp_path / "d.parquet").write_bytes(b"PAR1 and no more")
    assert count_rows([tmp_path / "d.parquet"], 2**20) is None
