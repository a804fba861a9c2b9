"""The driver's ledger."""

import errno
from pathlib import Path

import pytest
from faulty_disk import FailAt, disk

from sglang_hs_capture.errors import CorruptionError, DatasetLockedError, DiskFullError
from sglang_hs_capture.store.journal import encode_line
from sglang_hs_capture.store.requests import DroppedRecord, RequestLedger, RequestRecord, load_requests
from sglang_hs_capture.store.schema import sample_key


def request(sample_id: str, length: int = 3, end_hash: int = 2**64 - 1) -> RequestRecord:
    return RequestRecord(sample_id, sample_key(sample_id), length, end_hash, (1, length - 1), f"data.jsonl:{length}")


def test_round_trip(tmp_path: Path) -> None:
    records = [request("b"), request("a\ud800\n"), request("../../etc")]
    with RequestLedger.open(tmp_path) as ledger:
        for record in records:
            ledger.append(record)
        ledger.append(DroppedRecord("long", "data.jsonl:9", "too long"))
        ledger.fsync()
        assert list(load_requests(tmp_path).requests.values()) == records
    with RequestLedger.open(tmp_path) as ledger:
        assert list(ledger.requests.values()) == records
        assert ledger.dropped == {"long": DroppedRecord("long", "data.jsonl:9", "too long")}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock-requests", "requests.jsonl"]


def test_no_ledger_is_an_empty_one(tmp_path: Path) -> None:
    assert load_requests(tmp_path).requests == {}


def test_asking_again_replaces_and_revives(tmp_path: Path) -> None:
    with RequestLedger.open(tmp_path) as ledger:
        for record in (
            request("a"),
            request("b"),
            DroppedRecord("a", "data.jsonl:3", "failed 3 times"),
            request("a", 5),
        ):
            ledger.append(record)
        assert ledger.dropped == {}
    loaded = load_requests(tmp_path)
    assert [(r.id, r.length) for r in loaded.requests.values()] == [("a", 5), ("b", 3)]
    assert loaded.dropped == {}


def test_torn_last_line_is_cut(tmp_path: Path) -> None:
    with RequestLedger.open(tmp_path) as ledger:
        ledger.append(request("a"))
    path = tmp_path / "requests.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + encode_line(request("b").to_json())[:-1])
    assert list(load_requests(tmp_path).requests) == ["a"]
    RequestLedger.open(tmp_path).close()
    assert path.read_bytes() == whole


def test_two_drivers_are_refused(tmp_path: Path) -> None:
    with RequestLedger.open(tmp_path), pytest.raises(DatasetLockedError, match="lock-requests"):
        RequestLedger.open(tmp_path, lock_timeout_s=0)
    RequestLedger.open(tmp_path, lock_timeout_s=0).close()


@pytest.mark.parametrize(
    "change", [{"loss_mask": [1]}, {"loss_mask": [4, -1]}, {"length": "x"}, {"end_hash": 7}, {"loss_mask": None}]
)
def test_malformed_records_are_told_with_their_line(tmp_path: Path, change: dict) -> None:
    lines = encode_line(request("a").to_json()) + encode_line({**request("b").to_json(), **change})
    (tmp_path / "requests.jsonl").write_bytes(lines)
    with pytest.raises(CorruptionError, match=r"requests.jsonl, line 2"):
        load_requests(tmp_path)
    with pytest.raises(CorruptionError, match=r"requests.jsonl, line 2"):
        RequestLedger.open(tmp_path)
    (tmp_path / "requests.jsonl").unlink()
    RequestLedger.open(tmp_path, lock_timeout_s=0).close()


def test_full_disk_keeps_the_durable_records_and_lets_go_of_the_lock(tmp_path: Path) -> None:
    ledger = RequestLedger.open(tmp_path)
    ledger.append(request("a"))
    ledger.fsync()
    ledger.append(request("b"))
    with disk(FailAt(errno.ENOSPC, "pwrite", "requests.jsonl")), pytest.raises(DiskFullError):
        ledger.close()
    with RequestLedger.open(tmp_path, lock_timeout_s=0) as ledger:
        assert list(ledger.requests) == ["a"]
