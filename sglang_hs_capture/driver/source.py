"""The input of a run: conversation files, with a tokenizer that is loaded only if a conversation turns up."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_hs_capture.data.conversations import iter_records
from sglang_hs_capture.data.lines import GZIP_MAGIC
from sglang_hs_capture.data.prompts import Prompt, iter_prompts
from sglang_hs_capture.data.records import InputProblem, Record, Sample
from sglang_hs_capture.data.samples import SamplePreparer, iter_samples
from sglang_hs_capture.data.template import ChatTemplate, load_tokenizer, read_stop_ids
from sglang_hs_capture.errors import ConfigError

COUNT_BYTES_LIMIT = 2**31
_COUNT_BLOCK = 2**22


@dataclass(frozen=True)
class Source:
    """Where samples come from.

    Attributes:
        paths: conversation files.
        tokenizer: a directory or hub id.
        chat_template: a file that takes the place of the tokenizer's own template.
        template_kwargs: settings passed to the template.
        trust_remote_code: whether the tokenizer may run code of its own.
    """

    paths: Sequence[Path]
    tokenizer: str
    chat_template: Path | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False

    def samples(self, *, max_length: int | None, vocab_size: int | None) -> Iterator[Sample | InputProblem]:
        """Read the files.

        Args:
            max_length: the longest prompt the model takes, as far as it is known.
            vocab_size: token ids must be below it; None if it is not known.

        Raises:
            InputError: a file is missing.
        """
        return iter_samples(self.paths, LazyPreparer(self._load), max_length=max_length, vocab_size=vocab_size)

    def prompts(self, *, last_only: bool, vocab_size: int | None) -> Iterator[Prompt | InputProblem]:
        """Read the files for what comes before each answer, to have it answered anew.

        Args:
            last_only: only the last answer of each conversation is wanted.
            vocab_size: token ids must be below it; None if it is not known.

        Raises:
            InputError: a file is missing.
        """
        preparer = LazyPreparer(self._load)
        return iter_prompts(iter_records(self.paths), preparer.template_for, last_only=last_only, vocab_size=vocab_size)

    def _load(self) -> SamplePreparer:
        tokenizer = load_tokenizer(
            self.tokenizer, trust_remote_code=self.trust_remote_code, chat_template=self.chat_template
        )
        return SamplePreparer(tokenizer, template_kwargs=self.template_kwargs, stop_ids=read_stop_ids(self.tokenizer))


class LazyPreparer(SamplePreparer):
    """A preparer that is made when the first conversation comes; rows tokenised before need none."""

    def __init__(self, load: Callable[[], SamplePreparer]) -> None:
        super().__init__()
        self._load = load
        self._loaded: SamplePreparer | None = None

    def prepare(self, record: Record) -> Sample | InputProblem:
        """See ``SamplePreparer.prepare``."""
        return record if isinstance(record, Sample) else self._made().prepare(record)

    def template_for(self, source: str) -> ChatTemplate:
        """See ``SamplePreparer.template_for``."""
        return self._made().template_for(source)

    def _made(self) -> SamplePreparer:
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded


def parse_template_kwargs(text: str | None) -> dict[str, Any]:
    """Read ``--chat-template-kwargs``.

    Raises:
        ConfigError: it is no JSON object.
    """
    try:
        raw = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--chat-template-kwargs: not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"--chat-template-kwargs: expected a JSON object; got {text}")
    return raw


def count_lines(paths: Sequence[Path]) -> int | None:
    """Number of lines of plain files, for a progress bar; None where counting them would take long."""
    if sum(path.stat().st_size for path in paths) > COUNT_BYTES_LIMIT:
        return None
    total = 0
    for path in paths:
        with path.open("rb") as file:
            block = file.read(_COUNT_BLOCK)
            if block.startswith(GZIP_MAGIC):
                return None
            last = b"\n"
            while block:
                total += block.count(b"\n")
                last = block[-1:]
                block = file.read(_COUNT_BLOCK)
            total += last != b"\n"
    return total
