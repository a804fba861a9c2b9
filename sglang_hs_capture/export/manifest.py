"""What lies in an export's directory, and how far it is: ``export.json``, and the samples by number.

The numbers are given before any file is written, and for good. So a file that has its name is done, whichever way the
run that wrote it ended.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hs_capture.errors import CorruptionError, DatasetLockedError, DatasetMismatchError, StoreError
from sglang_hs_capture.export.files import write_bytes
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.index import SampleEntry
from sglang_hs_capture.store.journal import encode_line, read_records
from sglang_hs_capture.store.jsonfile import read_object
from sglang_hs_capture.store.lock import FileLock
from sglang_hs_capture.store.schema import to_hex

MANIFEST, SAMPLES = "export.json", "export-samples.jsonl"
LOCK, UNFINISHED = "lock-export", ".unfinished"
KIND, VERSION = "sglang-hs-capture export", 1
REMEDY = "export into an empty directory"


@dataclass(frozen=True, slots=True)
class Numbered:
    """A sample of an export, as it was when its number was given; the number is its place in the list."""

    id: str
    length: int
    end_hash: int
    loss_mask: str

    @classmethod
    def of(cls, sample: SampleEntry) -> "Numbered":
        """What an export remembers of a sample, by which it notices that the sample has changed."""
        runs = json.dumps(sample.loss_mask_rle).encode()
        return cls(sample.id, sample.length, sample.end_hash, hashlib.blake2b(runs, digest_size=8).hexdigest())

    def to_line(self) -> bytes:
        """A line of ``export-samples.jsonl``."""
        fields = {"id": self.id, "length": self.length, "end_hash": to_hex(self.end_hash), "loss_mask": self.loss_mask}
        return encode_line({"t": "exported", **fields})


class Output:
    """An export's directory, locked for as long as this object is open; use it as a context manager.

    Attributes:
        samples: those that have a number.
        finished: what ``finish`` was given by the last run that came to its end; None before, and while samples are
            to be written.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        """Begin an export in a directory that is empty or is not there, or go on with one.

        Args:
            identity: what must be the same for as long as the export is gone on with.

        Raises:
            StoreError: the directory holds something else.
            DatasetMismatchError: it holds another export; each differing field is named with both values.
            DatasetLockedError: another process is writing it.
        """
        self.path = path
        self.identity = dict(identity)
        self.samples: list[Numbered] = []
        self.finished: dict[str, Any] | None = None
        _require_empty_or_export(path)
        with fs.io_errors(path, "create the export"):
            fs.make_dir(path)
        self._lock = _take_lock(path)
        try:
            self._open()
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            shutil.rmtree(self.unfinished)
        self._lock.release()

    @property
    def unfinished(self) -> Path:
        """The folder for files that do not count yet."""
        return self.path / UNFINISHED

    def _open(self) -> None:
        # Another run may have begun in the meantime.
        _require_empty_or_export(self.path)
        manifest = read_object(self.path / MANIFEST, REMEDY)
        if manifest is not None:
            _require_same(self.path, manifest, self.identity)
            self.finished = manifest.get("finished")
            self.samples = _read_samples(self.path / SAMPLES)
            numbered = manifest.get("numbered", 0)
            if type(numbered) is not int:
                raise CorruptionError(
                    f"{self.path / MANIFEST}: numbered: expected a number of samples, got {numbered!r}; {REMEDY}"
                )
            if len(self.samples) < numbered:
                raise CorruptionError(
                    f"{self.path / SAMPLES}: expected {numbered} samples or more, got {len(self.samples)}: "
                    f"nobody can say whose the files are; {REMEDY}"
                )
        with fs.io_errors(self.unfinished, "create"):
            if self.unfinished.exists():
                shutil.rmtree(self.unfinished)
            fs.make_dir(self.unfinished)
        if manifest is None:
            self._write(None)

    def number(self, samples: Sequence[SampleEntry], file_of: Mapping[str, Path]) -> None:
        """Put the samples of this export, in the order of their numbers, in the place of those known so far.

        Where a sample was exported and has changed since, its file is removed.

        Args:
            samples: those that have a number already, and behind them those that get one now.
            file_of: the files by sample id, as far as they may be there.

        Raises:
            DiskFullError, StoreError: the disk refuses.
        """
        now = [Numbered.of(sample) for sample in samples]
        if now == self.samples:
            return
        self._write(None)
        changed = [new for old, new in zip(self.samples, now, strict=False) if old != new]
        with fs.io_errors(self.path, "remove outdated files in"):
            for sample in changed:
                fs.remove(file_of[sample.id])
            for folder in {file_of[sample.id].parent for sample in changed}:
                if folder.is_dir():
                    fs.fsync_dir(folder)
        write_bytes(self.unfinished, self.path / SAMPLES, b"".join(sample.to_line() for sample in now))
        self.samples = now
        self._write(None)

    def finish(self, state: Mapping[str, Any]) -> None:
        """Say that all is written.

        Raises:
            DiskFullError, StoreError: the disk refuses.
        """
        self._write(dict(state))

    def _write(self, finished: dict[str, Any] | None) -> None:
        self.finished = finished
        content = {
            "kind": KIND,
            "version": VERSION,
            **self.identity,
            "numbered": len(self.samples),
            "finished": finished,
        }
        write_bytes(self.unfinished, self.path / MANIFEST, (json.dumps(content, indent=2) + "\n").encode())


def _require_empty_or_export(path: Path) -> None:
    names: set[str] = set()
    with fs.io_errors(path, "read"):
        if path.is_dir():
            names = set(os.listdir(path)) - {LOCK, UNFINISHED}
        elif path.exists():
            names = {path.name}
    if names and MANIFEST not in names:
        raise StoreError(
            f"{path}: expected an empty directory or an export; it holds {sorted(names)[0]!r} and no {MANIFEST}; "
            "choose another directory: trainers read whatever lies beside their files"
        )


def _take_lock(path: Path) -> FileLock:
    try:
        return FileLock(path / LOCK, 0.0)
    except DatasetLockedError as error:
        raise DatasetLockedError(
            f"{path}: another export is being written here; wait for it, stop it, or choose another directory"
        ) from error


def _require_same(path: Path, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    where = path / MANIFEST
    if there.get("kind") != KIND or not isinstance(there.get("version"), int):
        raise StoreError(f"{where}: expected a {KIND}, got the kind {there.get('kind')!r}; {REMEDY}")
    if there["version"] > VERSION:
        raise StoreError(f"{where}: written by a newer release, in version {there['version']}; upgrade, or {REMEDY}")
    differing = [name for name, value in now.items() if there.get(name) != value]
    if "format" in differing:  # the ids follow from it, and are long
        differing = [name for name in differing if name != "layer_ids"]
    differences = [f"{name}: {there.get(name)!r} there, {now[name]!r} now" for name in differing]
    if differences:
        raise DatasetMismatchError(f"{path}: this is another export ({'; '.join(differences)}); {REMEDY}")


def _read_samples(path: Path) -> list[Numbered]:
    samples = []
    for line, record in read_records(path):
        try:
            if not isinstance(record["id"], str):
                raise TypeError(f"id: {record['id']!r}")
            samples.append(
                Numbered(record["id"], int(record["length"]), int(record["end_hash"], 16), record["loss_mask"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptionError(f"{path}, line {line}: not a sample's record ({error!r}); {REMEDY}") from None
    return samples
