"""What a crash left behind is put in order: the journal decides what counts, all else is cut.

Every step can be interrupted and done again. Nothing here trusts a file's size: the first ``rows`` rows of a shard are
durable because a journal line says so, and the line was written after they were.
"""

import re
from pathlib import Path

from sglang_hs_capture.errors import CorruptionError
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.identity import SHARD_FOLDER, read_info
from sglang_hs_capture.store.journal import JournalFile
from sglang_hs_capture.store.lock import FileLock
from sglang_hs_capture.store.replay import ShardState, journal_path, journal_writers, replay_journal
from sglang_hs_capture.store.schema import RESTORE, DatasetInfo
from sglang_hs_capture.store.shard import ShardLayout, ShardPaths, finish
from sglang_hs_capture.store.shard_reader import finished_rows


def lock_path(directory: Path, writer: str) -> Path:
    """The file that a writing process keeps locked."""
    return directory / f"lock-{writer}"


def recover(directory: Path, writer: str, info: DatasetInfo, journal: JournalFile) -> int:
    """Finish or remove what an earlier process of this writer left unfinished. The caller holds the writer's lock.

    Args:
        journal: the writer's journal, just opened, so that its torn last line is cut.

    Returns:
        The number for the writer's next shard; no number is used twice.

    Raises:
        CorruptionError: rows that the journal calls durable are not there.
        DiskFullError, StoreError: the disk refuses; what was acknowledged is safe, and the call can be made again.
    """
    folder = directory / SHARD_FOLDER
    shards = replay_journal(directory, writer, keep_samples=False).shards
    found = _shards_on_disk(folder, writer)
    for number in sorted(shards.keys() | found):
        paths = ShardPaths.of(directory, writer, number)
        state = shards.get(number)
        with fs.io_errors(paths.partial, "recover"):
            if state is not None and state.rows:
                _settle(directory, ShardLayout(info, writer, state.record), state, journal)
            elif paths.finished.exists():
                raise CorruptionError(
                    f"{paths.finished}: a finished shard whose rows the journal does not know; move it away"
                )
            else:
                fs.remove(paths.partial)
            fs.remove(paths.tokens)
    with fs.io_errors(folder, "recover"):
        fs.fsync_dir(folder)
    return max(shards.keys() | found, default=-1) + 1


def _shards_on_disk(folder: Path, writer: str) -> set[int]:
    pattern = re.compile(re.escape(writer) + r"-(\d{6,})\.(safetensors|partial|rows)")
    matches = (pattern.fullmatch(path.name) for path in folder.iterdir())
    return {int(match[1]) for match in matches if match}


def _settle(directory: Path, layout: ShardLayout, state: ShardState, journal: JournalFile) -> None:
    """Bring a shard with durable rows to its end: finished, and the journal says so."""
    paths = ShardPaths.of(directory, layout.writer, layout.record.shard)
    if not paths.finished.exists():
        if not paths.partial.exists():
            raise CorruptionError(
                f"{paths.finished}: the journal has {state.rows} durable rows and there is no such shard; {RESTORE}"
            )
        finish(directory, layout, state.rows)
    elif not state.finished:
        # It was renamed after its content was durable, but the new name may not be durable yet.
        rows = finished_rows(paths.finished, layout)
        if rows != state.rows:
            raise CorruptionError(
                f"{paths.finished}: the journal has {state.rows} durable rows; the shard has {rows}; {RESTORE}"
            )
        fs.fsync_dir(paths.finished.parent)
    if not state.finished:
        journal.append(finished_record(layout.record.shard, state.rows))
        journal.sync()


def finished_record(shard: int, rows: int) -> dict[str, object]:
    """The journal record of a shard that has its final name."""
    return {"t": "finished", "shard": shard, "rows": rows}


def recover_dataset(directory: Path, *, lock_timeout_s: float = 10.0) -> None:
    """Finish what every writer of a dataset left unfinished, so that it consists of finished shards only.

    Raises:
        DatasetLockedError: a writer is at work.
        CorruptionError, DiskFullError, StoreError: see ``recover``.
    """
    info = read_info(directory)
    for writer in journal_writers(directory):
        lock = FileLock(lock_path(directory, writer), lock_timeout_s)
        try:
            journal = JournalFile(journal_path(directory, writer))
            try:
                recover(directory, writer, info, journal)
            finally:
                journal.close()
        finally:
            lock.release()
