"""The input of a run: conversation files, with a tokenizer that is loaded only if a conversation turns up."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sglang_hs_capture.data.account import read_account
from sglang_hs_capture.data.conversations import iter_records
from sglang_hs_capture.data.files import count_rows, find_files
from sglang_hs_capture.data.parallel import PooledPreparer
from sglang_hs_capture.data.preparation import LossOn, Preparation
from sglang_hs_capture.data.prompts import Prompt, iter_prompts
from sglang_hs_capture.data.records import InputProblem, Prepared
from sglang_hs_capture.data.samples import SamplePreparer, iter_samples
from sglang_hs_capture.data.template import load_tokenizer, read_stop_ids
from sglang_hs_capture.errors import ConfigError, InputError

COUNT_BYTES_LIMIT = 2**31
# What tells how a tokenised set was tokenised.
TOKENIZED_BY = ("tokenizer", "tokenizer_hash", "vocabulary_hash", "chat_template_hash")
MOST_WORKERS = 16


@dataclass(frozen=True)
class Source:
    """Where samples come from.

    Attributes:
        paths: conversation files, folders and patterns (``data.files.find_files``).
        tokenizer: a directory or hub id.
        chat_template: a file that takes the place of the tokenizer's own template.
        preparation: how conversations become samples.
        trust_remote_code: whether the tokenizer may run code of its own.
        shuffle_seed: chooses a random order; None for that of the files.
        workers: the most processes that tokenise.
    """

    paths: Sequence[Path]
    tokenizer: str
    chat_template: Path | None = None
    preparation: Preparation = field(default_factory=Preparation)
    trust_remote_code: bool = False
    shuffle_seed: int | None = None
    workers: int = 1

    def samples(
        self,
        *,
        max_length: int | None,
        vocab_size: int | None,
        media_token: int | None = None,
        preparer: PooledPreparer | None = None,
    ) -> Iterator[Prepared]:
        """Read the files.

        Args:
            max_length: the longest prompt the model takes, as far as it is known.
            vocab_size: token ids must be below it; None if it is not known.
            media_token: what stands for an image in a prompt; None for a model that takes none, or is not known.
            preparer: from ``preparer``, for a caller that wants to see it afterwards; ``media_token`` is then its own.

        Raises:
            InputError: a file is missing.
        """
        return iter_samples(
            self.paths,
            preparer or self.preparer(media_token),
            max_length=max_length,
            vocab_size=vocab_size,
            shuffle_seed=self.shuffle_seed,
        )

    def prompts(self, *, vocab_size: int | None) -> Iterator[Prompt | InputProblem]:
        """Read the files for what comes before each answer, or each last one, to have it answered anew.

        Args:
            vocab_size: token ids must be below it; None if it is not known.

        Raises:
            InputError: a file is missing.
        """
        return iter_prompts(
            iter_records(self.paths, shuffle_seed=self.shuffle_seed),
            self.preparer().template_for,
            last_only=self.preparation.loss_on is LossOn.LAST,
            vocab_size=vocab_size,
        )

    def tokenized_sets(self) -> dict[Path, dict[str, Any]]:
        """The records of the tokenised sets in the input of which a tokenizer made tokens, by their folders.

        Raises:
            InputError: a file is missing, or a record is damaged.
        """
        folders = dict.fromkeys(file.parent for file in find_files(self.paths))
        accounts = {folder: read_account(folder) for folder in folders}
        return {folder: account for folder, account in accounts.items() if account and account.get("tokenizer_hash")}

    def check_sets(self) -> list[str]:
        """Hold tokenised sets in the input against the tokenizer: other tokens of the same ids would be other text.

        Returns:
            What could not be told, for a person.

        Raises:
            InputError: a set was tokenised with another vocabulary, or two sets with different ones.
        """
        sets = self.tokenized_sets()
        if not sets:
            return []
        first = next(iter(sets))
        other = next((folder for folder in sets if not _same_vocabulary(sets[first], sets[folder])), first)
        if other != first:
            raise InputError(
                f"{first} and {other}: were tokenised with different vocabularies, by {sets[first].get('tokenizer')} "
                f"and {sets[other].get('tokenizer')}; give sets of one model"
            )
        try:
            tokenizer = self.load_tokenizer()
        except InputError as error:
            return [f"{folder}: nobody can say whether its tokens are the model's: {error}" for folder in sets]
        if tokenizer is None:
            return [
                f"{folder}: nobody can say whether its tokens are the model's: no --model is given" for folder in sets
            ]
        from sglang_hs_capture.data.prepared import describe_tokenizer

        now, notices = describe_tokenizer(tokenizer), []
        for folder, there in sets.items():
            if there["tokenizer_hash"] == now["tokenizer_hash"]:
                continue
            by = f"{folder}: was tokenised by {there.get('tokenizer')} ({there['tokenizer_hash']}), and "
            if not _same_vocabulary(there, now):
                raise InputError(
                    f"{by}the vocabulary of {self.tokenizer} is another one, so its token ids stand for other text; "
                    "make the set anew with prepare-data and this model, or name the tokenizer that fits the model "
                    "with --tokenizer"
                )
            notices.append(
                f"{by}{self.tokenizer} is {now['tokenizer_hash']}: the vocabularies are the same, and the rest of the "
                "tokenizers, or the releases that read them, are not."
            )
        return notices

    def load_tokenizer(self) -> Any:
        """The tokenizer, with the chat template asked for; None where none is named.

        Raises:
            InputError: it cannot be loaded.
        """
        if not self.tokenizer:
            return None
        return load_tokenizer(
            self.tokenizer, trust_remote_code=self.trust_remote_code, chat_template=self.chat_template
        )

    def preparer(self, media_token: int | None = None) -> PooledPreparer:
        """What tokenises the conversations; it loads the tokenizer when the first one comes."""
        load = partial(self._load, media_token)
        return PooledPreparer(load, self.workers, preparation=self.preparation, media_token=media_token)

    def _load(self, media_token: int | None = None) -> SamplePreparer:
        return SamplePreparer(
            self.load_tokenizer(),
            self.preparation,
            stop_ids=read_stop_ids(self.tokenizer),
            media_token=media_token,
        )


def _same_vocabulary(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.get("vocabulary_hash") == other.get("vocabulary_hash")


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


def count_samples(paths: Sequence[Path]) -> int | None:
    """Number of lines and rows of an input, for a progress bar; None where counting them would take long."""
    try:
        return count_rows(find_files(paths), COUNT_BYTES_LIMIT)
    except InputError:  # reading will tell it, and better
        return None


def default_workers(share: int) -> int:
    """How many processes tokenise unless the user says otherwise.

    Args:
        share: one of so many processors may be taken.
    """
    return max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)) // share))
