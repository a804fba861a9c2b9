"""Brings one sample at a time to the server and waits until the journal says that its states are on disk."""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_hs_capture.data.records import BadRow
from sglang_hs_capture.driver.client import Prediction, RefusedError, RetryableError, ServerClient
from sglang_hs_capture.driver.feed import Job
from sglang_hs_capture.driver.known_answers import AnswerBook, Question
from sglang_hs_capture.driver.pool import MovedError, NoServerError, Server, ServerPool
from sglang_hs_capture.errors import EngineError
from sglang_hs_capture.store.requests import RequestRecord
from sglang_hs_capture.store.schema import FailureRecord, SampleRecord, make_rid, parse_rid

RESEND_PAUSE_S = 0.5


class DroppedError(Exception):
    """A sample was not captured in all its attempts; the text says why."""


@dataclass(frozen=True)
class DeliverySettings:
    """How long to try.

    Attributes:
        attempts: times a sample is sent before it is given up.
        ack_timeout_s: how long after the server's reply its acknowledgement may take.
        grace_s: how long a server that cannot be reached may take to come back.
    """

    attempts: int = 3
    ack_timeout_s: float = 120.0
    grace_s: float = 60.0


@dataclass
class _Pending:
    """A sample on its way: its latest request id, and the journal's word on it ("" for acknowledged)."""

    record: RequestRecord
    rid: str
    verdict: asyncio.Future[str]
    answer: Prediction | None = None

    @property
    def acknowledged(self) -> bool:
        return self.verdict.done() and not self.verdict.cancelled() and not self.verdict.result()

    def settle(self, verdict: str) -> bool:
        if self.verdict.done():
            return False
        self.verdict.set_result(verdict)
        return True


class Delivery:
    """Sends samples to servers, each as often as it needs, and matches the journals' records with them."""

    def __init__(self, pool: ServerPool, rid_prefix: str, settings: DeliverySettings, answers: AnswerBook) -> None:
        """
        Args:
            pool: the servers.
            rid_prefix: what the ids of captured requests begin with.
            settings: how long to try.
            answers: asks the engine for predictions along with a sample's first attempt.
        """
        self._pool = pool
        self._answers = answers
        self._rid_prefix = rid_prefix
        self._settings = settings
        self._pending: dict[str, _Pending] = {}
        self._reconnecting = asyncio.Lock()
        self.resent = 0

    @property
    def acknowledged(self) -> int:
        """Samples whose acknowledgement has been read, and whose turn has not ended yet."""
        return sum(pending.acknowledged for pending in self._pending.values())

    def offer(self, record: SampleRecord | FailureRecord) -> tuple[RequestRecord, int] | None:
        """Take one record of a journal; those of other requests are passed over.

        A sample counts as acknowledged only if it is the one asked for, by its length and its hash; a late
        acknowledgement of an earlier attempt is as good as one of the latest. Of failures only the latest attempt's
        counts.

        Returns:
            If this very record acknowledges a sample, what the ledger says of it, and the number of its tokens, those
            of its images included.
        """
        parsed = parse_rid(record.rid)
        pending = self._pending.get(parsed.key) if parsed and parsed.prefix == self._rid_prefix else None
        if pending is None:
            return None
        if isinstance(record, SampleRecord):
            if pending.record.is_met_by(record.length, record.end_hash, record.media):
                return (pending.record, record.length) if pending.settle("") else None
            if record.rid == pending.rid:
                pending.settle(_other_tokens(pending.record, record))
        elif record.rid == pending.rid:
            pending.settle(f"{record.reason}: {record.detail}")
        return None

    async def deliver(self, job: Job, computed: asyncio.Event | None = None) -> None:
        """Send a sample until it is acknowledged. That it is moved to another server does not count as a failure.

        Args:
            job: the sample.
            computed: set as soon as the server has computed the prompt, which is before its acknowledgement.

        Raises:
            RefusedError: the server does not take this prompt.
            DroppedError: all attempts failed.
            EngineError: the server cannot be reached any more.
        """
        with self._answers.asking(job.record) as question:
            answer = await self._deliver(job, computed, question)
            if question is not None:
                question.answer = answer

    async def _deliver(self, job: Job, computed: asyncio.Event | None, question: Question | None) -> Prediction | None:
        """Send a sample until it is acknowledged; what the engine predicted in that very attempt, if it was asked."""
        failures = 0
        tried: set[Server] = set()
        for number in itertools.count():
            self.resent += number > 0
            with self._watching(job, number) as pending:
                try:
                    # Rows that could not be found or proven in the cache are computed anew.
                    reason = await self._attempt(
                        job, pending, computed, tried, question=None if number else question, bypass_cache=failures > 0
                    )
                except MovedError:
                    if pending.acknowledged:
                        return pending.answer
                    continue
            if not reason:
                return pending.answer
            failures += 1
            if failures == self._settings.attempts:
                raise DroppedError(f"not captured in {failures} attempts; the last one: {reason}")
            await asyncio.sleep(RESEND_PAUSE_S)
        raise AssertionError("counting never ends")

    @contextlib.contextmanager
    def _watching(self, job: Job, number: int) -> Iterator[_Pending]:
        rid = make_rid(self._rid_prefix, job.record.key, number, job.record.end_hash)
        pending = _Pending(job.record, rid, asyncio.get_running_loop().create_future())
        self._pending[job.record.key] = pending
        try:
            yield pending
        finally:
            del self._pending[job.record.key]

    async def _attempt(
        self,
        job: Job,
        pending: _Pending,
        computed: asyncio.Event | None,
        tried: set[Server],
        *,
        question: Question | None,
        bypass_cache: bool,
    ) -> str:
        """One attempt: "" when the sample is acknowledged, the reason when it is not."""
        input_ids = job.input_ids.tolist()
        images = await asyncio.to_thread(_payloads, job) if job.images else []

        async def send(client: ServerClient) -> str:
            await self._prefill(client, pending, input_ids, images, question, bypass_cache)
            if computed is not None:
                computed.set()
            try:
                return await asyncio.wait_for(pending.verdict, self._settings.ack_timeout_s)
            except TimeoutError:
                return f"no acknowledgement within {self._settings.ack_timeout_s:g} s of the server's reply"

        try:
            return await self._pool.serve(job.routing_ids, send, tried)
        except (RefusedError, RetryableError, ConnectionError) as error:
            if pending.acknowledged:
                return ""  # the reply was lost, the states were not
            if isinstance(error, RefusedError):
                raise
            if isinstance(error, ConnectionError):
                await self._reconnect(error)
            if isinstance(error, NoServerError):
                raise MovedError(str(error)) from None
            return str(error)

    async def _prefill(
        self,
        client: ServerClient,
        pending: _Pending,
        input_ids: list[int],
        images: list[str],
        question: Question | None,
        bypass_cache: bool,
    ) -> None:
        """Have the prompt computed; what the engine predicts on the way is the same request's, so it costs no other."""
        if question is not None:
            with contextlib.suppress(RefusedError):
                pending.answer = await client.prefill(pending.rid, input_ids, predict_from=question.start)
                if pending.answer is None:
                    self._answers.ask_no_more()
                return
        await client.prefill(pending.rid, input_ids, images=images, bypass_cache=bypass_cache)
        if question is not None:
            self._answers.ask_no_more()  # it was not the prompt that the server refused

    async def _reconnect(self, error: ConnectionError) -> None:
        # One request asks for all: the others find the server healthy, or the run is over.
        async with self._reconnecting:
            await regain(self._pool, error, self._settings.grace_s)


async def regain(pool: ServerPool, error: ConnectionError, grace_s: float) -> None:
    """Wait until a server can be reached, if none can.

    Raises:
        EngineError: none comes back.
    """
    if not pool.usable and not await pool.wait_healthy(grace_s):
        raise EngineError(
            f"lost the server ({error}) and it did not come back within {grace_s:g} s{pool.unfit}; all acknowledged "
            "samples are safe, run again to go on"
        )


def _payloads(job: Job) -> list[str]:
    """The images of a sample as they are sent.

    Raises:
        DroppedError: one of them is not there any more as it was read.
    """
    try:
        return [image.payload() for image in job.images]
    except BadRow as error:
        raise DroppedError(str(error)) from None


def _other_tokens(asked: RequestRecord, stored: SampleRecord) -> str:
    if asked.images and stored.media is None:
        return "the states stored are those of the prompt without its images: the server did not take them"
    return f"the states stored are those of other tokens ({stored.length} of them, {asked.length} sent)"
