"""Joins datasets into one: their shards linked or copied as they are, each writer under a name of its own."""

import itertools
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_hs_capture.errors import (
    ConfigError,
    CorruptionError,
    DatasetLockedError,
    DatasetMismatchError,
    DiskFullError,
)
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.identity import DATASET_FILE, FINAL_NORM_FILE, LOCK_FILE, SHARD_FOLDER, read_info
from sglang_hs_capture.store.index import DatasetIndex, SampleEntry, load_index
from sglang_hs_capture.store.journal import encode_line, read_records
from sglang_hs_capture.store.jsonfile import read_object, write_object
from sglang_hs_capture.store.known_answers import KNOWN_ANSWERS_FILE
from sglang_hs_capture.store.lock import FileLock
from sglang_hs_capture.store.origin import Origin, read_origins, write_origins
from sglang_hs_capture.store.recovery import lock_path, recover_dataset
from sglang_hs_capture.store.replay import journal_path, journal_writers
from sglang_hs_capture.store.requests import LEDGER_FILE, RequestRecord
from sglang_hs_capture.store.session import read_sessions, session_path
from sglang_hs_capture.store.shard import ShardLayout, ShardPaths

PLAN_FILE = "merge.json"
LOCK_TIMEOUT_S = 10.0
SHOWN_CONFLICTS = 5
_COPY_BYTES = 8 << 20
_AFRESH = "remove it, or name another OUT"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """A dataset to be joined; ``names`` has the new name of each of its writers."""

    directory: Path
    index: DatasetIndex
    names: dict[str, str]


@dataclass(frozen=True)
class Merged:
    """What a merge made: samples, those that several datasets had, shards, and how many of them were copied."""

    samples: int
    duplicates: int
    shards: int
    copied: int


def merge(out: Path, directories: Sequence[Path], say: Say = lambda text: None) -> Merged:
    """Join datasets into a new one, all of it or nothing. The datasets are put in order, and stay what they are.

    It is built beside ``out`` and named at the end. A merge that was interrupted goes on where it was, if it is asked
    for again with the same datasets.

    Args:
        out: the new dataset; it must not exist, or be empty.
        directories: the datasets, which nobody may be capturing into.
        say: told in one line when shards of a dataset are to be copied, and when it is done.

    Raises:
        ConfigError: a dataset is named twice, or ``out`` is there already or inside one of them.
        DatasetMismatchError: they are of different models or settings, or have different samples of one id.
        DatasetLockedError: a capture or another merge is at work.
        CorruptionError: one of them is damaged.
        DiskFullError, StoreError: the disk refuses; what was done so far is kept for another try.
    """
    with fs.io_errors(out, "look at"):
        # A dataset takes the place of what a link leads to, not of the link.
        out = Path(os.path.realpath(out)) if out.is_symlink() else out.absolute()
    directories = [directory.absolute() for directory in directories]
    _check_names(out, directories)
    with ExitStack() as stack:
        writers = {}
        for directory in directories:
            recover_dataset(directory)
            writers[directory] = stack.enter_context(_at_rest(directory))
        sources = _sources(writers)
        _check_agreement(sources)
        building = _building(out)
        with fs.io_errors(building, "create the dataset"):
            fs.make_dir(building / SHARD_FOLDER)
        stack.enter_context(_locked(building / LOCK_FILE))
        # Another merge that was waited for may have made it.
        _check_free(out)
        _begin(building, sources)
        copied = 0
        for source in sources:
            copied += _take_shards(building, source, say)
            say(f"{source.directory}: {len(source.index.shards)} shards, {len(source.index.samples)} samples")
        _write_records(building, sources)
        _write_answers(building, sources, say)
        with fs.io_errors(out, "name the dataset"):
            fs.fsync_dir(building / SHARD_FOLDER)
            fs.rename(building, out)
            fs.remove(out / PLAN_FILE)
    samples = {sample.id for source in sources for sample in source.index.samples}
    total = sum(len(source.index.samples) for source in sources)
    return Merged(len(samples), total - len(samples), sum(len(source.index.shards) for source in sources), copied)


def _building(out: Path) -> Path:
    """Where a dataset is built, beside the place that it is to have."""
    return out.with_name(f".{out.name}.merging")


def _check_names(out: Path, directories: Sequence[Path]) -> None:
    # Path.resolve does not take links that lead in a circle.
    real = [os.path.realpath(directory) for directory in directories]
    for number, directory in enumerate(real):
        if directory in real[:number]:
            raise ConfigError(f"{directories[number]}: named twice; name each dataset once")
        if os.path.realpath(out) == directory:
            raise ConfigError(f"{out}: one of the datasets themselves; name another directory as OUT")
        # The datasets stay what they are: none gets another among its own files.
        if Path(directory) in Path(os.path.realpath(out)).parents:
            raise ConfigError(f"{out}: inside {directories[number]}, one of the datasets; name a directory outside it")
    _check_free(out)
    if os.path.realpath(_building(out)) in real:
        raise ConfigError(
            f"{_building(out)}: what an interrupted merge into {out} left; name the datasets that it was to join"
        )


def _check_free(out: Path) -> None:
    """See that a dataset can get this name.

    Raises:
        ConfigError: something is there already.
    """
    with fs.io_errors(out, "look at"):
        if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
            raise ConfigError(f"{out}: exists already and is not empty; {_AFRESH}")
        if out.is_mount():
            raise ConfigError(f"{out}: a mount point, which cannot be put in place when it is whole; name one in it")


@contextmanager
def _locked(path: Path) -> Iterator[FileLock]:
    lock = FileLock(path, LOCK_TIMEOUT_S)
    try:
        yield lock
    finally:
        lock.release()


@contextmanager
def _at_rest(directory: Path) -> Iterator[list[str]]:
    """Keep drivers and writers away from a dataset; the names of the writers."""
    with ExitStack() as stack:
        stack.enter_context(_locked(directory / "lock-requests"))
        writers = journal_writers(directory)
        for writer in writers:
            stack.enter_context(_locked(lock_path(directory, writer)))
        yield writers


def _sources(at_rest: Mapping[Path, Sequence[str]]) -> list[Source]:
    """Read the datasets and give each server or replica among their writers a number that no other has.

    Args:
        at_rest: each dataset's writers, which are kept away.

    Raises:
        DatasetLockedError: a capture began, or went on, before it could be kept away.
    """
    taken: set[str] = set()
    sources = []
    for directory, writers in at_rest.items():
        replicas: dict[str, str] = {}
        for writer in writers:
            replica = writer.split("-", maxsplit=1)[0]
            if replica not in replicas:
                numbered = (f"dp{number}" for number in itertools.count())
                replicas[replica] = next(name for name in itertools.chain([replica], numbered) if name not in taken)
                taken.add(replicas[replica])
        names = {writer: "-".join([replicas[writer.split("-")[0]], *writer.split("-")[1:]]) for writer in writers}
        index = load_index(directory)
        new = [writer for writer in journal_writers(directory) if writer not in names]
        new += [entry.writer for entry in index.shards if not entry.state.finished]
        if new:
            raise DatasetLockedError(
                f"{directory}: {new[0]} began to write while the dataset was looked at; wait for it or stop it, then "
                "merge again"
            )
        sources.append(Source(directory, index, names))
    return sources


def _check_agreement(sources: Sequence[Source]) -> None:
    """See that the datasets are of one model and one form, and say the same of every sample that they share.

    Raises:
        DatasetMismatchError: they do not.
    """
    first = sources[0]
    norm = _read_or_none(first.directory / FINAL_NORM_FILE)
    for source in sources[1:]:
        if differences := first.index.info.differences(source.index.info):
            raise DatasetMismatchError(
                f"{source.directory}: captured differently from {first.directory} ({'; '.join(differences)}); only "
                "datasets of one model and the same settings can be joined"
            )
        theirs = _read_or_none(source.directory / FINAL_NORM_FILE)
        if norm is not None and theirs is not None and norm != theirs:
            raise DatasetMismatchError(
                f"{source.directory / FINAL_NORM_FILE}: another final norm than that of {first.directory}, so the "
                "models have other weights; only datasets of one model can be joined"
            )
        norm = norm or theirs
    conflicts = list(_conflicts(sources))
    if conflicts:
        shown = "; ".join(conflicts[:SHOWN_CONFLICTS])
        raise DatasetMismatchError(
            f"{len(conflicts)} samples are different ones in several datasets: {shown}; give the samples ids of their "
            "own and capture them anew, or leave one of the datasets out"
        )


def _conflicts(sources: Sequence[Source]) -> Iterator[str]:
    seen: dict[str, tuple[SampleEntry, Path]] = {}
    for source in sources:
        for sample in source.index.samples:
            other, where = seen.setdefault(sample.id, (sample, source.directory))
            if (other.length, other.end_hash) != (sample.length, sample.end_hash):
                yield f"{sample.id!r} has other tokens in {where} than in {source.directory}"
            elif other.loss_mask_rle != sample.loss_mask_rle:
                yield f"{sample.id!r} has another loss mask in {where} than in {source.directory}"


def _begin(building: Path, sources: Sequence[Source]) -> None:
    """Keep what an interrupted merge of the same datasets left in ``building``, and remove what another one left."""
    plan = {"sources": [_account(source) for source in sources]}
    same = read_object(building / PLAN_FILE, _AFRESH) == plan
    kept = {LOCK_FILE, *((PLAN_FILE, SHARD_FOLDER) if same else ())}
    with fs.io_errors(building, "empty"):
        # Journals, too: those of a dataset that is joined no more name shards that are not there.
        for path in building.iterdir():
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() else fs.remove(path)
        fs.make_dir(building / SHARD_FOLDER)
    if not same:
        write_object(building / PLAN_FILE, plan)


def _account(source: Source) -> dict[str, Any]:
    """What tells a dataset from another in its place, which has other shards under the same names.

    One that was captured there anew has another date; one that was merged there anew has shards of other origins.
    """
    origins = {writer: read_origins(source.directory, writer) for writer in source.names}
    return {
        "directory": str(source.directory),
        "writers": source.names,
        "created_at": source.index.info.created_at,
        "origins": {
            writer: [[origin.writer, origin.below, origin.info.created_at] for origin in origins[writer]]
            for writer in source.names
        },
    }


def _take_shards(building: Path, source: Source, say: Say) -> int:
    """Link a dataset's shards, or copy them where they are on another file system; how many were copied.

    Raises:
        DiskFullError: there is no room for the copies.
    """
    missing: list[tuple[Path, Path, int]] = []
    for entry in source.index.shards:
        # A shard that was moved elsewhere and linked to is taken from there: a link to a link may lead nowhere.
        there = ShardPaths.of(source.directory, entry.writer, entry.shard).finished.resolve()
        here = ShardPaths.of(building, source.names[entry.writer], entry.shard).finished
        if here.exists():
            continue
        with fs.io_errors(here, "link"):
            linked = fs.link(there, here)
        if not linked:
            size = ShardLayout(source.index.info, entry.writer, entry.state.record).file_size(entry.state.rows)
            missing.append((there, here, size))
    needed, free = sum(size for *_, size in missing), fs.free_bytes(building)
    if needed > free:
        raise DiskFullError(
            f"{building.parent}: {source.directory} takes {needed} bytes, {free} are free; free some space, then merge "
            "again to go on"
        )
    if missing:
        say(f"{source.directory}: copying {len(missing)} shards, {needed / 1e9:.1f} GB ...")
    for there, here, _ in missing:
        _copy(there, here)
    return len(missing)


def _copy(there: Path, here: Path) -> None:
    """Copy a file; it gets its name when all of it is durable."""
    growing = here.with_suffix(".copying")
    with fs.io_errors(here, "copy"), ExitStack() as stack:
        source = fs.open_to_read(there)
        stack.callback(os.close, source)
        target = fs.open_file(growing, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        stack.callback(os.close, target)
        buffer = memoryview(bytearray(_COPY_BYTES))
        size = os.fstat(source).st_size
        for offset in range(0, size, _COPY_BYTES):
            piece = buffer[: size - offset]
            fs.pread_all(source, piece, offset)
            fs.pwrite_all(target, piece, offset)
        fs.fsync(target)
        fs.rename(growing, here)


def _write_records(building: Path, sources: Sequence[Source]) -> None:
    """Write all that says what the shards hold, anew in any case."""
    for source in sources:
        for writer, name in source.names.items():
            _write_journal(building, source, writer, name)
            _write_origin(building, source, writer, name)
        for session in read_sessions(source.directory):
            if session.writer in source.names:
                name = source.names[session.writer]
                closed = replace(session, writer=name, state="closed", error=None, error_kind=None)
                write_object(session_path(building, name), closed.to_json())
        norm = _read_or_none(source.directory / FINAL_NORM_FILE)
        if norm is not None:
            _write(building / FINAL_NORM_FILE, norm)
    _write_ledger(building, sources)
    write_object(building / DATASET_FILE, read_info(sources[0].directory).to_json())


def _write_journal(building: Path, source: Source, writer: str, name: str) -> None:
    lines = []
    for _, record in read_records(journal_path(source.directory, writer)):
        lines.append(encode_line({**record, "writer": name} if record["t"] == "journal" else record))
    _write(journal_path(building, name), b"".join(lines))


def _write_origin(building: Path, source: Source, writer: str, name: str) -> None:
    """Say what the headers of a writer's shards have, which are not changed."""
    numbers = [entry.shard for entry in source.index.shards if entry.writer == writer]
    here = Origin(writer, max(numbers, default=-1) + 1, source.index.info)
    write_origins(building, name, [*read_origins(source.directory, writer), here])


def _write_ledger(building: Path, sources: Sequence[Source]) -> None:
    """Join the ledgers: of a sample's records that of a dataset that holds it, else the last one."""
    held: set[str] = set()
    requests: dict[str, RequestRecord] = {}
    for source in sources:
        captured = {sample.id for sample in source.index.samples}
        for id, record in source.index.requested.items():
            if id not in held:
                requests[id] = record
        # A record of another dataset would make those sent by hand here samples of other tokens.
        for id in captured - source.index.requested.keys():
            requests.pop(id, None)
        held |= captured
    records = [record.to_json() for record in requests.values()]
    dropped = {record.id: record for source in sources for record in source.index.dropped if record.id not in held}
    records += [record.to_json() for record in dropped.values()]
    _write(building / LEDGER_FILE, b"".join(map(encode_line, records)))


def _write_answers(building: Path, sources: Sequence[Source], say: Say) -> None:
    """Join what the engines predicted for samples that no other dataset holds: each belongs to one capture of it."""
    holders = Counter(sample.id for source in sources for sample in source.index.samples)
    lines: list[bytes] = []
    for source in sources:
        path = source.directory / KNOWN_ANSWERS_FILE
        try:
            lines += [encode_line(raw) for _, raw in read_records(path) if holders[str(raw.get("id"))] == 1]
        except CorruptionError as error:
            say(f"warning: known answers are left out, which only verify --known-answer reads: {error}")
    if lines:
        _write(building / KNOWN_ANSWERS_FILE, b"".join(lines))
    else:
        with fs.io_errors(building / KNOWN_ANSWERS_FILE, "remove"):
            fs.remove(building / KNOWN_ANSWERS_FILE)


def _write(path: Path, data: bytes) -> None:
    with fs.io_errors(path, "write"):
        fs.replace_file(path, data)


def _read_or_none(path: Path) -> bytes | None:
    with fs.io_errors(path, "read"):
        return fs.read_bytes(path) if path.exists() else None
