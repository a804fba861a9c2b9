"""A draft model's own vocabulary: the tokens that the loss is on most often."""

import io
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_hs_capture.errors import ConfigError

Row = tuple[NDArray[np.int64], NDArray[np.int64]]


class TokenCounts:
    """How often each token stands where the loss mask is one."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def watch(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Pass samples on, input ids [S] and loss mask [S], and count their tokens."""
        for input_ids, loss_mask in rows:
            tokens, counts = np.unique(input_ids[loss_mask != 0], return_counts=True)
            self._counts.update(dict(zip(tokens.tolist(), counts.tolist(), strict=True)))
            yield input_ids, loss_mask

    def as_dict(self) -> dict[int, int]:
        """The counts by token."""
        return dict(self._counts)


@dataclass(frozen=True)
class DraftVocabulary:
    """The sizes of a draft model's vocabulary and of its target's."""

    size: int
    target_size: int

    def __post_init__(self) -> None:
        if self.size > self.target_size:
            raise ConfigError(
                f"--draft-vocab-size: expected at most the target's {self.target_size} tokens, got {self.size}"
            )

    def mappings(self, counts: dict[int, int]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Which tokens the vocabulary has: the most frequent ones, and of those as frequent the lowest.

        Where fewer were counted, the lowest others fill up. It is speculators' own rule.

        Returns:
            ``d2t``, int64 [size]: what to add to a draft token to get the target's; ``t2d``, bool [target_size]: which
            of the target's tokens the draft model has.

        Raises:
            ConfigError: the dataset has tokens that the target does not have.
        """
        outside = [token for token in counts if not 0 <= token < self.target_size]
        if outside:
            raise ConfigError(
                f"--draft-vocab-size: the loss is on token {outside[0]}, and the target has tokens from 0 to "
                f"{self.target_size - 1}; is --verifier the model that the dataset was captured from?"
            )
        frequency = np.zeros(self.target_size, np.int64)
        frequency[list(counts)] = list(counts.values())
        chosen = np.sort(np.argsort(-frequency, kind="stable")[: self.size])
        t2d = np.zeros(self.target_size, np.bool_)
        t2d[chosen] = True
        return chosen - np.arange(self.size), t2d


def torch_bytes(value: Any) -> bytes:
    """What ``torch.save`` writes for a small object."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def npy_bytes(array: NDArray[Any]) -> bytes:
    """What ``numpy.save`` writes for an array."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()
