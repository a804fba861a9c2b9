"""Stages put together: by the same rule for readers, for the driver, and for the check."""

import itertools

import pytest

from sglang_hs_capture.store.schema import Extent, Media, SampleRecord
from sglang_hs_capture.store.stages import StageJoin

COLUMNS = ("a", "b", "c", "d")


def sample(rid: str = "r", media: Media | None = None) -> SampleRecord:
    return SampleRecord(rid, 3, (Extent(0, 0, 3),), 7, "5e55", media)


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        (("abcd",), 1),
        (("ab", "cd"), 1),
        (("ab", "ab"), 0),
        (("ab", "ab", "cd"), 1),
        (("ab", "ab", "cd", "cd"), 2),
        (("ab", "abcd"), 1),
        # Begun by a pipeline of two stages, and captured by one of three.
        (("ab", "a", "bc", "d"), 1),
        (("ab", "bc"), 0),
    ],
)
def test_a_sample_is_whole_if_every_column_is_there_in_whatever_order(parts, whole):
    for order in itertools.permutations(parts):
        join: StageJoin[str] = StageJoin(COLUMNS)
        ends = [joined for part in order if (joined := join.add(sample(), tuple(part), part)).whole]
        assert len(ends) == whole, order
        for joined in ends:
            assert {column for part in joined.parts for column in part} == set(COLUMNS)


def test_only_what_agrees_in_everything_is_put_together():
    join: StageJoin[str] = StageJoin(COLUMNS)
    media = Media(((1, 1),), 99, 5)
    for other in (sample(), sample(media=media), sample("s")):
        assert join.add(other, ("a", "b"), "").missing == {"c", "d"}
    assert join.add(sample(media=media), ("c", "d"), "").whole


def test_what_is_whole_is_not_kept():
    join: StageJoin[str] = StageJoin(COLUMNS)
    for number in range(10):
        join.add(sample(f"r{number}"), ("a", "b"), "")
        join.add(sample(f"r{number}"), ("c", "d"), "")
    assert not join._unfinished
