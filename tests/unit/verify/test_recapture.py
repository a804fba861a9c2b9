"""The comparison of two captures: differences, the places of the worst ones, and what is allowed."""

from typing import Any

import pytest
import torch

from sglang_hs_capture.errors import CorruptionError
from sglang_hs_capture.verify.recapture import BOUNDS, Bound, bound_of, compare, row_differences, spread

COLUMNS = ("boundary:1", "final:pre_norm")


class Samples:
    """A dataset in memory."""

    columns = COLUMNS

    def __init__(self, states: list[torch.Tensor]) -> None:
        self.states = states

    def __getitem__(self, index: int) -> dict[str, Any]:
        states = self.states[index]
        ids = torch.arange(len(states)) + 100 * len(states)
        return {"id": f"s{index}", "input_ids": ids, "hidden_states": list(states.unbind(1))}


@pytest.fixture
def states() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, 2, 16, generator=generator) for length in (4, 9, 1)]


def both(states: list[torch.Tensor]) -> tuple[Samples, Samples]:
    return Samples(states), Samples([state.clone() for state in states])


PAIRS = [(0, 0), (1, 1), (2, 2)]


def test_equal_captures_do_not_differ(states):
    found = compare(*both(states), PAIRS, BOUNDS["float32"])
    assert (found.samples, found.tokens) == (3, 14)
    assert [(column.row, column.typical) for column in found.columns] == [(0, 0), (0, 0)]
    assert found.problems() == []


def test_the_worst_row_is_named(states):
    first, second = both(states)
    second.states[1][6, 1] *= 1.25
    second.states[0][2, 1] *= 1.125
    found = compare(first, second, PAIRS, Bound(0.2, 0.01))
    assert found.columns[0].row == 0
    worst = found.columns[1]
    assert (worst.row, worst.row_sample, worst.row_position) == (pytest.approx(0.25), "s1", 6)
    ((column, sample, position, text),) = found.problems()
    assert (column, sample, position) == ("final:pre_norm", "s1", 6)
    assert "differs by 0.25" in text


def test_a_small_difference_of_every_row_is_found(states):
    first, second = both(states)
    second.states[1][:, 0] *= 1.125
    found = compare(first, second, PAIRS, Bound(0.5, 0.05))
    ((column, sample, position, text),) = found.problems()
    assert (column, sample, position) == ("boundary:1", "s1", None)
    assert "half of the rows differ by 0.125" in text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_differs(states, value):
    first, second = both(states)
    second.states[2][0, 0, 3] = value
    found = compare(first, second, PAIRS, BOUNDS["bfloat16"])
    assert {(column, sample) for column, sample, _, _ in found.problems()} == {("boundary:1", "s2")}


def test_a_zero_row_differs_from_one_that_is_not():
    assert row_differences(torch.zeros(1, 4), torch.ones(1, 4)).tolist() == [float("inf")]
    assert row_differences(torch.ones(1, 4), torch.zeros(1, 4)).tolist() == [1.0]


def test_other_tokens_are_no_comparison(states):
    with pytest.raises(CorruptionError, match="sample 's0': the tokens captured again are others"):
        compare(*both(states), [(0, 1)], BOUNDS["float32"])


def test_the_coarser_dtype_says_what_is_allowed():
    assert bound_of("float32", "bfloat16") == bound_of("bfloat16", "float32") == BOUNDS["bfloat16"]
    assert bound_of("float32", "float16") == BOUNDS["float16"]
    assert bound_of("float32", "float32") == BOUNDS["float32"]


def test_spread():
    assert spread(10, 4) == [0, 2, 5, 7]
    assert spread(2, 4) == [0, 1]
    assert spread(0, 4) == []
