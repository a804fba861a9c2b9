"""A model directory's ``config.json``, read without ``transformers``: the sizes and the hash that identify a model."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hs_capture.config import CONFIG_KEY
from sglang_hs_capture.errors import ConfigError

# Upstream architecture -> the name under which `hs-capture prepare` enters the capture class into a config.json.
CAPTURE_CLASSES = {
    "DeepseekV2ForCausalLM": "DeepseekV2Capture",
    "DeepseekV3ForCausalLM": "DeepseekV3Capture",
    "DeepseekV32ForCausalLM": "DeepseekV32Capture",
    "KimiK25ForConditionalGeneration": "KimiK25Capture",
}

# These say how a model is loaded or where it lies, not what it computes: a prepared or moved copy is the same model.
NOT_HASHED = frozenset({CONFIG_KEY, "architectures", "_name_or_path", "transformers_version"})

# The keys SGLang reads a context length from, in its order.
CONTEXT_LENGTH_KEYS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class ModelConfig:
    """What the project needs to know of a model.

    Attributes:
        path: the model's directory.
        raw: the whole ``config.json``.
        architectures: SGLang's class names, in the order in which it tries them.
        num_layers: number of decoder layers.
        hidden_size: elements of one state.
        vocab_size: number of token ids.
        context_length: most tokens of a prompt and its answer, as SGLang derives it.
        config_hash: hex digest that equals that of every copy of the same model.
        media_token: the token id that stands for an image in a prompt; None for a model that takes no images.
    """

    path: Path
    raw: Mapping[str, Any]
    architectures: tuple[str, ...]
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    config_hash: str
    media_token: int | None = None

    @property
    def architecture(self) -> str:
        """The upstream architecture: in a prepared config.json it stands behind the capture class's name."""
        return next((a for a in self.architectures if a in CAPTURE_CLASSES), self.architectures[0])


def config_hash(raw: Mapping[str, Any]) -> str:
    """Hash a ``config.json`` over what the model computes: 64 hex digits, independent of key order and of its path."""
    kept = {key: value for key, value in raw.items() if key not in NOT_HASHED}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def is_hub_id(model: str) -> bool:
    """Whether ``model`` can only be the name of a model on a hub: ``owner/name``, and no such path exists here."""
    owner, slash, name = model.partition("/")
    plain = bool(owner and slash and name) and "/" not in name and not owner.startswith((".", "~"))
    return plain and not Path(model).exists()


def load_model_config(model: str | Path) -> ModelConfig:
    """Read ``config.json`` of a model directory.

    Raises:
        ConfigError: the directory or the file is missing, or the file lacks a size.
    """
    directory = Path(model).expanduser()
    file = directory / "config.json"
    if not directory.is_dir():
        raise ConfigError(
            f"model: {directory} is not a directory here; expected one with a config.json (run, serve and prepare-data "
            "also take a hub id, OWNER/NAME)"
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"model: cannot read {file}: {error.strerror}; is {directory} a model's directory?") from None
    except ValueError as error:
        raise ConfigError(f"model: {file} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"model: {file} should hold a JSON object; it holds {type(raw).__name__}")
    return _parse(directory, file, raw)


def resolve_model_config(model: str) -> ModelConfig:
    """``load_model_config``, also for a hub id whose files have been downloaded to the hub's cache here.

    Raises:
        ConfigError: as there, or the hub id is not in the cache.
    """
    if not is_hub_id(model):
        return load_model_config(model)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    if not isinstance(found, str):
        raise ConfigError(
            f"model: {model} is neither a directory here nor a hub id with a config.json in the hub's cache"
        )
    return load_model_config(Path(found).parent)


def _parse(directory: Path, file: Path, raw: dict[str, Any]) -> ModelConfig:
    text = raw.get("text_config")
    text = text if isinstance(text, dict) else raw
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not architectures or not all(isinstance(a, str) for a in architectures):
        raise ConfigError(f"model: {file}: expected a list of class names under 'architectures'; got {architectures!r}")
    return ModelConfig(
        path=directory,
        raw=raw,
        architectures=tuple(architectures),
        num_layers=_size(file, text, "num_hidden_layers"),
        hidden_size=_size(file, text, "hidden_size"),
        vocab_size=_size(file, text, "vocab_size"),
        context_length=_context_length(text),
        config_hash=config_hash(raw),
        media_token=_token(file, raw, "media_placeholder_token_id"),
    )


def _size(file: Path, text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"model: {file}: expected a positive number under {key!r}; got {value!r}")
    return value


def _token(file: Path, raw: Mapping[str, Any], key: str) -> int | None:
    value = raw.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ConfigError(f"model: {file}: expected a token id under {key!r}; got {value!r}")
    return value


def _context_length(text: Mapping[str, Any]) -> int:
    """SGLang's own rule: a rope factor stretches the context unless the stretched length is already the one given."""
    length = next((int(text[key]) for key in CONTEXT_LENGTH_KEYS if text.get(key) is not None), 2048)
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3":
        return length
    return int(length * (scaling.get("factor") or 1))
