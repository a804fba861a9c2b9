"""Small datasets with states like a model's, and ways to damage them, for tests of what checks datasets."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from sglang_hs_capture.float8 import scales_from_absmax
from sglang_hs_capture.store.hashing import prefix_hashes
from sglang_hs_capture.store.identity import FINAL_NORM_FILE
from sglang_hs_capture.store.journal import decode_line, encode_line
from sglang_hs_capture.store.known_answers import KNOWN_ANSWERS_FILE
from sglang_hs_capture.store.requests import RequestLedger, RequestRecord
from sglang_hs_capture.store.schema import DatasetInfo, make_rid, rle_encode, sample_key
from sglang_hs_capture.store.shard import ShardPaths
from sglang_hs_capture.store.writer import StoreWriter

HIDDEN = 32
COLUMNS = ("boundary:1", "boundary:3", "final:pre_norm")
LENGTHS = (7, 12, 3, 20, 1, 9)
ROWS_PER_SHARD = 16
WRITER = "dp0-pp0"
JOURNAL = f"journal-{WRITER}.jsonl"


def info_of(dtype: str = "bfloat16") -> DatasetInfo:
    return DatasetInfo(
        boundaries=(1, 3),
        columns=COLUMNS,
        num_layers=6,
        hidden_size=HIDDEN,
        dtype=dtype,
        model_path="/models/made",
        architecture="MadeForCausalLM",
        config_hash="c0ffee",
        final_norm_eps=1e-6,
        created_at="2025-01-31T12:00:00.000Z",
        sglang_version="0.5.23",
    )


def tokens_of(number: int, length: int) -> NDArray[np.int64]:
    return np.random.default_rng(number).integers(5, 2000, length)


def states_of(tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """float32 [S, C, H]: each row follows from its tokens, and a later column is longer."""
    hashes = prefix_hashes(tokens, 0, 0)
    rows = [np.random.default_rng(int(h)).normal(size=(len(COLUMNS), HIDDEN)) for h in hashes]
    return (np.stack(rows) * np.array([1, 4, 16])[:, None]).astype(np.float32)


def to_bytes(states: NDArray[np.float32], dtype: str) -> NDArray[np.uint8]:
    """uint8 [S, bytes of a row]; bfloat16 by cutting off, which is exact enough for what is made up."""
    if dtype == "float8_e4m3":
        scaled = torch.from_numpy(states / scales_of(states)[:, :, None])
        stored: NDArray[Any] = scaled.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    elif dtype == "bfloat16":
        stored = (np.ascontiguousarray(states).view(np.uint32) >> 16).astype("<u2")
    else:
        stored = states.astype("<f2" if dtype == "float16" else "<f4")
    return stored.reshape(len(states), -1).view(np.uint8)


def scales_of(states: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 [S, C]; 1 for a row that has none of its own."""
    absmax = np.abs(states).max(axis=-1)
    return scales_from_absmax(np.where(np.isfinite(absmax) & (absmax > 0), absmax, np.float32(448)))


def make(
    directory: Path,
    dtype: str = "bfloat16",
    change: Callable[[str, NDArray[np.float32]], None] = lambda _id, _states: None,
    close: bool = True,
) -> StoreWriter:
    """Make a dataset of six samples with ids ``s0`` to ``s5`` in several shards.

    Args:
        change: is given each sample's id and states, and may change them before they are stored.
        close: finish the last shard; else it stays as a crash leaves it.
    """
    store = open_store(directory, dtype)
    with RequestLedger.open(directory) as ledger:
        for number, length in enumerate(LENGTHS):
            put_sample(store, ledger, f"s{number}", tokens_of(number, length), dtype, change)
    write_norm(directory)
    if close:
        store.close()
    return store


def make_from(
    directory: Path, dtype: str, prompts: dict[str, list[int]], change: Callable[[str, NDArray[np.float32]], None]
) -> None:
    """Make a dataset of prompts, by id."""
    store = open_store(directory, dtype)
    with RequestLedger.open(directory) as ledger:
        for id, tokens in prompts.items():
            put_sample(store, ledger, id, np.array(tokens), dtype, change)
    store.close()


def open_store(directory: Path, dtype: str) -> StoreWriter:
    info = info_of(dtype)
    size = ROWS_PER_SHARD * info.row_bytes
    return StoreWriter.open(
        directory, WRITER, info, session_id="5e55", min_free_bytes=0, lock_timeout_s=0.0, shard_bytes=size
    )


def put_sample(
    store: StoreWriter,
    ledger: RequestLedger,
    id: str,
    tokens: NDArray[np.int64],
    dtype: str,
    change: Callable[[str, NDArray[np.float32]], None],
) -> None:
    """Ask for a sample and acknowledge it."""
    length, hashes = len(tokens), prefix_hashes(tokens, 0, 0)
    end = int(hashes[-1])
    mask = tuple(rle_encode(np.arange(length) >= length // 2))
    ledger.append(RequestRecord(id, sample_key(id), length, end, mask, f"data.jsonl:{len(ledger.requests) + 1}"))
    states = states_of(tokens)
    change(id, states)
    scales = scales_of(states) if store.info.scaled else None
    extents = store.append(to_bytes(states, dtype), tokens, np.arange(length), hashes, scales=scales)
    store.add_sample(make_rid("hs-", sample_key(id), 0, end), length, extents, end)
    store.commit()


def write_norm(directory: Path, eps: float = 1e-6, weight: NDArray[np.float64] | None = None) -> None:
    values = np.linspace(0.5, 1.5, HIDDEN) if weight is None else weight
    data = values.astype("<f4").tobytes()
    entry = {"dtype": "F32", "shape": [HIDDEN], "data_offsets": [0, len(data)]}
    metadata = {"eps": json.dumps(eps), "xxh3": xxhash.xxh3_64_hexdigest(data)}
    text = json.dumps({"__metadata__": metadata, "weight": entry}).encode()
    (directory / FINAL_NORM_FILE).write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_answers(directory: Path, records: list[dict[str, Any]]) -> None:
    (directory / KNOWN_ANSWERS_FILE).write_bytes(b"".join(map(encode_line, records)))


@dataclass
class Where:
    """Where a sample's row is in the dataset's files."""

    file: Path
    offset: int
    shard: int
    row: int


def records(path: Path) -> list[dict[str, Any]]:
    return [decode_line(line) for line in path.read_bytes().splitlines(keepends=True)]


def rewrite(path: Path, change: Callable[[dict[str, Any]], dict[str, Any] | list[dict[str, Any]]]) -> None:
    """Pass every record of a file of lines through ``change``, and seal them anew."""
    lines = []
    for record in records(path):
        changed = change(record)
        lines += [encode_line(r) for r in (changed if isinstance(changed, list) else [changed])]
    path.write_bytes(b"".join(lines))


def end_hash_of(id: str) -> int:
    number = int(id[1:])
    return int(prefix_hashes(tokens_of(number, LENGTHS[number]), 0, 0)[-1])


def rid_of(id: str) -> str:
    return make_rid("hs-", sample_key(id), 0, end_hash_of(id))


def where(directory: Path, id: str, position: int, dtype: str = "bfloat16") -> Where:
    """Where the states of a sample's row are."""
    info = info_of(dtype)
    journal = records(directory / JOURNAL)
    (sample,) = [r for r in journal if r["t"] == "sample" and r["rid"] == rid_of(id)][:1]
    for shard, start, count in sample["extents"]:
        if position < count:
            (offset,) = [r["data_offset"] for r in journal if r["t"] == "shard" and r["shard"] == shard]
            paths = ShardPaths.of(directory, WRITER, shard)
            file = paths.finished if paths.finished.exists() else paths.partial
            return Where(file, offset + (start + position) * info.row_bytes, shard, start + position)
        position -= count
    raise AssertionError(position)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def reseal(directory: Path, dtype: str = "bfloat16") -> None:
    """Bring the checksums in the journal up to date, as if damage had come before the store saw the rows."""
    info = info_of(dtype)
    layouts: dict[int, int] = {}

    def change(record: dict[str, Any]) -> dict[str, Any]:
        if record["t"] == "shard":
            layouts[record["shard"]] = record["data_offset"]
        if record["t"] != "rows":
            return record
        paths = ShardPaths.of(directory, WRITER, record["shard"])
        data = (paths.finished if paths.finished.exists() else paths.partial).read_bytes()
        begin = layouts[record["shard"]] + record["start"] * info.row_bytes
        digest = xxhash.xxh3_64_hexdigest(data[begin : begin + record["count"] * info.row_bytes])
        return {**record, "xxh3": digest}

    rewrite(directory / JOURNAL, change)


def token_offset(directory: Path, name: str, place: Where, dtype: str = "bfloat16") -> int:
    """Where the token, position or hash of a row is in its finished shard."""
    data = place.file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return 8 + length + int(header[name]["data_offsets"][0]) + 8 * place.row
