"""``hs-capture prepare``: a model directory whose config.json asks for capture by itself."""

import json
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_hs_capture.cli import options
from sglang_hs_capture.cli.tell import tell
from sglang_hs_capture.config import CONFIG_KEY, CaptureConfig
from sglang_hs_capture.errors import ConfigError, StoreError
from sglang_hs_capture.layers import resolve_boundaries
from sglang_hs_capture.model_config import CAPTURE_CLASSES, ModelConfig, load_model_config

CONFIG_FILE = "config.json"


@options.with_options(capture=options.CaptureOptions)
def prepare(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The model's directory.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to make; it must not exist, or be empty.")],
    *,
    output: options.OutputOption,
    capture: options.CaptureOptions,
) -> None:
    """Make a directory of links to a model's files, with an edited config.json.

    SGLang then captures with no --json-model-override-args; the environment variable
    SGLANG_EXTERNAL_MODEL_PACKAGE=sglang_hs_capture.models is still needed.
    """
    prepare_model(model.expanduser(), out.expanduser(), capture.config(output, cpu=False))
    capture_class = CAPTURE_CLASSES[load_model_config(out).architecture]
    tell(f"{out} is ready: {CONFIG_FILE} names {capture_class} first.")
    typer.echo(
        f"Serve it with: SGLANG_EXTERNAL_MODEL_PACKAGE=sglang_hs_capture.models {shlex.quote(sys.executable)} -m "
        f"sglang.launch_server --model-path {shlex.quote(str(out))} --model-impl sglang --disable-prefill-cuda-graph"
    )
    typer.echo("On a machine without a GPU put SGLANG_PLATFORM=hs_capture_cpu before it, too.")


def prepare_model(model: Path, out: Path, capture: CaptureConfig) -> None:
    """Make the directory, all of it or nothing.

    Raises:
        ConfigError: the model is not supported, or the layers are not its own.
        StoreError: ``out`` exists and is not empty, or cannot be written.
    """
    config = load_model_config(model)
    edited = edit_config(config, capture)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StoreError(f"{out}: exists already and is not empty; name another directory, or remove it")
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
        try:
            for entry in sorted(model.absolute().iterdir()):
                if entry.name != CONFIG_FILE:
                    (building / entry.name).symlink_to(entry)
            (building / CONFIG_FILE).write_text(json.dumps(edited, indent=2) + "\n", encoding="utf-8")
            building.chmod(0o755)
            os.rename(building, out)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
    except OSError as error:
        raise StoreError(f"{out}: cannot be written: {error.strerror or error}") from error


def edit_config(config: ModelConfig, capture: CaptureConfig) -> dict[str, Any]:
    """The model's config.json with the capture class first, the original behind it, and the capture settings.

    SGLang picks the first class it knows, and recognises multi-head latent attention by the original's name.

    Raises:
        ConfigError: the model is not supported, or the layers are not its own.
    """
    if config.architecture not in CAPTURE_CLASSES:
        raise ConfigError(
            f"{config.path}: {config.architecture} is not supported; supported are {', '.join(CAPTURE_CLASSES)}"
        )
    resolve_boundaries(capture.layers, config.num_layers)
    return {
        **config.raw,
        "architectures": [CAPTURE_CLASSES[config.architecture], config.architecture],
        CONFIG_KEY: capture.to_mapping(),
    }
