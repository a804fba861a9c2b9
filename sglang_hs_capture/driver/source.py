"""The input of a run: conversation files, with a tokenizer that is loaded only if a conversation turns up."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sglang_hs_capture.data.lines import GZIP_MAGIC
from sglang_hs_capture.data.records import InputProblem, Record, Sample
from sglang_hs_capture.data.samples import SamplePreparer, iter_samples
from sglang_hs_capture.data.template import load_tokenizer, read_stop_ids
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

    def samples(
        self, *, max_length: int | None, vocab_size: int | None, media_token: int | None = None
    ) -> Iterator[Sample | InputProblem]:
        """Read the files.

        Args:
            max_length: the longest prompt the model takes, as far as it is known.
            vocab_size: token ids must be below it; None if it is not known.
            media_token: what stands for an image in a prompt; None for a model that takes none, or is not known.

        Raises:
            InputError: a file is missing.
        """
        preparer = LazyPreparer(partial(self._load, media_token), media_token)
        return iter_samples(self.paths, preparer, max_length=max_length, vocab_size=vocab_size)

    def _load(self, media_token: int | None) -> SamplePreparer:
        tokenizer = load_tokenizer(
            self.tokenizer, trust_remote_code=self.trust_remote_code, chat_template=self.chat_template
        )
        return SamplePreparer(
            tokenizer,
            template_kwargs=self.template_kwargs,
            stop_ids=read_stop_ids(self.tokenizer),
            media_token=media_token,
        )


class LazyPreparer(SamplePreparer):
    """A preparer that is made when the first conversation comes; rows tokenised before need none."""

    def __init__(self, load: Callable[[], SamplePreparer], media_token: int | None = None) -> None:
        super().__init__(media_token=media_token)
        self._load = load
        self._loaded: SamplePreparer | None = None

    def prepare(self, record: Record) -> Sample | InputProblem:
        """See ``SamplePreparer.prepare``."""
        if isinstance(record, Sample):
            return super().prepare(record)
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded.prepare(record)


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
