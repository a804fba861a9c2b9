"""Lines of compressed files, and where they begin."""

import gzip
import random

import pyarrow as pa
import pytest

from sglang_hs_capture.data.conversations import iter_records
from sglang_hs_capture.data.lines import read_lines
from sglang_hs_capture.data.records import BadRow, InputProblem, Sample


def packed(data):
    return bytes(pa.compress(data, "zstd", asbytes=True))


def test_zstd_is_found_by_content(tmp_path):
    file = tmp_path / "f.jsonl"
    file.write_bytes(packed(b'\xef\xbb\xbf{"id": "x", "input_ids": [1]}\n'))
    [record] = iter_records(file)
    assert (record.id, record.source) == ("x", f"{file}:1")


@pytest.mark.parametrize("pack", [packed, gzip.compress])
def test_several_compressed_streams_behind_each_other_are_one_file(tmp_path, pack):
    file = tmp_path / "f"
    file.write_bytes(pack(b"a\nb") + pack(b"") + pack(b"c\n"))
    assert [line for _, _, line in read_lines(file)] == [b"a\n", b"bc\n"]


@pytest.mark.parametrize("kept", [5, 0.3, 0.9, -1])
def test_truncated_zstd_is_one_problem_and_the_next_file_is_read(tmp_path, kept):
    chance = random.Random(1)
    rows = b"".join(
        b'{"input_ids": [%s]}\n' % b",".join(b"%d" % chance.randrange(10**6) for _ in range(50)) for _ in range(2000)
    )
    data = packed(rows)
    size = int(len(data) * kept) if isinstance(kept, float) else kept % len(data)
    (tmp_path / "a.jsonl.zst").write_bytes(data[:size])
    (tmp_path / "b.jsonl").write_text('{"id": "b", "input_ids": [1]}\n')
    *before, problem, last = iter_records(tmp_path)
    assert last.id == "b"
    assert isinstance(problem, InputProblem)
    assert "the compressed data is damaged or cut off here (Truncated compressed stream)" in problem.reason
    assert all(isinstance(record, Sample) for record in before)


def test_damaged_zstd_raises_nothing(tmp_path):
    file = tmp_path / "f.zst"
    data = packed(b'{"input_ids": [1]}\n' * 1000)
    for place in range(4, len(data)):
        file.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        for _ in iter_records(file):
            pass


@pytest.mark.parametrize("pack", [bytes, packed, gzip.compress])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_line_begins_where_it_is_said_to(tmp_path, pack, mark):
    data = mark + b"one\n\n" + b"x" * 50 + b"\n" + "zwölf\n".encode() + b"last"
    (tmp_path / "f").write_bytes(pack(data))
    lines = list(read_lines(tmp_path / "f", 20))
    assert [number for number, _, _ in lines] == [1, 2, 3, 4, 5]
    assert isinstance(lines[2][2], BadRow)
    assert [line for _, _, line in lines if isinstance(line, bytes)] == [b"one\n", b"\n", "zwölf\n".encode(), b"last"]
    for _, start, line in lines:
        assert isinstance(line, BadRow) or data[start : start + len(line)] == line
