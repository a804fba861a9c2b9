"""The states that an export takes of each row, in the dtype and form that the trainer wants."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_hs_capture.errors import ConfigError
from sglang_hs_capture.reader.dataset import HiddenStateDataset
from sglang_hs_capture.reader.dequantize import dequantize
from sglang_hs_capture.store.index import SampleEntry, SamplePart
from sglang_hs_capture.text import shown

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class State:
    """One state of a row: a column of the dataset, put through the model's final norm if ``normed``."""

    column: str
    normed: bool = False


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name such as ``bfloat16``."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def apply_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The final norm, in float32.

    Args:
        states: float32 [..., H].
        weight: float32 [H].

    Returns:
        float32 [..., H].
    """
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps) * weight


class StateSource:
    """Reads the states of samples, block by block; for several threads.

    Attributes:
        states: those of a row, in the order in which they are given.
        dtype: in which they are given, whatever the dataset's.
    """

    def __init__(self, dataset: HiddenStateDataset, states: Sequence[State], dtype: torch.dtype) -> None:
        """Choose states of an open dataset.

        Raises:
            StoreError: a state is to be normed, and the dataset was captured without the norm's weight.
        """
        self.dataset = dataset
        self.states = tuple(states)
        self.dtype = dtype
        self._rows = max(1, _BLOCK_BYTES // dataset.info.row_bytes)
        self._norm: tuple[Tensor, float] | None = None
        if any(state.normed for state in states):
            weight, eps = dataset.final_norm()
            self._norm = (weight.float(), eps)

    def blocks(self, sample: SampleEntry) -> Iterator[tuple[int, Tensor]]:
        """The states of a sample, in order; each block is gone when the next one is asked for.

        Yields:
            The position of the block's first row, and its states [n, K, H], contiguous.

        Raises:
            ConfigError: the dtype has no number for one of them.
            CorruptionError, StoreError: they cannot be read.
        """
        as_stored = self._as_stored(sample.parts[0])
        places = _places(sample.parts)
        whole = torch.empty(0, dtype=self.dtype)
        for pieces in zip(*(self.dataset.read_blocks(part, self._rows) for part in sample.parts), strict=True):
            start, states, _ = pieces[0]
            if as_stored and states.dtype == self.dtype:
                yield start, states
                continue
            if not len(whole):
                whole = torch.empty(len(states), len(self.states), states.shape[-1], dtype=self.dtype)
            for number, state in enumerate(self.states):
                part, column = places[state.column]
                _, stored, scales = pieces[part]
                scale = None if scales is None else scales[:, column]
                whole[: len(states), number] = self._convert(stored[:, column], scale, state.normed)
            self._require_finite(sample, start, whole[: len(states)])
            yield start, whole[: len(states)]

    def _require_finite(self, sample: SampleEntry, start: int, block: Tensor) -> None:
        """Refuse states [n, K, H] that float16 has no numbers for: a trainer would get infinities.

        Raises:
            ConfigError: there is one.
        """
        if self.dtype != torch.float16 or block.isfinite().all():
            return
        row, number = (~block.isfinite().all(-1)).nonzero()[0].tolist()
        raise ConfigError(
            f"--dtype float16: expected states of at most {torch.finfo(torch.float16).max:.0f}, the largest number of "
            f"float16; {self.states[number].column} of the sample {shown(sample.id)} is larger at position "
            f"{start + row}; choose bfloat16 or float32"
        )

    def _as_stored(self, part: SamplePart) -> bool:
        """Whether a row of this part is just what is wanted, apart from its dtype."""
        return all(not state.normed for state in self.states) and part.columns == tuple(s.column for s in self.states)

    def _convert(self, stored: Tensor, scales: Tensor | None, normed: bool) -> Tensor:
        """One state [n, H] of n rows as it is wanted, or in a wider dtype; rounded at most once after this."""
        if scales is not None:
            stored = dequantize(stored, scales, torch.float32 if normed else self.dtype)
        if normed and self._norm is not None:
            return apply_norm(stored.float(), *self._norm)
        return stored


def _places(parts: Sequence[SamplePart]) -> dict[str, tuple[int, int]]:
    """For each column the first part that has it, and its place there."""
    found: dict[str, tuple[int, int]] = {}
    for number, part in enumerate(parts):
        for place, column in enumerate(part.columns):
            found.setdefault(column, (number, place))
    return found
