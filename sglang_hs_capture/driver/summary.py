"""What a run did, in numbers and in plain words."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_hs_capture.data.records import Exclusion, InputProblem

SHOWN_PROBLEMS = 20
EXCLUDED_FOR = {
    Exclusion.TOO_LONG: "longer than --max-length",
    Exclusion.NO_LOSS: "without a token to train on (--keep-untrained keeps such)",
    Exclusion.LOSS_CUT_OFF: "without a token to train on within --max-length",
    Exclusion.IMAGE_CUT_OFF: "with an image cut off by --max-length",
}
GB = 1e9


@dataclass
class Summary:
    """The account of a run; it grows while the run goes on.

    Attributes:
        output: the dataset.
        asked: samples and unusable lines looked at in the input.
        captured: samples captured by this run.
        already: samples that the dataset held before.
        remasked: of these, samples whose loss mask was brought up to date.
        truncated: samples looked at that were cut to ``--max-length``, those that the dataset held before among them.
        excluded: numbers of samples left out by the settings of the run, by reason.
        resent: times a sample was sent again.
        answered: prompts that the model answered for this run.
        tokens: tokens of the captured samples.
        bytes: bytes of states written, including those of failed attempts.
        zero_masks: of the captured samples, those whose loss mask has no one.
        known_answers: prompts for which the engine's own predictions were kept.
        seconds: from the first prompt sent to the last sample acknowledged.
        blocked_s: time the model waited because the ring was full.
        skipped: lines and samples left out, each with its reason.
        dropped: samples given up after several attempts, each with its reason.
        ended: why the run ended early; empty when it did not.
        exit_code: what the command exits with.
    """

    output: str
    asked: int = 0
    captured: int = 0
    already: int = 0
    remasked: int = 0
    truncated: int = 0
    excluded: dict[Exclusion, int] = field(default_factory=dict)
    resent: int = 0
    answered: int = 0
    tokens: int = 0
    bytes: int = 0
    zero_masks: int = 0
    known_answers: int = 0
    seconds: float = 0.0
    blocked_s: float = 0.0
    skipped: list[InputProblem] = field(default_factory=list)
    dropped: list[InputProblem] = field(default_factory=list)
    ended: str = ""
    exit_code: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens captured a second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """For ``--json-summary``: the fields, with the rate."""
        return {**asdict(self), "tokens_per_s": round(self.tokens_per_s, 1)}

    def lines(self) -> list[str]:
        """The account for a person."""
        if not self.seconds and not self.ended:
            return [self._nothing(), *self._changed(), *_list("Skipped", self.skipped)]
        rate = f", {self.tokens_per_s:,.0f} tokens/s" if self.seconds else ""
        lines = [
            f"Captured {count_of(self.captured, 'sample')} ({self.tokens:,} tokens, {self.bytes / GB:.2f} GB) "
            f"in {self.seconds:.1f} s{rate}.",
            f"Looked at {self.asked:,}; {self.already:,} were there already; {len(self.skipped):,} skipped; "
            f"{len(self.dropped):,} dropped.",
            *self._changed(),
        ]
        if self.blocked_s >= 0.1:
            lines.append(f"The model waited {self.blocked_s:.1f} s for the disk: the ring was full.")
        if self.answered:
            lines.append(f"Answered {count_of(self.answered, 'prompt')} anew before.")
        if self.resent:
            lines.append(f"Sent again {self.resent:,} times.")
        if self.zero_masks:
            lines.append(
                f"warning: {count_of(self.zero_masks, 'captured sample')} with a loss mask of zeros only: nothing is "
                "learned from such a sample; see that the input has turns of the assistant."
            )
        if self.known_answers:
            lines.append(f"Kept the engine's own log-probabilities of {count_of(self.known_answers, 'prompt')}.")
        lines += _list("Skipped", self.skipped) + _list("Dropped", self.dropped)
        lines.append(f"Dataset: {self.output}")
        return lines

    def _nothing(self) -> str:
        """What a run says that had nothing to send."""
        if not self.asked:
            return "Nothing to do: the input holds no sample."
        if self.asked == sum(self.excluded.values()):
            return "Nothing to do: every sample of the input is excluded."
        skipped = f", and {count_of(len(self.skipped), 'line')} skipped" if self.skipped else ""
        return f"Nothing left to do: all {count_of(self.already, 'sample')} of the input are in {self.output}{skipped}."

    def _changed(self) -> list[str]:
        lines = []
        if self.remasked:
            lines.append(f"Brought the loss mask of {count_of(self.remasked, 'sample')} up to date.")
        lines += excluded_lines(self.excluded)
        if self.truncated:
            lines.append(f"Cut {count_of(self.truncated, 'sample')} to --max-length.")
        return lines


def count_of(number: int, noun: str, nouns: str | None = None) -> str:
    """A number of things, in words; ``nouns`` is the plural where it is not ``noun`` with an s."""
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"


def excluded_lines(excluded: Mapping[Exclusion, int]) -> list[str]:
    """What was left out by the settings, for a person; nothing if nothing was."""
    if not excluded:
        return []
    reasons = (f"{excluded[reason]:,} {words}" for reason, words in EXCLUDED_FOR.items() if reason in excluded)
    return [f"Excluded {count_of(sum(excluded.values()), 'sample')}: {', '.join(reasons)}."]


def _list(title: str, problems: list[InputProblem]) -> list[str]:
    lines = [f"{title}: {problem}" for problem in problems[:SHOWN_PROBLEMS]]
    if len(problems) > SHOWN_PROBLEMS:
        lines.append(f"{title}: and {len(problems) - SHOWN_PROBLEMS:,} more")
    return lines
