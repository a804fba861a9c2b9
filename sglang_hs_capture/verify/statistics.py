"""What the rows' states look like: norms and largest elements of every row and column, in memory of a constant size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_hs_capture.store.elements import to_float32

# Histograms over the logarithm to base 2; a bin is a factor of 2**(1/16), 4%. The outermost bins take what is beyond.
BINS_PER_OCTAVE = 16
LOWEST_OCTAVE, HIGHEST_OCTAVE = -48, 48
BINS = (HIGHEST_OCTAVE - LOWEST_OCTAVE) * BINS_PER_OCTAVE
# Position 0 has a bucket of its own, then two buckets a doubling.
BUCKETS_PER_OCTAVE = 2
POSITION_BUCKETS = 1 + 24 * BUCKETS_PER_OCTAVE
EXTREMES_KEPT = 16


class Place(NamedTuple):
    """Where a row is stored."""

    writer: str
    shard: int
    row: int
    position: int


class Extreme(NamedTuple):
    """A row with an especially small or large norm."""

    norm: float
    place: Place


@dataclass(frozen=True)
class RowNumbers:
    """Numbers of n rows of C columns.

    Attributes:
        norm: float32 [n, C]; the Euclidean norm.
        largest: float32 [n, C]; the largest absolute value; NaN or infinity where an element is not finite.
        finite, zero, constant: bool [n, C]; zero rows are not constant ones.
    """

    norm: NDArray[np.float32]
    largest: NDArray[np.float32]
    finite: NDArray[np.bool_]
    zero: NDArray[np.bool_]
    constant: NDArray[np.bool_]


def row_numbers(
    data: NDArray[np.uint8], columns: int, dtype: str, scales: NDArray[np.float32] | None = None
) -> RowNumbers:
    """Look at every element of some rows once.

    Args:
        data: uint8 [n, C * H * element size], contiguous.
        columns: C.
        dtype: of the elements.
        scales: float32 [n, C], by which the elements are to be multiplied, if they have scales.
    """
    values = to_float32(data.reshape(-1), dtype).reshape(len(data), columns, -1)
    if scales is not None:
        values *= scales[:, :, None]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        high, low = values.max(axis=-1), values.min(axis=-1)
        squares = np.einsum("rch,rch->rc", values, values)
        norm = np.sqrt(squares)
        largest = np.maximum(high, -low)
        finite = np.isfinite(largest)
        zero = largest == 0
        # Squares of very large or small elements do not fit into float32.
        for row, column in np.argwhere(~((squares > 1e-30) & (squares < 1e30)) & finite & ~zero):
            norm[row, column] = np.linalg.norm(values[row, column].astype(np.float64))
    constant = (high == low) & ~zero & finite if values.shape[-1] > 1 else np.zeros_like(zero)
    return RowNumbers(norm, largest, finite, zero, constant)


class Statistics:
    """Numbers of all rows seen so far; those of several threads are merged.

    Attributes:
        columns: names of the C columns.
        norms: int64 [C, POSITION_BUCKETS, BINS], how many finite rows have such a norm at such a position.
        largest: int64 [C, BINS], how many have such a largest element.
        rows: int64 [C], rows seen of each column.
        low, high: float64 [C], the smallest and the largest norm.
        equal: rows in which two columns hold the same bytes, and the first such rows, by pair of columns.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = tuple(columns)
        count = len(self.columns)
        self.norms = np.zeros((count, POSITION_BUCKETS, BINS), np.int64)
        self.largest = np.zeros((count, BINS), np.int64)
        self.rows = np.zeros(count, np.int64)
        self.low = np.full(count, np.inf)
        self.high = np.full(count, -np.inf)
        self.lowest: list[list[Extreme]] = [[] for _ in self.columns]
        self.highest: list[list[Extreme]] = [[] for _ in self.columns]
        self.equal: dict[tuple[str, str], tuple[int, list[Place]]] = {}

    def add(
        self, names: Sequence[str], numbers: RowNumbers, positions: NDArray[np.int64], writer: str, shard: int, row: int
    ) -> None:
        """Take in n rows that follow each other in a shard.

        Args:
            names: the columns of these rows; columns that the dataset does not have are passed over.
            numbers: of these rows.
            positions: int64 [n].
            writer, shard, row: where the first of them is.
        """
        buckets = position_buckets(positions)
        for place, name in enumerate(names):
            if name not in self.columns:
                continue
            column = self.columns.index(name)
            self.rows[column] += len(positions)
            usable = np.flatnonzero(numbers.finite[:, place] & ~numbers.zero[:, place])
            if not len(usable):
                continue
            norms = numbers.norm[usable, place]
            np.add.at(self.norms[column], (buckets[usable], bins_of(norms)), 1)
            np.add.at(self.largest[column], bins_of(numbers.largest[usable, place]), 1)
            self.low[column] = min(self.low[column], norms.min())
            self.high[column] = max(self.high[column], norms.max())
            for kept, sign in ((self.lowest[column], 1), (self.highest[column], -1)):
                for index in _first(sign * norms, kept, sign):
                    at = int(usable[index])
                    kept.append(Extreme(float(norms[index]), Place(writer, shard, row + at, int(positions[at]))))
                _trim(kept, sign)

    def add_equal(self, pair: tuple[str, str], places: list[Place], count: int) -> None:
        """Take in rows in which two columns hold the same bytes."""
        number, kept = self.equal.get(pair, (0, []))
        self.equal[pair] = (number + count, sorted(kept + places)[:EXTREMES_KEPT])

    def merge(self, other: "Statistics") -> None:
        """Take in what another one has seen."""
        self.norms += other.norms
        self.largest += other.largest
        self.rows += other.rows
        self.low = np.minimum(self.low, other.low)
        self.high = np.maximum(self.high, other.high)
        for mine, theirs, sign in ((self.lowest, other.lowest, 1), (self.highest, other.highest, -1)):
            for kept, more in zip(mine, theirs, strict=True):
                kept.extend(more)
                _trim(kept, sign)
        for pair, (count, places) in other.equal.items():
            self.add_equal(pair, places, count)

    def quantiles(self, column: int, wanted: Sequence[float]) -> list[float]:
        """Norms that such shares of a column's rows lie below, to the width of a bin; NaN without rows."""
        found = histogram_quantiles(self.norms[column].sum(axis=0), wanted)
        return [float(np.clip(value, self.low[column], self.high[column])) for value in found]

    def outliers(self, column: int, above: float, below: float) -> tuple[int, list[Extreme]]:
        """Rows whose norm is more than ``above`` times or less than ``below`` times the column's median.

        Returns:
            How many there are at least, and the most extreme of them.
        """
        (median,) = self.quantiles(column, [0.5])
        counts = self.norms[column].sum(axis=0)
        edges = bin_edges()
        many = int(counts[edges[:-1] > median * above].sum() + counts[edges[1:] < median * below].sum())
        far = [e for e in self.highest[column] if e.norm > median * above]
        far += [e for e in self.lowest[column] if e.norm < median * below]
        return max(many, len(far)), far


def equal_pairs(
    data: NDArray[np.uint8], names: Sequence[str], numbers: RowNumbers
) -> Iterator[tuple[tuple[str, str], NDArray[np.int64]]]:
    """Rows in which two columns hold the same bytes: the pair's names, and int64 [k], the rows' numbers.

    Bytes are compared only where norm and largest element agree, so it costs next to nothing.
    """
    states = data.reshape(len(data), len(names), -1)
    for first in range(len(names)):
        for second in range(first + 1, len(names)):
            alike = (numbers.norm[:, first] == numbers.norm[:, second]) & ~numbers.zero[:, first]
            alike &= numbers.largest[:, first] == numbers.largest[:, second]
            rows = np.flatnonzero(alike)
            if len(rows):
                rows = rows[(states[rows, first] == states[rows, second]).all(axis=-1)]
            if len(rows):
                yield (names[first], names[second]), rows


def bins_of(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """The bin of each positive value."""
    with np.errstate(divide="ignore"):
        places = np.floor((np.log2(values.astype(np.float64)) - LOWEST_OCTAVE) * BINS_PER_OCTAVE)
    bins: NDArray[np.int64] = np.clip(places, 0, BINS - 1).astype(np.int64)
    return bins


def bin_edges() -> NDArray[np.float64]:
    """float64 [BINS + 1]: where bins begin and end."""
    return 2.0 ** (LOWEST_OCTAVE + np.arange(BINS + 1) / BINS_PER_OCTAVE)


def position_buckets(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bucket of each position; the first is for position 0 alone."""
    buckets: NDArray[np.int64] = np.floor(np.log2(np.maximum(positions, 1)) * BUCKETS_PER_OCTAVE).astype(np.int64) + 1
    buckets[positions < 1] = 0
    np.minimum(buckets, POSITION_BUCKETS - 1, out=buckets)
    return buckets


def bucket_start(bucket: int) -> int:
    """The first position that may lie in a bucket."""
    return 0 if bucket == 0 else int(np.ceil(2.0 ** ((bucket - 1) / BUCKETS_PER_OCTAVE) - 1e-9))


def histogram_quantiles(counts: NDArray[np.int64], wanted: Sequence[float]) -> list[float]:
    """Values that such shares of a histogram lie below, interpolated within their bin; NaN if it is empty."""
    total = int(counts.sum())
    if not total:
        return [float("nan")] * len(wanted)
    reached = np.concatenate(([0], np.cumsum(counts)))
    found = []
    for share in wanted:
        place = min(max(share * total, 0.5), total - 0.5)
        index = int(np.searchsorted(reached, place, side="right")) - 1
        inside = (place - reached[index]) / counts[index]
        found.append(float(2.0 ** (LOWEST_OCTAVE + (index + inside) / BINS_PER_OCTAVE)))
    return found


def _first(values: NDArray[np.float32], kept: list[Extreme], sign: int) -> NDArray[np.int64]:
    """Indices of those few of ``values`` that may be among the smallest."""
    bound = sign * kept[-1].norm if len(kept) >= EXTREMES_KEPT else np.inf
    candidates: NDArray[np.int64] = np.flatnonzero(values < bound)
    if len(candidates) > EXTREMES_KEPT:
        chosen = np.argpartition(values[candidates], EXTREMES_KEPT)[:EXTREMES_KEPT]
        candidates = candidates[chosen]
    return candidates


def _trim(kept: list[Extreme], sign: int) -> None:
    kept.sort(key=lambda extreme: sign * extreme.norm)
    del kept[EXTREMES_KEPT:]
