"""The final norm's weight, kept beside the dataset so that post-norm states can be derived from pre-norm ones."""

import json
import struct
from pathlib import Path

import numpy as np
import safetensors
import xxhash

from sglang_hs_capture.errors import CorruptionError, DatasetMismatchError
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.elements import to_float32
from sglang_hs_capture.store.identity import FINAL_NORM_FILE
from sglang_hs_capture.store.schema import DTYPE_OF_SAFETENSORS, ELEMENT_SIZE


def store_final_norm(directory: Path, dtype: str, weight: bytes, eps: float) -> None:
    """Write the final norm's weight and epsilon, or check that they are those of the dataset.

    Args:
        directory: the dataset.
        dtype: ``BF16``, ``F16`` or ``F32``.
        weight: its bytes, ``[H]``.
        eps: the norm's epsilon.

    Raises:
        DatasetMismatchError: the dataset holds another norm: the weights differ, though the config does not.
        CorruptionError: the file there cannot be read.
        StoreError: it cannot be written.
    """
    path = directory / FINAL_NORM_FILE
    with fs.io_errors(path, "read"):
        stored = path.read_bytes() if path.exists() else None
    if stored is not None:
        _check(path, stored, _as_float32(dtype, weight), eps)
        return
    element_size = ELEMENT_SIZE[DTYPE_OF_SAFETENSORS[dtype]]
    header = {
        "__metadata__": {"eps": json.dumps(eps), "xxh3": xxhash.xxh3_64_hexdigest(weight)},
        "weight": {"dtype": dtype, "shape": [len(weight) // element_size], "data_offsets": [0, len(weight)]},
    }
    # Written by hand, as the shards are: the library's own functions for this want a tensor library, or change.
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text = text.ljust(-(-len(text) // 8) * 8)
    with fs.io_errors(path, "write"):
        fs.replace_file(path, struct.pack("<Q", len(text)) + text + weight)


def _check(path: Path, stored: bytes, weight: np.ndarray, eps: float) -> None:
    try:
        (entry,) = [value for name, value in safetensors.deserialize(stored) if name == "weight"]
        header = json.loads(stored[8 : 8 + int.from_bytes(stored[:8], "little")])
        old, old_eps = _as_float32(entry["dtype"], bytes(entry["data"])), json.loads(header["__metadata__"]["eps"])
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptionError(f"{path}: not the final norm of a dataset ({error}); restore it, or remove it") from None
    if old.shape != weight.shape or not np.array_equal(old, weight) or old_eps != eps:
        raise DatasetMismatchError(
            f"{path}: the final norm there is not this model's, though its config is the same: the weights are of "
            "another model; choose another --output"
        )


def _as_float32(dtype: str, data: bytes) -> np.ndarray:
    """Float32 ``[H]``; a model may be served in another dtype than before."""
    return to_float32(np.frombuffer(data, np.uint8), DTYPE_OF_SAFETENSORS[dtype])
