"""Conversation files to samples that are ready to be captured."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sglang_hs_capture.data.conversations import check_template_kwargs, iter_records
from sglang_hs_capture.data.images import load_images
from sglang_hs_capture.data.loss_mask import tokenize
from sglang_hs_capture.data.media import references
from sglang_hs_capture.data.placeholders import check_placeholders
from sglang_hs_capture.data.records import BadRow, Conversation, InputProblem, Record, Sample, folder_of, shown
from sglang_hs_capture.data.template import ChatTemplate
from sglang_hs_capture.errors import InputError


class SamplePreparer:
    """Turns records into samples with one tokenizer and its chat template."""

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        stop_ids: Iterable[int] = (),
        media_token: int | None = None,
    ) -> None:
        """
        Args:
            tokenizer: a ``transformers`` tokenizer; None if every row is tokenised already.
            template_kwargs: settings passed to the chat template, such as ``{"thinking": False}``.
            stop_ids: token ids that end an assistant's turn, besides those the tokenizer and its template show
                (``read_stop_ids``).
            media_token: what stands for an image in a prompt; None for a model that takes none.

        Raises:
            InputError: ``template_kwargs`` names an argument that is not the template's.
        """
        try:
            self._kwargs = check_template_kwargs(dict(template_kwargs or {}), "template_kwargs")
        except BadRow as error:
            raise InputError(str(error)) from None
        self._tokenizer = tokenizer
        self._more_stop_ids = frozenset(stop_ids)
        self._media_token = media_token
        self._template: ChatTemplate | None = None

    def prepare(self, record: Record) -> Sample | InputProblem:
        """Tokenise one record and read its images; a row tokenised before is returned as it is.

        Raises:
            InputError: the record is a conversation, and there is no tokenizer or it has no chat template, so that no
                conversation at all can be prepared.
        """
        try:
            sample = record if isinstance(record, Sample) else self._tokenised(record)
            return check_placeholders(sample, self._media_token)
        except BadRow as problem:
            return InputProblem(record.source, str(problem), record.id)

    def _tokenised(self, record: Conversation) -> Sample:
        template = self._chat_template(record.source)
        images = load_images(references(record.messages), folder_of(record.source))
        input_ids, mask = tokenize(template, record, template.stop_ids | self._more_stop_ids)
        return Sample(record.id, record.source, input_ids, mask, images)

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
) -> Iterator[Sample | InputProblem]:
    """Read conversation files as samples, in the files' order, each id at most once.

    Memory grows by about a hundred bytes for each sample, for the ids seen.

    Args:
        paths: the files.
        preparer: tokenises conversations.
        max_length: the longest prompt that the model takes, in tokens; None for no limit.
        vocab_size: token ids must be below it; None for no limit.

    Raises:
        InputError: a file cannot be read (when missing: at the call), or no conversation can be prepared.
    """
    return _samples(iter_records(paths), preparer, max_length, vocab_size)


def _samples(
    records: Iterable[Record | InputProblem], preparer: SamplePreparer, max_length: int | None, vocab_size: int | None
) -> Iterator[Sample | InputProblem]:
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
        sample = preparer.prepare(record)
        reason = _problem(sample, max_length, vocab_size) if isinstance(sample, Sample) else ""
        yield InputProblem(record.source, reason, record.id) if reason else sample


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
