"""Conversation files to samples that are ready to be captured."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sglang_hs_capture.data.conversations import check_template_kwargs, iter_records
from sglang_hs_capture.data.loss_mask import tokenize
from sglang_hs_capture.data.records import BadRow, InputProblem, Record, Sample, Untrained, shown
from sglang_hs_capture.data.template import ChatTemplate
from sglang_hs_capture.errors import InputError

Prepared = Sample | InputProblem
Item = Sample | InputProblem | Untrained


class SamplePreparer:
    """Turns records into samples with one tokenizer and its chat template."""

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        stop_ids: Iterable[int] = (),
    ) -> None:
        """
        Args:
            tokenizer: a ``transformers`` tokenizer; None if every row is tokenised already.
            template_kwargs: settings passed to the chat template, such as ``{"thinking": False}``.
            stop_ids: token ids that end an assistant's turn, besides those the tokenizer and its template show
                (``read_stop_ids``).

        Raises:
            InputError: ``template_kwargs`` names an argument that is not the template's.
        """
        try:
            self._kwargs = check_template_kwargs(dict(template_kwargs or {}), "template_kwargs")
        except BadRow as error:
            raise InputError(str(error)) from None
        self._tokenizer = tokenizer
        self._more_stop_ids = frozenset(stop_ids)
        self._template: ChatTemplate | None = None

    @property
    def tokenizer(self) -> Any:
        """The ``transformers`` tokenizer; None if there is none."""
        return self._tokenizer

    def prepare(self, record: Record) -> Prepared:
        """Tokenise one record; a row tokenised before is returned as it is.

        Raises:
            InputError: the record is a conversation, and there is no tokenizer or it has no chat template, so that no
                conversation at all can be prepared.
        """
        if isinstance(record, Sample):
            return record
        template = self._chat_template(record.source)
        try:
            input_ids, mask = tokenize(template, record, template.stop_ids | self._more_stop_ids)
        except BadRow as problem:
            return InputProblem(record.source, str(problem), record.id)
        return Sample(record.id, record.source, input_ids, mask)

    def prepare_all(self, records: Iterable[Record | InputProblem]) -> Iterator[tuple[Record | InputProblem, Prepared]]:
        """Each record and what became of it, in the order given; problems are passed on as they are.

        Raises:
            InputError: see ``prepare``.
        """
        for record in records:
            yield record, record if isinstance(record, InputProblem) else self.prepare(record)

    def _chat_template(self, source: str) -> ChatTemplate:
        if self._tokenizer is None:
            raise InputError(
                f"{source}: is a conversation, which needs the model's tokenizer; only rows with input_ids do not"
            )
        if self._template is None:
            self._template = ChatTemplate(self._tokenizer, self._kwargs)
        return self._template


def iter_samples(
    paths: str | Path | Iterable[str | Path],
    preparer: SamplePreparer,
    *,
    max_length: int | None,
    vocab_size: int | None = None,
    shuffle_seed: int | None = None,
    keep_untrained: bool = False,
) -> Iterator[Item]:
    """Read conversation files as samples, in the files' order or a random one, each id at most once.

    Memory grows by about a hundred bytes for each sample, for the ids seen.

    Args:
        paths: files, folders and patterns.
        preparer: tokenises conversations.
        max_length: the longest prompt that the model takes, in tokens; None for no limit.
        vocab_size: token ids must be below it; None for no limit.
        shuffle_seed: see ``iter_records``.
        keep_untrained: give samples whose loss mask is all zero like any other, and not as ``Untrained``.

    Raises:
        InputError: a file cannot be read (when missing: at the call), or no conversation can be prepared.
    """
    records = iter_records(paths, shuffle_seed=shuffle_seed)
    return _samples(records, preparer, max_length, vocab_size, keep_untrained)


def _samples(
    records: Iterable[Record | InputProblem],
    preparer: SamplePreparer,
    max_length: int | None,
    vocab_size: int | None,
    keep_untrained: bool,
) -> Iterator[Item]:
    for record, prepared in preparer.prepare_all(_unique(records)):
        if isinstance(record, InputProblem) or isinstance(prepared, InputProblem):
            yield prepared
        elif reason := _problem(prepared, max_length, vocab_size):
            yield InputProblem(record.source, reason, record.id)
        elif not keep_untrained and not prepared.loss_mask.any():
            yield Untrained(record.source, record.id)
        else:
            yield prepared


def _unique(records: Iterable[Record | InputProblem]) -> Iterator[Record | InputProblem]:
    seen: set[bytes] = set()
    for record in records:
        if isinstance(record, InputProblem):
            yield record
            continue
        digest = hashlib.blake2b(record.id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in seen:
            yield InputProblem(record.source, f"an earlier line has the same id, {shown(record.id)}", record.id)
            continue
        seen.add(digest)
        yield record


def _problem(sample: Sample, max_length: int | None, vocab_size: int | None) -> str:
    length = len(sample.input_ids)
    if max_length is not None and length > max_length:
        return f"prompt of {length} tokens is longer than the model's context of {max_length}"
    if vocab_size is not None:
        position = int(np.argmax(sample.input_ids))
        if sample.input_ids[position] >= vocab_size:
            token = sample.input_ids[position]
            return f"token id {token} at position {position} lies outside the model's vocabulary of {vocab_size}"
    return ""
