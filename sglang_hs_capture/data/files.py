"""The files of an input: named one by one, by folders or by patterns, and of any of the formats that are read.

What a file is, is told by its first bytes. Only in a folder does its name decide whether it is read at all.
"""

import glob
import json
import os
from collections.abc import Collection, Iterable, Iterator
from enum import Enum, auto
from pathlib import Path
from typing import Any, NoReturn

from sglang_hs_capture.data.account import ACCOUNT_FILE, check_whole
from sglang_hs_capture.data.lines import GZIP_MAGIC, LINE_LIMIT, ZSTD_MAGIC, open_input, read_lines
from sglang_hs_capture.data.records import BadRow
from sglang_hs_capture.errors import InputError

# A line of JSON as it stands in its file, a row of a table, or why neither can be read.
Row = bytes | dict[str, Any] | BadRow

PACKED_SUFFIXES = (".gz", ".zst")
LINE_SUFFIXES = tuple(f".{kind}{packed}" for kind in ("jsonl", "ndjson") for packed in ("", *PACKED_SUFFIXES))
TABLE_SUFFIXES = (".parquet", ".arrow")
PARQUET_MAGIC, ARROW_FILE_MAGIC, ARROW_STREAM_MAGIC = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
# What ``datasets`` writes into the folder of a saved dataset: among other things the list of its files.
_STATE_FILE = "state.json"
# And into one of several splits, each in a folder of its own: their names.
_SPLITS_FILE = "dataset_dict.json"
_COUNT_BLOCK = 2**22


class Kind(Enum):
    """What a file is."""

    LINES = auto()
    COMPRESSED_LINES = auto()
    PARQUET = auto()
    ARROW_FILE = auto()
    ARROW_STREAM = auto()
    BROKEN = auto()  # called a table by its name, and none by its first bytes; or called compressed, and empty
    PIPE = auto()  # of lines; looking at its first bytes would take them away


_MAGICS = {
    GZIP_MAGIC: Kind.COMPRESSED_LINES,
    ZSTD_MAGIC: Kind.COMPRESSED_LINES,
    PARQUET_MAGIC: Kind.PARQUET,
    ARROW_FILE_MAGIC: Kind.ARROW_FILE,
    ARROW_STREAM_MAGIC: Kind.ARROW_STREAM,
}


def find_files(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """The files to read, all of which can be opened.

    Args:
        paths: files; folders, for every file in them, at any depth, that has a known suffix, sorted by path; patterns
            such as ``data/*.jsonl`` or ``data/**/*.parquet``, for what matches, sorted by path. A folder that
            ``datasets`` saved stands for the files that it lists. Hidden files and folders are passed over.

    Raises:
        InputError: nothing is given or found, something is missing or not readable, or a tokenised set lacks rows.
    """
    given = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    if not given:
        raise InputError("expected at least one conversation file; got none")
    files = [file for path in given for match in _matches(path) for file in _files_of(match)]
    for file in files:
        if file.is_file() or not file.exists():  # opening a pipe here would take its data away
            open_input(file).close()
    return files


def kind_of(file: Path) -> Kind:
    """What a file is, by its first bytes.

    Raises:
        InputError: the operating system cannot read the file.
    """
    if file.exists() and not file.is_file():
        return Kind.PIPE
    with open_input(file) as stream:
        head = stream.peek(8)
    for magic, kind in _MAGICS.items():
        if head.startswith(magic):
            return kind
    broken = file.suffix in TABLE_SUFFIXES or (not head and file.suffix in PACKED_SUFFIXES)
    return Kind.BROKEN if broken else Kind.LINES


def read_rows(
    file: Path, columns: Collection[str], needed: Collection[str], limit: int = LINE_LIMIT
) -> Iterator[tuple[int, Row]]:
    """The lines of a file or the rows of a table, with their numbers, counted from 1.

    Args:
        file: a regular file, or a pipe of lines.
        columns: of a table, what to read.
        needed: a table without any of these columns is a ``BadRow`` as a whole.
        limit: a longer line or row, in bytes, is a ``BadRow``.

    Raises:
        InputError: the operating system cannot read the file.
    """
    kind = kind_of(file)
    if kind in (Kind.LINES, Kind.COMPRESSED_LINES, Kind.PIPE):
        yield from ((number, line) for number, _, line in read_lines(file, limit))
    elif kind is Kind.BROKEN:
        yield 1, BadRow(f"is named {file.suffix} and is no such file, or only a part of one")
    else:
        # pyarrow takes a fifth of a second to import, and lines of JSON need none of it.
        from sglang_hs_capture.data import tables

        readers = {
            Kind.PARQUET: tables.parquet_batches,
            Kind.ARROW_FILE: tables.arrow_file_batches,
            Kind.ARROW_STREAM: tables.arrow_stream_batches,
        }
        yield from tables.read_table(file, readers[kind], columns, needed, limit)


def count_rows(files: Iterable[Path], most_bytes: int) -> int | None:
    """Number of lines and rows, for a progress bar; None where counting them would take long.

    Args:
        files: from ``find_files``.
        most_bytes: lines are not counted if there are more bytes of them.
    """
    total = 0
    for file in files:
        count = None
        kind = kind_of(file)
        if kind is Kind.PARQUET:
            from sglang_hs_capture.data.tables import count_parquet_rows

            count = count_parquet_rows(file)
        elif kind is Kind.LINES and (most_bytes := most_bytes - file.stat().st_size) >= 0:
            count = _count_lines(file)
        if count is None:
            return None
        total += count
    return total


def _matches(path: Path) -> list[Path]:
    if path.exists():
        return [path]
    if not glob.has_magic(str(path)):
        raise InputError(f"{path}: no such file or folder; expected conversations as JSON Lines, Parquet or Arrow")
    found = [Path(name) for name in glob.glob(str(path), recursive=True)]
    # A link that leads nowhere is kept: opening it says so, where leaving it out would lose a file in silence.
    known = [match for match in found if match.is_dir() or match.is_file() or not match.exists()]
    if not known:
        raise InputError(f"{path}: no file or folder matches this pattern")
    return sorted(known)


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files: list[Path] = []
    seen: set[str] = set()
    for root, folders, names in os.walk(path, onerror=_refuse, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:  # a link to a folder above it
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        if _SPLITS_FILE in names:
            _check_splits(Path(root))
        saved = _saved_files(Path(root))
        chosen = [name for name in names if _is_known(name)] if saved is None else saved
        if ACCOUNT_FILE in names:
            check_whole(Path(root), chosen)
        files += [Path(root) / name for name in chosen]
    if not files:
        raise InputError(
            f"{path}: the folder holds no file whose name ends in {', '.join((*LINE_SUFFIXES, *TABLE_SUFFIXES))}; "
            "name other files one by one, or by a pattern"
        )
    return sorted(files)


def _refuse(error: OSError) -> NoReturn:
    raise InputError(f"{error.filename}: cannot be read: {error.strerror or error}") from error


def _is_known(name: str) -> bool:
    return not name.startswith(".") and name.endswith((*LINE_SUFFIXES, *TABLE_SUFFIXES))


def _saved_files(folder: Path) -> list[str] | None:
    """The files of a dataset that ``datasets`` saved here, beside which its caches may lie; None for other folders."""
    try:
        state = json.loads((folder / _STATE_FILE).read_bytes())
        return [str(entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_splits(folder: Path) -> None:
    """See that a saved dataset of several splits has all of them, where a folder holds one.

    Raises:
        InputError: one is missing.
    """
    try:
        splits = [str(split) for split in json.loads((folder / _SPLITS_FILE).read_bytes())["splits"]]
    except (OSError, ValueError, KeyError, TypeError):
        return
    missing = [split for split in splits if not (folder / split).is_dir()]
    if missing:
        raise InputError(
            f"{folder}: expected the splits {', '.join(splits)}, as {_SPLITS_FILE} says; got no folder {missing[0]}; "
            "copy the whole dataset again, or name the splits that are wanted one by one"
        )


def _count_lines(file: Path) -> int:
    count, last = 0, b"\n"
    with open_input(file) as stream:
        while block := stream.read(_COUNT_BLOCK):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")
