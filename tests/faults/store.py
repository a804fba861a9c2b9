"""Faults under the store alone: a child process captures prompts of a few rows, and dies or meets a failing disk."""

import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
from faulty_disk import FailAt, FaultyOS, ForgetfulOS, KillAt, PowerLossError, ShortWrites, disk, join_store_threads
from toy_store import open_store, put_sample, queue_sample, states_of

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.errors import CorruptionError, HsCaptureError
from sglang_hs_capture.store.hashing import prefix_hashes
from sglang_hs_capture.verify.check import CheckSettings, CheckView, check_dataset
from tests.faults.account import Fault, NotPossibleError, NotStruckError, Outcome

Prompts = dict[str, list[int]]
Report = Callable[[list[str]], object]
JOURNAL = "journal-dp0-pp0.jsonl"
# More steps than a capture of these prompts takes; a step that is not reached is a try that does not count.
STEPS = 260


def make_prompts(seed: int, count: int = 8) -> Prompts:
    """Prompts of 1 to 12 tokens: shards of 5 rows are filled, cut through and left unfinished."""
    choose = random.Random(seed)
    return {f"p{n}": [choose.randrange(1, 9999) for _ in range(choose.randint(1, 12))] for n in range(count)}


def capture(directory: Path, prompts: Prompts, report: Report, seed: int) -> None:
    """Capture prompts, some waiting for their commit and some not, and report what is acknowledged.

    Every other seed has up to three shards written side by side, the next begun as soon as anything waits.
    """
    choose = random.Random(seed)
    store = open_store(directory, max_open_shards=1 + 2 * (seed % 2), spill_bytes=0)
    try:
        for rid, tokens in prompts.items():
            if choose.random() < 0.5:
                put_sample(store, rid, tokens)
                report([record.rid for record in store.commit()])
            else:
                queue_sample(store, rid, tokens, lambda: None)
                store.begin_commit()
                report([record.rid for record in store.acknowledged()])
        report([record.rid for record in store.close()])
    finally:
        # After a full disk the store still acknowledges what it wrote before.
        try:
            store.close()
        finally:
            report([record.rid for record in store._commits.take()])


def in_child(work: Callable[[Report], None], faulty: FaultyOS | None = None) -> tuple[int, set[str], str]:
    """Run ``work`` in a child process; how it ended, what it said was acknowledged, and its error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                with disk(faulty) if faulty else nullcontext():
                    work(lambda rids: os.write(writing, "".join(f"+{rid}\n" for rid in rids).encode()))
            except HsCaptureError as error:
                os.write(writing, f"!{error}\n".encode())
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        lines = pipe.read().splitlines()
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise AssertionError(f"the child failed by itself: status {status}")
    said = [line[1:] for line in lines if line.startswith("!")]
    return status, {line[1:] for line in lines if line.startswith("+")}, said[0] if said else ""


def read_all(directory: Path, prompts: Prompts) -> tuple[set[str], int]:
    """The samples that a dataset gives, and how many of them are not what was captured; none where there is none."""
    if not (directory / "dataset.json").exists():
        return set(), 0
    wrong = 0
    dataset = HiddenStateDataset(directory)
    for item in dataset:  # type: ignore[attr-defined]
        tokens = prompts[item["id"]]
        states = states_of(prefix_hashes(np.array(tokens), 0, 0))
        got = torch.cat([column.view(torch.uint8) for column in item["hidden_states"]], dim=1).numpy()
        wrong += item["input_ids"].tolist() != tokens or not np.array_equal(got, states)
    return {sample.id for sample in dataset.samples}, wrong


def go_on(directory: Path, prompts: Prompts, acknowledged: set[str], message: str = "") -> Outcome:
    """Read what is there, start again, capture what is missing, and read all of it once more."""
    before, wrong_before = read_all(directory, prompts)
    begin = time.perf_counter()
    store = open_store(directory)
    recover_s = time.perf_counter() - begin
    for rid in prompts.keys() - before:
        put_sample(store, rid, prompts[rid])
    store.close()
    after, wrong_after = read_all(directory, prompts)
    if after != prompts.keys():
        raise AssertionError(f"captured again, and not there: {sorted(prompts.keys() - after)}")
    lost = (acknowledged - before) | (before - after)
    return Outcome(len(acknowledged), len(lost), max(wrong_before, wrong_after), recover_s, shown(message, directory))


def shown(message: str, directory: Path) -> str:
    """A message without the folder of this try, and with one name for all shards."""
    text = message.replace(str(directory), "DATASET")
    return " ".join(text.split())


def seed_and_step(number: int) -> tuple[int, int]:
    """The seed and the step of a try: every step comes once with each seed, and few tries are spread over all."""
    return number // STEPS, 47 * number % STEPS


def killed(directory: Path, number: int, *, torn: bool) -> Outcome:
    """SIGKILL at a step of the store; the try's number says which."""
    seed, step = seed_and_step(number)
    prompts = make_prompts(seed)
    # A slow fsync lets the threads run beside each other.
    faulty = KillAt(step, torn, 0.001)
    status, acknowledged, _ = in_child(lambda report: capture(directory, prompts, report, seed), faulty)
    if not os.WIFSIGNALED(status):
        raise NotStruckError
    return go_on(directory, prompts, acknowledged)


def killed_in_recovery(directory: Path, number: int) -> Outcome:
    """SIGKILL at a random step of a capture, and then at a step of the recovery from that."""
    choose = random.Random(number)
    prompts = make_prompts(number)
    first = KillAt(choose.randrange(30, STEPS), choose.random() < 0.5)
    _, acknowledged, _ = in_child(lambda report: capture(directory, prompts, report, number), first)
    second = KillAt(choose.randrange(18), choose.random() < 0.5)
    status, _, _ = in_child(lambda report: report([open_store(directory).writer]), second)
    if not os.WIFSIGNALED(status):
        raise NotStruckError
    return go_on(directory, prompts, acknowledged)


def power_lost(directory: Path, number: int) -> Outcome:
    """The power goes at a step, and the disk has any mixture of what was and what was not made durable."""
    seed, step = seed_and_step(number)
    prompts, root = make_prompts(seed), directory / "before"
    root.mkdir()

    def work(report: Report) -> None:
        forgetful = ForgetfulOS(root, step)
        with disk(forgetful):
            try:
                capture(root / "data", prompts, report, seed)
            except PowerLossError:
                join_store_threads()
                report(["LOST"])
        forgetful.materialise(directory / "after", random.Random(number))

    _, acknowledged, _ = in_child(work)
    if "LOST" not in acknowledged:
        raise NotStruckError
    return go_on(directory / "after" / "data", prompts, acknowledged - {"LOST"})


def failing(directory: Path, number: int, *, code: int, calls: list[tuple[str, str]]) -> Outcome:
    """One call of the operating system's fails, and so says the error."""
    choose = random.Random(number)
    name, part = choose.choice(calls)
    prompts = make_prompts(number)
    faulty = FailAt(code, name, part, choose.randrange(5))
    _, acknowledged, message = in_child(lambda report: capture(directory, prompts, report, number), faulty)
    if not message:
        raise NotStruckError
    return go_on(directory, prompts, acknowledged, message)


def short_writes(directory: Path, number: int) -> Outcome:
    """The disk takes three bytes a call and gives two."""
    prompts = make_prompts(number)
    _, acknowledged, message = in_child(lambda report: capture(directory, prompts, report, number), ShortWrites())
    if message or acknowledged != prompts.keys():
        raise AssertionError(f"{message}: {prompts.keys() - acknowledged} were not acknowledged")
    return go_on(directory, prompts, acknowledged)


def torn_line(directory: Path, number: int) -> Outcome:
    """The journal ends somewhere in the line behind those that were acknowledged."""
    prompts, acknowledged = _left_unfinished(directory, number)
    line = json.dumps({"t": "sample", "rid": "p7", "length": 3, "extents": [[0, 0, 3]]}).encode()
    with (directory / JOURNAL).open("ab") as journal:
        journal.write(line[: random.Random(number).randrange(1, len(line))])
    return go_on(directory, prompts, acknowledged)


def flipped_in_journal(directory: Path, number: int) -> Outcome:
    """A bit of the journal flips: the dataset is refused, and whole again with the file restored."""
    prompts, acknowledged = _left_unfinished(directory, number)
    journal = directory / JOURNAL
    sound = journal.read_bytes()
    _flip(journal, random.Random(number))
    try:
        given, wrong = read_all(directory, prompts)
    except CorruptionError as error:
        message = str(error)
    else:
        # Only the last newline is such a bit: without it the line counts as torn.
        message = ""
        if wrong or not given < acknowledged:
            raise AssertionError(f"{journal}: a flipped bit was not noticed")
    journal.write_bytes(sound)
    return go_on(directory, prompts, acknowledged, message)


def flipped_in_shard(directory: Path, number: int) -> Outcome:
    """A bit of a finished shard flips: ``verify`` finds it, and with the file restored all is whole again."""
    prompts = make_prompts(number)
    _, acknowledged, _ = in_child(lambda report: capture(directory, prompts, report, number))
    choose = random.Random(number)
    shard = choose.choice(sorted((directory / "shards").glob("*.safetensors")))
    sound = shard.read_bytes()
    if not check_dataset(directory, CheckSettings(threads=1), CheckView()).sound:
        raise AssertionError("verify does not find the dataset sound")
    _flip(shard, choose)
    result = check_dataset(directory, CheckSettings(threads=1), CheckView())
    if result.sound:
        raise AssertionError(f"{shard}: verify did not find the flipped bit")
    message = str(result.findings.listed()[0])
    shard.write_bytes(sound)
    return go_on(directory, prompts, acknowledged, message)


def two_at_once(directory: Path, number: int) -> Outcome:
    """Another process opens the dataset for writing while one writes."""
    prompts = make_prompts(number)
    messages: list[str] = []

    def second(_: Report) -> None:
        open_store(directory)

    store = open_store(directory)
    for rid, tokens in prompts.items():
        put_sample(store, rid, tokens)
        messages.append(in_child(second)[2])
    acknowledged = {record.rid for record in store.close()}
    if not all(messages):
        raise AssertionError("a second writer was let in")
    return go_on(directory, prompts, acknowledged, messages[0].replace(str(os.getpid()), "N"))


def full_file_system(directory: Path, number: int) -> Outcome:
    """A real file system of some kilobytes in memory fills up, and is made larger."""
    choose = random.Random(number)
    prompts = make_prompts(number, 40)
    with mounted(directory / "disk", f"size={choose.randrange(36, 76, 4)}k") as folder:
        data = folder / "data"
        _, acknowledged, message = in_child(lambda report: capture(data, prompts, report, number))
        if not message:
            raise NotStruckError
        _mount("-o", "remount,size=4m", str(folder))
        return go_on(data, prompts, acknowledged, message)


def limited_files(directory: Path, number: int) -> Outcome:
    """The process may write no more than a few kilobytes into one file, as ``ulimit -f`` says it."""
    limit = random.Random(number).randrange(4200, 5200)
    prompts = make_prompts(number, 40)

    def work(report: Report) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        capture(directory, prompts, report, number)

    _, acknowledged, message = in_child(work)
    if not message:
        raise NotStruckError
    return go_on(directory, prompts, acknowledged, message)


def read_only(directory: Path, number: int) -> Outcome:
    """The file system is made read-only while a capture runs, and writable again."""
    prompts = make_prompts(number)
    with mounted(directory / "disk", "size=4m") as folder:
        data = folder / "data"
        _, acknowledged, _ = in_child(lambda report: capture(data, dict(list(prompts.items())[:4]), report, number))
        _mount("-o", "remount,ro", str(folder))
        _, _, message = in_child(lambda report: capture(data, prompts, report, number))
        if not message:
            raise AssertionError("a read-only file system was written to")
        read_all(data, prompts)
        _mount("-o", "remount,rw", str(folder))
        return go_on(data, prompts, acknowledged, message)


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory.

    Raises:
        NotPossibleError: this process may not mount one.
    """
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", options, "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise NotPossibleError(f"mounting a file system needs root: {done.stderr.strip()}")


def _left_unfinished(directory: Path, number: int) -> tuple[Prompts, set[str]]:
    """A dataset whose writer was killed after some prompts."""
    prompts = make_prompts(number)

    def work(report: Report) -> None:
        store = open_store(directory)
        for rid in list(prompts)[:5]:
            put_sample(store, rid, prompts[rid])
            report([record.rid for record in store.commit()])
        os.kill(os.getpid(), signal.SIGKILL)

    _, acknowledged, _ = in_child(work)
    return prompts, acknowledged


def _flip(path: Path, choose: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    path.write_bytes(data)


SHARD_CALLS = [("pwrite", ".partial"), ("pwrite", ".rows"), ("open", ".partial"), ("open", ".rows")]
SYNC_CALLS = [("fsync", ".partial"), ("fsync", ".rows"), ("fsync", "shards")]
JOURNAL_CALLS = [("pwrite", JOURNAL), ("fsync", JOURNAL)]
FULL, BROKEN = errno.ENOSPC, errno.EIO

FAULTS = [
    Fault("SIGKILL of the writing process, at each step of the store", "store", STEPS * 2, partial(killed, torn=False)),
    Fault("the same, in the middle of each write", "store", STEPS * 2, partial(killed, torn=True)),
    Fault("SIGKILL while an earlier SIGKILL is recovered from", "store", 200, killed_in_recovery),
    Fault("power loss, at each step of the store", "store", STEPS * 2, power_lost),
    Fault("disk full in a shard", "store", 100, partial(failing, code=FULL, calls=SHARD_CALLS)),
    Fault("disk full when a shard is made durable", "store", 60, partial(failing, code=FULL, calls=SYNC_CALLS)),
    Fault("disk full in the journal", "store", 60, partial(failing, code=FULL, calls=JOURNAL_CALLS)),
    Fault("disk full at rename", "store", 60, partial(failing, code=FULL, calls=[("rename", ".partial")])),
    Fault("a small file system that really fills up", "store", 60, full_file_system),
    Fault("a limit on the size of files", "store", 60, limited_files),
    Fault("EIO in a shard", "store", 100, partial(failing, code=BROKEN, calls=SHARD_CALLS + SYNC_CALLS)),
    Fault("EIO in the journal", "store", 60, partial(failing, code=BROKEN, calls=JOURNAL_CALLS)),
    Fault("short writes and reads", "store", 30, short_writes),
    Fault("a torn last line in the journal", "store", 100, torn_line),
    Fault("a flipped bit in the journal", "store", 200, flipped_in_journal),
    Fault("a flipped bit in a shard, found by `verify`", "store", 200, flipped_in_shard),
    Fault("two writers of one name at once", "store", 20, two_at_once),
    Fault("a file system that becomes read-only", "store", 20, read_only),
]
