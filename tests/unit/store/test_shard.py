"""A shard's bytes, and that any safetensors reader understands them."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from faulty_disk import ShortWrites, disk
from safetensors import safe_open
from toy_store import append_tokens, make_info, open_store, put_sample, scales_of

from sglang_hs_capture.errors import CorruptionError
from sglang_hs_capture.store import shard as shard_module
from sglang_hs_capture.store.hashing import prefix_hashes
from sglang_hs_capture.store.replay import replay_journal
from sglang_hs_capture.store.schema import ShardRecord
from sglang_hs_capture.store.shard import ShardLayout, ShardPaths
from sglang_hs_capture.store.shard_reader import ShardReader, finished_rows

GOLDEN_HEADER = (
    '{"__metadata__":{"format":"sglang-hs-capture","version":"1","writer":"dp0-pp0","shard":"0",'
    '"columns":"[\\"boundary:1\\", \\"final:pre_norm\\"]",'
    '"dataset":"{\\"format\\": \\"sglang-hs-capture\\", \\"version\\": 1, \\"boundaries\\": [1], '
    '\\"columns\\": [\\"boundary:1\\", \\"final:pre_norm\\"], \\"num_layers\\": 4, \\"hidden_size\\": 3, '
    '\\"dtype\\": \\"bfloat16\\", \\"model_path\\": \\"/models/toy\\", \\"architecture\\": \\"ToyForCausalLM\\", '
    '\\"config_hash\\": \\"c0ffee\\", \\"final_norm_eps\\": 1e-06, \\"created_at\\": \\"2025-01-31T12:00:00.000Z\\", '
    '\\"sglang_version\\": \\"0.5.23\\", \\"convention\\": \\"boundary\\"}"},'
    '"hidden_states":{"dtype":"BF16","shape":[1,2,3],"data_offsets":[0,12]},'
    '"_pad":{"dtype":"U8","shape":[4],"data_offsets":[12,16]},'
    '"input_ids":{"dtype":"I64","shape":[1],"data_offsets":[16,24]},'
    '"positions":{"dtype":"I64","shape":[1],"data_offsets":[24,32]},'
    '"prefix_hash":{"dtype":"I64","shape":[1],"data_offsets":[32,40]}}'
)
GOLDEN_FLOAT8 = (
    '"hidden_states":{"dtype":"F8_E4M3","shape":[1,2,3],"data_offsets":[0,6]},'
    '"_pad":{"dtype":"U8","shape":[2],"data_offsets":[6,8]},'
    '"input_ids":{"dtype":"I64","shape":[1],"data_offsets":[8,16]},'
    '"positions":{"dtype":"I64","shape":[1],"data_offsets":[16,24]},'
    '"prefix_hash":{"dtype":"I64","shape":[1],"data_offsets":[24,32]},'
    '"scales":{"dtype":"F32","shape":[1,2],"data_offsets":[32,40]}}'
)
GOLDEN_DATA = bytes.fromhex("000102030405060708090a0b 00000000 0700000000000000 0000000000000000 efcdab8967452301")


def write_golden(directory: Path) -> Path:
    store = open_store(directory)
    store.append(bytes(range(12)), np.array([7]), np.array([0]), np.array([0x0123456789ABCDEF], np.uint64))
    store.close()
    return directory / "shards" / "dp0-pp0-000000.safetensors"


def test_golden_bytes(tmp_path: Path) -> None:
    data = write_golden(tmp_path).read_bytes()
    assert data[:8] == struct.pack("<Q", 4088)
    assert data[8:4096].decode().rstrip(" ") == GOLDEN_HEADER
    assert data[4096:] == GOLDEN_DATA


def test_golden_bytes_of_float8(tmp_path: Path) -> None:
    store = open_store(tmp_path, info=make_info(dtype="float8_e4m3"))
    scales = np.array([[0.5, 1.5]], np.float32)
    store.append(bytes(range(6)), np.array([7]), np.array([0]), np.array([0x0123456789ABCDEF], np.uint64), None, scales)
    store.commit()
    rows = "0700000000000000 0000000000000000 efcdab8967452301 0000003f 0000c03f"
    assert ShardPaths.of(tmp_path, "dp0-pp0", 0).tokens.read_bytes() == bytes.fromhex(rows)
    store.close()
    data = (tmp_path / "shards" / "dp0-pp0-000000.safetensors").read_bytes()
    assert data[8:4096].decode().rstrip(" ").endswith(GOLDEN_FLOAT8)
    assert data[4096:] == bytes(range(6)) + bytes(2) + bytes.fromhex(rows)
    with safe_open(tmp_path / "shards" / "dp0-pp0-000000.safetensors", framework="pt") as file:
        assert file.get_tensor("hidden_states").dtype == torch.float8_e4m3fn
        assert file.get_tensor("hidden_states").view(torch.uint8).flatten().tolist() == list(range(6))
        assert file.get_tensor("scales").tolist() == [[0.5, 1.5]]


def test_safetensors_reads_it(tmp_path: Path) -> None:
    with safe_open(write_golden(tmp_path), framework="pt") as file:
        assert file.get_tensor("hidden_states").dtype == torch.bfloat16
        assert file.get_tensor("hidden_states").view(torch.uint8).flatten().tolist() == list(range(12))
        assert file.get_tensor("input_ids").tolist() == [7]
        assert file.get_tensor("prefix_hash").tolist() == [0x0123456789ABCDEF]
        metadata = file.metadata()
    assert json.loads(metadata["dataset"]) == make_info().to_json() | {
        "boundaries": [1],
        "columns": list(make_info().columns),
    }
    assert json.loads(metadata["columns"]) == ["boundary:1", "final:pre_norm"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3"])
@pytest.mark.parametrize("hidden", [1, 3, 4])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_every_alignment_is_read_back(tmp_path: Path, dtype: str, hidden: int, rows: int) -> None:
    info = make_info(dtype=dtype, hidden_size=hidden, columns=("boundary:1",))
    store = open_store(tmp_path, info=info)
    append_tokens(store, list(range(100, 100 + rows)))
    store.close()
    with safe_open(tmp_path / "shards" / "dp0-pp0-000000.safetensors", framework="pt") as file:
        assert file.get_tensor("hidden_states").shape == (rows, 1, hidden)
        assert file.get_tensor("hidden_states").dtype == getattr(torch, dtype.replace("e4m3", "e4m3fn"))
        assert file.get_tensor("input_ids").tolist() == list(range(100, 100 + rows))
        assert file.get_tensor("positions").tolist() == list(range(rows))
    tensors = ShardLayout(info, "w", ShardRecord(0, 4096, info.columns)).tensors(rows)
    aligned = [tensor.begin % 8 for name, tensor in tensors.items() if name not in ("hidden_states", "_pad")]
    assert aligned == [0] * (4 if dtype == "float8_e4m3" else 3)


def test_long_metadata_gets_a_larger_header(tmp_path: Path) -> None:
    info = make_info(model_path="/models/" + "x" * 9000)
    store = open_store(tmp_path, info=info)
    put_sample(store, "a", [1, 2])
    store.close()
    path = tmp_path / "shards" / "dp0-pp0-000000.safetensors"
    assert path.read_bytes()[:8] == struct.pack("<Q", 3 * 4096 - 8)
    with safe_open(path, framework="pt") as file:
        assert file.get_tensor("input_ids").tolist() == [1, 2]


def test_tokens_are_copied_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_module, "_CHUNK_ROWS", 3)
    store = open_store(tmp_path, info=make_info(dtype="float8_e4m3"), shard_bytes=1000)
    append_tokens(store, list(range(50, 58)))
    store.close()
    with safe_open(tmp_path / "shards" / "dp0-pp0-000000.safetensors", framework="np") as file:
        assert file.get_tensor("input_ids").tolist() == list(range(50, 58))
        assert file.get_tensor("positions").tolist() == list(range(8))
        assert np.array_equal(file.get_tensor("scales"), scales_of(prefix_hashes(np.arange(50, 58), 0, 0)))


def test_journal_has_the_checksum_of_the_states(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_sample(store, "a", [1, 2])
    store.commit()
    put_sample(store, "b", [3])
    put_sample(store, "c", [4])
    store.close()
    data = (tmp_path / "shards" / "dp0-pp0-000000.safetensors").read_bytes()[4096:]
    checksums = replay_journal(tmp_path, "dp0-pp0").shards[0].checksums
    assert [(c.start, c.count, c.xxh3) for c in checksums] == [
        (0, 2, xxhash.xxh3_64_intdigest(data[:24])),
        (2, 2, xxhash.xxh3_64_intdigest(data[24:48])),
    ]


def test_journal_has_the_checksum_of_the_scales(tmp_path: Path) -> None:
    store = open_store(tmp_path, info=make_info(dtype="float8_e4m3"))
    put_sample(store, "a", [1, 2])
    put_sample(store, "b", [3, 4, 5, 6])
    store.close()
    shards = replay_journal(tmp_path, "dp0-pp0").shards
    assert [len(state.checksums) for state in shards.values()] == [1, 1]
    for number, state in shards.items():
        with safe_open(tmp_path / "shards" / f"dp0-pp0-{number:06d}.safetensors", framework="np") as file:
            scales = file.get_tensor("scales")
        assert state.checksums[0].scales_xxh3 == xxhash.xxh3_64_intdigest(scales.tobytes())


def reader(directory: Path, rows: int) -> ShardReader:
    return ShardReader(directory, ShardLayout(make_info(), "dp0-pp0", ShardRecord(0, 4096, make_info().columns)), rows)


def test_reader_reads_partial_and_finished_alike(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_sample(store, "a", [1, 2, 3, 4])
    store.commit()
    with disk(ShortWrites()):
        before = reader(tmp_path, 4)
        store.close()
        after = reader(tmp_path, 4)
        for opened in (before, after):
            states = bytearray(24)
            opened.read_states(1, 2, memoryview(states))
            assert bytes(states) == (tmp_path / "shards" / "dp0-pp0-000000.safetensors").read_bytes()[4108:4132]
            ids, positions, hashes = opened.read_tokens(1, 2)
            assert (ids.tolist(), positions.tolist(), hashes.dtype) == ([2, 3], [1, 2], np.uint64)
    before.close()
    before.close()


def test_reader_tells_missing_and_short_shards(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_sample(store, "a", [1, 2, 3])
    store.commit()
    paths = ShardPaths.of(tmp_path, "dp0-pp0", 0)
    with pytest.raises(
        CorruptionError, match=r"partial: expected 4144 bytes or more for 4 durable rows; the file has 4132"
    ):
        reader(tmp_path, 4)
    paths.tokens.write_bytes(paths.tokens.read_bytes()[:-1])
    with pytest.raises(CorruptionError, match=r"rows: expected 72 bytes or more for 3 durable rows; the file has 71"):
        reader(tmp_path, 3)
    paths.tokens.unlink()
    with pytest.raises(CorruptionError, match="3 durable rows and there is no such shard"):
        reader(tmp_path, 3)


def test_reader_tells_a_file_cut_while_open(tmp_path: Path) -> None:
    path = write_golden(tmp_path)
    opened = reader(tmp_path, 1)
    with path.open("r+b") as file:
        file.truncate(4100)
    with pytest.raises(CorruptionError, match=r"000000.safetensors: the file ends at byte 4100, 8 bytes too early"):
        opened.read_states(0, 1, memoryview(bytearray(12)))


@pytest.mark.parametrize(
    ("place", "new", "message"),
    [
        (0, b"\xff", "expected a header of 4088 bytes"),
        (9, b"\xff", "the header is damaged"),
        (8 + GOLDEN_HEADER.index("[1,2,3]"), b"[1,2,4]", "expected the tensor hidden_states"),
        (8 + GOLDEN_HEADER.index('"shape":[1],'), b'"shape":[2],', "expected the tensor hidden_states"),
        (4136, b"+", "expected 4136 bytes for 1 rows; the file has 4137"),
    ],
)
def test_damaged_headers_are_told(tmp_path: Path, place: int, new: bytes, message: str) -> None:
    path = write_golden(tmp_path)
    data = bytearray(path.read_bytes())
    data[place : place + len(new)] = new
    path.write_bytes(data)
    layout = ShardLayout(make_info(), "dp0-pp0", ShardRecord(0, 4096, make_info().columns))
    with pytest.raises(CorruptionError, match=message):
        finished_rows(path, layout)
    path.write_bytes(b"x")
    with pytest.raises(CorruptionError, match="the file says -1"):
        finished_rows(path, layout)


def test_reader_refuses_a_finished_shard_with_too_few_rows(tmp_path: Path) -> None:
    write_golden(tmp_path)
    with pytest.raises(CorruptionError, match="expected 2 rows or more; the file has 1"):
        reader(tmp_path, 2)
