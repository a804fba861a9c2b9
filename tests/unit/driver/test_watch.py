"""Following journals and session records: a sample is whole when every stage of the pipeline has acknowledged it."""

from dataclasses import replace
from pathlib import Path

from sglang_hs_capture.driver.watch import JournalWatch, SessionWatch
from sglang_hs_capture.store.schema import FailureRecord, Media
from sglang_hs_capture.store.session import Counters, SessionRecord, write_session
from tests.unit.toy_store import open_store, put_sample

STAGES = {"dp0-pp0": ("boundary:1",), "dp0-pp1": ("final:pre_norm",)}


def rids(watch: JournalWatch) -> list[str]:
    return [record.rid for record in watch.poll()]


def test_a_sample_counts_when_the_last_stage_has_it(tmp_path):
    first, second = (open_store(tmp_path, writer, columns=columns) for writer, columns in STAGES.items())
    watch = JournalWatch(tmp_path)
    for store, prompts in ((first, {"hs-a": [1, 2], "hs-b": [3]}), (second, {"hs-b": [3]})):
        for rid, tokens in prompts.items():
            put_sample(store, rid, tokens)
        store.commit()
        if store is first:
            assert rids(watch) == []
    assert rids(watch) == ["hs-b"]
    put_sample(second, "hs-a", [1, 2])
    second.add_failure("hs-c", "incomplete", "x")
    second.commit()
    found = watch.poll()
    assert [record.rid for record in found] == ["hs-a", "hs-c"]
    assert isinstance(found[1], FailureRecord)
    first.close()
    second.close()


def test_stages_that_disagree_about_the_tokens_make_no_sample(tmp_path):
    first, second = (open_store(tmp_path, writer, columns=columns) for writer, columns in STAGES.items())
    watch = JournalWatch(tmp_path)
    put_sample(first, "hs-a", [1, 2])
    put_sample(second, "hs-a", [1, 3])
    first.close()
    second.close()
    assert rids(watch) == []


def test_stages_that_disagree_about_the_images_make_no_sample(tmp_path):
    first, second = (open_store(tmp_path, writer, columns=columns) for writer, columns in STAGES.items())
    watch = JournalWatch(tmp_path)
    put_sample(first, "hs-a", [1, 2], media=Media(((1, 1),), 9, 7))
    put_sample(second, "hs-a", [1, 2])
    first.close()
    second.close()
    assert rids(watch) == []


def test_a_writer_with_all_columns_needs_no_other(tmp_path):
    store = open_store(tmp_path)
    watch = JournalWatch(tmp_path)
    put_sample(store, "hs-a", list(range(7)))
    store.close()
    assert rids(watch) == ["hs-a"]


def record(directory: Path, writer: str, **counters: float) -> SessionRecord:
    session = SessionRecord(writer, f"id-{writer}", 1, "here", state="ready", counters=Counters(**counters))
    write_session(directory, session)
    return session


def test_stages_count_the_same_rows_and_different_bytes(tmp_path):
    writers = ["dp0-pp0", "dp0-pp1", "dp1-pp0", "dp1-pp1"]
    watch = SessionWatch(tmp_path, [record(tmp_path, writer, rows=100) for writer in writers])
    gains = [(110, 5, 10), (107, 4, 20), (101, 1, 1), (103, 1, 2)]
    for writer, (rows, samples, size) in zip(writers, gains, strict=True):
        record(tmp_path, writer, rows=rows, samples=samples, bytes=size, ring_bytes=8)
    watch.poll()
    total = watch.counters()
    assert (total.rows, total.samples, total.bytes, total.ring_bytes) == (13, 6, 33, 32)


def test_a_server_that_is_started_anew_counts_on_and_its_memory_counts_once(tmp_path):
    watch = SessionWatch(tmp_path, [record(tmp_path, "dp0-pp0", rows=100)])
    record(tmp_path, "dp0-pp0", rows=130, ring_bytes=8)
    watch.poll()
    anew = SessionRecord("dp0-pp0", "another", 2, "here", state="ready", counters=Counters(rows=5, ring_bytes=16))
    write_session(tmp_path, anew)
    assert [r.session_id for r in watch.poll()] == ["another"]
    total = watch.counters()
    assert (total.rows, total.ring_bytes) == (35, 16)


def test_a_capture_that_was_ended_in_order_is_told_until_it_begins_anew(tmp_path):
    first, second = (record(tmp_path, writer, rows=1) for writer in ("dp0-pp0", "dp1-pp0"))
    watch = SessionWatch(tmp_path, [first, second])
    watch.poll()
    assert watch.ends() == set()
    write_session(tmp_path, replace(second, state="closed"))
    watch.poll()
    assert watch.ends() == {"dp1"}
    assert watch.stops() == {}
    write_session(tmp_path, replace(second, session_id="another"))
    watch.poll()
    assert watch.ends() == set()


def test_writers_that_begin_during_a_run_are_followed_and_those_of_before_are_not(tmp_path):
    gone = record(tmp_path, "dp7-pp0", rows=1000)
    gone.state, gone.error = "stopped", "long ago"
    write_session(tmp_path, gone)
    watch = SessionWatch(tmp_path, [record(tmp_path, "dp0-pp0", rows=10)])
    record(tmp_path, "dp1-pp0", rows=3)
    assert [r.writer for r in watch.poll()] == ["dp0-pp0", "dp1-pp0"]
    assert watch.counters().rows == 3
    assert watch.stops() == {}
    began = record(tmp_path, "dp1-pp0", rows=4)
    began.state, began.error = "stopped", "no space"
    write_session(tmp_path, began)
    watch.poll()
    assert {replica: str(error) for replica, error in watch.stops().items()} == {
        "dp1": "capture has stopped: no space; all acknowledged samples are safe; run again to go on"
    }
