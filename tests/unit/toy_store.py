"""A store of tiny rows whose every byte can be computed, for tests of whatever reads or writes one."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hs_capture.store.hashing import prefix_hashes
from sglang_hs_capture.store.schema import DatasetInfo, Extent, Media
from sglang_hs_capture.store.writer import StoreWriter

ROWS_PER_SHARD = 5


def make_info(**changes: Any) -> DatasetInfo:
    """The description of a dataset with two columns of three bfloat16 elements: 12 bytes a row."""
    values: dict[str, Any] = {
        "boundaries": (1,),
        "columns": ("boundary:1", "final:pre_norm"),
        "num_layers": 4,
        "hidden_size": 3,
        "dtype": "bfloat16",
        "model_path": "/models/toy",
        "architecture": "ToyForCausalLM",
        "config_hash": "c0ffee",
        "final_norm_eps": 1e-6,
        "created_at": "2025-01-31T12:00:00.000Z",
        "sglang_version": "0.5.23",
    }
    return DatasetInfo(**{**values, **changes})


def open_store(
    directory: Path, writer: str = "dp0-pp0", info: DatasetInfo | None = None, **changes: Any
) -> StoreWriter:
    """A writer with five rows a shard and no floor of free space."""
    info = info or make_info()
    columns = changes.get("columns") or info.columns
    values = {"session_id": "5e55", "min_free_bytes": 0, "lock_timeout_s": 0.0}
    values["shard_bytes"] = ROWS_PER_SHARD * len(columns) * info.column_bytes
    return StoreWriter.open(directory, writer, info, **{**values, **changes})


def states_of(hashes: NDArray[np.uint64], columns: int = 2, column_bytes: int = 6) -> NDArray[np.uint8]:
    """Bytes that stand for the states of rows with these hashes.

    Returns:
        uint8 [n, columns * column_bytes], different in each row and column.
    """
    places = np.arange(columns * column_bytes, dtype=np.uint64)
    mixed = hashes[:, None] * np.uint64(0x9E3779B97F4A7C15) + places * np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(40)) & np.uint64(0x3F)).astype(np.uint8)


def scales_of(hashes: NDArray[np.uint64], columns: int = 2) -> NDArray[np.float32]:
    """Scales of rows with these hashes.

    Returns:
        float32 [n, columns], above 0 and different in each row and column.
    """
    mixed = hashes[:, None] * np.uint64(0xBF58476D1CE4E5B9) + np.arange(columns, dtype=np.uint64)
    return ((mixed >> np.uint64(44)) + np.uint64(1)).astype(np.float32) / 2**15


def _scales_for(store: StoreWriter, hashes: NDArray[np.uint64]) -> NDArray[np.float32] | None:
    return scales_of(hashes, len(store.columns)) if store.info.scaled else None


def append_tokens(store: StoreWriter, tokens: list[int], start: int = 0) -> tuple[list[Extent], int]:
    """Append the rows of ``tokens[start:]``; where they lie, and the hash of all tokens."""
    hashes = prefix_hashes(np.array(tokens), 0, 0)
    states = states_of(hashes, len(store.columns), store.info.column_bytes)[start:]
    positions = np.arange(start, len(tokens))
    scales = _scales_for(store, hashes[start:])
    extents = store.append(
        np.ascontiguousarray(states), np.array(tokens[start:]), positions, hashes[start:], scales=scales
    )
    return extents, int(hashes[-1])


def queue_sample(store: StoreWriter, rid: str, tokens: list[int], release: Callable[[], None]) -> list[Extent]:
    """Queue a prompt, and have the next commit acknowledge it."""
    hashes = prefix_hashes(np.array(tokens), 0, 0)
    states = states_of(hashes, len(store.columns), store.info.column_bytes)
    ids, scales = np.array(tokens), _scales_for(store, hashes)
    extents = store.append(states, ids, np.arange(len(tokens)), hashes, release, scales)
    store.add_sample(rid, len(tokens), extents, int(hashes[-1]))
    return extents


def put_sample(store: StoreWriter, rid: str, tokens: list[int], media: Media | None = None) -> list[Extent]:
    """Append a prompt and have the next commit acknowledge it."""
    extents, end_hash = append_tokens(store, tokens)
    store.add_sample(rid, len(tokens), extents, end_hash, media)
    return extents


def until(condition: Callable[[], object]) -> None:
    """Wait for a thread."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
