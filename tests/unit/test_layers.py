"""The layer convention: presets, refusals, and conversions to others' ids."""

import itertools

import pytest

from sglang_hs_capture import layers
from sglang_hs_capture.errors import ConfigError
from sglang_hs_capture.layers import Final


def test_presets_for_61_layers_are_the_documented_ones():
    assert layers.resolve_boundaries("eagle3", 61) == (3, 31, 59)
    assert layers.resolve_boundaries("sglang", 61) == (2, 30, 58)


def test_an_explicit_list_is_taken_as_boundaries():
    assert layers.resolve_boundaries([0, 60], 61) == (0, 60)


@pytest.mark.parametrize(
    ("given", "num_layers", "message"),
    [
        ([61], 61, "outside the model"),
        ([-1, 3], 61, "outside the model"),
        ([3, 3], 61, "repeated"),
        ([31, 3], 61, "out of order"),
        ([], 61, "at least one"),
        ("eagle3", 4, "out of order|repeated"),
        ("eagle4", 61, "expected one of eagle3, sglang"),
    ],
)
def test_what_cannot_be_captured_is_refused(given, num_layers, message):
    with pytest.raises(ConfigError, match=message):
        layers.resolve_boundaries(given, num_layers)


def test_the_command_line_form():
    assert layers.parse_layers("eagle3") == "eagle3"
    assert layers.parse_layers("3,31,59") == [3, 31, 59]
    with pytest.raises(ConfigError, match="3,31,59; got '3;31'"):
        layers.parse_layers("3;31")


def test_columns_name_each_state_once():
    names = [c.name for c in layers.make_columns((3, 31), Final.BOTH)]
    assert names == ["boundary:3", "boundary:31", "final:pre_norm", "final:post_norm"]
    assert [c.name for c in layers.make_columns((3,), Final.PRE_NORM)] == ["boundary:3", "final:pre_norm"]


def test_ids_in_each_convention():
    assert layers.draft_ids((3, 31, 59)) == {
        "boundary": [3, 31, 59],
        "sglang": [3, 31, 59],
        "output_of_layer": [2, 30, 58],
    }


def test_boundaries_that_a_convention_cannot_name_are_left_out_or_refused():
    assert layers.draft_ids((0, 5)) == {"boundary": [0, 5], "sglang": [0, 5]}
    assert layers.draft_ids((1, 5)) == {"boundary": [1, 5], "output_of_layer": [0, 4]}
    with pytest.raises(ConfigError, match="embeddings"):
        layers.output_of_layer_ids([0, 5])
    with pytest.raises(ConfigError, match="starts with 1"):
        layers.sglang_draft_ids([1, 5])


@pytest.mark.parametrize("bounds", [(0, 61), (0, 31, 61), (0, 3, 4, 31, 32, 59, 61), (0, 16, 31, 46, 61)])
def test_stages_share_the_columns_among_them_in_order(bounds):
    columns = layers.make_columns((0, 3, 31, 59), Final.BOTH)
    stages = [layers.stage_columns(columns, range(a, b), 61) for a, b in itertools.pairwise(bounds)]
    assert tuple(column for stage in stages for column in stage) == columns
    assert [c.name for c in stages[-1]][-2:] == ["final:pre_norm", "final:post_norm"]
    for (a, b), stage in zip(itertools.pairwise(bounds), stages, strict=True):
        assert all(a <= column.boundary < b for column in stage if column.boundary is not None)
