"""Lines: their bytes, what damage to them is told from, and how a growing file is followed."""

import errno
import zlib
from pathlib import Path

import pytest
from faulty_disk import FailAt, FaultyOS, ShortWrites, disk
from hypothesis import given
from hypothesis import strategies as st

from sglang_hs_capture.errors import CorruptionError, DiskFullError, StoreError
from sglang_hs_capture.store.journal import JournalFile, JournalTail, decode_line, encode_line, read_records

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


def write(path: Path, *records: dict) -> None:
    """Append records durably."""
    file = JournalFile(path)
    for record in records:
        file.append(record)
    file.sync()
    file.close()


def contents(path: Path) -> list[dict]:
    return [record for _, record in read_records(path)]


def test_golden_line() -> None:
    line = encode_line({"t": "rows", "shard": 1, "start": 0, "count": 5, "xxh3": "0c5e8ca8a3b5c850"})
    assert line == b'{"t":"rows","shard":1,"start":0,"count":5,"xxh3":"0c5e8ca8a3b5c850","crc":"e9903f6a"}\n'
    body = line[: line.index(b',"crc"')]
    assert line[-11:-3] == b"%08x" % zlib.crc32(body)


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.text())
def test_records_survive(record: dict, kind: str) -> None:
    record = {**record, "t": kind}
    line = encode_line(record)
    assert line.count(b"\n") == 1
    assert line.isascii()
    assert decode_line(line) == record


@given(st.data())
def test_any_changed_byte_is_noticed(data: st.DataObject) -> None:
    line = bytearray(encode_line({"t": "sample", "rid": "hs-x", "extents": [[0, 1, 2]]}))
    place = data.draw(st.integers(0, len(line) - 2))
    line[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match="checksum"):
        decode_line(bytes(line))


@pytest.mark.parametrize("record", [{}, {"t": 3}, {"a": "b"}])
def test_records_without_a_type_are_refused(record: dict) -> None:
    with pytest.raises(ValueError, match=r"type|checksum"):
        decode_line(encode_line(record))


def test_torn_last_line_is_passed_over_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "journal-w.jsonl"
    write(path, {"t": "a"}, {"t": "b"})
    whole = path.read_bytes()
    last = encode_line({"t": "c"})
    for length in range(1, len(last)):
        path.write_bytes(whole + last[:length])
        assert contents(path) == [{"t": "a"}, {"t": "b"}]
        JournalFile(path).close()
        assert path.read_bytes() == whole
    path.write_bytes(last[:5])
    write(path, {"t": "first"})
    assert contents(path) == [{"t": "first"}]


def test_tail_of_zeros_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "journal-w.jsonl"
    write(path, {"t": "a"})
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(200_000))
    write(path, {"t": "b"})
    assert contents(path) == [{"t": "a"}, {"t": "b"}]


@pytest.mark.parametrize("line", [1, 2, 3])
def test_flipped_byte_is_told_with_its_line(tmp_path: Path, line: int) -> None:
    path = tmp_path / "journal-w.jsonl"
    write(path, {"t": "a", "v": 1}, {"t": "a", "v": 2}, {"t": "a", "v": 3})
    data = bytearray(path.read_bytes())
    data[(line - 1) * len(data) // 3 + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match=rf"journal-w.jsonl, line {line}: the checksum is wrong"):
        contents(path)
    with pytest.raises(CorruptionError, match=f"line {line}:"):
        JournalTail(path).poll()


def test_file_that_is_not_there_has_no_records(tmp_path: Path) -> None:
    assert contents(tmp_path / "none.jsonl") == []


def test_records_count_only_after_sync(tmp_path: Path) -> None:
    path = tmp_path / "journal-w.jsonl"
    file = JournalFile(path)
    file.append({"t": "a"})
    assert contents(path) == []
    file.sync()
    file.append({"t": "lost"})
    file.close()
    file.close()
    assert contents(path) == [{"t": "a"}]


def test_opening_makes_lines_durable_that_a_killed_writer_left(tmp_path: Path) -> None:
    with disk(FaultyOS()) as counting:
        JournalFile(tmp_path / "journal-w.jsonl").close()
    assert counting.calls == ["open", "fsync", "fsync"]


def test_short_writes_are_continued(tmp_path: Path) -> None:
    with disk(ShortWrites()):
        write(tmp_path / "j.jsonl", {"t": "a" * 100})
    assert contents(tmp_path / "j.jsonl") == [{"t": "a" * 100}]


@pytest.mark.parametrize(
    ("code", "call", "kind"),
    [(errno.ENOSPC, "pwrite", DiskFullError), (errno.EIO, "fsync", StoreError), (errno.EDQUOT, "fsync", DiskFullError)],
)
def test_failed_sync_leaves_the_durable_lines(tmp_path: Path, code: int, call: str, kind: type[StoreError]) -> None:
    path = tmp_path / "journal-w.jsonl"
    write(path, {"t": "a"})
    whole = path.read_bytes()
    file = JournalFile(path)
    file.append({"t": "b"})
    with disk(FailAt(code, call, "journal-w")), pytest.raises(kind, match=r"journal-w.jsonl: could not write: .*safe"):
        file.sync()
    assert path.read_bytes() == whole
    with pytest.raises(StoreError, match="an earlier write failed"):
        file.sync()
    file.close()
    write(path, {"t": "c"})
    assert contents(path) == [{"t": "a"}, {"t": "c"}]


def test_tail_follows_a_growing_file(tmp_path: Path) -> None:
    path = tmp_path / "journal-w.jsonl"
    tail = JournalTail(path)
    assert tail.poll() == []
    write(path, {"t": "a"}, {"t": "b"})
    assert tail.poll() == [{"t": "a"}, {"t": "b"}]
    assert tail.poll() == []
    line = encode_line({"t": "c"})
    with path.open("ab") as file:
        file.write(line[:7])
    assert tail.poll() == []
    with path.open("ab") as file:
        file.write(line[7:] + line[:3])
    assert tail.poll() == [{"t": "c"}]
    JournalFile(path).close()
    assert tail.poll() == []
    write(path, {"t": "d"})
    assert tail.poll() == [{"t": "d"}]


def test_tail_says_when_delivered_lines_vanish(tmp_path: Path) -> None:
    path = tmp_path / "journal-w.jsonl"
    write(path, {"t": "a"}, {"t": "b"})
    tail = JournalTail(path)
    tail.poll()
    path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(CorruptionError, match="bytes that were read before are gone"):
        tail.poll()


def test_a_file_that_was_followed_and_is_gone_is_told(tmp_path):
    path = tmp_path / "journal-w.jsonl"
    tail = JournalTail(path)
    assert tail.poll() == []
    path.write_bytes(encode_line({"t": "x"}))
    assert len(tail.poll()) == 1
    path.unlink()
    with pytest.raises(CorruptionError, match=f"{path}: it was read before, and is not there any more"):
        tail.poll()
