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
        keep_untrained: whether samples without a token that is trained on are samples like any other.
    """

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    split_turns: SplitTurns = SplitTurns.AUTO
    loss_on: LossOn = LossOn.ALL
    max_length: int | None = None
    overflow: Overflow = Overflow.TRUNCATE_RIGHT
    keep_untrained: bool = False

    def to_json(self) -> dict[str, Any]:
        """As the record of a tokenised set has it."""
        return {
            "chat_template_kwargs": dict(self.template_kwargs),
            "split_turns": self.split_turns.value,
            "loss_on": self.loss_on.value,
            "max_length": self.max_length,
            "overflow": self.overflow.value if self.max_length is not None else None,
        }
