"""Options that several commands share, and the capture settings made of them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from sglang_hs_capture.config import DEFAULT_RID_PREFIX, GIB, CaptureConfig
from sglang_hs_capture.data.preparation import LossOn, Overflow, Preparation, SplitTurns
from sglang_hs_capture.driver.device import Device
from sglang_hs_capture.driver.intake import OnBadInput
from sglang_hs_capture.driver.source import Source, default_workers, parse_template_kwargs
from sglang_hs_capture.errors import ConfigError
from sglang_hs_capture.layers import Final, parse_layers

OVERFLOW_ALONE = "says what becomes of samples longer than --max-length; give that too"
TRUST_FLAG = "--trust-remote-code"
DEFAULT_LAYERS = "eagle3"
DEFAULT_RING_GB = 4.0
# On the CPU platform there is no device to run ahead of, and memory is what the model itself runs in.
CPU_RING_GB = 0.25
# An exbibyte; infinity, which is a float too, would be no number of bytes.
MOST_GIB = 2.0**30


class Dtype(StrEnum):
    """The dtypes that states are stored in."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT8_E4M3 = "float8_e4m3"


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
ReplicaOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=9999,
        help="A number of its own for each server that captures into the same --output; a server with N "
        "data-parallel ranks takes N numbers: 0, N, 2N, ...",
    ),
]
OnBadInputOption = Annotated[
    OnBadInput, typer.Option(help="Stop at a line or sample that cannot be captured, or leave it out.")
]
SplitTurnsOption = Annotated[
    SplitTurns,
    typer.Option(
        help="Make one sample of each of the assistant's turns: where the chat template shows earlier turns otherwise "
        "than the model wrote them, always, or never."
    ),
]
LossOnOption = Annotated[
    LossOn, typer.Option(help="Train on all of the assistant's turns, or on the last of each conversation.")
]
MaxLengthOption = Annotated[int | None, typer.Option(min=1, help="The longest sample, in tokens.")]
OverflowOption = Annotated[
    Overflow, typer.Option(help="Cut longer samples at their end or beginning, drop them, or call them bad input.")
]
TokenizerOption = Annotated[str | None, typer.Option(help="A tokenizer other than the model's.")]
ChatTemplateOption = Annotated[Path | None, typer.Option(help="A file with another chat template.")]
ChatTemplateKwargsOption = Annotated[str | None, typer.Option(help="Settings for the chat template, as a JSON object.")]
TrustOption = Annotated[
    bool, typer.Option(TRUST_FLAG, help="Let the model's tokenizer and config run code of their own.")
]
DataOption = Annotated[
    list[Path],
    typer.Option(
        help="Conversations: a file (JSON Lines, Parquet, Arrow), a folder, or a pattern in quotes; may be given "
        "several times."
    ),
]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Look at so many samples of the input only.")]
ShuffleSeedOption = Annotated[
    int | None,
    typer.Option(
        help="Take the samples in a random order that this number decides.", show_default="the order of the files"
    ),
]
KeepUntrainedOption = Annotated[
    bool,
    typer.Option("--keep-untrained", help="Keep samples with no token to train on; they are left out otherwise."),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(min=1, help="The most processes that tokenise; 1 for no further ones.", show_default="by processors"),
]
DeviceOption = Annotated[Device, typer.Option(help="Where the engine runs; auto takes a GPU if one is visible.")]


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """The options that say what is captured and how it is stored; None where the default depends on something else."""

    layers: LayersOption = None
    final: FinalOption = None
    dtype: DtypeOption = None
    rid_prefix: RidPrefixOption = DEFAULT_RID_PREFIX
    ring_gb: RingOption = None
    shard_gb: ShardOption = 4.0
    min_free_gb: FloorOption = 2.0
    replica: ReplicaOption = 0

    def config(self, output: Path, *, cpu: bool) -> CaptureConfig:
        """The settings of a capture into ``output``.

        Args:
            output: the dataset's directory.
            cpu: whether the engine runs on the CPU platform.

        Raises:
            ConfigError: one of the options is not usable.
        """
        ring_gb = self.ring_gb
        if ring_gb is None:
            ring_gb = CPU_RING_GB if cpu else DEFAULT_RING_GB
        return CaptureConfig.from_mapping(
            {
                "output_dir": str(output.expanduser().resolve()),
                "layers": parse_layers(DEFAULT_LAYERS if self.layers is None else self.layers),
                "final": (self.final or Final.PRE_NORM).value,
                "dtype": (self.dtype or Dtype.BFLOAT16).value,
                "rid_prefix": self.rid_prefix,
                "ring_bytes": int(ring_gb * GIB),
                "shard_bytes": int(self.shard_gb * GIB),
                "min_free_bytes": int(self.min_free_gb * GIB),
                "replica": self.replica,
            }
        )


def total_of(rows: int | None, limit: int | None) -> int | None:
    """Number of samples for a progress bar, of an input with so many rows and a limit; None if it is not known."""
    return min((number for number in (rows, limit) if number is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """The options that say how conversations become samples."""

    tokenizer: TokenizerOption = None
    chat_template: ChatTemplateOption = None
    chat_template_kwargs: ChatTemplateKwargsOption = None
    trust_remote_code: TrustOption = False
    split_turns: SplitTurnsOption = SplitTurns.AUTO
    loss_on: LossOnOption = LossOn.ALL
    keep_untrained: KeepUntrainedOption = False
    max_length: MaxLengthOption = None
    overflow: OverflowOption = Overflow.TRUNCATE_RIGHT
    shuffle_seed: ShuffleSeedOption = None
    workers: WorkersOption = None

    def source(self, data: list[Path], model: str | None, *, share: int) -> Source:
        """What these files give.

        Args:
            data: files, folders and patterns.
            model: its tokenizer is taken if no other one is named.
            share: by default one of so many processors tokenises.

        Raises:
            ConfigError: one of the options is not usable.
        """
        return Source(
            paths=data,
            tokenizer=self.tokenizer or model or "",
            chat_template=self.chat_template,
            preparation=Preparation(
                template_kwargs=parse_template_kwargs(self.chat_template_kwargs),
                split_turns=self.split_turns,
                loss_on=self.loss_on,
                max_length=self.max_length,
                overflow=self.overflow,
                keep_untrained=self.keep_untrained,
            ),
            trust_remote_code=self.trust_remote_code,
            shuffle_seed=self.shuffle_seed,
            workers=self.workers or default_workers(share=share),
        )


def with_options(**groups: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of dataclasses, such as ``CaptureOptions``, as options of its own.

    Typer makes options of a function's parameters, one each. So the function that it sees has a parameter for each
    field, where the command has one keyword-only parameter of each group's name that takes them together.
    """
    shared: dict[str, list[inspect.Parameter]] = {}
    for name, group in groups.items():
        hints = get_type_hints(group, include_extras=True)
        shared[name] = [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
            )
            for field in fields(group)
        ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def spread(*args: Any, **given: Any) -> None:
            chosen = {
                name: group(**{parameter.name: given.pop(parameter.name) for parameter in shared[name]})
                for name, group in groups.items()
            }
            command(*args, **chosen, **given)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command).parameters.values():
            parameters += shared.get(parameter.name, [parameter])
        vars(spread)["__signature__"] = inspect.Signature(parameters)
        return spread

    return decorate


def refuse_given(ctx: typer.Context, names: tuple[str, ...], why: str) -> None:
    """Refuse options that would have no effect, rather than pass over them."""
    for name in names:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"--{name.replace('_', '-')} {why}")
