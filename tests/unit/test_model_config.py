"""Reading a model's config.json."""

import json
import shutil
from pathlib import Path

import pytest

from sglang_hs_capture.errors import ConfigError
from sglang_hs_capture.model_config import config_hash, is_hub_id, load_model_config, resolve_model_config

TEXT = {"num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840, "max_position_embeddings": 262144}
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": TEXT,
    "vision_config": {"hidden_size": 1152},
}


def write(directory: Path, config: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_sizes_come_from_the_text_config_of_a_wrapper(tmp_path):
    config = load_model_config(write(tmp_path, KIMI))
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (61, 7168, 163840)
    assert config.context_length == 262144
    assert config.architecture == "KimiK25ForConditionalGeneration"


def test_a_prepared_and_moved_copy_is_the_same_model(tmp_path):
    original = load_model_config(write(tmp_path / "a", KIMI))
    edited = KIMI | {
        "architectures": ["KimiK25Capture", "KimiK25ForConditionalGeneration"],
        "hs_capture": {"output_dir": "/x"},
        "_name_or_path": "elsewhere",
        "transformers_version": "5.0",
    }
    prepared = load_model_config(write(tmp_path / "b", dict(reversed(edited.items()))))
    assert prepared.config_hash == original.config_hash
    assert prepared.architecture == "KimiK25ForConditionalGeneration"


def test_another_size_is_another_model():
    assert config_hash(KIMI) != config_hash(KIMI | {"text_config": TEXT | {"rope_theta": 1.0}})


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "yarn", "factor": 32, "original_max_position_embeddings": 4096}, 4096),
        ({"type": "linear", "factor": 2.0}, 8192),
        ({"rope_type": "llama3", "factor": 8}, 4096),
        (None, 4096),
    ],
)
def test_context_length_follows_the_rope_scaling(tmp_path, scaling, expected):
    text = TEXT | {"max_position_embeddings": 4096, "rope_scaling": scaling}
    config = load_model_config(write(tmp_path, {"architectures": ["DeepseekV3ForCausalLM"], **text}))
    assert config.context_length == expected


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ([], "should hold a JSON object"),
        ({"architectures": []}, "'architectures'"),
        ({"architectures": ["A"], "num_hidden_layers": 2, "hidden_size": "7", "vocab_size": 1}, "'hidden_size'"),
        ({"architectures": ["A"], "hidden_size": 7, "vocab_size": 1}, "'num_hidden_layers'"),
    ],
)
def test_a_config_that_cannot_be_used_is_named(tmp_path, config, said):
    with pytest.raises(ConfigError, match=said) as caught:
        load_model_config(write(tmp_path, config))
    assert str(tmp_path / "config.json") in str(caught.value)


def test_missing_model_missing_file_and_broken_json(tmp_path):
    with pytest.raises(ConfigError, match="is not a directory"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="cannot read"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_model_config(tmp_path)


def test_hub_ids_are_told_from_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("moonshotai/Kimi-K2.5")
    assert not is_hub_id("/models/kimi")
    assert not is_hub_id("./models/kimi")
    assert not is_hub_id("kimi")
    assert not is_hub_id("a/b/c")
    shutil.copytree(write(tmp_path / "x", KIMI), tmp_path / "models" / "kimi")
    assert not is_hub_id("models/kimi")


def test_a_hub_id_is_found_in_the_cache(tmp_path, monkeypatch):
    import huggingface_hub

    snapshot = write(tmp_path / "snapshot", KIMI)
    cached = {"moonshotai/Kimi-K2.5": str(snapshot / "config.json")}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, name: cached.get(repo))
    assert resolve_model_config("moonshotai/Kimi-K2.5").num_layers == 61
    assert resolve_model_config(str(snapshot)).num_layers == 61
    with pytest.raises(ConfigError, match="neither a directory here nor a hub id"):
        resolve_model_config("moonshotai/Other")
