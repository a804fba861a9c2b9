"""Where the row of each KV slot was stored, and the proof that it is the row a prompt needs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_hs_capture.store.hashing import prefix_hashes
from sglang_hs_capture.store.schema import Extent, extents_from_rows

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1


@dataclass(frozen=True)
class Prefix:
    """The stored rows of a request's first tokens, and the hash of these tokens."""

    extents: tuple[Extent, ...]
    end_hash: int


class SlotTable:
    """For every KV slot the stored row that was computed into it: place, token, position and prefix hash.

    A slot may have been rewritten since by a forward that captured nothing (decode, a request that is not captured).
    Such an entry does no harm: a row is taken only as part of a chain in which every row's position is its place in the
    prompt and every row's hash is the chained hash of the row's own token and those before it. Such a chain ends in the
    hash of exactly the tokens it was computed from, which is compared with the prompt's.

    Takes 32 bytes a slot, and grows to the highest slot seen.
    """

    def __init__(self) -> None:
        self._place = np.full(0, -1, dtype=np.int64)
        self._token = np.zeros(0, dtype=np.int64)
        self._position = np.zeros(0, dtype=np.int64)
        self._hash = np.zeros(0, dtype=np.uint64)

    @property
    def nbytes(self) -> int:
        """Host memory of the table in bytes."""
        return self._place.nbytes + self._token.nbytes + self._position.nbytes + self._hash.nbytes

    def record(
        self,
        slots: np.ndarray,
        extents: Sequence[Extent],
        tokens: np.ndarray,
        positions: np.ndarray,
        prefix_hash: np.ndarray,
    ) -> None:
        """Remember rows just stored: all arrays are int64 (hash: uint64) ``[n]``, and the extents hold ``n`` rows."""
        self._reserve(slots)
        places = [np.arange(e.start, e.start + e.count, dtype=np.int64) | (e.shard << _ROW_BITS) for e in extents]
        self._place[slots] = np.concatenate(places)
        self._token[slots] = tokens
        self._position[slots] = positions
        self._hash[slots] = prefix_hash

    def forget(self, slots: np.ndarray) -> None:
        """Mark slots as holding no stored row."""
        self._reserve(slots)
        self._place[slots] = -1

    def lookup(self, slots: np.ndarray) -> Prefix | str:
        """Find the stored rows of a prompt's first ``len(slots)`` tokens, or say why that cannot be done."""
        if slots.size == 0:
            return Prefix((), 0)
        if int(slots.max()) >= self._place.size:
            return "a prefix row was never captured"
        places = self._place[slots]
        if (places < 0).any():
            return f"{int((places < 0).sum())} of {slots.size} prefix rows were never captured"
        positions, hashes = self._position[slots], self._hash[slots]
        if not np.array_equal(positions, np.arange(slots.size)):
            return "the KV slots of the prefix hold rows of other positions"
        if not np.array_equal(prefix_hashes(self._token[slots], 0, 0), hashes):
            return "the KV slots of the prefix hold rows of another prompt"
        return Prefix(extents_from_rows(places >> _ROW_BITS, places & _ROW_MASK), int(hashes[-1]))

    def _reserve(self, slots: np.ndarray) -> None:
        needed = int(slots.max(initial=-1)) + 1
        if needed > self._place.size:
            grown = max(needed, 2 * self._place.size) - self._place.size
            self._place = np.concatenate([self._place, np.full(grown, -1, dtype=np.int64)])
            for name in ("_token", "_position", "_hash"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros(grown, dtype=old.dtype)]))
