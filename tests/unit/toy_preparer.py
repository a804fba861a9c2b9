"""A preparer that loads in no time, for tests of the processes that tokenise; they import it by its name."""

import os
from pathlib import Path

import numpy as np

from sglang_hs_capture.data.records import Conversation, InputProblem, Sample
from sglang_hs_capture.data.samples import SamplePreparer
from sglang_hs_capture.errors import InputError


class ToyPreparer(SamplePreparer):
    """Takes a message's characters for tokens, the last message being trained on; some answers make two samples."""

    def prepare(self, record):
        if isinstance(record, Sample):
            return [record]
        texts = [message["content"] for message in record.messages]
        if texts[-1] == "bad":
            return [InputProblem(record.source, "a bad answer", record.id)]
        if texts[-1] == "die":
            os._exit(3)
        ids = np.array([ord(character) for character in "".join(texts)], dtype=np.int64)
        sample = Sample(record.id, record.source, ids, (np.arange(len(ids)) >= len(texts[0])).astype(np.uint8))
        return [sample] * (2 if texts[-1] == "answeranswer" else 1)


class FailingIn(ToyPreparer):
    """One that cannot be made any more when a file is gone."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        if not file.exists():
            raise InputError("the tokenizer cannot be loaded")


class Pids(ToyPreparer):
    """Tells by which process a conversation was prepared."""

    def prepare(self, record):
        return [InputProblem(record.source, str(os.getpid())) if isinstance(record, Conversation) else record]
