"""How a call that the operating system refused is told: the file, the reason, and what to do."""

import errno
from pathlib import Path

import pytest

from sglang_hs_capture.errors import DiskFullError, StoreError
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.journal import JournalTail, read_records


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (errno.ENOSPC, DiskFullError, "free some space or choose another file system, then run again"),
        (errno.EDQUOT, DiskFullError, "free some space or choose another file system, then run again"),
        (errno.EROFS, StoreError, "make the file system writable, then run again"),
        (errno.EACCES, StoreError, "let this user read and write there, then run again"),
        (errno.EMFILE, StoreError, "raise the limit of open files (ulimit -n), then run again"),
        (errno.EFBIG, StoreError, "raise the limit of a file's size (ulimit -f), or lower --shard-gb, then run again"),
        (errno.EIO, StoreError, "see what the system's log says of the disk, then run again"),
    ],
)
def test_each_failure_says_what_to_do(code: int, kind: type[StoreError], said: str) -> None:
    with pytest.raises(StoreError) as caught, fs.io_errors(Path("/data/x"), "write"):
        raise OSError(code, "no")
    assert type(caught.value) is kind
    assert str(caught.value).startswith("/data/x: could not write: ")
    assert str(caught.value).endswith(f"; all acknowledged samples are safe; {said}")


def test_an_error_without_a_number_is_told_by_its_text() -> None:
    said = "x: could not read: odd; all acknowledged samples are safe; see what the system's log says"
    with pytest.raises(StoreError, match=said), fs.io_errors(Path("x"), "read"):
        raise OSError("odd")


def test_a_journal_that_cannot_be_opened_is_told_by_its_name(tmp_path: Path) -> None:
    """A folder in its place stands for whatever keeps a file from being read, also for root."""
    with pytest.raises(StoreError, match="could not read: Is a directory"):
        list(read_records(tmp_path))
    with pytest.raises(StoreError, match="could not read: Is a directory"):
        JournalTail(tmp_path).poll()
