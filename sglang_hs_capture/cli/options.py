"""Options that several commands share, and the capture settings made of them."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sglang_hs_capture.config import DEFAULT_RID_PREFIX, GIB, CaptureConfig
from sglang_hs_capture.driver.device import Device
from sglang_hs_capture.layers import Final, parse_layers

DEFAULT_LAYERS = "eagle3"
DEFAULT_RING_GB = 4.0
# On the CPU platform there is no device to run ahead of, and memory is what the model itself runs in.
CPU_RING_GB = 0.25


class Dtype(StrEnum):
    """The dtypes that states are stored in."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


ModelOption = Annotated[str, typer.Option(help="The model: a directory, or a hub id.")]
OutputOption = Annotated[Path, typer.Option(help="The dataset's directory; created, or gone on with.")]
LayersOption = Annotated[
    str | None,
    typer.Option(
        help="Boundaries to capture: a preset, eagle3 or sglang, or a list such as 3,31,59. "
        "Boundary b is the residual stream entering layer b.",
        show_default=DEFAULT_LAYERS,
    ),
]
FinalOption = Annotated[
    Final | None, typer.Option(help="The form of the final layer's output.", show_default=Final.PRE_NORM.value)
]
DtypeOption = Annotated[
    Dtype | None, typer.Option(help="The dtype that states are stored in.", show_default=Dtype.BFLOAT16.value)
]
RidPrefixOption = Annotated[str, typer.Option(help="Only requests whose id starts with this are captured.")]
MOST_GIB = 2.0**30
RingOption = Annotated[
    float | None,
    typer.Option(
        "--ring-gb",
        min=0.001,
        max=MOST_GIB,
        help="Host memory, in GiB, for rows on their way to disk.",
        show_default=f"{DEFAULT_RING_GB:g}; {CPU_RING_GB:g} on the CPU platform",
    ),
]
ShardOption = Annotated[float, typer.Option("--shard-gb", min=0.001, max=MOST_GIB, help="Size of a shard, in GiB.")]
FloorOption = Annotated[
    float,
    typer.Option(
        "--min-free-gb", min=0, max=MOST_GIB, help="Capture stops when less than this is free on disk, in GiB."
    ),
]
DeviceOption = Annotated[Device, typer.Option(help="Where the engine runs; auto takes a GPU if one is visible.")]
DEFAULT_PREFIX = DEFAULT_RID_PREFIX


def make_capture(
    output: Path,
    *,
    layers: str | None,
    final: Final | None,
    dtype: Dtype | None,
    rid_prefix: str,
    ring_gb: float | None,
    shard_gb: float,
    min_free_gb: float,
    cpu: bool,
    run_id: str = "",
) -> CaptureConfig:
    """The capture settings for a set of options.

    Raises:
        ConfigError: one of them is not usable.
    """
    if ring_gb is None:
        ring_gb = CPU_RING_GB if cpu else DEFAULT_RING_GB
    return CaptureConfig.from_mapping(
        {
            "output_dir": str(output.expanduser().resolve()),
            "layers": parse_layers(DEFAULT_LAYERS if layers is None else layers),
            "final": (final or Final.PRE_NORM).value,
            "dtype": (dtype or Dtype.BFLOAT16).value,
            "rid_prefix": rid_prefix,
            "ring_bytes": int(ring_gb * GIB),
            "shard_bytes": int(shard_gb * GIB),
            "min_free_bytes": int(min_free_gb * GIB),
            "run_id": run_id,
        }
    )
