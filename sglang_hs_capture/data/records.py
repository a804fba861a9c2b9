"""What passes between the parts of this package: conversations, samples, and lines that cannot be used."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from sglang_hs_capture.data.images import Image

Message = dict[str, Any]
TokenIds = npt.NDArray[np.int64]
LossMask = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation in the form that chat templates take.

    Attributes:
        id: the sample's id, from the file or derived from the content.
        source: ``file:line``.
        messages: ``role``, ``content`` (a string, or parts as in ``data/media.py`` where it has images), and
            ``reasoning_content``, ``tool_calls``, ``tool_call_id``, ``name`` and whatever else the file gives.
        tools: tool declarations in OpenAI's form, or None.
        template_kwargs: the row's own ``chat_template_kwargs``.
    """

    id: str
    source: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt to capture.

    Attributes:
        id: unique in a dataset; any string of at most 4096 characters, lone surrogates included.
        source: ``file:line``, or ``file:row`` for a table.
        input_ids: int64 ``[S]``, S at least 1.
        loss_mask: uint8 ``[S]``; 1 for tokens that are trained on.
        images: those that the placeholders among ``input_ids``, one each, stand for.
        media_token: the placeholder; None without images.
        cut: number of tokens that were cut off to make it no longer than ``--max-length``.
    """

    id: str
    source: str
    input_ids: TokenIds
    loss_mask: LossMask
    images: "tuple[Image, ...]" = ()
    media_token: int | None = None
    cut: int = 0


@dataclass(frozen=True, slots=True)
class InputProblem:
    """A line that cannot be used, and why; the caller decides whether to stop or to skip it."""

    source: str
    reason: str
    sample_id: str | None = None

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}"


class Exclusion(StrEnum):
    """Why a sample that could be captured is left out; unlike a problem, this never stops a run."""

    TOO_LONG = "too-long"
    NO_LOSS = "no-loss"
    LOSS_CUT_OFF = "loss-cut-off"
    IMAGE_CUT_OFF = "image-cut-off"


@dataclass(frozen=True, slots=True)
class Excluded:
    """A sample that is left out by the settings of the run, and only counted."""

    source: str
    reason: Exclusion
    sample_id: str


# What becomes of a record.
Prepared = Sample | InputProblem | Excluded

# A row that was tokenised before needs nothing more than the limits of its length, so it is a sample already.
Record = Conversation | Sample


def folder_of(source: str) -> Path:
    """The folder of the file that a row came from: what relative paths in it are relative to."""
    return Path(source.rpartition(":")[0]).parent


class BadRow(Exception):  # noqa: N818 - never leaves this package: it always ends as an InputProblem
    """The row being read cannot be used; the text says why."""
