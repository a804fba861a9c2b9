"""What a check of a dataset found: each finding says what, where, and what to do; lists are bounded, counts are not."""

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sglang_hs_capture.store.schema import RESTORE
from sglang_hs_capture.text import printable

KEPT_PER_KIND = 100


class Severity(StrEnum):
    """Whether a finding makes the dataset wrong, or is only to be looked at."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Kind:
    """A kind of finding: how much it weighs, and what to do about it."""

    severity: Severity
    remedy: str


_CAPTURE_ANEW = "capture the dataset anew into another directory, and report it with the versions in dataset.json"
_ANSWERS = "restore it from a copy, or remove it: only --known-answer reads it"
_RUN_AGAIN = "run the same capture again, which captures what is missing"

# docs/verify.md explains each of them.
KINDS = {
    "dataset-file": Kind(Severity.ERROR, RESTORE),
    "origin-file": Kind(Severity.ERROR, RESTORE),
    "journal-line": Kind(Severity.ERROR, RESTORE),
    "journal-record": Kind(Severity.ERROR, RESTORE),
    "ledger-line": Kind(Severity.ERROR, RESTORE),
    "ledger-record": Kind(Severity.ERROR, RESTORE),
    "loss-mask": Kind(Severity.ERROR, RESTORE),
    "final-norm": Kind(Severity.ERROR, "restore it from a copy; a capture writes it anew where it is removed"),
    "shard-missing": Kind(Severity.ERROR, RESTORE),
    "shard-size": Kind(Severity.ERROR, RESTORE),
    "shard-header": Kind(Severity.ERROR, RESTORE),
    "stray-file": Kind(
        Severity.ERROR, "restore the journal from a copy; where the file is none of this dataset, remove it"
    ),
    "unreadable": Kind(Severity.ERROR, "see that the disk works, then " + RESTORE),
    "checksum": Kind(Severity.ERROR, RESTORE),
    "tokens": Kind(Severity.ERROR, RESTORE),
    "non-finite": Kind(Severity.ERROR, _CAPTURE_ANEW),
    "zero-row": Kind(Severity.ERROR, _CAPTURE_ANEW),
    "constant-row": Kind(Severity.ERROR, _CAPTURE_ANEW),
    "column-copied": Kind(Severity.ERROR, _CAPTURE_ANEW),
    "other-tokens": Kind(Severity.ERROR, _RUN_AGAIN),
    "unclaimed": Kind(Severity.ERROR, "restore requests.jsonl from a copy, or run the same capture again"),
    "recapture": Kind(Severity.ERROR, "see that model and flags are those of the capture; else " + _CAPTURE_ANEW),
    "reference": Kind(Severity.ERROR, "see that the model is that of the capture; else " + _CAPTURE_ANEW),
    "answer-line": Kind(Severity.ERROR, _ANSWERS),
    "answer-record": Kind(Severity.ERROR, _ANSWERS),
    "known-answer": Kind(Severity.ERROR, "see that --model has the weights of the capture; else " + _CAPTURE_ANEW),
    "final-norm-missing": Kind(Severity.WARNING, "the next capture into the dataset writes it"),
    "torn-line": Kind(Severity.WARNING, "none where a capture runs or was killed; the next capture cuts it off"),
    "session-file": Kind(Severity.WARNING, "it can be removed while nothing captures"),
    "missing": Kind(Severity.WARNING, _RUN_AGAIN),
    "dropped": Kind(Severity.WARNING, "run the same capture again, which tries it again"),
    "incomplete": Kind(Severity.WARNING, _RUN_AGAIN),
    "duplicate": Kind(Severity.WARNING, "none, readers take the first; for requests sent by hand, use each id once"),
    "rows-copied": Kind(Severity.WARNING, "compare with the model: --against-model"),
    "equal-norms": Kind(Severity.WARNING, "compare with the model: --against-model"),
    "poor-target": Kind(
        Severity.WARNING,
        "serve the model with the flags of the capture and see whether its answers make sense; none for random weights",
    ),
    "outlier": Kind(Severity.WARNING, "look at --report; massive activations look like this, and garbage too"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        kind: a key of ``KINDS``.
        what: what was expected and what is there.
        file: the file, relative to the dataset.
        sample: the id of a sample that it concerns; None where it concerns none.
        position: the token's position in that sample.
        column: the state's name.
    """

    kind: str
    what: str
    file: str = ""
    sample: str | None = None
    position: int | None = None
    column: str | None = None

    @property
    def severity(self) -> Severity:
        """How much it weighs."""
        return KINDS[self.kind].severity

    @property
    def remedy(self) -> str:
        """What to do."""
        return KINDS[self.kind].remedy

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "kind": self.kind,
            "severity": self.severity.value,
            "what": self.what,
            "file": self.file,
            "sample": self.sample,
            "position": self.position,
            "column": self.column,
            "what_to_do": self.remedy,
        }

    def __str__(self) -> str:
        places = [self.file] if self.file else []
        places += [f"sample {self.sample!r}"] if self.sample is not None else []
        places += [f"position {self.position}"] if self.position is not None else []
        places += [self.column] if self.column is not None else []
        return printable(f"{', '.join(places)}: {self.what}" if places else self.what)


class Findings:
    """Collects findings from several threads: the first of each kind, and how many there were of it.

    ``samples`` are the ids of samples that an error concerns.
    """

    def __init__(self, kept: int = KEPT_PER_KIND) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._found: dict[str, list[Finding]] = {}
        self.counts: Counter[str] = Counter()
        self.samples: set[str] = set()

    def add(self, finding: Finding, affected: Iterable[str] = ()) -> None:
        """Take one more; ``affected`` are the ids of all samples that it makes unusable."""
        with self._lock:
            self.counts[finding.kind] += 1
            kept = self._found.setdefault(finding.kind, [])
            if len(kept) < self._kept:
                kept.append(finding)
            if finding.severity is Severity.ERROR:
                self.samples.update(affected)
                if finding.sample is not None:
                    self.samples.add(finding.sample)

    def count(self, kind: str, number: int, affected: Iterable[str] = ()) -> None:
        """Count findings of a kind beyond those added, where their places are not kept."""
        with self._lock:
            if number:
                self.counts[kind] += number
            if KINDS[kind].severity is Severity.ERROR:
                self.samples.update(affected)

    def has_room(self, kind: str) -> bool:
        """Whether the next finding of this kind is kept, and not only counted."""
        with self._lock:
            return len(self._found.get(kind, ())) < self._kept

    @property
    def errors(self) -> int:
        """Number of findings that make the dataset wrong."""
        return sum(n for kind, n in self.counts.items() if KINDS[kind].severity is Severity.ERROR)

    @property
    def warnings(self) -> int:
        """Number of findings to be looked at."""
        return sum(self.counts.values()) - self.errors

    def listed(self) -> list[Finding]:
        """Those kept: errors first, each kind in the order of ``KINDS``, by file and position."""
        return [
            finding
            for kind in KINDS
            for finding in sorted(self._found.get(kind, ()), key=lambda f: (f.file, f.sample or "", f.position or 0))
        ]
