"""A random order that a seed decides, over all kinds of files."""

import gzip
import json
import os
import tempfile
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sglang_hs_capture.data import shuffle
from sglang_hs_capture.data.conversations import iter_records
from sglang_hs_capture.data.records import InputProblem
from sglang_hs_capture.data.samples import SamplePreparer, iter_samples
from sglang_hs_capture.errors import InputError


def row(number):
    return {"id": str(number), "input_ids": [number]}


@pytest.fixture
def files(tmp_path):
    """60 rows in three kinds of files, with a bad one in each but the last, and blank lines."""
    lines = [json.dumps(row(n)).encode() + b"\n" for n in range(40)]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines[:20]) + b"oops\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[20:]) + b"oops"))
    pq.write_table(pa.Table.from_pylist([row(n) for n in range(40, 60)]), tmp_path / "c.parquet")
    return tmp_path


def test_shuffled_records_are_the_same_records(files):
    plain = {str(record): record for record in iter_records(files)}
    shuffled = list(iter_records(files, shuffle_seed=1))
    assert len(plain) == len(shuffled) == 62
    assert [str(record) for record in shuffled] != list(plain)
    for record in shuffled:
        expected = plain[str(record)]
        assert record.source == expected.source
        assert isinstance(record, InputProblem) or (record.id, *record.input_ids) == (expected.id, *expected.input_ids)


def test_a_seed_decides_the_order(files):
    def order(seed):
        return [record.source for record in iter_records(files, shuffle_seed=seed)]

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in (0, 1, 2, -1, 2**63)}) == 5


def test_the_order_is_the_same_today_and_later():
    assert shuffle.random_order(10, 7).tolist() == [7, 8, 1, 2, 3, 9, 5, 4, 0, 6]
    assert shuffle.random_order(0, 7).tolist() == []


@pytest.mark.parametrize("change", ["cut", "shorter-lines"])
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, change):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row(100 + n)) + "\n" for n in range(50)))
    records = iter_records(path, shuffle_seed=1)
    next(records)
    if change == "cut":
        os.truncate(path, path.stat().st_size // 2 - 7)
    else:
        path.write_text("".join(json.dumps(row(n % 10)) + "\n" for n in range(100)))
    with pytest.raises(InputError, match=r"a\.jsonl:\d+: expected the line of \d+ bytes .* the file has changed"):
        list(records)


def test_every_place_is_as_likely_as_any_other():
    places = np.array([np.argsort(shuffle.random_order(8, seed))[0] for seed in range(4000)])
    counts = np.bincount(places, minlength=8)
    assert counts.min() > 400
    assert counts.max() < 600


def test_a_limit_takes_from_all_of_the_input(files):
    samples = iter_samples(files, SamplePreparer(), max_length=None, shuffle_seed=3)
    sources = {next(samples).source.rpartition(":")[0] for _ in range(12)}
    assert len(sources) == 3


def test_a_pipe_can_be_shuffled(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = b"".join(json.dumps(row(n)).encode() + b"\n" for n in range(30))
    child = os.fork()
    if not child:
        try:
            pipe.write_bytes(content)
        finally:
            os._exit(0)
    ids = [record.id for record in iter_records(pipe, shuffle_seed=1)]
    os.waitpid(child, 0)
    assert sorted(ids, key=int) == [str(n) for n in range(30)] != ids


def test_a_line_over_the_limit_keeps_its_place(tmp_path):
    (tmp_path / "f").write_bytes(b'{"input_ids": [1]}\n' + b"x" * 100 + b"\n")
    problems = [
        str(record)
        for record in iter_records(tmp_path / "f", line_limit=30, shuffle_seed=1)
        if isinstance(record, InputProblem)
    ]
    assert problems == [f"{tmp_path / 'f'}:2: the line is longer than the limit of 30 bytes"]


def test_lines_of_plain_files_stay_where_they_are(tmp_path):
    line = json.dumps({"id": None, "prompt": "x" * 100_000, "response": "y"}).encode() + b"\n"
    (tmp_path / "f").write_bytes(line * 200)
    tracemalloc.start()
    assert (
        sum(len(record.messages[0]["content"]) for record in iter_records(tmp_path / "f", shuffle_seed=1)) == 2 * 10**7
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * len(line)


def test_a_temporary_folder_without_room_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "f.gz").write_bytes(gzip.compress(b'{"input_ids": [1]}\n'))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shuffle.os, "pwrite", full)
    with pytest.raises(
        InputError, match=r"rows to shuffle cannot be written here: No space left on device; set TMPDIR"
    ):
        list(iter_records(tmp_path / "f.gz", shuffle_seed=1))


def test_no_temporary_file_is_left(files, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(files / "tmp"))
    (files / "tmp").mkdir()
    records = iter_records(files, shuffle_seed=1)
    next(records)
    assert list((files / "tmp").iterdir()) == []
    records.close()
