"""Lanes: shards that are written side by side, each by threads of its own.

One thread that writes fills one file at a time, and so does not reach the rate of memory, of several disks behind one
file system, or of a disk that wants several writes at once. A file system lets one thread at a time into a file, so
every lane has a shard of its own. The second lane is opened only when the first does not keep up, and so on: a store
that does writes one shard after the other.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sglang_hs_capture.store.appender import Appender, Run
from sglang_hs_capture.store.shard import ShardLayout

logger = logging.getLogger(__name__)

Marks = tuple[int, ...]


@dataclass(eq=False)
class Lane:
    """One of them.

    Attributes:
        layout: the shard that is being filled; None before the first row, and when one is full.
        run: its rows since the last commit was begun; None where there are none.
    """

    appender: Appender
    layout: ShardLayout | None = None
    run: Run | None = None


class Lanes:
    """The lanes of a writer. All methods are for the writer's owner, ``wait`` and ``stop`` for any thread."""

    def __init__(self, make: Callable[[], Appender], *, most: int, spill_bytes: int) -> None:
        """Begin with one lane.

        Args:
            make: starts a lane's threads.
            most: lanes at most.
            spill_bytes: rows go to the next lane when so much waits to be written in those before it.
        """
        self._make, self._most, self._spill_bytes = make, most, spill_bytes
        self._lanes = [Lane(make())]

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    def pick(self) -> Lane:
        """The lane for the next rows: the first that keeps up, a new one, or the one with the least to do."""
        for lane in self._lanes:
            if lane.appender.backlog <= self._spill_bytes:
                return lane
        if len(self._lanes) < self._most and self._add():
            return self._lanes[-1]
        return min(self._lanes, key=lambda lane: lane.appender.backlog)

    def _add(self) -> bool:
        """Begin another lane; False where the process may start no more threads."""
        try:
            self._lanes.append(Lane(self._make()))
        except RuntimeError as error:
            # A lane is there for speed alone. It is not tried again: each try costs time, and would fail likewise.
            self._most = len(self._lanes)
            logger.warning("hs_capture: going on with %d shards side by side: %s", self._most, error)
            return False
        return True

    def marks(self) -> Marks:
        """How far each lane has been filled, for ``wait``."""
        return tuple(lane.appender.last for lane in self._lanes)

    def wait(self, marks: Marks) -> None:
        """Wait until everything that was put before ``marks`` was taken is settled, well or not."""
        for lane, number in zip(self._lanes, marks, strict=False):
            lane.appender.wait(number)

    def stop(self) -> None:
        """End all threads once everything is settled."""
        for lane in self._lanes:
            lane.appender.stop()
