"""What the writing thread remembers of a request from its first chunk until its sample is settled."""

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass, field

import numpy as np

# Requests aborted between chunks never come back for their state; the oldest are dropped first.
MOST_REMEMBERED = 4096
# Refuted requests matter to those that wait for them, which is seconds.
MOST_REFUTED = 65536


@dataclass
class RequestState:
    """One request from its first chunk to its end.

    Attributes:
        rid: its id.
        serial: its number as an owner of rows, never used again.
        problem: why a chunk was not stored, as reason and detail.
        slots: the KV slots of the rows stored so far, chunk by chunk.
        last_prefill: number of the prefill forward that had its latest chunk.
    """

    rid: str
    serial: int
    problem: tuple[str, str] | None = None
    slots: list[np.ndarray] = field(default_factory=list)
    last_prefill: int = -1

    def all_slots(self) -> np.ndarray:
        """Int64 ``[n]``: the KV slots of all rows stored so far."""
        return np.concatenate(self.slots) if self.slots else np.zeros(0, dtype=np.int64)


class InFlight:
    """States of the requests that are not settled yet, by request id; bounded in number."""

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        self._states: dict[str, RequestState] = {}
        self._open: set[int] = set()
        self._refuted: OrderedDict[int, None] = OrderedDict()
        self._most = most
        self._serial = 0

    def __len__(self) -> int:
        return len(self._states)

    def enter(self, rid: str, prefix_len: int) -> RequestState:
        """The state of a request that has a chunk in this forward; a new one for its first chunk."""
        state = self._states.get(rid)
        if state is None or prefix_len == 0:
            if state is not None:
                self.leave(state, proven=False)
            while len(self._states) >= self._most:
                self.leave(next(iter(self._states.values())), proven=False)
            self._serial += 1
            state = self._states[rid] = RequestState(rid, self._serial)
            self._open.add(state.serial)
        return state

    def leave(self, state: RequestState, *, proven: bool) -> None:
        """Settle a request: its rows are what they claim to be, or nobody may take them."""
        if self._states.get(state.rid) is state:
            del self._states[state.rid]
        if state.serial in self._open:
            self._open.discard(state.serial)
            if not proven:
                self._refuted[state.serial] = None
                while len(self._refuted) > MOST_REFUTED:
                    self._refuted.popitem(last=False)

    def all_proven(self, serials: Set[int]) -> bool | None:
        """Whether the rows of these requests are what they claim to be; None while one of them is not settled."""
        if any(serial in self._refuted for serial in serials):
            return False
        return None if serials & self._open else True
