"""The chained token hash: one number for a row that depends on every token from position 0 to that row."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The SplitMix64 finaliser, element by element; arithmetic modulo 2**64.

    Args:
        values: uint64, any shape.
    """
    z = values + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def prefix_hashes(tokens: NDArray[np.int64] | Sequence[int], start: int, base: int) -> NDArray[np.uint64]:
    """Hash a run of tokens onto the hash of the tokens before it.

    ``h_i`` is the sum, modulo 2**64, of ``splitmix64(splitmix64(token_j) ^ (j + 1) * 0x9E3779B97F4A7C15)`` over all
    positions ``j <= i``. A sum can be continued in chunks of any size and computed without a Python loop.

    Args:
        tokens: int64 [n], the tokens at positions ``start`` to ``start + n - 1``; any 64-bit value.
        start: the position of the first token.
        base: the hash at position ``start - 1``; 0 for ``start == 0``.

    Returns:
        uint64 [n], the hash at each of the positions.
    """
    ids = np.ascontiguousarray(tokens, dtype=np.int64).view(np.uint64)
    places = np.arange(start + 1, start + 1 + len(ids), dtype=np.uint64) * _GOLDEN
    hashes = np.cumsum(splitmix64(splitmix64(ids) ^ places), dtype=np.uint64)
    hashes += np.uint64(base & _MASK)
    return hashes


def end_hash(tokens: NDArray[np.int64] | Sequence[int]) -> int:
    """The hash of a whole prompt: that of its last position.

    Args:
        tokens: int64 [S], S at least 1.
    """
    return int(prefix_hashes(tokens, 0, 0)[-1])
