"""Conversation files to samples that are ready to be captured."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sglang_hs_capture.data.conversations import MAX_ID_CHARACTERS, check_template_kwargs, iter_records
from sglang_hs_capture.data.images import load_images
from sglang_hs_capture.data.limits import fitted, last_run
from sglang_hs_capture.data.loss_mask import tokenize
from sglang_hs_capture.data.media import references
from sglang_hs_capture.data.passages import find_passages
from sglang_hs_capture.data.placeholders import check_placeholders
from sglang_hs_capture.data.preparation import LossOn, Preparation
from sglang_hs_capture.data.records import (
    BadRow,
    Conversation,
    InputProblem,
    Prepared,
    Record,
    Sample,
    TokenIds,
    folder_of,
)
from sglang_hs_capture.data.template import ChatTemplate
from sglang_hs_capture.errors import InputError
from sglang_hs_capture.text import shown


class SamplePreparer:
    """Turns records into samples with one tokenizer and its chat template."""

    def __init__(
        self,
        tokenizer: Any = None,
        preparation: Preparation | None = None,
        *,
        stop_ids: Iterable[int] = (),
        media_token: int | None = None,
    ) -> None:
        """
        Args:
            tokenizer: a ``transformers`` tokenizer; None if every row is tokenised already.
            preparation: how conversations become samples; the defaults if None.
            stop_ids: token ids that end an assistant's turn, besides those the tokenizer and its template show
                (``read_stop_ids``).
            media_token: what stands for an image in a prompt; None for a model that takes none.

        Raises:
            InputError: its ``template_kwargs`` name an argument that is not the template's.
        """
        self._preparation = preparation or Preparation()
        try:
            self._kwargs = check_template_kwargs(dict(self._preparation.template_kwargs), "template_kwargs")
        except BadRow as error:
            raise InputError(str(error)) from None
        self._tokenizer = tokenizer
        self._more_stop_ids = frozenset(stop_ids)
        self._media_token = media_token
        self._template: ChatTemplate | None = None

    @property
    def tokenizer(self) -> Any:
        """The ``transformers`` tokenizer; None if there is none."""
        return self._tokenizer

    def prepare(self, record: Record) -> list[Prepared]:
        """Tokenise one record, read its images, and bring it to the length and the loss that are asked for.

        Raises:
            InputError: the record is a conversation, and there is no tokenizer or it has no chat template, so that no
                conversation at all can be prepared.
        """
        try:
            samples = [self._with_loss(record)] if isinstance(record, Sample) else self._tokenised(record)
            return [fitted(check_placeholders(sample, self._media_token), self._preparation) for sample in samples]
        except BadRow as problem:
            return [InputProblem(record.source, str(problem), record.id)]

    def prepare_all(
        self, records: Iterable[Record | InputProblem]
    ) -> Iterator[tuple[Record | InputProblem, list[Prepared]]]:
        """Each record and what became of it, in the order given; problems are passed on as they are.

        Raises:
            InputError: see ``prepare``.
        """
        for record in records:
            yield record, [record] if isinstance(record, InputProblem) else self.prepare(record)

    def _with_loss(self, sample: Sample) -> Sample:
        """A row tokenised before, with its loss on the last turn alone if that is asked for."""
        if self._preparation.loss_on is LossOn.LAST:
            return replace(sample, loss_mask=last_run(sample.loss_mask))
        return sample

    def _tokenised(self, record: Conversation) -> list[Sample]:
        template = self.template_for(record.source)
        images = load_images(references(record.messages), folder_of(record.source))
        passages = find_passages(template, record, self._preparation)
        samples = []
        for passage in passages:
            input_ids, mask = tokenize(template, passage.text, passage.spans, template.stop_ids | self._more_stop_ids)
            sample_id = record.id if len(passages) == 1 else _turn_id(record.id, passage.turn)
            shown_images = images[: len(references(record.messages[: passage.messages]))]
            samples.append(Sample(sample_id, record.source, input_ids, mask, shown_images))
        return samples

    def template_for(self, source: str) -> ChatTemplate:
        """The chat template, for a conversation at ``source``.

        Raises:
            InputError: there is no tokenizer, or it has no chat template.
        """
        if self._tokenizer is None:
            raise InputError(
                f"{source}: is a conversation, which needs a tokenizer: give --model or --tokenizer (only rows with "
                "input_ids need none)"
            )
        if self._template is None:
            self._template = ChatTemplate(self._tokenizer, self._kwargs)
        return self._template


def _turn_id(record_id: str, turn: int) -> str:
    """The id of one of several samples of a conversation, the last turn of which is given."""
    sample_id = f"{record_id}#turn-{turn}"
    if len(sample_id) > MAX_ID_CHARACTERS:
        raise BadRow(f"id: the ids of the conversation's turns would be longer than {MAX_ID_CHARACTERS} characters")
    return sample_id


def iter_samples(
    paths: str | Path | Iterable[str | Path],
    preparer: SamplePreparer,
    *,
    max_length: int | None,
    vocab_size: int | None = None,
    shuffle_seed: int | None = None,
) -> Iterator[Prepared]:
    """Read conversation files as samples, in the files' order or a random one, each id at most once.

    Memory grows by about a hundred bytes for each sample, for the ids seen.

    Args:
        paths: files, folders and patterns.
        preparer: tokenises conversations.
        max_length: the longest prompt that the model takes, in tokens; None for no limit.
        vocab_size: token ids must be below it; None for no limit.
        shuffle_seed: see ``iter_records``.

    Raises:
        InputError: a file cannot be read (when missing: at the call), or no conversation can be prepared.
    """
    return _samples(iter_records(paths, shuffle_seed=shuffle_seed), preparer, max_length, vocab_size)


def _samples(
    records: Iterable[Record | InputProblem], preparer: SamplePreparer, max_length: int | None, vocab_size: int | None
) -> Iterator[Prepared]:
    seen = SeenIds()
    for record, prepared in preparer.prepare_all(records):
        # In the order of the samples, so that it does not matter how far ahead records are read.
        if not isinstance(record, InputProblem) and seen.has(record.id):
            yield InputProblem(record.source, repeated(record.id), record.id)
            continue
        for sample in prepared:
            if not isinstance(sample, Sample):
                yield sample
                continue
            # The samples of a conversation that was split have ids of their own.
            split = not isinstance(record, InputProblem) and sample.id != record.id
            taken = split and seen.has(sample.id)
            reason = repeated(sample.id) if taken else problem_of(sample.input_ids, max_length, vocab_size)
            yield InputProblem(sample.source, reason, sample.id) if reason else sample


class SeenIds:
    """The ids seen so far, by their hashes."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def has(self, sample_id: str) -> bool:
        """Whether an id came before; it has come now."""
        digest = hashlib.blake2b(sample_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        before = digest in self._seen
        self._seen.add(digest)
        return before


def repeated(sample_id: str) -> str:
    """Why a row or sample is left out whose id came before."""
    return f"an earlier line has the same id, {shown(sample_id)}"


def problem_of(input_ids: TokenIds, max_length: int | None, vocab_size: int | None) -> str:
    """Why a model does not take these tokens, ``[S]``; empty if it does. See ``iter_samples`` for the limits."""
    length = len(input_ids)
    if max_length is not None and length > max_length:
        return f"prompt of {length} tokens is longer than the model's context of {max_length}"
    if vocab_size is not None:
        position = int(np.argmax(input_ids))
        if input_ids[position] >= vocab_size:
            token = input_ids[position]
            return f"token id {token} at position {position} lies outside the model's vocabulary of {vocab_size}"
    return ""
