"""Samples captured a second time: the same tokens through the same model, compared state by state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sglang_hs_capture.errors import CorruptionError


@dataclass(frozen=True)
class Bound:
    """How far two captures of one prompt may lie apart, as ``||first - second|| / ||first||`` of a row.

    Batches and chunks differ from capture to capture, and with them the order in which sums are rounded.

    Attributes:
        row: the most for any row.
        typical: the most for the median of a sample's rows. A layer too many or too few moves every row.
    """

    row: float
    typical: float


# docs/verify.md says what they were measured against.
BOUNDS = {"float32": Bound(1e-3, 1e-5), "float16": Bound(0.5, 0.01), "bfloat16": Bound(0.5, 0.05)}
# Rounding to e4m3 moves an element by a sixteenth at most, in both captures.
BOUNDS["float8_e4m3"] = Bound(BOUNDS["bfloat16"].row, BOUNDS["bfloat16"].typical + 2.0**-4)
_COARSENESS = ("float32", "float16", "bfloat16", "float8_e4m3")


class Captured(Protocol):
    """What is needed of a dataset; ``HiddenStateDataset`` has it."""

    @property
    def columns(self) -> Sequence[str]: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


@dataclass
class ColumnDifference:
    """How far a column lies from the second capture.

    Attributes:
        row: the largest difference of a row; ``row_sample`` and ``row_position`` say which.
        typical: the largest median of a sample's rows; ``typical_sample`` says which.
    """

    column: str
    row: float = 0.0
    row_sample: str = ""
    row_position: int = 0
    typical: float = 0.0
    typical_sample: str = ""


@dataclass(frozen=True)
class Comparison:
    """The outcome: one difference a column, over ``samples`` samples with ``tokens`` tokens in all."""

    samples: int
    tokens: int
    bound: Bound
    columns: tuple[ColumnDifference, ...]

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "samples": self.samples,
            "tokens": self.tokens,
            "bound": vars(self.bound),
            "columns": [vars(column) for column in self.columns],
        }

    def lines(self, title: str) -> list[str]:
        """The same for a person; ``title`` says what the second one is."""
        shown = [
            f"{title}: {self.samples:,} samples, {self.tokens:,} tokens; allowed is {self.bound.row:g} for a row and "
            f"{self.bound.typical:g} for a sample's median",
            f"{'state':<16} {'worst row':>11} {'worst median':>13}  the worst row is",
        ]
        shown += [
            f"{column.column:<16} {column.row:>11.2e} {column.typical:>13.2e}  sample {column.row_sample!r}, position "
            f"{column.row_position}"
            for column in self.columns
        ]
        return shown

    def problems(self) -> list[tuple[str, str, int | None, str]]:
        """Where a bound is exceeded: column, sample, position (None for a whole sample), and what was found."""
        found: list[tuple[str, str, int | None, str]] = []
        for column in self.columns:
            if not column.row <= self.bound.row:
                text = f"the row differs by {column.row:.3g} when captured again; allowed is {self.bound.row:g}"
                found.append((column.column, column.row_sample, column.row_position, text))
            if not column.typical <= self.bound.typical:
                text = (
                    f"half of the rows differ by {column.typical:.3g} or more when captured again; allowed is "
                    f"{self.bound.typical:g}"
                )
                found.append((column.column, column.typical_sample, None, text))
        return found


def bound_of(stored: str, computed: str) -> Bound:
    """The bound for states stored in one dtype and computed in another: that of the coarser one."""
    return BOUNDS[max(stored, computed, key=_COARSENESS.index)]


def compare(first: Captured, second: Captured, pairs: Sequence[tuple[int, int]], bound: Bound) -> Comparison:
    """Compare samples of two datasets.

    Args:
        first, second: datasets with the same columns.
        pairs: the index of a sample in the first, and of the same tokens in the second; at least one.
        bound: what is allowed; kept with the outcome.

    Raises:
        CorruptionError: a sample cannot be read, or two of a pair are not of the same tokens.
    """
    columns = tuple(ColumnDifference(name) for name in first.columns)
    tokens = 0
    for mine, theirs in pairs:
        one, other = first[mine], second[theirs]
        if not torch.equal(one["input_ids"], other["input_ids"]):
            raise CorruptionError(f"sample {one['id']!r}: the tokens captured again are others; please report it")
        tokens += len(one["input_ids"])
        for column, a, b in zip(columns, one["hidden_states"], other["hidden_states"], strict=True):
            _take(column, one["id"], row_differences(a, b))
    return Comparison(len(pairs), tokens, bound, columns)


def row_differences(first: Tensor, second: Tensor) -> Tensor:
    """``||first - second|| / ||first||`` of each row.

    Args:
        first, second: ``[S, H]``, of any floating dtype.

    Returns:
        float64 ``[S]``; infinity where it cannot be said, because of a NaN or a zero row.
    """
    a, b = first.double(), second.double()
    differences: Tensor = (a - b).norm(dim=-1) / a.norm(dim=-1)
    return differences.nan_to_num(nan=float("inf"), posinf=float("inf"))


def _take(column: ColumnDifference, sample: str, differences: Tensor) -> None:
    worst = int(differences.argmax())
    if float(differences[worst]) >= column.row:
        column.row, column.row_sample, column.row_position = float(differences[worst]), sample, worst
    median = float(differences.median())
    if median >= column.typical:
        column.typical, column.typical_sample = median, sample


def spread(count: int, wanted: int) -> list[int]:
    """No more than ``wanted`` of the numbers from 0 to ``count - 1``, spread evenly."""
    taken = min(count, wanted)
    return [number * count // taken for number in range(taken)]
