"""Which samples a stored row belongs to: a damaged row makes them unusable."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_hs_capture.store.index import SampleEntry


class Owners:
    """The samples of each row; a row of a shared prefix has several, one of a failed attempt none."""

    def __init__(self, samples: Sequence[SampleEntry]) -> None:
        self._ids = [sample.id for sample in samples]
        places: defaultdict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
        for number, sample in enumerate(samples):
            for part in sample.parts:
                for shard, start, count in part.extents:
                    places[part.writer, shard].append((start, start + count, number))
        self._places = {place: np.array(spans, np.int64) for place, spans in places.items()}

    def of(self, writer: str, shard: int, start: int, end: int) -> list[str]:
        """Ids of the samples that have any of the rows from ``start`` to ``end - 1``."""
        spans = self._places.get((writer, shard))
        if spans is None:
            return []
        return self._named(spans[(spans[:, 0] < end) & (spans[:, 1] > start), 2])

    def of_rows(self, writer: str, shard: int, rows: NDArray[np.int64]) -> list[str]:
        """Ids of the samples that have any of ``rows``, int64 [n], ascending."""
        spans = self._places.get((writer, shard))
        if spans is None:
            return []
        return self._named(spans[np.searchsorted(rows, spans[:, 0]) < np.searchsorted(rows, spans[:, 1]), 2])

    def _named(self, numbers: NDArray[np.int64]) -> list[str]:
        return list(dict.fromkeys(self._ids[number] for number in numbers.tolist()))
