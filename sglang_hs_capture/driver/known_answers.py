"""Asks the engine for its own log-probabilities along with the first prompts of a run, and keeps them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sglang_hs_capture.driver.client import Prediction
from sglang_hs_capture.store.known_answers import AnswerFile, KnownAnswer
from sglang_hs_capture.store.requests import RequestRecord

# Predictions asked for with a prompt, at its end. So few, because the engine computes logits over the whole vocabulary
# for each of them, and because SGLang takes no prefix from its cache beyond the first of them.
POSITIONS = 32


@dataclass
class Question:
    """What is asked along with one prompt: predictions from position ``start`` on, and the engine's answer."""

    start: int
    answer: Prediction | None = None


class AnswerBook:
    """Has as many prompts answered as are wanted. Of what was asked with a prompt that failed another one is asked."""

    def __init__(self, directory: Path, wanted: int) -> None:
        """
        Args:
            directory: the dataset, whose ledger the caller has locked.
            wanted: how many prompts.
        """
        self._file = AnswerFile(directory)
        self._wanted = wanted
        self._asked = 0
        self.kept = 0

    @contextmanager
    def asking(self, record: RequestRecord) -> Iterator[Question | None]:
        """A question to go with this sample's request, or None if none is wanted; its answer is kept on leaving.

        Raises:
            DiskFullError, StoreError: the answer could not be kept.
        """
        # Positions in the engine's own counting are not those of a prompt with images as it is sent.
        if self._asked >= self._wanted or record.length < 2 or record.images:
            yield None
            return
        self._asked += 1
        question = Question(max(0, record.length - 1 - POSITIONS))
        try:
            yield question
        finally:
            if question.answer is None:
                self._asked -= 1
        if question.answer is not None:
            self._file.append(KnownAnswer(record.id, record.length, record.end_hash, question.start, *question.answer))
            self.kept += 1

    def ask_no_more(self) -> None:
        """The server refuses such requests, or replies without predictions."""
        self._wanted = 0

    def close(self) -> None:
        """Close the file."""
        self._file.close()
