"""What the user asks of an export, and what came of it."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class Format(StrEnum):
    """The layouts that can be written."""

    EAGLE_PT = "eagle-pt"
    SPECULATORS = "speculators"
    SPECFORGE = "specforge"
    MODELOPT = "modelopt"
    SAFETENSORS = "safetensors"


class ExportDtype(StrEnum):
    """The dtypes that states can be written in."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of one export.

    Attributes:
        dtype: of the states written; None for the format's own.
        workers: threads that read and write.
        min_loss_tokens: samples with fewer ones in their loss mask are left out.
        verifier: the target model's directory.
        draft_vocab_size: tokens of a draft model's own vocabulary; None where it has the target's.
    """

    format: Format
    dtype: ExportDtype | None = None
    workers: int = 1
    min_loss_tokens: int = 0
    verifier: Path | None = None
    draft_vocab_size: int | None = None


@dataclass(frozen=True)
class ExportResult:
    """What an export holds now, and what this run has written of it.

    Attributes:
        left_out: samples of the dataset with too few loss tokens.
        layer_ids: the states' ids in the trainer's convention, as ``export.json`` has them.
    """

    samples: int
    tokens: int
    written: int
    bytes_written: int
    seconds: float
    left_out: int
    layer_ids: dict[str, object]


class ExportView(Protocol):
    """Shows how an export goes on; ``advance`` is called by several threads."""

    def begin(self, what: str, total: int, unit: str) -> None:
        """A part of the work begins, of ``total`` in ``unit``: ``bytes`` or ``samples``."""

    def advance(self, amount: int) -> None:
        """So much more of it is done."""
