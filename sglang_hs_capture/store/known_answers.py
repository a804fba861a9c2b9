"""The engine's own log-probabilities of a few prompts, ``known_answers.jsonl``: what the final states must lead to."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hs_capture.errors import CorruptionError
from sglang_hs_capture.store.journal import JournalFile, read_records
from sglang_hs_capture.store.schema import RESTORE, to_hex

KNOWN_ANSWERS_FILE = "known_answers.jsonl"


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """What the engine predicted at the last positions of one sample, in the request that captured it.

    Attributes:
        id: the sample's.
        length: number of tokens S.
        end_hash: chained hash of all tokens.
        start: the first position whose prediction is known.
        logprobs: [S - 1 - start]; of the token at position ``start + 1 + i``, given those before it: what the row at
            position ``start + i`` leads to. None where the engine's was not finite.
        top: [S - 1 - start]; the token that the engine held for the likeliest there.
    """

    id: str
    length: int
    end_hash: int
    start: int
    logprobs: tuple[float | None, ...]
    top: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.length - 1:
            raise ValueError(f"of {self.length} tokens there is no prediction from position {self.start} on")
        for name, values in (("log-probabilities", self.logprobs), ("likeliest tokens", self.top)):
            if len(values) != self.length - 1 - self.start:
                raise ValueError(f"expected {self.length - 1 - self.start} {name}; got {len(values)}")

    def to_json(self) -> dict[str, Any]:
        """The record as a line of the file has it."""
        return {
            "t": "answer",
            "id": self.id,
            "length": self.length,
            "end_hash": to_hex(self.end_hash),
            "start": self.start,
            "logprobs": list(self.logprobs),
            "top": list(self.top),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "KnownAnswer":
        """Read such a record.

        Raises:
            KeyError, TypeError, ValueError: it is malformed.
        """
        if not isinstance(raw["id"], str):
            raise ValueError(f"a sample cannot have the id {raw['id']!r}")
        return cls(
            raw["id"],
            int(raw["length"]),
            int(raw["end_hash"], 16),
            int(raw["start"]),
            finite_or_none(raw["logprobs"]),
            tuple(int(token) for token in raw["top"]),
        )


def finite_or_none(values: Sequence[float | None]) -> tuple[float | None, ...]:
    """Numbers as the file holds them, which has none that are not finite."""
    return tuple(None if value is None or not math.isfinite(value) else float(value) for value in values)


def load_known_answers(directory: Path) -> list[KnownAnswer]:
    """Every answer of a dataset, in the order in which they were given, also while more are added.

    Raises:
        CorruptionError: a line is damaged.
    """
    return list(_read(directory / KNOWN_ANSWERS_FILE))


def _read(path: Path) -> Iterator[KnownAnswer]:
    for number, raw in read_records(path):
        if raw["t"] != "answer":
            continue
        try:
            yield KnownAnswer.from_json(raw)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptionError(f"{path}, line {number}: {error!r} in the record; {RESTORE}") from None


class AnswerFile:
    """The file, for the one driver that holds the ledger's lock; it is made when the first answer is kept."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / KNOWN_ANSWERS_FILE
        self._file: JournalFile | None = None

    def append(self, answer: KnownAnswer) -> None:
        """Add an answer, durably.

        Raises:
            DiskFullError, StoreError: it is not there.
        """
        if self._file is None:
            self._file = JournalFile(self._path)
        self._file.append(answer.to_json())
        self._file.sync()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None
