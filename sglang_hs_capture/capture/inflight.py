"""What the writing thread remembers of a request between its chunks."""

from dataclasses import dataclass, field

import numpy as np

# Requests aborted between chunks never come back for their state; the oldest are dropped first.
MOST_REMEMBERED = 4096


@dataclass
class RequestState:
    """One request from its first chunk to its last.

    Attributes:
        serial: its number as an owner of rows, never used again.
        problem: why a chunk was not stored, as reason and detail.
        slots: the KV slots of the rows stored so far, chunk by chunk.
    """

    serial: int
    problem: tuple[str, str] | None = None
    slots: list[np.ndarray] = field(default_factory=list)

    def all_slots(self) -> np.ndarray:
        """Int64 ``[n]``: the KV slots of all rows stored so far."""
        return np.concatenate(self.slots) if self.slots else np.zeros(0, dtype=np.int64)


class InFlight:
    """States of the requests between their chunks, by request id; bounded in number."""

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        self._states: dict[str, RequestState] = {}
        self._most = most
        self._serial = 0

    def __len__(self) -> int:
        return len(self._states)

    def enter(self, rid: str, prefix_len: int) -> RequestState:
        """The state of a request that has a chunk in this forward; a new one for its first chunk."""
        state = self._states.get(rid)
        if state is None or prefix_len == 0:
            self._states.pop(rid, None)
            while len(self._states) >= self._most:
                del self._states[next(iter(self._states))]
            self._serial += 1
            state = self._states[rid] = RequestState(self._serial)
        return state

    def leave(self, rid: str) -> None:
        """Forget a request: its last chunk has come."""
        self._states.pop(rid, None)
