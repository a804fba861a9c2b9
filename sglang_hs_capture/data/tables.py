"""Reads the rows of Parquet and Arrow files, a few at a time, in the form that the same rows have as lines of JSON.

A table has every column in every row, and every field in every struct of a column. What a row does not have is null
there: a message without tool calls has ``tool_calls: null``. So null fields are left out again; a null that somebody
wrote on purpose is left out with them. Columns of JSON text (``arrow.json``, ``Json`` of ``datasets``) keep theirs.
"""

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from sglang_hs_capture.data.records import BadRow
from sglang_hs_capture.errors import InputError
from sglang_hs_capture.text import one_line, shown

# The columns to read of a table with such a schema; raises ``BadRow`` where it cannot be used.
Choice = Callable[[pyarrow.Schema], list[str]]
# The batches of a file, of the columns chosen, and for rows of no more bytes than a limit.
Batches = Callable[[Path, Choice, int], Iterator[pyarrow.RecordBatch]]

# Rows that are turned into Python objects at a time.
BATCH_ROWS = 64
_READ_BYTES = 2**20


def read_table(
    file: Path, batches: Batches, columns: Collection[str], needed: Collection[str], row_limit: int
) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """The rows of a table, with their numbers, counted from 1.

    Only a batch of rows and, for Parquet, the pages they lie on are in memory. Damaged data is given as a ``BadRow`` at
    the row where it was met, after which the file has no further rows.

    Args:
        file: a regular file.
        batches: the reader for files of its kind, of those below.
        columns: what to read; others are passed over.
        needed: without any of these columns the whole file is a ``BadRow``.
        row_limit: a row of more bytes in memory is a ``BadRow``.

    Raises:
        InputError: the operating system cannot read the file.
    """
    number = 0
    try:
        for batch in batches(file, lambda schema: _chosen(schema, columns, needed), row_limit):
            for row in _rows(batch, row_limit):
                number += 1
                yield number, row
    except BadRow as problem:
        yield number + 1, problem
    except (pyarrow.ArrowException, ValueError, OSError, EOFError) as error:  # ValueError: a name that is not UTF-8
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(f"{file}: cannot be read: {error.strerror or error}") from error
        yield number + 1, BadRow(f"the table is damaged or cut off here ({one_line(str(error))})")


def parquet_batches(file: Path, choose: Choice, row_limit: int) -> Iterator[pyarrow.RecordBatch]:
    """Batches of a Parquet file."""
    with pyarrow.parquet.ParquetFile(file, buffer_size=_READ_BYTES, pre_buffer=False) as table:
        yield from table.iter_batches(_rows_at_a_time(table.metadata, row_limit), columns=choose(table.schema_arrow))


def arrow_file_batches(file: Path, choose: Choice, _: int) -> Iterator[pyarrow.RecordBatch]:
    """Batches of an Arrow file, which has a list of them at its end."""
    with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_file(source) as reader:
        chosen = choose(reader.schema)
        for index in range(reader.num_record_batches):
            yield from _pieces(reader.get_batch(index).select(chosen))


def arrow_stream_batches(file: Path, choose: Choice, _: int) -> Iterator[pyarrow.RecordBatch]:
    """Batches of an Arrow stream, the form in which ``datasets`` saves."""
    with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as reader:
        chosen = choose(reader.schema)
        for batch in reader:
            yield from _pieces(batch.select(chosen))


def count_parquet_rows(file: Path) -> int | None:
    """Number of rows of a Parquet file, from its footer; None if it is damaged."""
    try:
        return int(pyarrow.parquet.read_metadata(file).num_rows)
    except (pyarrow.ArrowException, OSError):
        return None


def _pieces(batch: pyarrow.RecordBatch) -> Iterator[pyarrow.RecordBatch]:
    """A batch as a file has it, which may be the whole file, in small ones that still lie in the file's own pages."""
    batch.validate(full=True)  # a wrong offset in a file mapped to memory would be followed wherever it leads
    for start in range(0, batch.num_rows, BATCH_ROWS):
        yield batch.slice(start, BATCH_ROWS)


def _rows_at_a_time(metadata: pyarrow.parquet.FileMetaData, row_limit: int) -> int:
    """Fewer rows where rows are large, by the largest average of a row group."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    average = max((group.total_byte_size // group.num_rows for group in groups if group.num_rows), default=0)
    return max(1, min(BATCH_ROWS, row_limit // max(average, 1)))


def _chosen(schema: pyarrow.Schema, columns: Collection[str], needed: Collection[str]) -> list[str]:
    repeated = sorted({name for name in schema.names if schema.names.count(name) > 1 and name in columns})
    if repeated:
        raise BadRow(f"the table has the column {repeated[0]} more than once")
    if not set(needed).intersection(schema.names):
        raise BadRow(
            f"unknown form: expected one of the columns {', '.join(needed)}; got {shown(sorted(schema.names))}"
        )
    return [name for name in schema.names if name in columns]


def _rows(batch: pyarrow.RecordBatch, row_limit: int) -> Iterator[dict[str, Any] | BadRow]:
    """The rows of a batch, all at once if it is small and every one can be told."""
    if batch.nbytes <= row_limit:
        try:
            yield from [_row(batch.schema, values) for values in batch.to_pylist()]
            return
        except ValueError:  # not UTF-8, not JSON, or a struct with a field twice: row by row the others can be told
            pass
    for index in range(batch.num_rows):
        alone = batch.slice(index, 1)
        if alone.nbytes > row_limit:
            yield BadRow(f"the row is longer than the limit of {row_limit} bytes")
            continue
        try:
            yield _row(alone.schema, alone.to_pylist()[0])
        except ValueError as error:
            yield BadRow(f"the row cannot be told: {one_line(str(error))}")


def _row(schema: pyarrow.Schema, values: dict[str, Any]) -> dict[str, Any]:
    return {field.name: _as_json(field.type, values[field.name]) for field in schema if values[field.name] is not None}


def _as_json(kind: pyarrow.DataType, value: Any) -> Any:
    """A value as ``json.loads`` would give it, but for its null fields.

    Raises:
        ValueError: text that should be JSON is not.
    """
    types = pyarrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if value is None:
        return None
    if isinstance(kind, pyarrow.JsonType):
        return json.loads(value)
    if types.is_struct(kind):
        return {field.name: _as_json(field.type, value[field.name]) for field in kind if value[field.name] is not None}
    if types.is_map(kind):
        return {key: _as_json(kind.item_type, item) for key, item in value if item is not None}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = kind.value_type
        if types.is_nested(inner) or isinstance(inner, pyarrow.JsonType):
            return [_as_json(inner, item) for item in value]
    return value
