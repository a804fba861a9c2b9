"""The dataset as a trainer sees it: whole samples with the right bytes, or an error."""

import gc
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from faulty_disk import open_files
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from toy_store import append_tokens, make_info, open_store, put_sample, scales_of, states_of

import sglang_hs_capture
from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.errors import CorruptionError, StoreError
from sglang_hs_capture.reader import dataset as dataset_module
from sglang_hs_capture.reader.dequantize import dequantize
from sglang_hs_capture.store.hashing import end_hash, prefix_hashes
from sglang_hs_capture.store.requests import RequestLedger, RequestRecord
from sglang_hs_capture.store.schema import DatasetInfo, Media, make_rid, rle_encode, sample_key
from sglang_hs_capture.store.writer import StoreWriter
from sglang_hs_capture.verify.check import CheckSettings, CheckView, check_dataset

SHARD = Path("shards") / "dp0-pp0-000000.safetensors"
PROMPTS = {"a": [1, 2, 3], "b": list(range(50, 62)), "c": [7]}


def capture(directory: Path, info: DatasetInfo | None = None) -> StoreWriter:
    """Three samples, the second across three shards; the store is left open."""
    store = open_store(directory, info=info)
    for name, tokens in PROMPTS.items():
        put_sample(store, name, tokens)
    store.commit()
    return store


def check_items(dataset: HiddenStateDataset) -> None:
    """Every item, bit for bit; those in float8 must be given as they are stored."""
    assert [item["id"] for item in dataset] == list(PROMPTS)
    info = dataset.info
    for item in dataset:
        tokens = PROMPTS[item["id"]]
        states = states_of(prefix_hashes(np.array(tokens), 0, 0), len(info.columns), info.column_bytes)
        assert item["input_ids"].dtype == item["loss_mask"].dtype == torch.int64
        assert item["input_ids"].tolist() == tokens
        assert item["loss_mask"].tolist() == [1] * len(tokens)
        assert len(item["hidden_states"]) == len(info.columns)
        for column, values in enumerate(item["hidden_states"]):
            assert values.shape == (len(tokens), info.hidden_size)
            assert values.dtype == getattr(torch, info.dtype.replace("e4m3", "e4m3fn"))
            assert values.is_contiguous()
            expected = states[:, column * info.column_bytes : (column + 1) * info.column_bytes]
            assert np.array_equal(values.view(torch.uint8).numpy(), expected)
        assert ("scales" in item) is info.scaled
        if info.scaled:
            expected = scales_of(prefix_hashes(np.array(tokens), 0, 0), len(info.columns))
            for column, scales in enumerate(item["scales"]):
                assert scales.is_contiguous()
                assert np.array_equal(scales.numpy(), expected[:, column])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3"])
@pytest.mark.parametrize("hidden", [1, 3, 8])
def test_samples_come_back_from_finished_and_unfinished_shards(tmp_path: Path, dtype: str, hidden: int) -> None:
    store = capture(tmp_path, make_info(dtype=dtype, hidden_size=hidden))
    unfinished = HiddenStateDataset(tmp_path, raw=True)
    check_items(unfinished)
    append_tokens(store, [99])
    check_items(HiddenStateDataset(tmp_path, raw=True))
    store.close()
    check_items(unfinished)
    check_items(pickle.loads(pickle.dumps(unfinished)))
    finished = HiddenStateDataset(tmp_path, raw=True)
    check_items(finished)
    assert len(finished) == 3
    assert finished.columns == ("boundary:1", "final:pre_norm")
    assert finished.boundaries == (1,)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
def test_rows_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    capture(tmp_path, make_info(dtype=dtype)).close()
    whole = list(HiddenStateDataset(tmp_path))
    for size in (1, 12, 30, 36):
        monkeypatch.setattr(dataset_module, "_STAGING_BYTES", size)
        check_items(HiddenStateDataset(tmp_path, raw=True))
        for item, expected in zip(HiddenStateDataset(tmp_path), whole, strict=True):
            assert all(map(torch.equal, item["hidden_states"], expected["hidden_states"]))


def test_float8_comes_out_as_bfloat16(tmp_path: Path) -> None:
    capture(tmp_path, make_info(dtype="float8_e4m3", hidden_size=40)).close()
    for item, raw in zip(HiddenStateDataset(tmp_path), HiddenStateDataset(tmp_path, raw=True), strict=True):
        assert "scales" not in item
        for values, stored, scales in zip(item["hidden_states"], raw["hidden_states"], raw["scales"], strict=True):
            assert values.dtype == torch.bfloat16
            assert values.is_contiguous()
            assert values.any()
            assert torch.equal(values, (stored.float() * scales[:, None]).to(torch.bfloat16))


def test_a_sample_of_many_extents_is_read_in_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of another prompt between any two of its own: the conversion is of blocks all the same."""
    store = open_store(tmp_path, info=make_info(dtype="float8_e4m3"), shard_bytes=10**6)
    tokens, extents = list(range(200)), []
    for length in range(1, 201):
        mine, end = append_tokens(store, tokens[:length], start=length - 1)
        append_tokens(store, [7])
        extents += mine
    store.add_sample("a", 200, extents, end)
    store.close()
    dataset, calls = HiddenStateDataset(tmp_path), []
    assert len(dataset.samples[0].extents) == 200

    def counted(*args: torch.Tensor | torch.dtype) -> torch.Tensor:
        calls.append(args)
        return dequantize(*args)

    monkeypatch.setattr(dataset_module, "dequantize", counted)
    states = dataset[0]["hidden_states"]
    assert len(calls) == 2
    hashes = prefix_hashes(np.array(tokens), 0, 0)
    codes = torch.from_numpy(states_of(hashes, 2, 3)).view(torch.float8_e4m3fn)
    for column, values in enumerate(states):
        scales = torch.from_numpy(scales_of(hashes)[:, column].copy())
        assert torch.equal(values, dequantize(codes[:, 3 * column : 3 * column + 3], scales, torch.bfloat16))


def test_more_shards_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture(tmp_path).close()
    monkeypatch.setattr(dataset_module, "_OPEN_SHARDS", 1)
    dataset = HiddenStateDataset(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    check_items(dataset)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1


def test_a_dataset_opened_before_a_shard_was_finished_stays_readable(tmp_path: Path) -> None:
    store = capture(tmp_path)
    dataset = HiddenStateDataset(tmp_path)
    store.close()
    check_items(dataset)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_loader_workers(tmp_path: Path, context: str) -> None:
    capture(tmp_path).close()
    dataset = HiddenStateDataset(tmp_path)
    check_items(dataset)  # the workers get it with shards open
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=context)
    items = list(loader)
    assert [item["id"] for item in items] == list(PROMPTS)
    for item, own in zip(items, dataset, strict=True):
        assert torch.equal(item["input_ids"], own["input_ids"])
        assert all(map(torch.equal, item["hidden_states"], own["hidden_states"]))


def test_loss_masks_come_from_the_ledger(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    tokens, key = [5, 6, 7, 8], sample_key("conversation")
    with RequestLedger.open(tmp_path) as ledger:
        ledger.append(RequestRecord("conversation", key, 4, end_hash(tokens), (1, 2, 1), "f:1"))
    put_sample(store, make_rid("hs-", key, 0, end_hash(tokens)), tokens)
    store.close()
    item = HiddenStateDataset(tmp_path)[0]
    assert item["id"] == "conversation"
    assert item["loss_mask"].tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
def test_pipeline_stages_become_one_item(tmp_path: Path, dtype: str) -> None:
    info = make_info(boundaries=(1, 2), columns=("boundary:1", "boundary:2", "final:pre_norm"), dtype=dtype)
    width = info.column_bytes
    # The second stage starts a shard with other rows, so that the extents differ.
    for writer, columns in (("dp0-pp1", info.columns[1:]), ("dp0-pp0", info.columns[:1])):
        store = open_store(tmp_path, writer, info, columns=columns)
        append_tokens(store, [1] * len(columns))
        put_sample(store, "x", [5, 6, 7, 8, 9])
        store.close()
    item = HiddenStateDataset(tmp_path, raw=True)[0]
    hashes = prefix_hashes(np.array([5, 6, 7, 8, 9]), 0, 0)
    first, second = states_of(hashes, 1, width), states_of(hashes, 2, width)
    for values, expected in zip(item["hidden_states"], (first, second[:, :width], second[:, width:]), strict=True):
        assert np.array_equal(values.view(torch.uint8).numpy(), expected)
    if dtype == "float8_e4m3":
        expected_scales = np.concatenate([scales_of(hashes, 1), scales_of(hashes, 2)], axis=1)
        assert np.array_equal(np.stack(item["scales"], axis=1), expected_scales)


def flip(offset: int, by: int = 1) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        data = bytearray((directory / SHARD).read_bytes())
        data[offset] ^= by
        (directory / SHARD).write_bytes(data)

    return damage


def cut(directory: Path) -> None:
    (directory / SHARD).write_bytes((directory / SHARD).read_bytes()[:-1])


TOKENS_AT = 4096 + 5 * 12 + 4


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip(TOKENS_AT + 8), r"sample 'a' of dp0-pp0: .* from token 1 on"),
        (flip(TOKENS_AT + 40), r"sample 'a' of dp0-pp0: .* from token 0 on"),
        (flip(TOKENS_AT + 80 + 16), r"sample 'a' of dp0-pp0: .* from token 2 on"),
        (flip(0), "expected a header of 4088 bytes"),
        (flip(TOKENS_AT + 24), None),
    ],
    ids=["token", "position", "hash", "header", "another sample's token"],
)
def test_damage_is_told(tmp_path: Path, damage: Callable[[Path], None], message: str | None) -> None:
    capture(tmp_path).close()
    damage(tmp_path)
    dataset = HiddenStateDataset(tmp_path)
    if message is None:
        assert dataset[0]["id"] == "a"
        with pytest.raises(CorruptionError, match="sample 'b'"):
            dataset[1]
    else:
        with pytest.raises(CorruptionError, match=message):
            dataset[0]


def test_a_cut_shard_is_told_when_the_dataset_is_opened_and_when_it_is_read(tmp_path: Path) -> None:
    capture(tmp_path).close()
    dataset = HiddenStateDataset(tmp_path)
    cut(tmp_path)
    with pytest.raises(CorruptionError, match="expected 4280 bytes for 5 rows; the file has 4279"):
        dataset[0]
    with pytest.raises(CorruptionError, match="expected at least 4280 bytes for 5 rows, got 4279"):
        HiddenStateDataset(tmp_path)


def test_tokens_are_not_checked_unless_asked_for(tmp_path: Path) -> None:
    capture(tmp_path).close()
    flip(TOKENS_AT)(tmp_path)
    assert HiddenStateDataset(tmp_path, check=False)[0]["input_ids"].tolist() == [0, 2, 3]


@pytest.mark.parametrize("wrong", ["end", "rows"])
def test_a_sample_of_the_wrong_rows_is_told(tmp_path: Path, wrong: str) -> None:
    store = open_store(tmp_path)
    first, first_end = append_tokens(store, [1, 2, 3])
    second, _ = append_tokens(store, [4, 5, 6])
    store.add_sample("x", 3, first if wrong == "end" else second, first_end + (wrong == "end"))
    store.close()
    with pytest.raises(CorruptionError, match="at its end"):
        HiddenStateDataset(tmp_path)[0]


def test_a_prefix_of_another_prompt_is_told(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    other, _ = append_tokens(store, [9, 2])
    tail, end = append_tokens(store, [1, 2, 3], start=2)
    store.add_sample("x", 3, other + tail, end)
    store.close()
    with pytest.raises(CorruptionError, match="from token 2 on"):
        HiddenStateDataset(tmp_path)[0]


def test_final_norm(tmp_path: Path) -> None:
    capture(tmp_path).close()
    dataset = HiddenStateDataset(tmp_path)
    with pytest.raises(StoreError, match="without the final norm's weight"):
        dataset.final_norm()
    save_file({"weight": torch.arange(3.0)}, tmp_path / "final_norm.safetensors", metadata={"eps": "1e-06"})
    weight, eps = dataset.final_norm()
    assert weight.tolist() == [0, 1, 2]
    assert eps == 1e-6


def test_empty_and_missing_datasets(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="expected a dataset"):
        HiddenStateDataset(tmp_path)
    open_store(tmp_path).close()
    dataset = HiddenStateDataset(str(tmp_path))
    assert len(dataset) == 0
    with pytest.raises(IndexError):
        dataset[0]


def test_the_package_exports_it() -> None:
    assert "HiddenStateDataset" in sglang_hs_capture.__all__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        sglang_hs_capture.nothing  # noqa: B018


IMAGE_TOKENS = [1, 2, 10**15, 10**16, 10**15, 3, 4]
IMAGES = Media(((2, 3),), 99, end_hash([1, 2, 99, 3, 4]))


def capture_images(directory: Path, media: Media = IMAGES) -> StoreWriter:
    """Three samples without images, one with an image asked for, and one that was sent by hand."""
    store = capture(directory)
    images = ("sha256:a",)
    with RequestLedger.open(directory) as ledger:
        key, mask = sample_key("asked", images), tuple(rle_encode([0, 1, 0, 1, 1]))
        ledger.append(RequestRecord("asked", key, 5, IMAGES.prompt_hash, mask, "f:1", images))
    for rid in (make_rid("hs-", key, 0, IMAGES.prompt_hash), "hs-by-hand"):
        extents, end = append_tokens(store, IMAGE_TOKENS)
        store.add_sample(rid, len(IMAGE_TOKENS), extents, end, media)
    store.close()
    return store


def test_positions_of_images_are_marked_and_carry_no_loss(tmp_path):
    capture_images(tmp_path)
    items = {item["id"]: item for item in HiddenStateDataset(tmp_path)}
    assert set(items) == {*PROMPTS, "asked", "hs-by-hand"}
    for id in ("asked", "hs-by-hand"):
        assert items[id]["input_ids"].tolist() == [1, 2, 99, 99, 99, 3, 4]
        assert items[id]["modality_mask"].tolist() == [0, 0, 1, 1, 1, 0, 0]
        assert items[id]["modality_mask"].dtype == torch.int64
    assert items["asked"]["loss_mask"].tolist() == [0, 1, 0, 0, 0, 1, 1]
    assert items["hs-by-hand"]["loss_mask"].tolist() == [1, 1, 0, 0, 0, 1, 1]
    # Every item has the same keys, so that they can be put into one batch.
    assert items["a"]["modality_mask"].tolist() == [0, 0, 0]


def test_a_dataset_without_images_has_no_modality_mask(tmp_path):
    capture(tmp_path)
    assert all("modality_mask" not in item for item in HiddenStateDataset(tmp_path))


def test_images_at_other_positions_than_the_rows_are_noticed(tmp_path):
    capture_images(tmp_path, Media(((2, 2),), 99, IMAGES.prompt_hash))
    dataset = HiddenStateDataset(tmp_path)
    place = [sample.id for sample in dataset.samples].index("hs-by-hand")
    with pytest.raises(CorruptionError, match="without its images' positions the stored tokens are not those"):
        dataset[place]
    assert HiddenStateDataset(tmp_path, check=False)[place]["modality_mask"].sum() == 2


def test_a_dataset_that_is_let_go_leaves_no_files_open(tmp_path):
    """At once, and not when the garbage is collected: a loop over many datasets must not run out of files."""
    capture(tmp_path).close()
    gc.disable()
    try:
        dataset = HiddenStateDataset(tmp_path)
        check_items(dataset)
        assert len(open_files(tmp_path)) > 1
        del dataset
        assert open_files(tmp_path) == []
        check_dataset(tmp_path, CheckSettings(), CheckView())
        assert open_files(tmp_path) == []
    finally:
        gc.enable()
