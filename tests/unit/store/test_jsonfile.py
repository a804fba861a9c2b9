"""Files of one JSON object: no bit of one can flip unseen, and those of releases without a checksum are read."""

import json
from pathlib import Path

import pytest

from sglang_hs_capture.errors import CorruptionError
from sglang_hs_capture.store.jsonfile import read_object, write_object

CONTENT = {"name": "a\u00e9", "list": [1, 2], "none": None, "inner": {"0123abcd": 1.5, "x": "01234567"}}


def test_an_object_comes_back_as_it_was(tmp_path: Path) -> None:
    assert read_object(tmp_path / "x.json", "") is None
    write_object(tmp_path / "x.json", CONTENT)
    assert read_object(tmp_path / "x.json", "") == CONTENT


def test_no_bit_flips_unseen(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_object(path, CONTENT)
    whole = path.read_bytes()
    for offset in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[offset] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(CorruptionError):
                read_object(path, "")


@pytest.mark.parametrize("content", [CONTENT, {"a": {"b": "01234567"}, "last": 3}, {}])
def test_an_object_without_a_checksum_is_read(tmp_path: Path, content: dict[str, object]) -> None:
    (tmp_path / "x.json").write_text(json.dumps(content, indent=2) + "\n")
    assert read_object(tmp_path / "x.json", "") == content
