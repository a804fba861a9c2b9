"""Merging: datasets of several nodes become one, whatever their writers are called, and however often it is killed."""

import contextlib
import errno
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import exported_dataset
import numpy as np
import pytest
import torch
from faulty_disk import FailAt, FaultyOS, KillAt, disk
from made_dataset import flip, info_of, open_store, put_sample, states_of, to_bytes, tokens_of, write_norm

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.errors import (
    ConfigError,
    DatasetLockedError,
    DatasetMismatchError,
    DiskFullError,
    StoreError,
)
from sglang_hs_capture.store import fs
from sglang_hs_capture.store import merge as merge_module
from sglang_hs_capture.store.hashing import prefix_hashes
from sglang_hs_capture.store.index import load_index
from sglang_hs_capture.store.known_answers import (
    KNOWN_ANSWERS_FILE,
    AnswerFile,
    KnownAnswer,
    load_known_answers,
)
from sglang_hs_capture.store.merge import Merged, merge
from sglang_hs_capture.store.origin import origin_path, read_origins, write_origins
from sglang_hs_capture.store.requests import DroppedRecord, RequestLedger, RequestRecord
from sglang_hs_capture.store.schema import rle_encode, sample_key
from sglang_hs_capture.store.session import SessionRecord, read_sessions, write_session
from sglang_hs_capture.store.writer import StoreWriter
from sglang_hs_capture.verify.check import CheckResult, CheckSettings, CheckView, check_dataset

DTYPES = ["bfloat16", "float8_e4m3"]


def make(
    directory: Path,
    ids: dict[str, int],
    *,
    writer: str = "dp0-pp0",
    dtype: str = "bfloat16",
    close: bool = True,
    created_at: str = "2025-02-01T00:00:00.000Z",
    config_hash: str = "c0ffee",
) -> Path:
    """A dataset of samples whose ids go to the number that their tokens are made of; shards have 16 rows."""
    info = info_of(dtype)
    vars(info).update(created_at=created_at, config_hash=config_hash)
    store = StoreWriter.open(
        directory, writer, info, session_id="5e55", min_free_bytes=0, lock_timeout_s=0, shard_bytes=16 * info.row_bytes
    )
    with RequestLedger.open(directory) as ledger:
        for id, number in ids.items():
            put_sample(store, ledger, id, tokens_of(number, 5 + number % 13), dtype, lambda _id, _states: None)
    write_norm(directory)
    write_session(directory, SessionRecord(writer, "5e55", os.getpid(), "elsewhere", state="ready"))
    if close:
        store.close()
    else:
        store._lock.release()
    return directory


def some(*numbers: int) -> dict[str, int]:
    return {f"s{number}": number for number in numbers}


def check(directory: Path) -> CheckResult:
    return check_dataset(directory, CheckSettings(), CheckView())


def content(directory: Path) -> dict[str, tuple[list[int], list[torch.Tensor], list[int]]]:
    dataset = HiddenStateDataset(directory)
    samples = [dataset[number] for number in range(len(dataset))]
    return {s["id"]: (s["input_ids"].tolist(), s["hidden_states"], s["loss_mask"].tolist()) for s in samples}


def assert_joined(out: Path, *sources: Path) -> None:
    """``out`` is sound and has just what the sources have."""
    result = check(out)
    assert result.sound, result.findings.listed()
    expected: dict[str, Any] = {}
    for source in sources:
        expected |= content(source)
    got = content(out)
    assert got.keys() == expected.keys()
    for id, (tokens, states, mask) in expected.items():
        assert (got[id][0], got[id][2]) == (tokens, mask)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(got[id][1], states, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_datasets_of_several_nodes_become_one(tmp_path, dtype):
    first = make(tmp_path / "a", some(1, 2, 3, 4), dtype=dtype)
    second = make(tmp_path / "b", some(5, 6, 7), dtype=dtype, created_at="2025-03-01T00:00:00.000Z")
    third = make(tmp_path / "c", some(8, 9), writer="dp4-pp0", dtype=dtype)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and "lock" not in path.name}
    done = merge(tmp_path / "out", [first, second, third])
    assert done.samples == 9
    assert (done.duplicates, done.copied) == (0, 0)
    assert_joined(tmp_path / "out", first, second, third)
    writers = {entry.writer for entry in load_index(tmp_path / "out").shards}
    assert writers == {"dp0-pp0", "dp1-pp0", "dp4-pp0"}, "the second dataset's writer has a number of its own"
    assert {path: path.read_bytes() for path in before} == before, "the datasets stay as they are"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c", "out"}
    assert not check(tmp_path / "out").findings.warnings


def test_shards_are_links_where_that_can_be_and_copies_elsewhere(tmp_path):
    first, second = make(tmp_path / "a", some(1, 2)), make(tmp_path / "b", some(3))
    merge(tmp_path / "linked", [first, second])
    assert all(path.stat().st_nlink == 2 for path in (tmp_path / "linked" / "shards").iterdir())

    class NoLinks(FaultyOS):
        def before(self, step: int, name: str, args: tuple[Any, ...]) -> None:
            if name == "link":
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    with disk(NoLinks()):
        done = merge(tmp_path / "copied", [first, second])
    assert done.copied == done.shards > 0
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "copied" / "shards").glob("dp1-*"))
    assert_joined(tmp_path / "copied", first, second)


def test_no_copy_is_begun_without_room_for_all(tmp_path, monkeypatch):
    first = make(tmp_path / "a", some(1, 2))
    monkeypatch.setattr(fs, "link", lambda old, new: False)
    monkeypatch.setattr(fs, "free_bytes", lambda path: 100)
    with pytest.raises(DiskFullError, match="100 are free"):
        merge(tmp_path / "out", [first])
    monkeypatch.undo()
    assert not (tmp_path / "out").exists()
    merge(tmp_path / "out", [first])
    assert_joined(tmp_path / "out", first)


def test_what_a_crash_left_unfinished_is_finished_first(tmp_path):
    first, second = make(tmp_path / "a", some(1, 2), close=False), make(tmp_path / "b", some(3), close=False)
    assert list(tmp_path.rglob("*.partial"))
    merge(tmp_path / "out", [first, second])
    assert_joined(tmp_path / "out", first, second)
    assert not list(tmp_path.rglob("*.partial"))


def test_a_sample_that_two_datasets_have_counts_once(tmp_path):
    first, second = make(tmp_path / "a", some(1, 2)), make(tmp_path / "b", some(2, 3))
    done = merge(tmp_path / "out", [first, second])
    assert (done.samples, done.duplicates) == (3, 1)
    assert_joined(tmp_path / "out", first, second)
    assert [sample.id for sample in load_index(tmp_path / "out").samples] == ["s1", "s2", "s3"]
    assert set(check(tmp_path / "out").findings.counts) == {"duplicate"}


def test_one_id_with_other_tokens_is_refused(tmp_path):
    first, second = make(tmp_path / "a", {"x": 1, "y": 2}), make(tmp_path / "b", {"x": 3})
    with pytest.raises(DatasetMismatchError, match=r"'x' has other tokens in .*/a than in .*/b"):
        merge(tmp_path / "out", [first, second])
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_one_id_with_another_loss_mask_is_refused(tmp_path):
    first, second = make(tmp_path / "a", some(1)), make(tmp_path / "b", some(1))
    with RequestLedger.open(second) as ledger:
        old = ledger.requests["s1"]
        ledger.append(RequestRecord(old.id, old.key, old.length, old.end_hash, (0, old.length), old.source))
    with pytest.raises(DatasetMismatchError, match="another loss mask"):
        merge(tmp_path / "out", [first, second])


def test_what_was_asked_for_and_not_captured_is_known_unless_another_dataset_has_it(tmp_path):
    first, second = make(tmp_path / "a", some(1)), make(tmp_path / "b", some(2))
    other = tokens_of(7, 4)
    with RequestLedger.open(first) as ledger:
        for id in ("s2", "s3", "s4"):  # asked for from other tokens than those that were captured elsewhere
            mask = tuple(rle_encode([0] * len(other)))
            ledger.append(RequestRecord(id, sample_key(id), len(other), 9, mask, "old.jsonl:1"))
        ledger.append(DroppedRecord("s2", "old.jsonl:1", "no luck"))
        ledger.append(DroppedRecord("s3", "old.jsonl:1", "no luck"))
    merge(tmp_path / "out", [first, second])
    index = load_index(tmp_path / "out")
    assert {sample.id for sample in index.samples} == {"s1", "s2"}
    assert [record.id for record in index.dropped] == ["s3"]
    assert index.pending == ("s4",)


@pytest.mark.parametrize("field", ["dtype", "config_hash"])
def test_datasets_of_other_settings_or_models_are_refused(tmp_path, field):
    first = make(tmp_path / "a", some(1))
    value = {"dtype": "float16", "config_hash": "0ff1ce"}[field]
    second = make(tmp_path / "b", some(2), **{field: value})
    with pytest.raises(DatasetMismatchError, match=rf"/b: captured differently from .*/a \({field}"):
        merge(tmp_path / "out", [first, second])


def test_datasets_of_other_weights_are_refused(tmp_path):
    first, second = make(tmp_path / "a", some(1)), make(tmp_path / "b", some(2))
    write_norm(second, eps=1e-5)
    with pytest.raises(DatasetMismatchError, match="another final norm"):
        merge(tmp_path / "out", [first, second])


def test_a_dataset_that_is_being_captured_is_refused(tmp_path):
    first = make(tmp_path / "a", some(1))
    with RequestLedger.open(first), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sglang_hs_capture.store.merge.LOCK_TIMEOUT_S", 0.0)
        with pytest.raises(DatasetLockedError):
            merge(tmp_path / "out", [first])


def test_names_that_make_no_sense_are_refused(tmp_path):
    first = make(tmp_path / "a", some(1))
    with pytest.raises(ConfigError, match="named twice"):
        merge(tmp_path / "out", [first, tmp_path / "." / "a"])
    with pytest.raises(ConfigError, match="not empty"):
        merge(first, [make(tmp_path / "b", some(2))])
    with pytest.raises(ConfigError, match="one of the datasets themselves"):
        merge(first, [first])


def test_a_merged_dataset_is_merged_again_and_captured_into(tmp_path):
    """The headers of shards have the names of where they were written, however often they were moved since."""
    first, second = make(tmp_path / "a", some(1, 2)), make(tmp_path / "b", some(3, 4))
    merge(tmp_path / "ab", [first, second])
    make(tmp_path / "ab", some(5, 6), writer="dp1-pp0")
    assert check(tmp_path / "ab").sound
    third = make(tmp_path / "c", some(7), created_at="2025-04-01T00:00:00.000Z")
    merge(tmp_path / "out", [third, tmp_path / "ab"])
    assert_joined(tmp_path / "out", third, tmp_path / "ab")
    assert [origin.writer for origin in read_origins(tmp_path / "out", "dp1-pp0")] == ["dp0-pp0", "dp0-pp0"]


def test_verify_finds_a_header_that_is_not_its_origins(tmp_path):
    first, second = make(tmp_path / "a", some(1)), make(tmp_path / "b", some(2))
    merge(tmp_path / "out", [first, second])
    path = origin_path(tmp_path / "out", "dp1-pp0")
    text = path.read_text()
    (origin,) = read_origins(tmp_path / "out", "dp1-pp0")
    other = replace(origin, info=replace(origin.info, created_at="2025-02-02T00:00:00.000Z"))
    write_origins(tmp_path / "out", "dp1-pp0", [other])
    assert set(check(tmp_path / "out").findings.counts) == {"shard-header"}
    path.write_text("{")
    assert "origin-file" in check(tmp_path / "out").findings.counts
    path.write_text(text)
    flip(next((tmp_path / "b" / "shards").iterdir()), 100)
    assert set(check(tmp_path / "out").findings.counts) == {"shard-header"}, "a link is the same file"


def test_nobody_is_said_to_capture_into_a_merged_dataset(tmp_path):
    first, second = make(tmp_path / "a", some(1)), make(tmp_path / "b", some(2))
    merge(tmp_path / "out", [first, second])
    assert [(r.writer, r.state) for r in read_sessions(tmp_path / "out")] == [
        ("dp0-pp0", "closed"),
        ("dp1-pp0", "closed"),
    ]


def test_samples_with_images_stay_what_they_are(tmp_path):
    sources = [exported_dataset.make(tmp_path / name, by_hand=False) for name in ("a", "b")]
    media = exported_dataset.add_image(sources[0], "image")
    exported_dataset.add_image(sources[1], "another")
    assert merge(tmp_path / "out", sources).samples == len(exported_dataset.PROMPTS) + 2
    assert_joined(tmp_path / "out", *sources)
    entries = {sample.id: sample for sample in load_index(tmp_path / "out").samples}
    assert entries["image"].media == entries["another"].media == media
    assert load_index(tmp_path / "out").requested["image"].images == ("sha256:a",)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is such a thing: the disk's own speed at ``fsync`` is not under test."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as name:
        yield Path(name)


def merge_in_child(out: Path, sources: list[Path], faulty: FaultyOS) -> int:
    """Merge in a process of its own, which a faulty disk may kill; its wait status."""
    child = os.fork()
    if not child:
        try:
            with disk(faulty):
                merge(out, sources)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_a_merge_that_is_killed_at_any_step_is_done_when_asked_for_again(directory, links, stride, monkeypatch):
    if not links:
        monkeypatch.setattr(fs, "link", lambda old, new: False)
    first, second = make(directory / "a", some(1, 2)), make(directory / "b", some(2, 3))
    counter = FaultyOS()
    with disk(counter):
        merge(directory / "whole", [first, second])
    expected = content(directory / "whole").keys()
    # From the end, where the dataset gets its name.
    for step in range(counter.steps - 1, -1, -stride):
        out = directory / f"out-{step}"
        status = merge_in_child(out, [first, second], KillAt(step, torn=True))
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL
        if out.exists():
            assert step >= counter.steps - 3, "it has its name before it is whole"
        else:
            assert isinstance(merge(out, [first, second]), Merged)
        assert content(out).keys() == expected
        assert check(out).sound


def test_a_merge_goes_on_where_it_was_and_another_one_begins_afresh(tmp_path, monkeypatch):
    monkeypatch.setattr(fs, "link", lambda old, new: False)
    first, second = make(tmp_path / "a", some(1, 2, 3)), make(tmp_path / "b", some(4))
    shards = merge(tmp_path / "whole", [first, second]).copied
    counter = FaultyOS()
    with disk(counter):
        merge(tmp_path / "whole2", [first, second])
    renames = [step for step, name in enumerate(counter.calls) if name == "rename"]
    merge_in_child(tmp_path / "out", [first, second], KillAt(renames[3], torn=False))
    there = len(list((tmp_path / ".out.merging" / "shards").glob("*.safetensors")))
    assert 0 < there < shards
    assert merge(tmp_path / "out", [first, second]).copied == shards - there
    merge_in_child(tmp_path / "other", [first, second], KillAt(renames[3], torn=False))
    assert merge(tmp_path / "other", [second, first]).copied == shards
    assert_joined(tmp_path / "other", first, second)


@pytest.mark.parametrize("there", [True, False])
def test_a_merge_into_a_link_makes_what_the_link_leads_to(tmp_path, there):
    first, elsewhere = make(tmp_path / "a", some(1, 2)), tmp_path / "disk" / "out"
    elsewhere.parent.mkdir()
    if there:
        elsewhere.mkdir()
    (tmp_path / "out").symlink_to(elsewhere)
    merge(tmp_path / "out", [first])
    assert (tmp_path / "out").is_symlink()
    assert_joined(tmp_path / "out", first)
    assert {path.name for path in elsewhere.parent.iterdir()} == {"out"}


def test_a_shard_that_was_moved_and_linked_to_is_taken_from_where_it_is(tmp_path):
    """A name given to the link itself would lead nowhere, and to nothing once the original is removed."""
    first, disk_two = make(tmp_path / "a", some(1, 2, 3)), tmp_path / "disk"
    disk_two.mkdir()
    for number, shard in enumerate(sorted((first / "shards").iterdir())):
        moved = shard.rename(disk_two / f"moved-{number}")
        shard.symlink_to(Path("..") / ".." / "disk" / moved.name)
    merge(tmp_path / "deep" / "down" / "out", [first])
    shards = list((tmp_path / "deep" / "down" / "out" / "shards").iterdir())
    assert shards
    assert not any(shard.is_symlink() for shard in shards)
    assert_joined(tmp_path / "deep" / "down" / "out", first)


def test_shards_of_a_dataset_captured_anew_in_between_are_not_taken_for_the_new_ones(tmp_path, monkeypatch):
    first = make(tmp_path / "a", some(1, 2, 3))
    with monkeypatch.context() as patch:
        patch.setattr("sglang_hs_capture.store.merge._write_records", lambda *_: os._exit(1))
        merge_in_child(tmp_path / "out", [first], FaultyOS())
    assert list((tmp_path / ".out.merging" / "shards").iterdir())
    first.rename(tmp_path / "old")
    first = make(tmp_path / "a", some(4, 5, 6), created_at="2025-06-01T00:00:00.000Z")
    merge(tmp_path / "out", [first])
    assert_joined(tmp_path / "out", first)


def test_what_the_engines_predicted_is_joined_for_samples_that_one_dataset_has(tmp_path):
    first, second = make(tmp_path / "a", some(1, 2)), make(tmp_path / "b", some(2, 3))
    for directory, ids in ((first, ["s1", "s2"]), (second, ["s2", "s3"])):
        file = AnswerFile(directory)
        for id in ids:
            file.append(KnownAnswer(id, 3, 7, 1, (-0.5,), (4,)))
        file.close()
    merge(tmp_path / "out", [first, second])
    assert [answer.id for answer in load_known_answers(tmp_path / "out")] == ["s1", "s3"]
    flip(second / KNOWN_ANSWERS_FILE, 10)
    said: list[str] = []
    merge(tmp_path / "other", [first, second], said.append)
    assert [answer.id for answer in load_known_answers(tmp_path / "other")] == ["s1"]
    assert any(f"{second / KNOWN_ANSWERS_FILE}, line 1: the checksum is wrong" in line for line in said)
    assert check(tmp_path / "other").sound


def stop_before_the_name(out: Path, sources: list[Path]) -> None:
    """Merge in a process that dies when all is there but the name."""

    class Kill(FaultyOS):
        def before(self, step: int, name: str, args: tuple[Any, ...]) -> None:
            if name == "rename" and str(args[0]).endswith(".merging"):
                os.kill(os.getpid(), signal.SIGKILL)

    assert os.WIFSIGNALED(merge_in_child(out, sources, Kill()))


def test_nothing_of_an_interrupted_merge_of_other_datasets_is_left(tmp_path):
    first, second, third = (make(tmp_path / name, some(number)) for number, name in enumerate("abc", start=1))
    stop_before_the_name(tmp_path / "out", [first, second, third])
    torn = tmp_path / ".out.merging" / ".requests.jsonl.1.tmp"
    torn.touch()
    merge(tmp_path / "out", [first, second])
    assert_joined(tmp_path / "out", first, second)
    merge(tmp_path / "again", [first, second])
    names = [{path.name for path in (tmp_path / out).iterdir()} for out in ("out", "again")]
    assert names[0] == names[1]


def test_what_an_interrupted_merge_left_is_no_dataset_to_join(tmp_path):
    first = make(tmp_path / "a", some(1, 2))
    stop_before_the_name(tmp_path / "out", [first])
    with pytest.raises(ConfigError, match=r"/\.out\.merging: what an interrupted merge into .*/out left"):
        merge(tmp_path / "out", [tmp_path / ".out.merging"])
    merge(tmp_path / "out", [first])
    assert_joined(tmp_path / "out", first)


def test_shards_of_a_dataset_merged_anew_in_between_are_not_taken_for_the_new_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(fs, "link", lambda old, new: False)
    dates = (f"2025-0{number}-01T00:00:00.000Z" for number in (1, 2, 3))
    a, b, c = (make(tmp_path / n, some(i), created_at=next(dates)) for i, n in enumerate("abc", start=1))
    merge(tmp_path / "joined", [a, b])
    stop_before_the_name(tmp_path / "out", [tmp_path / "joined"])
    (tmp_path / "joined").rename(tmp_path / "old")
    merge(tmp_path / "joined", [a, c])
    merge(tmp_path / "out", [tmp_path / "joined"])
    assert_joined(tmp_path / "out", a, c)


@pytest.mark.parametrize("close", [True, False])
def test_a_writer_that_begins_while_the_dataset_is_looked_at_is_told(tmp_path, monkeypatch, close):
    first = make(make(tmp_path / "a", some(1, 2)), some(3), writer="dp7-pp0", close=close)
    journal = (first / "journal-dp7-pp0.jsonl").rename(tmp_path / "later")

    def late(directory: Path) -> Any:
        journal.rename(directory / "journal-dp7-pp0.jsonl")
        return load_index(directory)

    with monkeypatch.context() as patch:
        patch.setattr(merge_module, "load_index", late)
        with pytest.raises(DatasetLockedError, match=r"/a: dp7-pp0 began to write while the dataset was looked at"):
            merge(tmp_path / "out", [first])
    assert not (tmp_path / ".out.merging").exists()
    merge(tmp_path / "out", [first])
    assert_joined(tmp_path / "out", first)


def test_a_merge_that_waited_for_another_one_is_told_that_it_is_made(tmp_path, monkeypatch):
    first, second = make(tmp_path / "a", some(1)), make(tmp_path / "b", some(2))
    locked = merge_module._locked

    def wait(path: Path) -> Any:
        if path.parent.name == ".out.merging":
            monkeypatch.setattr(merge_module, "_locked", locked)
            merge(tmp_path / "out", [second])
            return contextlib.nullcontext()  # as the lock of a file that has another name by now
        return locked(path)

    monkeypatch.setattr(merge_module, "_locked", wait)
    with pytest.raises(ConfigError, match="/out: exists already"):
        merge(tmp_path / "out", [first])
    assert_joined(tmp_path / "out", second)


@pytest.mark.parametrize("turned", [True, False])
def test_a_sample_sent_by_hand_stays_one_whatever_another_dataset_asked_for(tmp_path, turned):
    first, second = make(tmp_path / "a", {}), make(tmp_path / "b", some(1))
    store, tokens = open_store(first, "bfloat16"), tokens_of(3, 7)
    hashes = prefix_hashes(tokens, 0, 0)
    extents = store.append(to_bytes(states_of(tokens), "bfloat16"), tokens, np.arange(7), hashes)
    store.add_sample("hs-mine", 7, extents, int(hashes[-1]))
    store.commit()
    store.close()
    with RequestLedger.open(second) as ledger:
        ledger.append(RequestRecord("hs-mine", sample_key("hs-mine"), 4, 9, (0, 4), "data.jsonl:1"))
    merge(tmp_path / "out", [second, first] if turned else [first, second])
    assert_joined(tmp_path / "out", first, second)


def test_names_that_the_file_system_refuses_are_told(tmp_path):
    first = make(tmp_path / "a", some(1))
    (tmp_path / "one").symlink_to(tmp_path / "two")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    with pytest.raises(ConfigError, match="/one: exists already"):
        merge(tmp_path / "one", [first])
    with pytest.raises(StoreError, match=r"/one/dataset\.json: could not read"):
        merge(tmp_path / "out", [tmp_path / "one"])
    with pytest.raises(StoreError, match="File name too long"):
        merge(tmp_path / ("x" * 300), [first])


def test_a_mount_point_is_refused_before_anything_is_copied(tmp_path, monkeypatch):
    first, out = make(tmp_path / "a", some(1)), tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == out)
    with pytest.raises(ConfigError, match="/out: a mount point"):
        merge(out, [first])
    assert not (tmp_path / ".out.merging").exists()


def test_a_link_that_fails_is_told(tmp_path):
    first = make(tmp_path / "a", some(1))
    with disk(FailAt(errno.ENOSPC, "link", "shards")), pytest.raises(DiskFullError, match="could not link: No space"):
        merge(tmp_path / "out", [first])
    merge(tmp_path / "out", [first])
    assert_joined(tmp_path / "out", first)


@pytest.mark.parametrize("there", ["a/in", "a/shards/in", "link/in"])
def test_a_dataset_is_not_made_inside_one_of_the_datasets(tmp_path, there):
    make(tmp_path / "a", some(1))
    (tmp_path / "link").symlink_to(tmp_path / "a")
    before = sorted((tmp_path / "a").rglob("*"))
    with pytest.raises(ConfigError, match="inside"):
        merge(tmp_path / there, [tmp_path / "a"])
    assert sorted((tmp_path / "a").rglob("*")) == before
