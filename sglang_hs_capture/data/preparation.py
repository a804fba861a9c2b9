"""The settings of data preparation: how conversations become samples."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class SplitTurns(StrEnum):
    """When a conversation becomes several samples, each of which ends with a turn of the assistant."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class LossOn(StrEnum):
    """Which of the assistant's turns are trained on."""

    ALL = "all"
    LAST = "last"


class Overflow(StrEnum):
    """What becomes of a sample that is longer than ``Preparation.max_length``."""

    TRUNCATE_RIGHT = "truncate-right"
    TRUNCATE_LEFT = "truncate-left"
    DROP = "drop"
    BAD_INPUT = "bad-input"


@dataclass(frozen=True)
class Preparation:
    """How conversations become samples; it can be pickled, for worker processes.

    Attributes:
        template_kwargs: settings passed to the chat template, such as ``{"thinking": False}``.
        split_turns: ``auto`` splits a conversation where its template would show a turn otherwise than the model wrote
            it, ``always`` after each turn of the assistant, ``never`` not at all.
        loss_on: all of the assistant's turns, or the last one of each conversation.
        max_length: the longest sample, in tokens; None for no limit.
        overflow: what becomes of a longer one.
    """

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    split_turns: SplitTurns = SplitTurns.AUTO
    loss_on: LossOn = LossOn.ALL
    max_length: int | None = None
    overflow: Overflow = Overflow.TRUNCATE_RIGHT
