"""The reader in ``docs/format.md`` reads what this project writes, and the page's examples hold."""

import json
import re
import subprocess
import sys
from pathlib import Path

from toy_store import append_tokens, open_store, put_sample

from sglang_hs_capture.store.hashing import end_hash
from sglang_hs_capture.store.journal import decode_line
from sglang_hs_capture.store.schema import make_rid, rle_decode, sample_key

PAGE = (Path(__file__).parents[3] / "docs" / "format.md").read_text(encoding="utf-8")


def test_the_reader_reads(tmp_path: Path) -> None:
    program = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    (tmp_path / "reader.py").write_text(program)
    store = open_store(tmp_path / "data")
    prompts = {"a": [1, -2, 3], "b": list(range(9))}
    for rid, tokens in prompts.items():
        put_sample(store, rid, tokens)
    store.commit()
    append_tokens(store, [1])
    command = [sys.executable, str(tmp_path / "reader.py"), str(tmp_path / "data")]
    unfinished = subprocess.run(command, check=True, capture_output=True).stdout
    store.close()
    finished = subprocess.run(command, check=True, capture_output=True).stdout
    assert [json.loads(line) for line in finished.splitlines()] == [[r, t, 12 * len(t)] for r, t in prompts.items()]
    assert unfinished == finished


def test_the_examples_hold() -> None:
    line = re.findall(r'^\{"t":"rows".*"crc".*$', PAGE, re.MULTILINE)[0]
    assert decode_line(line.encode())["xxh3"] == "0c5e8ca8a3b5c850"
    assert f"`{end_hash([1, 2, 3]):016x}`" in PAGE
    assert f"`{make_rid('hs-', sample_key('conversation-1'), 0, end_hash([1, 2, 3]))}`" in PAGE
    assert rle_decode([2, 3]).tolist() == [0, 0, 1, 1, 1]
