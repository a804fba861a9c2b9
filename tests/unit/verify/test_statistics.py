"""Numbers of rows, histograms, extremes, and the charts drawn from them."""

import re

import numpy as np
import pytest
import torch

from sglang_hs_capture.store.elements import to_float32
from sglang_hs_capture.verify import statistics as module
from sglang_hs_capture.verify.report import Axis, histogram_svg, position_svg
from sglang_hs_capture.verify.statistics import (
    BINS,
    EXTREMES_KEPT,
    POSITION_BUCKETS,
    Statistics,
    bin_edges,
    bins_of,
    bucket_start,
    equal_pairs,
    histogram_quantiles,
    position_buckets,
    row_numbers,
)

COLUMNS = ("boundary:1", "final:pre_norm")


def as_bytes(states: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(states.astype("<f4")).reshape(len(states), -1).view(np.uint8)


def test_elements_are_exact():
    values = np.array([0.0, -0.0, 1.0, -2.5, 3.0e38, 1e-40, np.inf], np.float32)
    upper = (values.view(np.uint32) >> 16).astype("<u2")
    expected = (upper.astype(np.uint32) << 16).view(np.float32)
    assert to_float32(upper.view(np.uint8), "bfloat16").tolist() == expected.tolist()
    half = np.array([1.5, -65504.0, 6e-8], np.float16)
    assert to_float32(half.view(np.uint8), "float16").tolist() == half.astype(np.float32).tolist()
    assert to_float32(values.view(np.uint8), "float32").tolist() == values.tolist()
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(to_float32(codes.numpy(), "float8_e4m3"), theirs, equal_nan=True)
    with pytest.raises(ValueError, match="got 'float8_e4m3fn'"):
        to_float32(values.view(np.uint8), "float8_e4m3fn")


def test_each_row_is_looked_at():
    states = np.random.default_rng(0).normal(size=(6, 2, 8))
    states[1, 0, 3] = np.nan
    states[2, 1, 0] = -np.inf
    states[3, 0] = 0
    states[4, 1] = -2.5
    numbers = row_numbers(as_bytes(states), 2, "float32")
    assert np.argwhere(~numbers.finite).tolist() == [[1, 0], [2, 1]]
    assert np.argwhere(numbers.zero).tolist() == [[3, 0]]
    assert np.argwhere(numbers.constant).tolist() == [[4, 1]]
    usable = numbers.finite
    assert numbers.norm[usable] == pytest.approx(np.linalg.norm(states, axis=-1)[usable], rel=1e-6)
    assert numbers.largest[usable] == pytest.approx(np.abs(states).max(axis=-1)[usable], rel=1e-6)


def test_one_element_is_not_called_constant():
    assert not row_numbers(as_bytes(np.ones((3, 2, 1))), 2, "float32").constant.any()


def test_bins_hold_what_their_edges_say():
    values = np.array([1e-20, 0.3, 1.0, 1.05, 7.7, 1e20], np.float32)
    edges, bins = bin_edges(), bins_of(values)
    for value, number in zip(values[1:-1], bins[1:-1], strict=True):
        assert edges[number] <= value * (1 + 1e-6)
        assert value < edges[number + 1] * (1 + 1e-6)
    assert (bins[0], bins[-1]) == (0, BINS - 1)


def test_buckets_begin_where_they_say():
    positions = np.arange(100_000)
    buckets = position_buckets(positions)
    assert buckets[:5].tolist() == [0, 1, 3, 4, 5]
    assert (np.diff(buckets) >= 0).all()
    for bucket in set(buckets.tolist()):
        assert positions[buckets == bucket][0] == bucket_start(bucket)
    assert position_buckets(np.array([-1, 2**60])).tolist() == [0, POSITION_BUCKETS - 1]


def test_quantiles_are_those_of_the_values():
    values = np.random.default_rng(0).lognormal(2, 1, 20_000).astype(np.float32)
    counts = np.bincount(bins_of(values), minlength=BINS)
    for share, found in zip((0.01, 0.5, 0.99), histogram_quantiles(counts, (0.01, 0.5, 0.99)), strict=True):
        assert found == pytest.approx(np.quantile(values, share), rel=0.03)
    assert np.isnan(histogram_quantiles(np.zeros(BINS, np.int64), [0.5])).all()


@pytest.mark.parametrize("pieces", [1, 3, 100])
def test_pieces_add_up(pieces):
    generator = np.random.default_rng(0)
    states = generator.normal(size=(300, 2, 8)) * generator.lognormal(size=(300, 1, 1))
    positions = np.arange(300)
    whole = Statistics(COLUMNS)
    for start in range(0, 300, 300 // pieces):
        some = slice(start, start + 300 // pieces)
        part = Statistics(COLUMNS)
        part.add(COLUMNS, row_numbers(as_bytes(states[some]), 2, "float32"), positions[some], "dp0-pp0", 7, start)
        whole.merge(part)
    norms = np.linalg.norm(states, axis=-1)
    assert whole.rows.tolist() == [300, 300]
    assert whole.norms.sum() == whole.largest.sum() == 600
    for column in range(2):
        order = np.argsort(norms[:, column])
        assert [e.place.row for e in whole.lowest[column]] == order[:EXTREMES_KEPT].tolist()
        assert [e.place.row for e in whole.highest[column]] == order[::-1][:EXTREMES_KEPT].tolist()
        assert whole.highest[column][0].place.position == order[-1]
        assert whole.quantiles(column, [0.5]) == pytest.approx([np.median(norms[:, column])], rel=0.05)


def test_outliers_are_counted_beyond_those_kept():
    states = np.ones((200, 2, 8))
    states[:50, 1] *= 4096
    states[50, 1] /= 4096
    numbers = Statistics(COLUMNS)
    numbers.add(COLUMNS, row_numbers(as_bytes(states), 2, "float32"), np.arange(200), "dp0-pp0", 0, 0)
    assert numbers.outliers(0, 1024, 1 / 1024) == (0, [])
    count, far = numbers.outliers(1, 1024, 1 / 1024)
    assert count == 51
    assert len(far) == EXTREMES_KEPT + 1
    assert far[-1].place.row == 50


def test_equal_columns_are_found_row_by_row():
    states = np.random.default_rng(0).normal(size=(9, 3, 8)).astype(np.float32)
    states[4, 2] = states[4, 0]
    states[6, 1] = -states[6, 0]  # the same norm and largest value, other bytes
    data = as_bytes(states)
    found = list(equal_pairs(data, ("a", "b", "c"), row_numbers(data, 3, "float32")))
    assert [(pair, rows.tolist()) for pair, rows in found] == [(("a", "c"), [4])]


@pytest.mark.parametrize(("low", "high"), [(20, 30), (18.6, 36.9), (0.5, 7), (1, 90), (3e-4, 5e3), (1e-12, 1e12)])
def test_a_logarithmic_axis_has_some_ticks(low, high):
    axis = Axis(low, high, 50, 400)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 12
    assert all(low <= tick <= high for tick in ticks)
    assert axis.place(low) == 50
    assert axis.place(high) == pytest.approx(400)
    assert axis.place((low * high) ** 0.5) == pytest.approx(225)


@pytest.mark.parametrize("high", [1.05, 7, 99, 123456])
def test_a_linear_axis_has_some_ticks(high):
    ticks = Axis(0, high, 176, 10, logarithmic=False).ticks()
    assert 2 <= len(ticks) <= 7
    assert ticks[0] == 0


def test_the_bars_of_a_histogram_are_as_high_as_its_counts():
    counts = np.zeros(BINS, np.int64)
    counts[800:803] = [10, 40, 20]
    svg = histogram_svg(counts)
    heights = [float(height) for height in re.findall(r'<rect [^>]*height="([\d.]+)"', svg)]
    assert heights[1] == pytest.approx(4 * heights[0], abs=0.3)
    assert heights[1] == pytest.approx(2 * heights[2], abs=0.3)
    assert ": 40 rows" in svg
    assert "no rows" in histogram_svg(np.zeros(BINS, np.int64))


def test_norms_by_position_are_drawn_where_they_are():
    norms = np.zeros((POSITION_BUCKETS, BINS), np.int64)
    for bucket, norm in ((0, 100.0), (1, 10.0), (9, 1.0)):
        norms[bucket, bins_of(np.array([norm], np.float32))] = 5
    svg = position_svg(norms)
    circles = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg)]
    assert len(circles) == 3
    (x0, y0), (x1, y1), (x2, y2) = circles
    assert x0 < x1 < x2
    assert y0 < y1 < y2
    assert y1 - y0 == pytest.approx(y2 - y1, abs=1)
    assert "positions from 16: median 1" in svg
    assert "no rows" in position_svg(np.zeros((POSITION_BUCKETS, BINS), np.int64))


def test_bins_are_as_wide_as_the_pages_say():
    assert pytest.approx(1.04, abs=0.005) == 2 ** (1 / module.BINS_PER_OCTAVE)
