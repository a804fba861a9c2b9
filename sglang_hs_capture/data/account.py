"""The record of a tokenised set, by which its folder is told from others and from what is left of one."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sglang_hs_capture.errors import CorruptionError, InputError
from sglang_hs_capture.store.jsonfile import read_object

FORMAT, VERSION = "sglang-hs-capture-prepared", 1
# Readers of whole folders of Parquet files pass over a name that begins so.
ACCOUNT_FILE = "_prepared.json"
_REMEDY = "copy the whole folder again, or make the set anew"


def read_account(folder: Path) -> dict[str, Any] | None:
    """The record of the tokenised set in a folder; None where there is none.

    Raises:
        InputError: it is damaged, or a newer release wrote it.
    """
    path = folder / ACCOUNT_FILE
    try:
        account = read_object(path, _REMEDY)
    except CorruptionError as error:
        raise InputError(str(error)) from None
    if account is None or account.get("format") != FORMAT:
        return None
    if account.get("version") != VERSION:
        raise InputError(
            f"{path}: expected version {VERSION}, got {account.get('version')!r}: written by another release; upgrade, "
            "or make the set anew"
        )
    return account


def check_whole(folder: Path, names: Iterable[str]) -> None:
    """See that a tokenised set has all its rows, where the folder holds one.

    Args:
        folder: a folder.
        names: of the files in it.

    Raises:
        InputError: there are fewer rows than its record says, or more.
    """
    account = read_account(folder)
    if account is None:
        return
    # pyarrow takes a fifth of a second to import.
    from sglang_hs_capture.data.tables import count_parquet_rows

    counts = [count_parquet_rows(folder / name) for name in names if name.endswith(".parquet")]
    rows = sum(count for count in counts if count is not None)
    # Where a file is damaged, reading it says so and where.
    if None not in counts and rows != account.get("samples"):
        raise InputError(
            f"{folder}: expected {account.get('samples')} samples, as {ACCOUNT_FILE} says; got {rows} in "
            f"{len(counts)} Parquet files; {_REMEDY}, or remove {ACCOUNT_FILE} if rows were changed on purpose"
        )
