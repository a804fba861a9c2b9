"""Reading conversation files: forms, ids, and one clear line for whatever cannot be used."""

import gzip
import hashlib
import json
import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hs_capture.data.conversations import iter_records
from sglang_hs_capture.data.records import Conversation, InputProblem, Sample
from sglang_hs_capture.errors import InputError

USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}


@pytest.fixture
def read(tmp_path):
    """Writes lines (bytes, or values as JSON) to a file and reads them; what comes names the file ``f.jsonl``."""

    def write_and_read(*lines, name="f.jsonl", **more):
        file = tmp_path / name
        file.write_bytes(
            b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
        )
        return list(iter_records(file, **more))

    return write_and_read


def reasons(records) -> list[str]:
    assert all(isinstance(record, InputProblem) for record in records), records
    assert all("\n" not in str(record) for record in records)
    return [record.reason for record in records]


def test_openai_messages(read):
    tools = [{"type": "function", "function": {"name": "f"}}]
    [record] = read({"id": "x", "messages": [USER, ANSWER], "tools": tools, "chat_template_kwargs": {"thinking": True}})
    assert isinstance(record, Conversation)
    assert record.id == "x"
    assert record.source.endswith("f.jsonl:1")
    assert record.messages == [USER, ANSWER]
    assert record.tools == tools
    assert record.template_kwargs == {"thinking": True}


def test_content_of_text_parts_is_joined(read):
    parts = [{"type": "text", "text": "one "}, "two", {"type": "text", "text": ""}]
    [record] = read({"messages": [{"role": "user", "content": parts}]})
    assert record.messages == [{"role": "user", "content": "one two"}]


def test_tool_calls_without_content_and_values_that_are_null(read):
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}, {"name": "g"}]
    [record] = read(
        {
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": calls, "name": None},
                {"role": "tool", "tool_call_id": "1", "content": "r", "tool_calls": None},
                {"role": "assistant", "content": "c", "tool_calls": [], "reasoning": "why"},
            ],
            "input_ids": None,
            "tools": None,
        }
    )
    assert record.messages == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [calls[0], {"type": "function", "function": {"name": "g", "arguments": {}}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "assistant", "content": "c", "reasoning_content": "why"},
    ]
    assert record.tools is None


def test_sharegpt(read):
    calls = json.dumps([{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": "{}"}])
    turns = [("human", "q"), ("function_call", calls), ("observation", "1"), ("tool", "2"), ("gpt", "a")]
    row = {"conversations": [{"from": who, "value": value} for who, value in turns], "system": "s"}
    [record] = read({**row, "tools": json.dumps([{"name": "f", "parameters": {}}])})
    assert [message["role"] for message in record.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert record.messages[0] == {"role": "system", "content": "s"}
    assert [call["id"] for call in record.messages[2]["tool_calls"]] == ["functions.f:0", "functions.g:1"]
    assert [message["tool_call_id"] for message in record.messages[3:5]] == ["functions.f:0", "functions.g:1"]
    assert record.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def test_conversations_with_roles_are_openai_messages(read):
    [record] = read({"conversations": [USER, ANSWER]})
    assert record.messages == [USER, ANSWER]


def test_rows_tokenised_before(read):
    masked, bare = read({"id": "1", "input_ids": [5, 0, 7], "loss_mask": [0, 1, True]}, {"id": "2", "input_ids": [9]})
    assert isinstance(masked, Sample)
    assert (masked.input_ids.dtype, masked.loss_mask.dtype) == (np.int64, np.uint8)
    assert (masked.input_ids.tolist(), masked.loss_mask.tolist()) == ([5, 0, 7], [0, 1, 1])
    assert (bare.input_ids.tolist(), bare.loss_mask.tolist()) == ([9], [1])


MESSAGE_PROBLEMS = {
    "messages: the conversation is empty": [],
    "messages: expected a list of messages; got str": "hello",
    "messages[1]: expected an object with role and content; got int": [USER, 3],
    "messages[0]: unknown role 'narrator'; expected one of system, developer, user, assistant, tool": [
        {"role": "narrator", "content": "x"}
    ],
    "messages[0]: unknown role ['user']": [{"role": ["user"], "content": "x"}],
    "messages[0]: unknown role None": [{"content": "x"}],
    "messages[1]: content is missing or null": [USER, {"role": "assistant", "content": None}],
    "messages[0]: content: expected a string or a list of text parts; got int": [{"role": "user", "content": 1}],
    "messages[0]: content[0]: parts of type 'video_url' are not supported, only text and images": [
        {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}
    ],
    "messages[0]: content[0]: expected a text part; got 7": [{"role": "user", "content": [7]}],
    "messages[0]: content[0]: text: expected a string; got NoneType": [{"role": "user", "content": [{"type": "text"}]}],
    "messages[0]: reasoning_content: expected a string; got list": [{**ANSWER, "reasoning_content": []}],
    "messages[0]: tool_calls: only an assistant message": [{**USER, "tool_calls": [{"name": "f"}]}],
    "messages[0]: tool_calls: expected a list; got dict": [{**ANSWER, "tool_calls": {"name": "f"}}],
    "messages[0]: tool_calls[0]: expected a function with a name": [{**ANSWER, "tool_calls": ["f"]}],
    "messages[0]: tool_calls[0]: arguments: expected an object or its JSON text; got list": [
        {**ANSWER, "tool_calls": [{"name": "f", "arguments": [1]}]}
    ],
    "messages[0]: function_call: expected the call in tool_calls, a list; got {'name': 'f'}": [
        {**ANSWER, "function_call": {"name": "f"}}
    ],
    "messages[1]: weight: expected 1 or true, as each of the assistant's turns is trained on; got 0; remove it": [
        USER,
        {**ANSWER, "weight": 0},
    ],
    "messages[0]: weight: expected 1 or true, as each of the assistant's turns is trained on; got 0.5": [
        {**ANSWER, "weight": 0.5}
    ],
    "messages[0]: train: expected 1 or true": [{**ANSWER, "train": False}],
    "messages[0]: loss: expected 1 or true": [{**ANSWER, "loss": False}],
}
ROW_PROBLEMS = {
    "unknown form: expected one of the keys input_ids, messages, conversations, prompt; got ['text']": {"text": "x"},
    "prompt: expected one of response, completion beside it; got ['chosen', 'prompt']": {"prompt": "x", "chosen": "y"},
    "response and completion: expected one of them": {"prompt": "x", "response": "y", "completion": "z"},
    "prompt: expected a text or a list of messages; got int": {"prompt": 1, "response": "y"},
    "completion: expected a text or a list of messages; got dict": {"prompt": "x", "completion": {}},
    "prompt: the conversation is empty": {"prompt": [], "response": "y"},
    "prompt[0]: unknown role 'bot'": {"prompt": [{"role": "bot", "content": "x"}], "response": "y"},
    "loss_mask and loss_mask_rle: expected one of them": {"input_ids": [1], "loss_mask": [1], "loss_mask_rle": [0, 1]},
    "loss_mask_rle: expected a list of lengths of runs; got str": {"input_ids": [1], "loss_mask_rle": "0 1"},
    "loss_mask_rle: expected runs of 3 tokens together, as input_ids has; got 2": {
        "input_ids": [1, 2, 3],
        "loss_mask_rle": [1, 1],
    },
    "loss_mask_rle[0]: expected the length of a run, from 0 to 2; got -1": {
        "input_ids": [1, 2],
        "loss_mask_rle": [-1, 3],
    },
    "loss_mask_rle[1]: expected the length of a run, from 0 to 2; got 1.0": {
        "input_ids": [1, 2],
        "loss_mask_rle": [1, 1.0],
    },
    "loss_mask_rle: expected runs of 1 tokens together, as input_ids has; got 0": {
        "input_ids": [1],
        "loss_mask_rle": [],
    },
    **{
        f"{key}: expected what is trained on as one of loss_mask, loss_mask_rle, assistant_masks": {
            "input_ids": [1, 2],
            key: [-100, 2],
        }
        for key in ("labels", "completion_mask", "assistant_mask", "label_mask", "mask")
    },
    "attention_mask: expected ones alone; got 0 at position 2: the row is padded": {
        "input_ids": [1, 2, 0],
        "loss_mask": [0, 1, 0],
        "attention_mask": [1, 1, 0],
    },
    "conversations[1]: weight: expected 1 or true": {
        "conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y", "weight": 0}]
    },
    "assistant_masks[0]: expected 0 or 1; got 2": {"input_ids": [1], "assistant_masks": [2]},
    "videos: only images are supported, no other media": {"messages": [USER], "videos": ["a.mp4"]},
    "tools: expected a list of objects; got {'a': 1}": {"messages": [USER], "tools": {"a": 1}},
    "tools: expected JSON; got '{'": {"messages": [USER], "tools": "{"},
    "chat_template_kwargs: expected an object; got list": {"messages": [USER], "chat_template_kwargs": []},
    "chat_template_kwargs: chat_template, tokenize cannot be set here": {
        "messages": [USER],
        "chat_template_kwargs": {"tokenize": True, "chat_template": "{{ evil }}"},
    },
    "conversations[0]: unknown role 'narrator'": {"conversations": [{"from": "narrator", "value": "x"}]},
    "conversations[0]: value: expected a string; got NoneType": {"conversations": [{"from": "human"}]},
    "conversations[0]: expected an object with from and value; got str": {"conversations": ["x"]},
    "conversations[0]: value: expected JSON; got 'f(x)'": {
        "conversations": [{"from": "function_call", "value": "f(x)"}]
    },
    "conversations[0]: value: expected at least one function call": {
        "conversations": [{"from": "function_call", "value": "[]"}]
    },
    "system: expected a string; got int": {"conversations": [{"from": "human", "value": "x"}], "system": 3},
    "input_ids: the list is empty": {"input_ids": []},
    "input_ids: expected a list of token ids; got str": {"input_ids": "1 2"},
    "input_ids[1]: expected a whole number from 0 up; got -1": {"input_ids": [1, -1]},
    "input_ids[0]: expected a whole number from 0 up; got 1.0": {"input_ids": [1.0]},
    "input_ids[0]: expected a whole number from 0 up; got True": {"input_ids": [True]},
    "input_ids[0]: expected a whole number from 0 up; got [1]": {"input_ids": [[1]]},
    "input_ids[0]: expected a whole number from 0 up; got 9223372036854775808": {"input_ids": [2**63]},
    "loss_mask: expected 2 values, one for each of input_ids; got 1": {"input_ids": [1, 2], "loss_mask": [1]},
    "loss_mask[1]: expected 0 or 1; got 2": {"input_ids": [1, 2], "loss_mask": [1, 2]},
    "loss_mask[0]: expected 0 or 1; got 0.5": {"input_ids": [1], "loss_mask": [0.5]},
    "loss_mask: expected a list of 0 and 1; got str": {"input_ids": [1], "loss_mask": "1"},
    "id: expected a string or a whole number; got float": {"id": 1.5, "input_ids": [1]},
    "id: expected a string or a whole number; got bool": {"id": True, "input_ids": [1]},
    "id: expected 1 to 4096 characters; got 0": {"id": "", "input_ids": [1]},
    "id: expected 1 to 4096 characters; got 1000000": {"id": "x" * 1_000_000, "input_ids": [1]},
}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "Hi", "response": "Yes"}, [("user", "Hi"), ("assistant", "Yes")]),
        (
            {"prompt": "Hi", "completion": "", "system": "Be kind."},
            [("system", "Be kind."), ("user", "Hi"), ("assistant", "")],
        ),
        ({"prompt": [USER], "completion": [ANSWER]}, [("user", USER["content"]), ("assistant", ANSWER["content"])]),
        (
            {"prompt": [{"role": "system", "content": "s"}, USER], "response": "Yes"},
            [("system", "s"), ("user", USER["content"]), ("assistant", "Yes")],
        ),
    ],
)
def test_prompts_with_answers(read, row, messages):
    [record] = read({"id": "x", "tools": [{"name": "f"}], "chat_template_kwargs": {"k": 1}, **row})
    assert [(message["role"], message["content"]) for message in record.messages] == messages
    assert record.tools == [{"type": "function", "function": {"name": "f"}}]
    assert record.template_kwargs == {"k": 1}


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ({"loss_mask_rle": [2, 1]}, [0, 0, 1]),
        ({"loss_mask_rle": [0, 1, 2]}, [1, 0, 0]),
        ({"loss_mask_rle": [3]}, [0, 0, 0]),
        ({"loss_mask": [True, False, True]}, [1, 0, 1]),
        ({"assistant_masks": [0, 1, 0]}, [0, 1, 0]),
        ({"loss_mask": None}, [1, 1, 1]),
    ],
)
def test_masks_of_rows_tokenised_before(read, mask, expected):
    [record] = read({"input_ids": [7, 8, 9], **mask})
    assert record.loss_mask.tolist() == expected
    assert record.loss_mask.dtype == np.uint8


def test_what_other_tools_add_to_rows_is_no_problem_where_it_says_the_same(read):
    messages = [{**USER, "weight": 0}, {**ANSWER, "weight": 1}, {**ANSWER, "train": True, "loss": None}]
    rows = [
        {"messages": messages},
        {
            "conversations": [
                {"from": "human", "value": "x", "train": False},
                {"from": "gpt", "value": "y", "weight": 1},
            ]
        },
        {"input_ids": [1, 2], "loss_mask": [0, 1], "attention_mask": [1, 1], "labels": [-100, 2]},
        {"input_ids": [1, 2], "labels": None, "attention_mask": None},
    ]
    assert [type(record) for record in read(*rows)] == [Conversation, Conversation, Sample, Sample]


@pytest.mark.parametrize(("reason", "messages"), MESSAGE_PROBLEMS.items())
def test_problems_of_messages(read, reason, messages):
    [problem] = reasons(read({"messages": messages}))
    assert problem.startswith(reason)


@pytest.mark.parametrize(("reason", "row"), ROW_PROBLEMS.items(), ids=list(ROW_PROBLEMS))
def test_problems_of_rows(read, reason, row):
    [problem] = reasons(read(row))
    assert problem.startswith(reason)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{nonsense}\n", "not JSON: Expecting property name"),
        (b'{"id": "x", "messages": []\n', "not JSON: Expecting ',' delimiter at character 28 of the line"),
        (b'{"messages": [{"role": "us', "so it may be cut off"),
        (b'{"id": "\xff"}\n', "not UTF-8: byte 0xff at byte 9"),
        ('{"id": "x"}'.encode("utf-16"), "not UTF-8: byte 0xff at byte 1"),
        (
            b"[\n",
            "one object a line is expected, not one array for the whole file (jq -c '.[]' FILE makes lines of one)",
        ),
        (b'[{"id": 1}]\n', "not one array for the whole file (jq -c '.[]' FILE makes lines of one); got list"),
        (b'"text"\n', "expected a JSON object a line; got str"),
        (b"null\n", "expected a JSON object a line; got NoneType"),
        (b"[" * 200_000 + b"\n", "nested too deeply"),
        (b'{"input_ids": [' + b"9" * 5000 + b"]}\n", "not JSON: Exceeds the limit"),
        (b"\0\0\0\0", "not JSON"),
        (b'{"input_ids": [1], "input_ids": [2]}\n', "the key 'input_ids' comes more than once in one object"),
        (
            b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}\n',
            "the key 'content' comes more than once",
        ),
    ],
)
def test_lines_that_cannot_be_read(read, line, reason):
    [problem] = reasons(read(line))
    assert reason in problem


def test_a_problem_names_its_file_line_and_id_and_the_next_line_is_read(read, tmp_path):
    first, second, third = read(
        b"\xef\xbb\xbf" + b"  \n", {"id": 7, "messages": []}, b"\n", b"oops\n", {"input_ids": [1]}
    )
    assert str(first) == f"{tmp_path / 'f.jsonl'}:2: messages: the conversation is empty"
    assert first.sample_id == "7"
    assert (second.source, second.sample_id) == (f"{tmp_path / 'f.jsonl'}:4", None)
    assert third.source == f"{tmp_path / 'f.jsonl'}:5"


def test_a_byte_order_mark_is_tolerated(read):
    [record] = read(b"\xef\xbb\xbf" + b'{"id": "x", "input_ids": [1]}\n')
    assert record.id == "x"
    assert read(b"\xef\xbb\xbf") == []
    assert read(b"") == []


def test_the_last_line_needs_no_newline_and_windows_line_ends_are_fine(read):
    assert [record.id for record in read(b'{"id": "x", "input_ids": [1]}\r\n{"id": "y", "input_ids": [1]}')] == [
        "x",
        "y",
    ]


HOSTILE_IDS = [
    "\0",
    "a\nb",
    "../../etc/passwd",
    "/etc/passwd",
    "\ud800",
    "😀" * 4096,
    "x" * 4096,
    " ",
    "id'; --",
    "$(rm)",
]


@pytest.mark.parametrize("hostile", HOSTILE_IDS, ids=range(len(HOSTILE_IDS)))
def test_hostile_ids_are_legal(read, hostile):
    [record] = read({"id": hostile, "input_ids": [1]})
    assert record.id == hostile


def test_whole_numbers_as_ids(read):
    assert [r.id for r in read({"id": 0, "input_ids": [1]}, {"id": -12345678901234567890, "input_ids": [1]})] == [
        "0",
        "-12345678901234567890",
    ]


def test_a_row_without_id_is_named_by_its_content(read):
    row = {"messages": [USER, ANSWER]}
    same = {
        "note": "not part of the content",
        "id": None,
        "messages": [dict(reversed(item.items())) for item in row["messages"]],
    }
    other = {"messages": [USER]}
    names = [record.id for record in read(row, other, same, {"id": "x", **row}, row)]
    canonical = json.dumps(row, sort_keys=True, separators=(",", ":")).encode()
    base = f"sha256-{hashlib.sha256(canonical).hexdigest()[:32]}"
    assert names == [base, names[1], f"{base}-2", "x", f"{base}-3"]
    shuffled = [record.id for record in read(other, row, row, same, name="g.jsonl")]
    assert sorted(shuffled) == sorted([names[0], names[1], names[2], names[4]])


def test_what_is_not_the_forms_own_does_not_name_a_row(read):
    row = {"messages": [USER, ANSWER]}
    plain, more, asked = read(row, {**row, "prompt": "Hi", "completion": "x"}, {"prompt": "Hi", "response": "x"})
    assert more.id == f"{plain.id}-2"
    assert asked.id != plain.id


def test_null_fields_do_not_name_a_row(read):
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    row = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    empty = {"messages": [{**message, "name": None} for message in row["messages"]]}
    parts = {"messages": [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}]}
    null_part = {"messages": [{"role": "user", "content": ["a", {"type": "text", "text": "b", "image": None}]}]}
    plain, null, first, second = read(row, empty, parts, null_part)
    assert null.id == f"{plain.id}-2"
    assert second.id == f"{first.id}-2"


def test_content_names_count_over_all_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text('{"input_ids": [1]}\n')
    first, second = (record.id for record in iter_records([tmp_path / "a", tmp_path / "b"]))
    assert second == f"{first}-2"


def test_gzip_is_found_by_content(tmp_path):
    file = tmp_path / "f.jsonl"
    file.write_bytes(gzip.compress(b'\xef\xbb\xbf{"id": "x", "input_ids": [1]}\n'))
    [record] = iter_records(file)
    assert (record.id, record.source) == ("x", f"{file}:1")


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_gzip_is_one_problem_and_the_next_file_is_read(tmp_path, damage):
    row = b'{"input_ids": [%s]}\n' % b",".join(b"%d" % (n * 7919 % 65521) for n in range(20_000))
    packed = bytearray(gzip.compress(row * 3))
    if damage == "cut":
        del packed[len(packed) // 2 :]
    else:
        packed[len(packed) // 2] ^= 0xFF
    (tmp_path / "a.gz").write_bytes(packed)
    (tmp_path / "b").write_text('{"id": "b", "input_ids": [1]}\n')
    *before, problem, last = iter_records([tmp_path / "a.gz", tmp_path / "b"])
    assert "the compressed data is damaged or cut off here" in problem.reason or "not JSON" in problem.reason
    assert all(isinstance(record, Sample) for record in before)
    assert last.id == "b"


def test_an_over_long_line_is_skipped(read):
    row = b'{"id": "x", "input_ids": [1]}'
    exact, over = row + b"\n", row + b" \n"
    first, problem, last = read(exact, over, exact, line_limit=len(row))
    assert (first.id, last.id) == ("x", "x")
    assert problem.reason == f"the line is longer than the limit of {len(row)} bytes"
    assert reasons(read(row + b" ", line_limit=len(row))) == [problem.reason]


def test_an_over_long_line_is_read_in_bounded_memory(tmp_path):
    file = tmp_path / "f.jsonl.gz"
    with gzip.open(file, "wb", compresslevel=1) as stream:
        for _ in range(40):
            stream.write(bytes(2**20))
        stream.write(b'\n{"id": "x", "input_ids": [1]}\n')
    tracemalloc.start()
    problem, record = iter_records(file, line_limit=2**20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(problem, InputProblem)
    assert record.id == "x"
    assert peak < 12 * 2**20


def test_files_that_cannot_be_opened_are_errors_at_the_call(tmp_path):
    with pytest.raises(InputError, match=r"missing\.jsonl: no such file"):
        iter_records(tmp_path / "missing.jsonl")
    with pytest.raises(InputError, match="the folder holds no file whose name ends in"):
        iter_records([tmp_path])
    with pytest.raises(InputError, match="at least one"):
        iter_records([])


def test_a_file_that_goes_away_while_reading_is_an_error(tmp_path):
    file = tmp_path / "f.jsonl"
    file.write_text("")
    records = iter_records(file)
    file.unlink()
    with pytest.raises(InputError, match=r"f\.jsonl: cannot be read: No such file"):
        list(records)


def test_a_pipe_is_read_once_and_as_it_is(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    holder = os.open(pipe, os.O_RDWR)  # neither end waits for the other then
    try:
        os.write(holder, b'{"id": "x", "input_ids": [1]}\n')
        assert next(iter_records(pipe)).id == "x"
    finally:
        os.close(holder)


IDS = st.one_of(st.none(), st.integers(), st.text(min_size=1, max_size=20))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.tuples(IDS, st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 1)), min_size=1)), max_size=5
    )
)
def test_any_tokenised_row_comes_back_as_it_was(tmp_path_factory, rows):
    file = tmp_path_factory.mktemp("rows") / "f.jsonl"
    lines = [
        {"id": sample_id, "input_ids": [token for token, _ in row], "loss_mask": [keep for _, keep in row]}
        for sample_id, row in rows
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = list(iter_records(file))
    assert [(r.input_ids.tolist(), r.loss_mask.tolist()) for r in records] == [
        (line["input_ids"], line["loss_mask"]) for line in lines
    ]
    assert [r.id for r, line in zip(records, lines, strict=True) if line["id"] is not None] == [
        str(line["id"]) for line in lines if line["id"] is not None
    ]
    assert len({r.id for r, line in zip(records, lines, strict=True) if line["id"] is None}) == sum(
        line["id"] is None for line in lines
    )


GOOD = b'{"id": "good", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "tools": []}'
KNOWN_KEYS = [
    *("id", "messages", "conversations", "input_ids", "loss_mask", "tools", "system", "images", "chat_template_kwargs"),
    *("role", "content", "type", "text", "from", "value", "function", "name", "arguments", "tool_calls"),
]
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KNOWN_KEYS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(
    lines=st.lists(
        st.binary(max_size=80)
        | JSON_VALUES.map(lambda value: json.dumps(value).encode())
        | st.builds(
            lambda at, byte: GOOD[:at] + byte + GOOD[at + 1 :], st.integers(0, len(GOOD)), st.binary(max_size=2)
        ),
        max_size=6,
    ),
    limit=st.integers(1, 200),
)
def test_no_bytes_raise_and_each_line_gives_at_most_one_record(tmp_path_factory, lines, limit):
    file = tmp_path_factory.mktemp("fuzz") / "f.jsonl"
    file.write_bytes(b"\n".join([b"", *lines, b""]))  # not at the start of the file, where bytes could look like gzip
    for paths, longest in ((file, limit), ([file, file], 2**20)):
        records = list(iter_records(paths, line_limit=longest))
        assert all(isinstance(record, Conversation | Sample | InputProblem) for record in records)
        sources = [record.source for record in records]
        assert len(set(sources)) * (2 if paths != file else 1) == len(sources)
        assert all("\n" not in record.reason for record in records if isinstance(record, InputProblem))
