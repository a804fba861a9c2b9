"""A crash at every step of capturing loses nothing acknowledged, and what is left can be read and gone on with."""

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from faulty_disk import ForgetfulOS, KillAt, PowerLossError, close_all_below, disk, join_store_threads
from safetensors import safe_open
from toy_store import append_tokens, make_info, open_store, put_sample, queue_sample, scales_of, states_of

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.store.hashing import prefix_hashes
from sglang_hs_capture.store.identity import read_info
from sglang_hs_capture.store.index import load_index
from sglang_hs_capture.store.journal import JournalTail
from sglang_hs_capture.store.recovery import recover_dataset
from sglang_hs_capture.store.replay import replay_journal

PROMPTS = {
    "one": [11, 12, 13],
    "chunked": [21, 22, 23, 24, 25, 26, 27],
    "shared": [21, 22, 23, 24, 35, 36],
    "beside": [41, 42, 43, 44],
    "second session": [51],
    "last": [61, 62],
}
CAPTURED = set(PROMPTS)
FLOWING = 6
PROMPTS |= {f"flowing {number}": [100 + number, 1, 2, 3] for number in range(FLOWING)}


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is such a thing: the disk's own speed at ``fsync`` is not under test."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as name:
        yield Path(name)


def capture(directory: Path, report: Callable[[list[str]], object], dtype: str = "bfloat16") -> None:
    """Two sessions that roll shards, share a prefix and report a failure; what is acknowledged is reported."""
    info = make_info(dtype=dtype)

    def acknowledged(store_records: list) -> None:
        report([record.rid for record in store_records])

    store = open_store(directory, info=info)
    put_sample(store, "one", PROMPTS["one"])
    acknowledged(store.commit())
    first, _ = append_tokens(store, PROMPTS["chunked"][:4])
    second, end_hash = append_tokens(store, PROMPTS["chunked"], start=4)
    store.add_sample("chunked", 7, first + second, end_hash)
    store.add_failure("broken", "non_finite", "row 3")
    acknowledged(store.commit())
    tail, end_hash = append_tokens(store, PROMPTS["shared"], start=4)
    store.add_sample("shared", 6, first + tail, end_hash)
    put_sample(store, "beside", PROMPTS["beside"])
    acknowledged(store.commit())
    acknowledged(store.close())
    store = open_store(directory, info=info)
    put_sample(store, "second session", PROMPTS["second session"])
    acknowledged(store.commit())
    append_tokens(store, [71, 72, 73, 74])
    put_sample(store, "last", PROMPTS["last"])
    acknowledged(store.close())


def capture_flowing(directory: Path, report: Callable[[list[str]], object], **changes: int) -> None:
    """A session in which nothing is waited for: shards are filled while those before are committed and finished."""
    store = open_store(directory, **changes)
    for number in range(FLOWING):
        queue_sample(store, f"flowing {number}", PROMPTS[f"flowing {number}"], lambda: None)
        if number % 2:
            store.begin_commit()
        report([record.rid for record in store.acknowledged()])
        time.sleep(0.002)
    report([record.rid for record in store.close()])


def capture_side_by_side(directory: Path, report: Callable[[list[str]], object]) -> None:
    """The same, with the next shard begun as soon as anything waits for the one before, three at most at a time."""
    capture_flowing(directory, report, max_open_shards=3, spill_bytes=0)


def read_all(directory: Path) -> set[str]:
    """The samples of a dataset, each compared with what was captured; none if there is no dataset yet."""
    if not (directory / "dataset.json").exists():
        return set()
    dataset = HiddenStateDataset(directory, raw=True)
    width = dataset.info.column_bytes
    for item in dataset:
        tokens = PROMPTS[item["id"]]
        hashes = prefix_hashes(np.array(tokens), 0, 0)
        states = states_of(hashes, 2, width)
        assert item["input_ids"].tolist() == tokens
        for column, values in enumerate(item["hidden_states"]):
            expected = states[:, width * column : width * (column + 1)]
            assert np.array_equal(values.view(torch.uint8).numpy(), expected)
        if dataset.info.scaled:
            assert np.array_equal(np.stack(item["scales"], axis=1), scales_of(hashes))
    return {sample.id for sample in dataset.samples}


def check_survived(directory: Path, acknowledged: set[str]) -> None:
    """All that was acknowledged is there before and after recovery, and capturing goes on."""
    assert acknowledged <= read_all(directory)
    store = open_store(directory, info=read_info(directory) if (directory / "dataset.json").exists() else None)
    before = read_all(directory)
    assert acknowledged <= before
    PROMPTS["afterwards"] = [81, 82, 83, 84, 85, 86]
    put_sample(store, "afterwards", PROMPTS["afterwards"])
    assert [record.rid for record in store.commit()] == ["afterwards"]
    store.close()
    assert read_all(directory) == before | {"afterwards"}
    check_tidy(directory)


def check_tidy(directory: Path) -> None:
    """Nothing but finished shards is left, each a file that safetensors reads and the journal knows."""
    index = load_index(directory)
    names = sorted(path.name for path in (directory / "shards").iterdir())
    assert names == [f"dp0-pp0-{entry.shard:06d}.safetensors" for entry in index.shards]
    for entry in index.shards:
        assert entry.state.finished
        with safe_open(directory / "shards" / f"dp0-pp0-{entry.shard:06d}.safetensors", framework="np") as file:
            hashes = file.get_tensor("prefix_hash").view(np.uint64)
            assert len(hashes) == entry.state.rows
            assert file.get_slice("hidden_states").get_shape() == [entry.state.rows, 2, 3]
            assert file.get_tensor("positions").max() < entry.state.rows + 7
    assert JournalTail(directory / "journal-dp0-pp0.jsonl").poll()


def run_killed(
    work: Callable[[Callable[[list[str]], object]], None], step: int, torn: bool, sync_s: float = 0.0
) -> tuple[bool, set[str]]:
    """Run ``work`` in a child that kills itself at a step; whether it did, and what it reported before."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with disk(KillAt(step, torn, sync_s)):
                work(lambda rids: os.write(writing, "".join(f"{rid}\n" for rid in rids).encode()))
            os._exit(0)
        except BaseException:
            os._exit(1)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        reported = set(pipe.read().splitlines())
    _, status = os.waitpid(child, 0)
    assert (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status), reported


@pytest.mark.parametrize(
    ("torn", "dtype"),
    [(False, "bfloat16"), (True, "bfloat16"), (True, "float8_e4m3")],
    ids=["between writes", "in a write", "in a write of float8"],
)
def test_killed_at_every_step(directory: Path, torn: bool, dtype: str) -> None:
    step = 0
    while True:
        target = directory / str(step) / "data"
        killed, acknowledged = run_killed(lambda report, d=target: capture(d, report, dtype), step, torn)
        check_survived(target, acknowledged)
        if not killed:
            break
        step += 1
    assert acknowledged == CAPTURED
    assert step > 100


@pytest.mark.parametrize("work", [capture_flowing, capture_side_by_side])
@pytest.mark.parametrize("torn", [False, True], ids=["between writes", "in a write"])
def test_killed_at_every_step_with_several_shards_in_flight(
    directory: Path, torn: bool, work: Callable[[Path, Callable[[list[str]], object]], None]
) -> None:
    """The disk is slow to make things durable, so that shards are filled faster than they are finished."""
    step = 0
    killed = True
    in_flight, durable = set(), set()
    while killed:
        target = directory / str(step) / "data"
        killed, acknowledged = run_killed(lambda report, d=target: work(d, report), step, torn, 0.003)
        if (target / "journal-dp0-pp0.jsonl").exists():
            partial = {int(path.stem[-6:]) for path in target.glob("shards/*.partial")}
            known = {n for n, state in replay_journal(target, "dp0-pp0").shards.items() if state.rows}
            in_flight.add(len(partial))
            durable.add(len(partial & known))
        check_survived(target, acknowledged)
        step += 1
    assert acknowledged == {f"flowing {number}" for number in range(FLOWING)}
    assert max(in_flight) > 1
    assert max(durable) > 1
    assert step > 50


def kind_of_state(target: Path) -> str:
    """What recovery has to deal with: each unfinished shard's files, what the journal knows, what must be cut."""
    if not (target / "shards").exists():
        return ""
    shards = replay_journal(target, "dp0-pp0").shards
    parts = []
    for path in sorted(target.glob("shards/*.rows")):
        state = shards.get(int(path.stem[-6:]))
        rows = state.rows if state else 0
        partial = path.with_suffix(".partial")
        tail = partial.stat().st_size - 4096 - 12 * rows if partial.exists() else None
        extra = path.stat().st_size - 24 * rows
        parts.append((state is None, rows > 0, bool(state and state.finished), tail and min(tail, 13), extra > 0))
    return str(parts) if parts else ""


def unfinished_shards(kind: str) -> int:
    """How many shards with durable rows, and without the record of their end, a kind of state has."""
    return kind.count("(False, True, False")


def recoverable_states(
    folder: Path, torn: bool, work: Callable[[Path, Callable[[list[str]], object]], None] = capture, sync_s: float = 0.0
) -> dict[str, tuple[Path, set[str]]]:
    """One dataset of each kind that a kill leaves."""
    states: dict[str, tuple[Path, set[str]]] = {}
    step = 0
    killed = True
    while killed:
        target = folder / f"state-{step}"
        killed, acknowledged = run_killed(lambda report, d=target: work(d, report), step, torn, sync_s)
        kind = kind_of_state(target)
        if kind:
            states.setdefault(kind, (target, acknowledged))
        step += 1
    return states


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_step_of_recovery(directory: Path, stride: int) -> None:
    """With a stride only every so-manyth step, a different part of them for each state."""
    states = recoverable_states(directory, torn=False) | recoverable_states(directory / "torn", torn=True)
    assert len(states) > 8
    flowing = recoverable_states(directory / "flowing", False, capture_flowing, sync_s=0.003)
    # Of those with several unfinished shards the ones that have most to be finished.
    several = sorted(flowing, key=unfinished_shards, reverse=True)[:3]
    assert unfinished_shards(several[0]) > 1
    states |= {kind: flowing[kind] for kind in several}
    deepest = 0
    for number, (state, acknowledged) in enumerate(states.values()):
        step = number % stride
        killed = True
        while killed:
            target = directory / f"recovery-{number}-{step}"
            shutil.copytree(state, target)
            killed, _ = run_killed(lambda report, d=target: report([open_store(d).writer]), step, torn=True)
            check_survived(target, acknowledged)
            step += stride
        deepest = max(deepest, step)
    assert deepest > 15


def capture_float8(directory: Path, report: Callable[[list[str]], object]) -> None:
    """The sessions of ``capture``, in float8."""
    capture(directory, report, "float8_e4m3")


@pytest.mark.parametrize(
    ("work", "seed"),
    [
        *product([capture, capture_flowing, capture_side_by_side], [None, 1, 2, 3]),
        (capture_float8, None),
        (capture_float8, 4),
    ],
)
def test_power_loss_at_every_step(
    directory: Path, seed: int | None, work: Callable[[Path, Callable[[list[str]], object]], None]
) -> None:
    step = 0
    lost = True
    while lost:
        root = directory / str(step)
        root.mkdir()
        acknowledged: list[str] = []
        forgetful = ForgetfulOS(root, step)
        with disk(forgetful):
            try:
                work(root / "data", acknowledged.extend)
                lost = False
            except PowerLossError:
                join_store_threads()
        forgetful.materialise(root / "after", None if seed is None else random.Random(seed * 1000 + step))
        close_all_below(root)
        check_survived(root / "after" / "data", set(acknowledged))
        step += 1
    assert step > 50


def test_recover_dataset_finishes_every_writer(directory: Path) -> None:
    for writer in ("dp0-pp0", "dp1-pp0"):
        run_killed(lambda report, w=writer: report([put_and_commit(directory, w)]), 10**9, torn=False)
    assert len(list((directory / "shards").glob("*.partial"))) == 2
    recover_dataset(directory)
    assert sorted(path.name for path in (directory / "shards").iterdir()) == [
        "dp0-pp0-000000.safetensors",
        "dp1-pp0-000000.safetensors",
    ]


def put_and_commit(target: Path, writer: str) -> str:
    """Leave a store without closing it."""
    store = open_store(target, writer)
    put_sample(store, "one", PROMPTS["one"])
    return store.commit()[0].rid
