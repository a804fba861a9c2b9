"""What a model refuses before anything of the engine is looked at."""

from types import SimpleNamespace

import pytest

from sglang_hs_capture.capture.attach import attach
from sglang_hs_capture.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"output_dir": "/data", "max_open_shards": 1000},
            "hs_capture.max_open_shards: Input should be less than or equal to 64 (got 1000)",
        ),
        ({"output_dir": "data"}, "hs_capture.output_dir: expected an absolute path, got 'data'"),
    ],
)
def test_wrong_settings_are_one_line_of_the_log(caplog, settings, problem):
    with pytest.raises(ConfigError):
        attach(None, None, SimpleNamespace(hs_capture=settings))
    assert [record.getMessage() for record in caplog.records] == [f"hs_capture: refused to start: {problem}"]


def test_a_model_without_settings_captures_nothing_and_says_so(caplog):
    assert attach(None, None, SimpleNamespace()) is None
    assert "has no 'hs_capture' object, so nothing is captured" in caplog.text
