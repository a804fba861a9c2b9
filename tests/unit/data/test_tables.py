"""Rows of Parquet and Arrow files: the same records as from lines of JSON, in bounded memory, and damaged files."""

import json
import subprocess
import sys
from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sglang_hs_capture.data import tables
from sglang_hs_capture.data.conversations import iter_records
from sglang_hs_capture.data.records import InputProblem, Sample
from sglang_hs_capture.data.samples import SamplePreparer, iter_samples

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"city": "Oslo"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ROWS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, 世界 😀"}]},
    {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]},
            {"role": "tool", "content": "4", "tool_call_id": "1"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"unit": 3}}}],
            },
        ],
        "tools": [TOOL, {"type": "function", "function": {"name": "g"}}],
    },
    {"id": "named", "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"thinking": False}},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
    {"prompt": "p", "response": "r"},
    {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
    {"input_ids": [1, 2, 3], "loss_mask_rle": [1, 2]},
    {"input_ids": [2**40]},
]
PARTS = [{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}]


def write_lines(folder, rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def filled(rows):
    """Every column in every row, as tables have them; pyarrow does the same to the structs in them."""
    columns = {key for row in rows for key in row}
    return [{key: row.get(key) for key in columns} for row in rows]


def write_table(folder, rows, kind):
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(filled(rows))
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=3)
    else:
        opened = pa.ipc.new_stream if kind == "arrow" else pa.ipc.new_file
        with opened(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    return path


def strings(texts):
    """A column of strings that need not be UTF-8, as writers of other languages make them."""
    binary = pa.array(texts, pa.binary())
    return pa.StringArray.from_buffers(len(texts), *binary.buffers()[1:])


def without_source(records):
    seen = []
    for record in records:
        assert not isinstance(record, InputProblem), record
        if isinstance(record, Sample):
            seen.append((record.id, record.input_ids.tolist(), record.loss_mask.tolist()))
        else:
            seen.append((record.id, record.messages, record.tools, record.template_kwargs))
    return seen


def problems(path, **more):
    return [record for record in iter_records(path, **more) if isinstance(record, InputProblem)]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "feather"])
@pytest.mark.parametrize("rows", [ROWS, PARTS])
def test_rows_of_a_table_are_what_the_same_lines_are(tmp_path, kind, rows):
    table = list(iter_records(write_table(tmp_path, rows, kind)))
    assert without_source(table) == without_source(iter_records(write_lines(tmp_path, rows)))
    assert [record.source for record in table] == [f"{tmp_path}/rows.{kind}:{n + 1}" for n in range(len(rows))]


@pytest.mark.parametrize("how", ["save_to_disk", "to_parquet"])
@pytest.mark.parametrize("mixed", [None, "use_json"])
def test_what_the_library_datasets_writes(tmp_path, how, mixed):
    import datasets

    rows = [*ROWS[:2], {"messages": [{"role": "user", "content": "x"}], "tools": []}]
    given = datasets.Dataset.from_list(filled(rows), on_mixed_types=mixed)
    assert any("Json" in str(feature) for feature in given.features.values()) == bool(mixed)
    if how == "save_to_disk":
        datasets.DatasetDict({"train": given}).save_to_disk(tmp_path / "saved", num_shards={"train": 2})
    else:
        (tmp_path / "saved").mkdir()
        given.to_parquet(tmp_path / "saved" / "x.parquet")
    assert without_source(iter_records(tmp_path / "saved")) == without_source(iter_records(write_lines(tmp_path, rows)))


@pytest.mark.parametrize(
    "kind",
    [pa.int8(), pa.uint16(), pa.int32(), pa.uint64()],
    ids=str,
)
def test_token_ids_and_masks_of_any_integers(tmp_path, kind):
    for outer in (pa.list_, pa.large_list, lambda inner: pa.list_(inner, 3)):
        table = pa.table(
            {
                "input_ids": pa.array([[1, 2, 3]], outer(kind)),
                "loss_mask": pa.array([[False, True, True]], outer(pa.bool_())),
            }
        )
        [sample] = iter_records(write_table(tmp_path, table, "parquet"))
        assert (sample.input_ids.tolist(), sample.loss_mask.tolist()) == ([1, 2, 3], [0, 1, 1])
        assert (sample.input_ids.dtype, sample.loss_mask.dtype) == (np.int64, np.uint8)


def test_text_columns_that_are_dictionaries_or_large(tmp_path):
    text = pa.array(["p", "q"], pa.large_string()).dictionary_encode()
    first, second = iter_records(write_table(tmp_path, pa.table({"prompt": text, "response": ["a", "b"]}), "arrow"))
    assert [first.messages[0]["content"], second.messages[1]["content"]] == ["p", "b"]


def test_only_the_columns_of_a_row_are_read(tmp_path, monkeypatch):
    table = pa.table({"input_ids": [[1]], "embedding": [[0.5] * 100], "note": ["x"]})
    seen = []
    rows_of = tables._rows
    monkeypatch.setattr(tables, "_rows", lambda batch, limit: seen.append(batch.schema.names) or rows_of(batch, limit))
    for kind in ("parquet", "arrow", "feather"):
        assert len(list(iter_records(write_table(tmp_path, table, kind)))) == 1
    assert seen == [["input_ids"]] * 3


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_other_masks_of_a_table_are_not_passed_over(tmp_path, kind):
    tables = [
        pa.table({"input_ids": [[1, 2]], "labels": [[-100, 2]]}),
        pa.table({"input_ids": [[1, 0]], "loss_mask": [[1, 0]], "attention_mask": [[1, 0]]}),
    ]
    for table, key in zip(tables, ("labels", "attention_mask"), strict=True):
        [problem] = problems(write_table(tmp_path, table, kind))
        assert problem.reason.startswith(f"{key}: expected")


def test_a_table_of_another_kind_is_one_problem(tmp_path):
    [problem] = problems(write_table(tmp_path, pa.table({"text": ["x"] * 100, "n": [1] * 100}), "parquet"))
    assert problem.reason == (
        "unknown form: expected one of the columns input_ids, messages, conversations, prompt; got ['n', 'text']"
    )
    assert problem.source.endswith("rows.parquet:1")


def test_a_row_that_is_null_in_every_column_is_a_problem_of_its_own(tmp_path):
    first, problem = iter_records(write_table(tmp_path, [{"input_ids": [1]}, {"input_ids": None}], "parquet"))
    assert isinstance(first, Sample)
    assert problem.reason.startswith("unknown form: expected one of the keys")
    assert problem.source.endswith(":2")


def test_a_repeated_column_is_a_problem(tmp_path):
    table = pa.table([pa.array([[1]]), pa.array([[2]])], names=["input_ids", "input_ids"])
    [problem] = problems(write_table(tmp_path, table, "arrow"))
    assert problem.reason == "the table has the column input_ids more than once"


def test_one_id_in_two_files_of_different_kinds_is_a_problem(tmp_path):
    rows = [{"id": "7", "input_ids": [1]}, {"id": "8", "input_ids": [2]}]
    write_table(tmp_path, rows, "parquet")
    (tmp_path / "a.jsonl").write_text('{"id": 7, "input_ids": [1]}\n')
    first, again, last = iter_samples(tmp_path, SamplePreparer(), max_length=None)
    assert (first.source, last.id) == (f"{tmp_path}/a.jsonl:1", "8")
    assert str(again) == f"{tmp_path}/rows.parquet:1: an earlier line has the same id, '7'"


def test_a_table_without_rows_has_no_records(tmp_path):
    empty = pa.table({"input_ids": pa.array([], pa.list_(pa.int64()))})
    for kind in ("parquet", "arrow", "feather"):
        assert list(iter_records(write_table(tmp_path, empty, kind))) == []


def test_values_that_json_does_not_have_are_problems(tmp_path):
    calls = [{"function": {"name": "f", "arguments": {"when": datetime(2026, 1, 1)}}}]
    rows = [{"messages": [{"role": "assistant", "content": "", "tool_calls": calls}]}]
    [problem] = problems(write_table(tmp_path, rows, "parquet"))
    assert "the row holds a value of a type that JSON does not have" in problem.reason
    [problem] = problems(write_table(tmp_path, pa.table({"prompt": [b"x"], "response": [b"y"]}), "parquet"))
    assert problem.reason == "prompt: expected a text or a list of messages; got bytes"


def test_text_that_is_not_utf8_or_not_json_is_a_problem_of_its_row(tmp_path):
    texts = [b"good", b"\xff\xfe", b"good"]
    table = pa.table({"prompt": strings(texts), "response": ["a", "b", "c"]})
    first, problem, last = iter_records(write_table(tmp_path, table, "parquet"))
    assert (first.messages[0]["content"], last.messages[1]["content"]) == ("good", "c")
    assert problem.reason.startswith("the row cannot be told: 'utf-8' codec can't decode byte 0xff")
    tools = pa.array(["[]", "{", "[]"], pa.string()).cast(pa.json_())
    table = pa.table({"prompt": ["a", "b", "c"], "response": ["a", "b", "c"], "tools": tools})
    first, problem, last = iter_records(write_table(tmp_path, table, "parquet"))
    assert problem.reason.startswith("the row cannot be told: Expecting property name")
    assert last.id != first.id


def test_a_row_over_the_limit_is_a_problem_and_the_others_are_read(tmp_path):
    rows = [{"id": "a", "input_ids": [1]}, {"id": "b", "input_ids": [1] * 10_000}, {"id": "c", "input_ids": [1]}]
    for kind in ("parquet", "arrow", "feather"):
        first, problem, last = iter_records(write_table(tmp_path, rows, kind), line_limit=2000)
        assert (first.id, last.id) == ("a", "c")
        assert problem.reason == "the row is longer than the limit of 2000 bytes"


def test_large_rows_are_read_a_few_at_a_time(tmp_path, monkeypatch):
    sizes = []
    rows_of = tables._rows
    monkeypatch.setattr(tables, "_rows", lambda batch, limit: sizes.append(batch.num_rows) or rows_of(batch, limit))
    rng = np.random.default_rng(0)
    table = pa.table({"input_ids": [rng.integers(0, 2**31, 1000) for _ in range(200)]})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=100)
    assert len(list(iter_records(tmp_path / "x.parquet"))) == 200
    assert max(sizes) == tables.BATCH_ROWS
    sizes.clear()
    assert len(list(iter_records(tmp_path / "x.parquet", line_limit=20_000))) == 200
    assert max(sizes) < 5


@pytest.mark.parametrize("kind", ["parquet", "arrow", "feather"])
def test_a_truncated_table_is_one_problem_and_the_next_file_is_read(tmp_path, kind):
    table = pa.table({"input_ids": [list(range(n, n + 50)) for n in range(500)]})
    path = write_table(tmp_path, table, kind)
    whole = path.read_bytes()
    (tmp_path / "next.jsonl").write_text('{"id": "next", "input_ids": [1]}\n')
    for size in (8, 100, len(whole) // 2, len(whole) - 9):
        path.write_bytes(whole[:size])
        *before, last = iter_records([path, tmp_path / "next.jsonl"])
        assert last.id == "next"
        found = [record for record in before if isinstance(record, InputProblem)]
        # A stream may lack the mark at its end and nothing else.
        assert len(found) == 1 or (kind == "arrow" and len(before) == 500)
        assert all("the table is damaged or cut off here" in problem.reason for problem in found)
        assert all(problem is before[-1] for problem in found)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "feather"])
def test_damage_anywhere_in_a_table_neither_raises_nor_ends_the_process(tmp_path, kind):
    """In a process of its own: a wrong offset that is followed would end it."""
    rows = [
        {"id": str(n), "input_ids": [n, n + 1], "messages": [{"role": "user", "content": "x" * n}]} for n in range(40)
    ]
    path = write_table(tmp_path, rows, kind)
    program = (
        "import random, sys; from sglang_hs_capture.data.conversations import iter_records\n"
        "path = sys.argv[1]; whole = open(path, 'rb').read(); chance = random.Random(5)\n"
        "for turn in range(150):\n"
        "    damaged = bytearray(whole)\n"
        "    for _ in range(8): damaged[chance.randrange(6, len(whole))] = chance.randrange(256)\n"
        "    open(path, 'wb').write(damaged)\n"
        "    for record in iter_records(path): str(record)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_lines_of_json_need_no_pyarrow(tmp_path):
    path = write_lines(tmp_path, ROWS)
    program = (
        "import sys; from sglang_hs_capture.data.conversations import iter_records;"
        f"print(len(list(iter_records({str(path)!r}))), 'pyarrow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(ROWS)), "False"]
