"""Where the row of each KV slot was stored, and the proof that it is the row a prompt needs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_hs_capture.store.hashing import prefix_hashes
from sglang_hs_capture.store.schema import Extent, extents_from_rows

# The owner of rows that any request may take.
PROVEN = 0
_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1


@dataclass(frozen=True)
class Prefix:
    """The stored rows of a request's first tokens, and the hash of these tokens.

    ``lenders`` are the owners of rows among them that are not proven yet.
    """

    extents: tuple[Extent, ...]
    end_hash: int
    lenders: frozenset[int] = frozenset()


class SlotTable:
    """For every KV slot the stored row that was computed into it: place, token, position, prefix hash and owner.

    A slot may have been rewritten since by a forward that captured nothing (decode, also in a replayed graph; a request
    that is not captured). Such an entry does no harm: a row is taken only as part of a chain in which every row's
    position is its place in the prompt and every row's hash is the chained hash of the row's own token and those before
    it. Such a chain ends in the hash of exactly the tokens it was computed from, which is compared with the prompt's.

    That holds if every row's hash is true. A row's hash builds on that of the row before it, which may be such a
    rewritten slot's, so it is only *claimed* until the request it was computed for, its owner, has ended in the right
    hash. Whoever takes such a row must wait for that.

    Takes 40 bytes a slot, and grows to the highest slot seen.
    """

    def __init__(self) -> None:
        self._place = np.full(0, -1, dtype=np.int64)
        self._token = np.zeros(0, dtype=np.int64)
        self._position = np.zeros(0, dtype=np.int64)
        self._hash = np.zeros(0, dtype=np.uint64)
        self._owner = np.full(0, PROVEN, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Host memory of the table in bytes."""
        return sum(a.nbytes for a in (self._place, self._token, self._position, self._hash, self._owner))

    def record(
        self,
        slots: np.ndarray,
        extents: Sequence[Extent],
        tokens: np.ndarray,
        positions: np.ndarray,
        prefix_hash: np.ndarray,
        owner: int,
    ) -> None:
        """Remember rows just stored for the request ``owner``.

        Args:
            slots: int64 ``[n]``, the KV slots the rows were computed into.
            extents: where the ``n`` rows are stored, in order.
            tokens: int64 ``[n]``.
            positions: int64 ``[n]``.
            prefix_hash: uint64 ``[n]``.
            owner: a number above zero, the request's own.
        """
        self._reserve(slots)
        places = [np.arange(e.start, e.start + e.count, dtype=np.int64) | (e.shard << _ROW_BITS) for e in extents]
        self._place[slots] = np.concatenate(places)
        self._token[slots] = tokens
        self._position[slots] = positions
        self._hash[slots] = prefix_hash
        self._owner[slots] = owner

    def forget(self, slots: np.ndarray) -> None:
        """Mark slots as holding no stored row."""
        self._reserve(slots)
        self._place[slots] = -1

    def prove(self, slots: np.ndarray, owner: int) -> None:
        """Let every request take the rows of ``owner`` among ``slots``: it has ended in the right hash."""
        mine = slots[self._owner[slots] == owner]
        self._owner[mine] = PROVEN

    def forget_of(self, slots: np.ndarray, owner: int) -> None:
        """Forget the rows of ``owner`` among ``slots``: it has ended in a wrong hash."""
        self.forget(slots[self._owner[slots] == owner])

    def tokens(self, slots: np.ndarray) -> np.ndarray:
        """Int64 ``[n]``: the tokens of the rows that a ``lookup`` of these slots has just found."""
        tokens: np.ndarray = self._token[slots]
        return tokens

    def lookup(self, slots: np.ndarray, owner: int, *, own_only: bool) -> Prefix | str:
        """Find the stored rows of a prompt's first ``len(slots)`` tokens, or say why that cannot be done.

        Args:
            slots: int64 ``[n]``, the KV slots of these tokens.
            owner: the request that asks.
            own_only: take only rows that were computed for this very request.
        """
        if slots.size == 0:
            return Prefix((), 0)
        problem = self._problem(slots, owner, own_only)
        if problem:
            return problem
        places = self._place[slots]
        extents = extents_from_rows(places >> _ROW_BITS, places & _ROW_MASK)
        lenders = frozenset(np.unique(self._owner[slots]).tolist()) - {PROVEN, owner}
        return Prefix(extents, int(self._hash[slots[-1]]), lenders)

    def _problem(self, slots: np.ndarray, owner: int, own_only: bool) -> str:
        known = slots < self._place.size
        known[known] = self._place[slots[known]] >= 0
        owners = self._owner[slots[known]]
        positions, hashes = self._position[slots[known]], self._hash[slots[known]]
        if not known.all():
            reason = f"{slots.size - int(known.sum())} of {slots.size} prefix rows were never captured"
        elif own_only and (owners != owner).any():
            reason = (
                "a part of the prompt was taken from the prefix cache, and a request sent by hand does not say which "
                "prompt it must add up to; send it with an extra_key of its own, or use hs-capture run"
            )
        elif not np.array_equal(positions, np.arange(slots.size)):
            reason = "the KV slots of the prefix hold rows of other positions"
        elif not np.array_equal(prefix_hashes(self._token[slots], 0, 0), hashes):
            reason = "the KV slots of the prefix hold rows of another prompt"
        else:
            reason = ""
        return reason

    def _reserve(self, slots: np.ndarray) -> None:
        needed = int(slots.max(initial=-1)) + 1
        if needed > self._place.size:
            grown = max(needed, 2 * self._place.size) - self._place.size
            self._place = np.concatenate([self._place, np.full(grown, -1, dtype=np.int64)])
            for name in ("_token", "_position", "_hash", "_owner"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros(grown, dtype=old.dtype)]))
