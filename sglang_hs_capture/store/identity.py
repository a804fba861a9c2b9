"""``dataset.json``: written once by the first writer, checked by every later one."""

from pathlib import Path

from sglang_hs_capture.errors import DatasetMismatchError, StoreError
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.jsonfile import read_object, write_object
from sglang_hs_capture.store.lock import FileLock
from sglang_hs_capture.store.schema import RESTORE, DatasetInfo

DATASET_FILE = "dataset.json"
LOCK_FILE = "lock-dataset"
SHARD_FOLDER = "shards"
FINAL_NORM_FILE = "final_norm.safetensors"


def read_info(directory: Path) -> DatasetInfo:
    """What a dataset holds.

    Raises:
        StoreError: there is no dataset, or it is of another format or a newer version.
        CorruptionError: ``dataset.json`` is not what was written.
    """
    path = directory / DATASET_FILE
    raw = read_object(path, RESTORE)
    if raw is None:
        raise StoreError(
            f"{directory}: expected a dataset, but there is no {DATASET_FILE}; check the path, or wait if a capture "
            "into it is just starting: the file is written when the model is loaded"
        )
    return DatasetInfo.from_json(raw, str(path))


def check_or_write_info(directory: Path, info: DatasetInfo, lock_timeout_s: float = 10.0) -> DatasetInfo:
    """Make ``directory`` the dataset that ``info`` describes, or check that it is.

    Returns:
        What ``dataset.json`` says, which may name another path or version than ``info``.

    Raises:
        DatasetMismatchError: it is another dataset; each differing field is named with both values.
    """
    with fs.io_errors(directory, "create the dataset"):
        fs.make_dir(directory / SHARD_FOLDER)
    path = directory / DATASET_FILE
    lock = FileLock(directory / LOCK_FILE, lock_timeout_s)
    try:
        if not path.exists():
            write_object(path, info.to_json())
        existing = read_info(directory)
    finally:
        lock.release()
    require_same(directory, existing, info)
    return existing


def require_same(directory: Path, there: DatasetInfo, now: DatasetInfo) -> None:
    """Check that a dataset may go on with ``now``.

    Raises:
        DatasetMismatchError: each field that differs is named with both values.
    """
    if differences := there.differences(now):
        raise DatasetMismatchError(
            f"{directory}: this dataset was captured differently ({'; '.join(differences)}); choose another --output"
        )


def model_identity(info: DatasetInfo) -> dict[str, object]:
    """The part of ``info`` that a session record repeats as ``model``."""
    return {key: value for key, value in info.to_json().items() if key not in ("format", "version", "created_at")}
