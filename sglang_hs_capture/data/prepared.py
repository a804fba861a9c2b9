"""A tokenised set on disk: Parquet files of rows tokenised before, which are input again, and what is in them.

The folder appears in one step, when everything in it is durable; until then it is built under another name beside it.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow
import pyarrow.parquet

from sglang_hs_capture.data.account import ACCOUNT_FILE, FORMAT, VERSION
from sglang_hs_capture.data.records import Sample
from sglang_hs_capture.errors import DatasetLockedError, DiskFullError, StoreError
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.jsonfile import write_object
from sglang_hs_capture.store.lock import FileLock

SHARD_TOKENS = 2**26
GROUP_TOKENS = 2**20
SCHEMA = pyarrow.schema(
    [
        ("id", pyarrow.string()),
        ("input_ids", pyarrow.list_(pyarrow.int64())),
        ("loss_mask", pyarrow.list_(pyarrow.int8())),
        ("source", pyarrow.string()),
    ]
)
_LOCK_FILE = ".lock"


class PreparedSet:
    """Writes a tokenised set; as a context, it leaves nothing behind unless ``finish`` was called.

    What a killed process left is removed by the next one that makes the same set.
    """

    def __init__(self, out: Path) -> None:
        """
        Args:
            out: the folder to make; it must not exist, or be empty.

        Raises:
            StoreError: there is something already, another process makes the same set, or the file system refuses.
        """
        # A link cannot be replaced by a folder, what it leads to can.
        self.out = Path(os.path.realpath(out))
        with _write_errors(self.out):
            if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
                raise StoreError(f"{out}: exists already and is not empty; name another folder, or remove it")
        if os.path.ismount(self.out):
            raise StoreError(f"{out}: is where a file system is mounted, and cannot be replaced; name a folder in it")
        self._building = self.out.parent / f".{self.out.name}.preparing"
        with _write_errors(self._building):
            fs.make_dir(self._building)
        try:
            self._lock = FileLock(self._building / _LOCK_FILE, timeout_s=0)
        except DatasetLockedError as error:
            raise StoreError(
                f"{out}: another process is making this set; wait for it, or name another folder"
            ) from error
        with _write_errors(self._building):
            self._clear()
        self._rows: list[dict[str, Any]] = []
        self._samples = self._tokens_waiting = self._tokens_in_shard = self._shards = 0
        self._writer: pyarrow.parquet.ParquetWriter | None = None
        self._finished = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            with suppress(OSError):  # what it writes is removed
                self._writer.close()
        if not self._finished:  # another process may have begun a set of this name by then
            shutil.rmtree(self._building, ignore_errors=True)
        self._lock.release()

    def add(self, sample: Sample) -> None:
        """Write a sample, whose id must have a form in UTF-8; at most ``GROUP_TOKENS`` and a sample are in memory.

        Raises:
            DiskFullError, StoreError: it could not be written.
        """
        self._rows.append(
            {
                "id": sample.id,
                "input_ids": sample.input_ids,
                "loss_mask": sample.loss_mask,
                "source": sample.source.encode("utf-8", "replace").decode("utf-8"),
            }
        )
        self._samples += 1
        self._tokens_waiting += len(sample.input_ids)
        if self._tokens_waiting >= GROUP_TOKENS:
            self._write_group()

    def finish(self, account: Mapping[str, Any]) -> None:
        """Make the set durable, and give it its name.

        Args:
            account: what is in it besides the number of samples, for ``_prepared.json``; JSON values.

        Raises:
            DiskFullError, StoreError: there is no set.
        """
        if self._rows or not self._shards:  # a set without samples has a file too, which says so
            self._write_group()
        self._close_shard()
        with _write_errors(self._building):
            write_object(
                self._building / ACCOUNT_FILE,
                {"format": FORMAT, "version": VERSION, **account, "samples": self._samples},
            )
            fs.remove(self._building / _LOCK_FILE)
            fs.fsync_dir(self._building)
            fs.rename(self._building, self.out)
        self._finished = True

    def _write_group(self) -> None:
        with _write_errors(self._building):
            if self._writer is None:
                path = self._building / f"data-{self._shards:05d}.parquet"
                self._writer = pyarrow.parquet.ParquetWriter(path, SCHEMA, compression="zstd")
                self._shards += 1
            self._writer.write_table(pyarrow.Table.from_pylist(self._rows, SCHEMA))
        self._tokens_in_shard += self._tokens_waiting
        self._rows, self._tokens_waiting = [], 0
        if self._tokens_in_shard >= SHARD_TOKENS:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._writer is None:
            return
        with _write_errors(self._building):
            writer, self._writer = self._writer, None
            writer.close()
            fd = fs.open_file(self._building / f"data-{self._shards - 1:05d}.parquet", os.O_RDONLY)
            try:
                fs.fsync(fd)
            finally:
                os.close(fd)
        self._tokens_in_shard = 0

    def _clear(self) -> None:
        for entry in self._building.iterdir():
            if entry.name != _LOCK_FILE:
                entry.unlink()


def describe_tokenizer(tokenizer: Any) -> dict[str, str | None]:
    """By what one can tell whether two sets were tokenised alike: hashes of a tokenizer and of its parts.

    Args:
        tokenizer: a ``transformers`` tokenizer; None for none.

    Returns:
        ``tokenizer_hash``, ``vocabulary_hash`` and ``chat_template_hash``: ``sha256-`` and 32 hexadecimal digits, or
        None. The first may also differ between releases of the library ``tokenizers``.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = None if tokenizer is None else json.dumps(sorted(tokenizer.get_vocab().items()))
    content = vocabulary if backend is None else backend.to_str()
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = json.dumps(template, sort_keys=True)
    return {
        "tokenizer_hash": _hash(content),
        "vocabulary_hash": _hash(vocabulary),
        "chat_template_hash": _hash(template),
    }


def _hash(text: str | None) -> str | None:
    return None if text is None else f"sha256-{hashlib.sha256(text.encode('utf-8')).hexdigest()[:32]}"


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"{path}: could not be written: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"{message}; free some space, or name a folder on another file system") from error
        raise StoreError(message) from error
