"""Whatever the files of a dataset hold, readers give what was captured or one of this project's errors, and no more."""

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import made_dataset
import pytest
from all_readers import read_with_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_hs_capture.store.journal import decode_line, encode_line

EXAMPLES = os.environ.get("HS_CAPTURE_FUZZ")
# The same examples in each run, unless somebody wants to look further: `make fuzz`.
FUZZ = settings(
    max_examples=int(EXAMPLES or 60),
    derandomize=EXAMPLES is None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
NUMBERS = st.sampled_from([-1, 0, 1, 2, 7, 16, 2**31, 2**53, 2**62, 2**63, 2**64, 10**30, -(2**63)])
SCALARS = st.none() | st.booleans() | NUMBERS | st.integers() | st.floats() | st.text(max_size=8)
STRANGE = st.sampled_from(
    ["../../x", "\x00", "\n", "\x1b[2J", "\ud800", "'\"", "x" * 100_000, "0", "f" * 16, "boundary:1"]
)
VALUES = st.recursive(
    SCALARS | STRANGE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module", params=["bfloat16", "float8_e4m3"])
def made(request, tmp_path_factory):
    """A dataset whose last shard is unfinished, as a crash leaves it; each example damages a copy."""
    directory = tmp_path_factory.mktemp("made") / "dataset"
    made_dataset.make(directory, request.param, close=False).commit()
    return directory


def damaged_copy(made: Path, tmp_path: Path) -> Path:
    target = tmp_path / "copy"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(made, target)
    return target


def files_of(directory: Path, *patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in directory.glob(pattern))


@FUZZ
@given(data=st.data())
def test_any_bytes_in_any_file(made, tmp_path, data):
    directory = damaged_copy(made, tmp_path)
    file = data.draw(st.sampled_from(files_of(directory, "*.json*", "*.safetensors", "shards/*")))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content)))
        content[place : place + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=40))
    file.write_bytes(content)
    read_with_all(directory)


@FUZZ
@given(data=st.data())
def test_lines_that_are_sealed_and_lie(made, tmp_path, data):
    directory = damaged_copy(made, tmp_path)
    file = data.draw(st.sampled_from(files_of(directory, "*.jsonl")))
    records = [decode_line(line) for line in file.read_bytes().splitlines(keepends=True)]
    for _ in range(data.draw(st.integers(1, 3))):
        change_somewhere(data, records[data.draw(st.integers(0, len(records) - 1))])
    file.write_bytes(b"".join(encode(record) for record in records))
    read_with_all(directory)


@FUZZ
@given(data=st.data())
def test_objects_that_lie(made, tmp_path, data):
    directory = damaged_copy(made, tmp_path)
    file = directory / "dataset.json"
    content = json.loads(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        change_somewhere(data, content)
    file.write_text(json.dumps(content))
    read_with_all(directory)


@FUZZ
@given(data=st.data())
def test_a_header_that_lies(made, tmp_path, data):
    directory = damaged_copy(made, tmp_path)
    file = data.draw(st.sampled_from(files_of(directory, "shards/*.safetensors", "final_norm.safetensors")))
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    for _ in range(data.draw(st.integers(1, 3))):
        change_somewhere(data, header)
    text = json.dumps(header).encode().ljust(length)
    said = data.draw(st.sampled_from([len(text), len(text), length, 0, 7, 2**31, 2**63, 2**64 - 1]))
    file.write_bytes(struct.pack("<Q", said) + text + content[8 + length :])
    read_with_all(directory)


def change_somewhere(data: st.DataObject, record: dict[str, Any]) -> None:
    """Put another value in the place of one of a record's, at any depth, or take one away."""
    target: Any = record
    while True:
        keys = list(target) if isinstance(target, dict) else list(range(len(target)))
        key = data.draw(st.sampled_from(keys)) if keys else None
        inner = None if key is None else target[key]
        if not (isinstance(inner, dict | list) and inner and data.draw(st.booleans())):
            break
        target = inner
    if key is not None and data.draw(st.integers(0, 9)) == 0:
        del target[key]
    elif key is not None:
        target[key] = data.draw(VALUES)


def encode(record: dict[str, Any]) -> bytes:
    try:
        return encode_line(record)
    except ValueError:  # no line holds a NaN
        return b""
