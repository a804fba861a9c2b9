"""Makes a tokenised set of an input, and the account of it."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from sglang_hs_capture.data.prepared import PreparedSet
from sglang_hs_capture.data.records import Excluded, Exclusion, InputProblem, Prepared, Sample
from sglang_hs_capture.driver.intake import OnBadInput
from sglang_hs_capture.driver.summary import SHOWN_PROBLEMS, count_of, excluded_lines
from sglang_hs_capture.errors import InputError

PERCENTILES = (0, 10, 50, 90, 99, 100)
# Reasons told apart; whoever has more of them gets the rest as one.
MOST_REASONS = 100
_VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|\d[\d.,]*")


@dataclass
class Account:
    """What a tokenised set holds and what was left out of it; its size does not grow with the set's.

    Attributes:
        samples: samples in the set.
        tokens: their tokens.
        trained: of these, the tokens that are trained on.
        lengths: how many samples have how many tokens.
        truncated: samples that were cut to the longest length.
        excluded: numbers of samples left out by the settings, by reason.
        left_out: lines, rows and samples that cannot be used.
        reasons: how many of them for each reason, in which values are dots.
        first: the first of them.
        shown: the first samples, to be looked at.
    """

    samples: int = 0
    tokens: int = 0
    trained: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    truncated: int = 0
    excluded: Counter[Exclusion] = field(default_factory=Counter)
    left_out: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    first: list[InputProblem] = field(default_factory=list)
    shown: list[Sample] = field(default_factory=list)

    def add(self, sample: Sample) -> None:
        """Count a sample of the set."""
        self.samples += 1
        self.tokens += len(sample.input_ids)
        self.trained += int(sample.loss_mask.sum())
        self.lengths[len(sample.input_ids)] += 1
        self.truncated += bool(sample.cut)

    def leave_out(self, problem: InputProblem) -> None:
        """Count something that cannot be used."""
        self.left_out += 1
        if len(self.first) < SHOWN_PROBLEMS:
            self.first.append(problem)
        reason = _VALUES.sub("...", problem.reason)
        self.reasons[reason if reason in self.reasons or len(self.reasons) < MOST_REASONS else "other reasons"] += 1

    def percentiles(self) -> dict[int, int]:
        """The lengths, in tokens, that so many per cent of the samples do not exceed; empty without samples."""
        found: dict[int, int] = {}
        passed = 0
        for length, count in sorted(self.lengths.items()):
            passed += count
            for percent in PERCENTILES:
                if percent not in found and 100 * passed >= percent * self.samples:
                    found[percent] = length
        return found

    def to_json(self) -> dict[str, Any]:
        """For the set's own record."""
        return {
            "samples": self.samples,
            "tokens": self.tokens,
            "trained_tokens": self.trained,
            "length_percentiles": {str(percent): length for percent, length in self.percentiles().items()},
            "left_out": self.left_out,
            "left_out_reasons": dict(self.reasons.most_common()),
            "truncated": self.truncated,
            "excluded": {reason.value: count for reason, count in self.excluded.items()},
        }

    def lines(self) -> list[str]:
        """The account for a person."""
        share = f", {self.trained / self.tokens:.1%}" if self.tokens else ""
        lines = [f"{count_of(self.samples, 'sample')}: {self.tokens:,} tokens, {self.trained:,} trained on{share}."]
        if self.samples:
            low, *middle, high = self.percentiles().items()
            between = ", ".join(f"{percent}%: {length:,}" for percent, length in middle)
            lines.append(f"Tokens a sample: shortest: {low[1]:,}, {between}, longest: {high[1]:,}.")
        lines += excluded_lines(self.excluded)
        if self.truncated:
            lines.append(f"Cut {count_of(self.truncated, 'sample')} to --max-length.")
        if self.left_out:
            lines.append(f"Left out {count_of(self.left_out, 'line or sample', 'lines or samples')}:")
            lines += [f"  {count:,}: {reason}" for reason, count in self.reasons.most_common(SHOWN_PROBLEMS)]
            lines += [f"Left out: {problem}" for problem in self.first]
        if self.left_out > len(self.first):
            lines.append(f"Left out: and {self.left_out - len(self.first):,} more")
        return lines


@dataclass(frozen=True)
class SetSettings:
    """How a set is made.

    Attributes:
        on_bad_input: stop at the first line or sample that cannot be used, or leave such ones out.
        limit: look at no more than so many samples of the input.
        show: keep so many of the first samples for a person to look at.
    """

    on_bad_input: OnBadInput = OnBadInput.STOP
    limit: int | None = None
    show: int = 0


def make_set(
    items: Iterable[Prepared], prepared: PreparedSet, settings: SetSettings, advance: Callable[[int], None]
) -> Account:
    """Write all samples of an input into a set, which the caller finishes.

    Args:
        items: from ``data.samples.iter_samples``.
        prepared: takes the samples.
        settings: how.
        advance: is told of each item.

    Raises:
        InputError: the input cannot be read on, or a line or sample cannot be used and such are not to be left out.
        DiskFullError, StoreError: the set cannot be written.
    """
    account = Account()
    for item in items if settings.limit is None else islice(items, settings.limit):
        problem = item if isinstance(item, InputProblem) else None
        if isinstance(item, Excluded):
            account.excluded[item.reason] += 1
        elif isinstance(item, Sample) and not (problem := _problem(item)):
            prepared.add(item)
            account.add(item)
            if len(account.shown) < settings.show:
                account.shown.append(item)
        if problem is not None:
            if settings.on_bad_input is OnBadInput.STOP:
                raise InputError(f"{problem} (--on-bad-input skip leaves such samples out)")
            account.leave_out(problem)
        advance(1)
    return account


def _problem(sample: Sample) -> InputProblem | None:
    if sample.images:
        reason = "it has images, which a tokenised set cannot hold; give the conversation itself to run"
        return InputProblem(sample.source, reason, sample.id)
    try:
        sample.id.encode("utf-8")
    except UnicodeEncodeError as error:
        reason = f"id: holds half of a surrogate pair, {sample.id[error.start]!r}, which a Parquet file cannot hold"
        return InputProblem(sample.source, reason, sample.id)
    return None
