"""Samples that are too long, and samples without a token to train on."""

import numpy as np
import pytest

from sglang_hs_capture.data.images import Image
from sglang_hs_capture.data.limits import fitted, last_run
from sglang_hs_capture.data.preparation import LossOn, Overflow, Preparation
from sglang_hs_capture.data.records import Excluded, Exclusion, InputProblem, Sample
from sglang_hs_capture.data.samples import SamplePreparer


def sample(mask) -> Sample:
    return Sample("x", "f:1", np.arange(len(mask), dtype=np.int64), np.array(mask, dtype=np.uint8))


@pytest.mark.parametrize(
    ("overflow", "ids", "mask"),
    [
        (Overflow.TRUNCATE_RIGHT, [0, 1, 2], [0, 1, 0]),
        (Overflow.TRUNCATE_LEFT, [2, 3, 4], [0, 1, 1]),
    ],
)
def test_a_long_sample_is_cut_at_one_end(overflow, ids, mask):
    cut = fitted(sample([0, 1, 0, 1, 1]), Preparation(max_length=3, overflow=overflow))
    assert (cut.input_ids.tolist(), cut.loss_mask.tolist(), cut.cut) == (ids, mask, 2)
    assert (cut.id, cut.source, cut.loss_mask.dtype) == ("x", "f:1", np.uint8)


def test_a_long_sample_is_cut_at_its_end_unless_told_otherwise():
    assert fitted(sample([1, 1, 1]), Preparation(max_length=2)).input_ids.tolist() == [0, 1]


@pytest.mark.parametrize("overflow", Overflow)
def test_a_sample_of_the_greatest_length_is_kept(overflow):
    kept = fitted(sample([0, 1]), Preparation(max_length=2, overflow=overflow))
    assert (kept.input_ids.tolist(), kept.cut) == ([0, 1], 0)


def test_a_long_sample_is_dropped_or_bad_input():
    dropped = fitted(sample([1, 1]), Preparation(max_length=1, overflow=Overflow.DROP))
    assert dropped == Excluded("f:1", Exclusion.TOO_LONG, "x")
    problem = fitted(sample([1, 1]), Preparation(max_length=1, overflow=Overflow.BAD_INPUT))
    assert problem == InputProblem("f:1", "prompt of 2 tokens is longer than --max-length, 1", "x")


@pytest.mark.parametrize("overflow", Overflow)
def test_a_sample_without_loss_is_excluded_however_long(overflow):
    result = fitted(sample([0, 0, 0]), Preparation(max_length=2, overflow=overflow))
    assert result == Excluded("f:1", Exclusion.NO_LOSS, "x")


def test_a_sample_whose_loss_is_cut_off_is_excluded():
    left_out = Excluded("f:1", Exclusion.LOSS_CUT_OFF, "x")
    assert fitted(sample([0, 0, 1]), Preparation(max_length=2)) == left_out
    left = Preparation(max_length=2, overflow=Overflow.TRUNCATE_LEFT)
    assert fitted(sample([1, 0, 0]), left) == left_out


@pytest.mark.parametrize(
    ("mask", "kept"),
    [
        ([], []),
        ([0, 0], [0, 0]),
        ([1, 1], [1, 1]),
        ([1, 0, 1, 1, 0], [0, 0, 1, 1, 0]),
        ([1, 1, 0, 0, 1], [0, 0, 0, 0, 1]),
    ],
)
def test_the_last_run_of_a_mask(mask, kept):
    assert last_run(np.array(mask, dtype=np.uint8)).tolist() == kept


def test_rows_tokenised_before_are_limited_too():
    row = sample([1, 0, 1, 1])
    [last] = SamplePreparer(preparation=Preparation(loss_on=LossOn.LAST)).prepare(row)
    assert last.loss_mask.tolist() == [0, 0, 1, 1]
    [cut] = SamplePreparer(preparation=Preparation(max_length=3)).prepare(row)
    assert (cut.loss_mask.tolist(), cut.cut) == ([1, 0, 1], 1)
    assert row.loss_mask.tolist() == [1, 0, 1, 1]


IMAGE = Image("sha256:a", data=b"a", nbytes=1)


@pytest.mark.parametrize(
    ("ids", "overflow", "kept"),
    [
        ([9, 1, 2, 3], Overflow.TRUNCATE_RIGHT, [9, 1, 2]),
        ([1, 2, 9, 3], Overflow.TRUNCATE_LEFT, [2, 9, 3]),
        ([1, 2, 3, 9], Overflow.TRUNCATE_RIGHT, None),
        ([9, 1, 2, 3], Overflow.TRUNCATE_LEFT, None),
    ],
)
def test_no_image_is_cut_off(ids, overflow, kept):
    row = Sample("x", "f:1", np.array(ids), np.array([1] * 4, dtype=np.uint8), (IMAGE,))
    preparation = Preparation(max_length=3, overflow=overflow)
    [result] = SamplePreparer(preparation=preparation, media_token=9).prepare(row)
    if kept is None:
        assert result == Excluded("f:1", Exclusion.IMAGE_CUT_OFF, "x")
    else:
        assert (result.input_ids.tolist(), result.images, result.cut) == (kept, (IMAGE,), 1)
        assert result.loss_mask.tolist() == [int(token != 9) for token in kept]
