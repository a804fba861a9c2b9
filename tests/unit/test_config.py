"""Capture settings: defaults, the way through JSON, and errors that name the field."""

import pytest

from sglang_hs_capture.config import CaptureConfig
from sglang_hs_capture.errors import ConfigError
from sglang_hs_capture.layers import Final


def test_defaults_are_the_documented_ones():
    config = CaptureConfig.from_mapping({"output_dir": "/data/states"})
    assert (config.layers, config.final, config.dtype, config.rid_prefix) == (
        "eagle3",
        Final.PRE_NORM,
        "bfloat16",
        "hs-",
    )


def test_settings_survive_json():
    config = CaptureConfig(output_dir="/x", layers=(3, 31), final=Final.BOTH, dtype="float16", run_id="r")
    assert CaptureConfig.from_mapping(config.to_mapping()) == config


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({}, "hs_capture.output_dir"),
        ({"output_dir": ""}, "hs_capture.output_dir"),
        (
            {"output_dir": "/x", "layer": [3]},
            "hs_capture.layer: there is no such setting, expected one of output_dir, ",
        ),
        ({"output_dir": "/x", "layers": "eagle"}, "hs_capture.layers"),
        ({"output_dir": "/x", "dtype": "int8"}, "hs_capture.dtype"),
        ({"output_dir": "/x", "final": "none"}, "hs_capture.final"),
        ({"output_dir": "/x", "rid_prefix": ""}, "hs_capture.rid_prefix"),
        ({"output_dir": "/x", "max_open_shards": 0}, "hs_capture.max_open_shards"),
        ({"output_dir": "/x", "max_open_shards": 65}, "hs_capture.max_open_shards"),
        ({"output_dir": "/x", "max_open_shards": True}, "hs_capture.max_open_shards"),
        ({"output_dir": "/x", "replica": "1"}, "hs_capture.replica"),
        ({"output_dir": "/x", "ring_bytes": 5}, "hs_capture.ring_bytes"),
        ([1], "expected an object"),
        ("/x", "expected an object"),
    ],
)
def test_what_is_wrong_is_named(raw, named):
    with pytest.raises(ConfigError, match=named):
        CaptureConfig.from_mapping(raw)
