"""What is refused before an engine is started."""

import json
from dataclasses import replace

import pytest
from fake_server import INFO

from sglang_hs_capture.config import CaptureConfig
from sglang_hs_capture.driver.check import check_output, find_model
from sglang_hs_capture.driver.start import Wanted
from sglang_hs_capture.errors import ConfigError, DatasetMismatchError, DiskFullError
from sglang_hs_capture.layers import Final
from sglang_hs_capture.model_config import load_model_config
from sglang_hs_capture.store.identity import check_or_write_info

TEXT = {"num_hidden_layers": 4, "hidden_size": 2, "vocab_size": 32, "max_position_embeddings": 64}


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"architectures": ["DeepseekV3ForCausalLM"], **TEXT}))
    return load_model_config(directory)


@pytest.fixture
def dataset(tmp_path, model):
    directory = tmp_path / "dataset"
    check_or_write_info(directory, replace(INFO, config_hash=model.config_hash))
    return directory


def capture(directory, **changes):
    settings = {"layers": (1,), "dtype": "float32", "min_free_bytes": 0, **changes}
    return CaptureConfig(output_dir=str(directory), **settings)


def test_the_same_capture_goes_on(dataset, model):
    check_output(dataset, model, capture(dataset))
    check_output(dataset, None, capture(dataset))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": (2,)}, r"boundaries: \[1\] there, \[2\] now"),
        ({"dtype": "bfloat16"}, "dtype: float32 there, bfloat16 now"),
        ({"final": Final.BOTH}, "columns"),
    ],
)
def test_another_capture_into_the_same_dataset_is_refused(dataset, model, changes, said):
    for known in (model, None):
        with pytest.raises(DatasetMismatchError, match=said) as caught:
            check_output(dataset, known, capture(dataset, **changes))
        assert "choose another --output" in str(caught.value)


def test_another_model_into_the_same_dataset_is_refused(dataset, model):
    with pytest.raises(DatasetMismatchError, match="config_hash"):
        check_output(dataset, replace(model, config_hash="1" * 64), capture(dataset))


def test_layers_of_another_model_are_refused(tmp_path, model):
    with pytest.raises(ConfigError, match="lies outside the model"):
        check_output(tmp_path, model, capture(tmp_path, layers=(3, 31, 59)))


def test_too_little_room_is_told(tmp_path, model):
    with pytest.raises(DiskFullError, match="--min-free-gb"):
        check_output(tmp_path, model, capture(tmp_path, min_free_bytes=2**60))


def test_models_are_found_or_refused(tmp_path, model):
    assert find_model(str(model.path)).num_layers == 4
    assert find_model("owner/not-downloaded") is None
    with pytest.raises(ConfigError, match="is not a directory"):
        find_model(str(tmp_path / "none"))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **TEXT}))
    with pytest.raises(ConfigError, match="is a LlamaForCausalLM; supported are DeepseekV2ForCausalLM"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (Wanted(), None),
        (Wanted("1", Final.PRE_NORM, "float32"), None),
        (Wanted("2"), "boundaries"),
        (Wanted(final=Final.POST_NORM), "columns"),
        (Wanted(dtype="float16"), "dtype"),
    ],
)
def test_what_a_running_server_captures_is_compared_with_what_was_asked_for(wanted, said):
    differences = wanted.differences(INFO, None)
    assert (said is None) == (not differences)
    assert said is None or said in "; ".join(differences)


def test_a_running_servers_model_is_compared(model):
    assert "config_hash" in Wanted().differences(INFO, model)[0]
