"""Decides for each sample of the input what is to be done with it, a few at a time and never all at once."""

import asyncio
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from sglang_hs_capture.data.images import Image
from sglang_hs_capture.data.records import Excluded, InputProblem, Prepared, TokenIds
from sglang_hs_capture.driver.routing import load_of, routing_ids
from sglang_hs_capture.store.hashing import end_hash
from sglang_hs_capture.store.requests import RequestLedger, RequestRecord
from sglang_hs_capture.store.schema import rle_encode, sample_key

BATCH_SAMPLES = 64
BATCH_S = 0.1


@dataclass(frozen=True)
class Job:
    """A sample to capture.

    Attributes:
        record: what the ledger says of it.
        input_ids: int64 [S]; each image counts as one, its placeholder.
        images: what stands behind the placeholders, in order.
        media_token: the placeholder.
        cut: number of tokens that were cut off to make it short enough.
    """

    record: RequestRecord
    input_ids: TokenIds
    images: tuple[Image, ...] = ()
    media_token: int | None = None
    cut: int = 0

    @cached_property
    def routing_ids(self) -> TokenIds:
        """See ``driver/routing.py``."""
        return routing_ids(self.input_ids, self.images, self.media_token)

    @property
    def load(self) -> int:
        """How much it fills the window of what is in flight, in tokens."""
        return load_of(self.routing_ids, self.images)


@dataclass(frozen=True)
class Done:
    """A sample that the dataset holds already; ``record`` is set if its loss mask has changed."""

    record: RequestRecord | None = None
    cut: int = 0


Verdict = Job | InputProblem | Excluded | Done


class Judge:
    """Compares samples with what the dataset holds and with what the server allows."""

    def __init__(self, ledger: RequestLedger, captured: Container[str]) -> None:
        """
        Args:
            ledger: what was asked for before.
            captured: ids of the samples that the dataset holds.
        """
        self._ledger = ledger
        self._captured = captured
        self.server_limit: int | None = None
        self.takes_images = True

    def captured_from(self, sample_id: str) -> str | None:
        """Where the sample of this id came from that the dataset holds; None if it holds none."""
        return self._ledger.requests[sample_id].source if sample_id in self._captured else None

    def judge(self, sample: Prepared) -> Verdict:
        """Say what is to be done with one item of ``data.samples.iter_samples``."""
        if isinstance(sample, InputProblem | Excluded):
            return sample
        names = tuple(image.name for image in sample.images)
        record = RequestRecord(
            id=sample.id,
            key=sample_key(sample.id, names),
            length=len(sample.input_ids),
            end_hash=end_hash(sample.input_ids),
            loss_mask=tuple(rle_encode(sample.loss_mask)),
            source=sample.source,
            images=names,
        )
        if sample.id in self._captured:
            return self._judge_captured(record, sample.cut)
        job = Job(record, sample.input_ids, sample.images, sample.media_token, sample.cut)
        return self.problem(job) or job

    def _judge_captured(self, record: RequestRecord, cut: int) -> Verdict:
        known = self._ledger.requests[record.id]
        if (known.length, known.end_hash) != (record.length, record.end_hash):
            reason = (
                f"the id {record.id!r} was captured from other tokens ({known.length} from {known.source}, now "
                f"{record.length}); give the sample another id, or choose another --output if the tokenizer, the chat "
                "template, --split-turns or --max-length changed"
            )
            return InputProblem(record.source, reason, record.id)
        if known.images != record.images:
            reason = (
                f"the id {record.id!r} was captured with other images (from {known.source}); give the sample another id"
            )
            return InputProblem(record.source, reason, record.id)
        return Done(record if known.loss_mask != record.loss_mask else None, cut)

    def problem(self, job: Job) -> InputProblem | None:
        """The problem of a prompt that is longer than the server allows, or has images that it does not; else None."""
        if job.images and not self.takes_images:
            reason = (
                "the prompt has images, and the server takes none: start it with --enable-multimodal (after '--'), "
                "without --language-model-only"
            )
            return InputProblem(job.record.source, reason, job.record.id)
        if self.server_limit is None or job.record.length <= self.server_limit:
            return None
        reason = f"prompt of {job.record.length} tokens is longer than the server's longest prompt, {self.server_limit}"
        return InputProblem(job.record.source, reason, job.record.id)

    def needs_request(self, record: RequestRecord) -> bool:
        """Whether the ledger does not say already what ``record`` says."""
        return self._ledger.requests.get(record.id) != record or record.id in self._ledger.dropped


class Feed:
    """Pulls samples on a thread, so that tokenising does not hold up what is in flight."""

    def __init__(self, samples: Iterable[Prepared], judge: Judge, limit: int | None = None) -> None:
        """
        Args:
            samples: from ``data.samples.iter_samples``.
            judge: decides on each.
            limit: look at no more than so many of them.
        """
        self._samples: Iterator[Prepared] = iter(samples) if limit is None else islice(samples, limit)
        self._judge = judge
        self._ahead: list[Verdict] = []

    async def next_batch(self) -> Sequence[Verdict]:
        """The next verdicts, in the input's order; empty at its end.

        Raises:
            InputError: the input cannot be read on.
        """
        if self._ahead:
            batch, self._ahead = self._ahead, []
            return batch
        return await asyncio.to_thread(self._pull)

    def put_back(self, verdicts: Sequence[Verdict]) -> None:
        """Take back verdicts, to be given again."""
        self._ahead = [*verdicts, *self._ahead]

    def _pull(self) -> list[Verdict]:
        deadline = time.monotonic() + BATCH_S
        batch: list[Verdict] = []
        for sample in self._samples:
            batch.append(self._judge.judge(sample))
            if len(batch) >= BATCH_SAMPLES or time.monotonic() >= deadline:
                break
        return batch
