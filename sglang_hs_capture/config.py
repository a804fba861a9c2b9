"""Capture settings: what crosses from the launching process to the model, as its config's ``hs_capture`` object."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from sglang_hs_capture.errors import ConfigError
from sglang_hs_capture.layers import PRESETS, Final

CONFIG_KEY = "hs_capture"
DEFAULT_RID_PREFIX = "hs-"
GIB = 2**30


def _known_layers(layers: str | tuple[int, ...]) -> str | tuple[int, ...]:
    if isinstance(layers, str) and layers not in PRESETS:
        raise ValueError(f"expected one of {', '.join(PRESETS)} or a list of boundaries")
    return layers


def _problem(found: Mapping[str, Any]) -> str:
    name = ".".join(map(str, found["loc"]))
    expected = f"expected one of {', '.join(CaptureConfig.model_fields)}"
    message = f"there is no such setting, {expected}" if found["type"] == "extra_forbidden" else found["msg"]
    return f"{CONFIG_KEY}.{name}: {message} (got {found['input']!r})"


class CaptureConfig(BaseModel):
    """Settings of one capture.

    Attributes:
        output_dir: the dataset's directory; an absolute path.
        layers: a preset or a list of boundaries (see ``layers.py``).
        final: the form of the last layer's output.
        dtype: the dtype on disk; with ``float8_e4m3`` each state of a row has a scale of its own.
        rid_prefix: only requests whose id starts with this are captured.
        ring_bytes: host memory for rows on their way to disk.
        shard_bytes: a shard is finished when it reaches this size.
        max_open_shards: shards that are written side by side at most; the next is begun when the others do not keep up.
        min_free_bytes: capture stops when the file system has less room than this.
        commit_interval_s: rows are made durable, and samples acknowledged, at least this often.
        replica: added to the data-parallel rank in the writer's name; servers that capture into one dataset at the same
            time have different ones.
        run_id: set by ``hs-capture run`` to recognise its own session.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    output_dir: Annotated[str, Field(min_length=1)]
    layers: Annotated[str | tuple[int, ...], AfterValidator(_known_layers)] = "eagle3"
    final: Final = Final.PRE_NORM
    dtype: Literal["bfloat16", "float16", "float32", "float8_e4m3"] = "bfloat16"
    rid_prefix: Annotated[str, Field(min_length=1)] = DEFAULT_RID_PREFIX
    ring_bytes: Annotated[int, Field(strict=True, ge=2**20)] = 4 * GIB
    shard_bytes: Annotated[int, Field(strict=True, ge=2**16)] = 4 * GIB
    max_open_shards: Annotated[int, Field(strict=True, ge=1, le=64)] = 4
    min_free_bytes: Annotated[int, Field(strict=True, ge=0)] = 2 * GIB
    commit_interval_s: Annotated[float, Field(gt=0, le=60)] = 0.2
    replica: Annotated[int, Field(strict=True, ge=0, le=9999)] = 0
    run_id: str = ""

    @classmethod
    def from_mapping(cls, raw: Any) -> "CaptureConfig":
        """Check the ``hs_capture`` object of a model's config.

        Raises:
            ConfigError: naming each field that is missing, unknown or wrong.
        """
        if not isinstance(raw, Mapping):
            raise ConfigError(f'{CONFIG_KEY}: expected an object such as {{"output_dir": "/data/states"}}; got {raw!r}')
        try:
            return cls.model_validate(dict(raw))
        except ValidationError as error:
            raise ConfigError("; ".join(_problem(found) for found in error.errors())) from None

    def to_mapping(self) -> dict[str, Any]:
        """The JSON object that ``from_mapping`` reads back."""
        return self.model_dump(mode="json")
