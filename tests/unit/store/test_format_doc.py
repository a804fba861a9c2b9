"""The reader in ``docs/format.md`` reads what this project writes, and the page's examples hold."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from toy_store import append_tokens, make_info, open_store, put_sample, scales_of

from sglang_hs_capture.store.hashing import end_hash, prefix_hashes
from sglang_hs_capture.store.journal import decode_line
from sglang_hs_capture.store.schema import make_rid, rle_decode, sample_key

PAGE = (Path(__file__).parents[3] / "docs" / "format.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("dtype", "row_bytes"), [("bfloat16", 12), ("float8_e4m3", 6)])
def test_the_reader_reads(tmp_path: Path, dtype: str, row_bytes: int) -> None:
    program = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    (tmp_path / "reader.py").write_text(program)
    store = open_store(tmp_path / "data", info=make_info(dtype=dtype))
    prompts = {"a": [1, -2, 3], "b": list(range(9))}
    for rid, tokens in prompts.items():
        put_sample(store, rid, tokens)
    store.commit()
    append_tokens(store, [1])
    command = [sys.executable, str(tmp_path / "reader.py"), str(tmp_path / "data")]
    unfinished = subprocess.run(command, check=True, capture_output=True).stdout
    store.close()
    finished = subprocess.run(command, check=True, capture_output=True).stdout
    found = [json.loads(line) for line in finished.splitlines()]
    assert [line[:3] for line in found] == [[r, t, row_bytes * len(t)] for r, t in prompts.items()]
    for tokens, (*_, scales) in zip(prompts.values(), found, strict=True):
        expected = scales_of(prefix_hashes(np.array(tokens), 0, 0)).tolist()
        assert scales == (expected if dtype == "float8_e4m3" else [[]] * len(tokens))
    assert unfinished == finished


def test_the_examples_hold() -> None:
    line = re.findall(r'^\{"t":"rows".*"crc".*$', PAGE, re.MULTILINE)[0]
    assert decode_line(line.encode())["xxh3"] == "0c5e8ca8a3b5c850"
    assert f"`{end_hash([1, 2, 3]):016x}`" in PAGE
    assert f"`{make_rid('hs-', sample_key('conversation-1'), 0, end_hash([1, 2, 3]))}`" in PAGE
    assert rle_decode([2, 3]).tolist() == [0, 0, 1, 1, 1]
