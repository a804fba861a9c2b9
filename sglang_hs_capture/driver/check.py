"""What can be refused before an engine is started, in a second instead of after the model's weights are loaded."""

from dataclasses import replace
from pathlib import Path

from sglang_hs_capture.config import CaptureConfig
from sglang_hs_capture.errors import ConfigError, DiskFullError
from sglang_hs_capture.layers import make_columns, resolve_boundaries
from sglang_hs_capture.model_config import CAPTURE_CLASSES, ModelConfig, is_hub_id, resolve_model_config
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.identity import DATASET_FILE, read_info, require_same


def find_model(model: str) -> ModelConfig | None:
    """Read the model's config; None for a hub id that is not downloaded yet, which SGLang will resolve.

    Raises:
        ConfigError: there is no such model, or its architecture is not supported.
    """
    try:
        config = resolve_model_config(model)
    except ConfigError:
        if is_hub_id(model):
            return None
        raise
    if config.architecture not in CAPTURE_CLASSES:
        raise ConfigError(f"model: {model} is a {config.architecture}; supported are {', '.join(CAPTURE_CLASSES)}")
    return config


def make_output(output: Path) -> None:
    """Make the dataset's directory where it is missing.

    Raises:
        StoreError: the file system refuses.
    """
    with fs.io_errors(output, "create the dataset"):
        fs.make_dir(output)


def check_output(output: Path, model: ModelConfig | None, capture: CaptureConfig) -> None:
    """Check the output directory against what is about to be captured.

    Raises:
        ConfigError: the layers are not the model's.
        DatasetMismatchError: the directory holds another dataset.
        DiskFullError: there is less room than the floor.
    """
    if model is not None:
        resolve_boundaries(capture.layers, model.num_layers)
    if (output / DATASET_FILE).exists():
        _check_dataset(output, model, capture)
    free = fs.free_bytes(output)
    if free < capture.min_free_bytes:
        raise DiskFullError(
            f"{output}: {free / 1e9:.1f} GB are free, less than the floor of {capture.min_free_bytes / 1e9:.1f} GB "
            "(--min-free-gb); free some space or choose another --output"
        )


def _check_dataset(output: Path, model: ModelConfig | None, capture: CaptureConfig) -> None:
    there = read_info(output)
    num_layers = there.num_layers if model is None else model.num_layers
    boundaries = resolve_boundaries(capture.layers, num_layers)
    now = replace(
        there,
        boundaries=boundaries,
        columns=tuple(column.name for column in make_columns(boundaries, capture.final)),
        dtype=capture.dtype,
    )
    if model is not None:
        now = replace(now, num_layers=num_layers, hidden_size=model.hidden_size, config_hash=model.config_hash)
    require_same(output, there, now)
