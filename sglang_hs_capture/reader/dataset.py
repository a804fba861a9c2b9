"""A captured dataset as a PyTorch dataset: whole samples, read from the shards and checked against their tokens."""

import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.data import Dataset

from sglang_hs_capture.errors import CorruptionError, StoreError
from sglang_hs_capture.reader.dequantize import dequantize
from sglang_hs_capture.store.hashing import prefix_hashes
from sglang_hs_capture.store.identity import FINAL_NORM_FILE
from sglang_hs_capture.store.index import SampleEntry, SamplePart, load_index
from sglang_hs_capture.store.media import modality_mask, prompt_hash
from sglang_hs_capture.store.schema import FLOAT8, RESTORE, DatasetInfo, Extent, ShardRecord, split_extents
from sglang_hs_capture.store.shard import ShardLayout
from sglang_hs_capture.store.shard_reader import ShardReader

_TORCH_DTYPE = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    FLOAT8: torch.float8_e4m3fn,
}
# Rows pass through a buffer that stays in the processor's cache on their way to one tensor per column.
_STAGING_BYTES = 1 << 20
_OPEN_SHARDS = 64


class HiddenStateDataset(Dataset[dict[str, Any]]):
    """The samples of a dataset, also of one that is still being captured: those acknowledged when it was opened.

    An item is a dictionary of

    - ``id``: str;
    - ``input_ids``: int64 [S]; at the positions of an image the model's placeholder for one;
    - ``hidden_states``: a list with one contiguous tensor [S, H] for each of ``columns``, in the dtype stored, or in
      bfloat16 where that is float8, multiplied by the scales;
    - ``scales``: only with ``raw``, and of a dataset in float8, whose ``hidden_states`` are then as they are stored: a
      list with a float32 tensor [S] for each of ``columns``. ``dequantize`` in ``reader/dequantize.py`` takes a pair;
    - ``loss_mask``: int64 [S], all ones for a request sent by hand, but for positions of images, which are 0;
    - ``modality_mask``: only of a dataset that has a sample with images, and there in every item: int64 [S], 1 at the
      positions of images.

    It can be pickled, and shared with data loader workers: shards are opened where they are read.
    """

    def __init__(self, path: str | Path, *, check: bool = True, raw: bool = False) -> None:
        """Read the index of the dataset in the folder ``path``.

        Args:
            check: compute each sample's token hashes anew as it is read, and compare them with those stored at its rows
                and in the journal.
            raw: give states in float8 as they are stored, and their scales; of no effect for the other dtypes.

        Raises:
            StoreError: there is no dataset.
            CorruptionError: a journal is damaged.
        """
        index = load_index(Path(path))
        self.path = Path(path)
        self.check = check
        self.raw = raw
        self.info: DatasetInfo = index.info
        if index.unclaimed:
            warnings.warn(
                f"{path}: {len(index.unclaimed)} captured samples are left out, because requests.jsonl has no record "
                "of them: restore that file, or run again to capture them anew",
                stacklevel=2,
            )
        self.samples: tuple[SampleEntry, ...] = index.samples
        self.has_images = any(sample.media is not None for sample in index.samples)
        self._shards: dict[tuple[str, int], tuple[ShardRecord, int]] = {
            (entry.writer, entry.shard): (entry.state.record, entry.state.rows) for entry in index.shards
        }
        self._shard = self._opener()

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of ``hidden_states``, in order, such as ``boundary:31`` and ``final:pre_norm``."""
        return self.info.columns

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The layer boundaries captured."""
        return self.info.boundaries

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read one sample.

        Raises:
            IndexError: there is no such sample.
            CorruptionError: the bytes on disk are not those that were captured.
        """
        sample = self.samples[index]
        dtype = torch.bfloat16 if self.info.scaled and not self.raw else _TORCH_DTYPE[self.info.dtype]
        states = {name: torch.empty(sample.length, self.info.hidden_size, dtype=dtype) for name in self.columns}
        scales: dict[str, Tensor] = {}
        wanted = set(self.columns)
        input_ids = self.read_input_ids(sample)
        for part in sample.parts:
            columns = {name: states[name] for name in part.columns if name in wanted}
            self._read_states(part, columns)
            if self.raw and self.info.scaled:
                scales_of_part = self._read_scales(part)
                scales |= {name: scales_of_part[:, part.columns.index(name)].contiguous() for name in columns}
            wanted -= set(part.columns)
        item = {
            "id": sample.id,
            "input_ids": torch.from_numpy(input_ids),
            "hidden_states": list(states.values()),
            "loss_mask": torch.from_numpy(sample.loss_mask()),
        }
        if self.has_images:
            item["modality_mask"] = torch.from_numpy(modality_mask(sample.length, sample.media))
        return {**item, "scales": [scales[name] for name in self.columns]} if self.raw and scales else item

    def read_input_ids(self, sample: SampleEntry) -> NDArray[np.int64]:
        """The tokens int64 [S] of a sample, checked at every part if ``check`` is set; placeholders for its images.

        Raises:
            CorruptionError: they are not those that were captured.
        """
        ids = [self._read_tokens(sample, part) for part in sample.parts][-1]
        if sample.media is None:
            return ids
        return np.where(modality_mask(len(ids), sample.media) == 1, sample.media.token, ids)

    def final_norm(self) -> tuple[Tensor, float]:
        """The model's final norm: its weight [H] and its epsilon, by which a post-norm state can be computed.

        Raises:
            StoreError: the dataset has none.
            CorruptionError: the file is not what was written.
        """
        path = self.path / FINAL_NORM_FILE
        if not path.is_file():
            raise StoreError(f"{path}: the dataset was captured without the final norm's weight")
        try:
            with safe_open(path, framework="pt") as file:
                weight, eps = file.get_tensor("weight"), float(file.metadata()["eps"])
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise CorruptionError(f"{path}: not the final norm of a dataset ({error}); {RESTORE}") from None
        if weight.shape != (self.info.hidden_size,):
            raise CorruptionError(
                f"{path}: expected a weight of {self.info.hidden_size} elements, got {list(weight.shape)}; {RESTORE}"
            )
        return weight, eps

    def read_blocks(self, part: SamplePart, rows: int | None = None) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """The rows of one part of a sample as they are stored, in order, a block at a time.

        All blocks use the same memory: each is gone when the next one is asked for.

        Args:
            part: C columns, S rows.
            rows: of a block; as many as stay in the processor's cache, if not given.

        Yields:
            The position of the block's first row; its states [n, C, H] in the dtype stored; and their scales, float32
            [n, C], or None where states have none.

        Raises:
            CorruptionError: a shard is shorter than the journal says.
            StoreError: the disk refuses.
        """
        width, length = len(part.columns), sum(extent.count for extent in part.extents)
        row_bytes = width * self.info.column_bytes
        rows = min(rows or max(1, _STAGING_BYTES // row_bytes), length)
        scales = self._read_scales(part) if self.info.scaled else None
        staging = torch.empty(rows, width, self.info.hidden_size, dtype=_TORCH_DTYPE[self.info.dtype])
        memory = staging.view(torch.uint8).view(-1).numpy().data
        starts = range(0, length, rows)
        blocks = split_extents(part.extents, [min(rows, length - start) for start in starts])
        for start, extents in zip(starts, blocks, strict=True):
            end = start + self._stage(part.writer, extents, memory, row_bytes)
            yield start, staging[: end - start], None if scales is None else scales[start:end]

    def _opener(self) -> Callable[[str, int], ShardReader]:
        """Opens a writer's shard, and keeps the last ones open.

        It does not know the dataset itself: a cycle would keep files open until the garbage is collected.
        """
        path, info, shards = self.path, self.info, self._shards

        @lru_cache(_OPEN_SHARDS)
        def open_shard(writer: str, shard: int) -> ShardReader:
            record, rows = shards[writer, shard]
            return ShardReader(path, ShardLayout(info, writer, record), rows)

        return open_shard

    def _read_tokens(self, sample: SampleEntry, part: SamplePart) -> NDArray[np.int64]:
        """The input ids [S] of one part, checked if that was asked for."""
        pieces = [
            self._shard(part.writer, extent.shard).read_tokens(extent.start, extent.count) for extent in part.extents
        ]
        ids: NDArray[np.int64] = np.concatenate([piece[0] for piece in pieces])
        positions = np.concatenate([piece[1] for piece in pieces])
        hashes = np.concatenate([piece[2] for piece in pieces])
        if self.check:
            expected = prefix_hashes(ids, 0, 0)
            wrong = np.flatnonzero((positions != np.arange(len(ids))) | (hashes != expected))
            if len(wrong) or int(expected[-1]) != sample.end_hash:
                place = f"from token {wrong[0]} on" if len(wrong) else "at its end"
                raise CorruptionError(
                    f"{self.path}: sample {sample.id!r} of {part.writer}: the stored tokens are not those of the "
                    f"prompt, {place}; its rows are {part.extents}. Restore the shard from a copy, or capture anew"
                )
            if sample.media is not None and prompt_hash(ids, sample.media) != sample.media.prompt_hash:
                raise CorruptionError(
                    f"{self.path}: sample {sample.id!r} of {part.writer}: without its images' positions the stored "
                    "tokens are not those of the prompt. Restore the journal from a copy, or capture anew"
                )
        return ids

    def _read_scales(self, part: SamplePart) -> Tensor:
        """The scales float32 [S, C] of one part of a sample whose states have some."""
        pieces = [
            self._shard(part.writer, extent.shard).read_scales(extent.start, extent.count) for extent in part.extents
        ]
        return torch.from_numpy(np.concatenate(pieces))

    def _read_states(self, part: SamplePart, columns: dict[str, Tensor]) -> None:
        """Fill each of ``columns``, a tensor [S, H], from the rows of one part, times their scales unless ``raw``."""
        places = {name: part.columns.index(name) for name in columns}
        for start, states, scales in self.read_blocks(part):
            for name, column in columns.items():
                values = states[:, places[name]]
                if scales is not None and not self.raw:
                    values = dequantize(values, scales[:, places[name]], column.dtype)
                column[start : start + len(values)] = values

    def _stage(self, writer: str, extents: list[Extent], memory: memoryview, row_bytes: int) -> int:
        """Read the rows of ``extents`` one behind the other, however many there are; the number of rows."""
        done = 0
        for shard, start, count in extents:
            into = memory[done * row_bytes : (done + count) * row_bytes]
            self._shard(writer, shard).read_states(start, count, into)
            done += count
        return done

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_shard"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shard = self._opener()
