"""``answers.jsonl``: what the model answered, kept before it is captured, so that a run goes on with the same text.

A line is also a row of input: ``input_ids`` holds the prompt and the answer, ``loss_mask`` is 1 on the answer. So the
file can be given to ``--data`` of another run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_hs_capture.data.prompts import Prompt
from sglang_hs_capture.errors import ConfigError, CorruptionError
from sglang_hs_capture.store.hashing import end_hash
from sglang_hs_capture.store.journal import JournalFile, read_records
from sglang_hs_capture.store.schema import RESTORE, sample_key, to_hex

ANSWERS_FILE = "answers.jsonl"


class Answers:
    """The file, open for the one driver that may write it; in memory, about a hundred bytes for each answer."""

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        """Open or create the file, and read which prompts are answered.

        Args:
            directory: the dataset.
            settings: how the model answers; part of every line.

        Raises:
            ConfigError: the file holds answers that were made with other settings.
            CorruptionError: a line is damaged.
            StoreError: the file system refuses.
        """
        self.path = directory / ANSWERS_FILE
        self._settings = settings
        self._file = JournalFile(self.path)
        self._prompts: dict[str, int] = {}
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> None:
        for number, raw in read_records(self.path):
            try:
                settings, sample_id, prompt = raw["settings"], raw["id"], int(raw["prompt_hash"], 16)
            except (KeyError, TypeError, ValueError) as error:
                raise CorruptionError(f"{self.path}, line {number}: {error!r} in the record; {RESTORE}") from None
            if settings != self._settings:
                raise ConfigError(
                    f"{self.path}: its answers were made with {settings}, and {self._settings} is asked for now; give "
                    "the same settings, or choose another --output"
                )
            self._prompts[sample_key(sample_id)] = prompt

    def __len__(self) -> int:
        return len(self._prompts)

    def holds(self, prompt: Prompt) -> bool:
        """Whether the prompt is answered.

        Raises:
            ConfigError: its id is, but the answer belongs to another prompt.
        """
        known = self._prompts.get(sample_key(prompt.id))
        if known is not None and known != end_hash(prompt.input_ids):
            raise ConfigError(
                f"{prompt.source}: {self.path} answers another prompt under the id {prompt.id!r}; give the sample "
                "another id, or choose another --output if the tokenizer or the chat template changed"
            )
        return known is not None

    def append(self, prompt: Prompt, answer: Sequence[int], finish: str) -> None:
        """Add an answer; durable after ``sync``.

        Args:
            prompt: what was answered.
            answer: token ids, at least one.
            finish: why the model stopped, in SGLang's words: ``stop`` or ``length``.
        """
        length = len(prompt.input_ids)
        self._file.append(
            {
                "t": "answer",
                "id": prompt.id,
                "source": prompt.source,
                "input_ids": [*prompt.input_ids.tolist(), *answer],
                "loss_mask": [0] * length + [1] * len(answer),
                "prompt_hash": to_hex(end_hash(prompt.input_ids)),
                "finish": finish,
                "settings": self._settings,
            }
        )
        self._prompts[sample_key(prompt.id)] = end_hash(prompt.input_ids)

    def sync(self) -> None:
        """Make what was added durable.

        Raises:
            DiskFullError, StoreError: it is not.
        """
        self._file.sync()

    def close(self) -> None:
        """Close the file; answers that were not synced are lost."""
        self._file.close()
