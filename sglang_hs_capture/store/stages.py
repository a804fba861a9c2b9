"""Pipeline stages put together: each acknowledges a sample for its own columns, and all of them make it whole."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from sglang_hs_capture.store.schema import Media, SampleRecord

Part = TypeVar("Part")


class Acknowledged(NamedTuple):
    """What all stages must agree in to have acknowledged the same sample."""

    rid: str
    length: int
    end_hash: int
    media: Media | None


@dataclass(slots=True)
class Joined(Generic[Part]):
    """What is put together so far: the parts, in the order in which they came, and the columns that none of them has.

    A part may have columns that one before it has as well: those of a sample that two different pipelines began.
    """

    name: Acknowledged
    parts: list[Part]
    missing: frozenset[str]

    @property
    def whole(self) -> bool:
        """Whether every column is there."""
        return not self.missing


class StageJoin(Generic[Part]):
    """Puts acknowledgements together as they come, in whatever order.

    What a stage acknowledges a second time, as after a restart, belongs to the sample's next acknowledgement. So a
    sample is whole exactly if its acknowledgements together have every column.
    """

    def __init__(self, columns: Iterable[str]) -> None:
        """
        Args:
            columns: those of the dataset.
        """
        self._columns = frozenset(columns)
        self._unfinished: dict[Acknowledged, list[Joined[Part]]] = {}

    def add(self, sample: SampleRecord, columns: Sequence[str], part: Part) -> Joined[Part]:
        """Take one stage's acknowledgement.

        Args:
            sample: the record in the journal.
            columns: those of its rows there.
            part: whatever the caller wants to find again in ``parts``.

        Returns:
            What it belongs to, with it; nothing is added to it any more once it is whole.
        """
        name = Acknowledged(sample.rid, sample.length, sample.end_hash, sample.media)
        begun = self._unfinished.setdefault(name, [])
        joined = next((one for one in begun if not one.missing.isdisjoint(columns)), None)
        if joined is None:
            joined = Joined(name, [], self._columns)
            begun.append(joined)
        joined.parts.append(part)
        joined.missing = joined.missing.difference(columns)
        if joined.whole:
            begun.remove(joined)
        if not begun:
            del self._unfinished[name]
        return joined
