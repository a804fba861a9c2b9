"""Brings one sample at a time to the server and waits until the journal says that its states are on disk."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_hs_capture.driver.client import Prediction, RefusedError, RetryableError, ServerClient
from sglang_hs_capture.driver.feed import Job
from sglang_hs_capture.driver.known_answers import AnswerBook, Question
from sglang_hs_capture.driver.pool import ServerPool
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
    attempt: int
    verdict: asyncio.Future[str]
    answer: Prediction | None = None

    def settle(self, verdict: str) -> bool:
        if self.verdict.done():
            return False
        self.verdict.set_result(verdict)
        return True


class Delivery:
    """Sends samples to servers, each as often as it needs, and matches the journals' records with them."""

    def __init__(
        self, client: ServerClient | ServerPool, rid_prefix: str, settings: DeliverySettings, answers: AnswerBook
    ) -> None:
        """
        Args:
            client: of the servers.
            rid_prefix: what the ids of captured requests begin with.
            settings: how long to try.
            answers: asks the engine for predictions along with a sample's first attempt.
        """
        self._client = client
        self._answers = answers
        self._rid_prefix = rid_prefix
        self._settings = settings
        self._pending: dict[str, _Pending] = {}
        self._reconnecting = asyncio.Lock()
        self.resent = 0

    def offer(self, record: SampleRecord | FailureRecord) -> RequestRecord | None:
        """Take one record of a journal; those of other requests are passed over.

        A sample counts as acknowledged only if its length and its hash are the prompt's own; a late acknowledgement of
        an earlier attempt is as good as one of the latest. Of failures only the latest attempt's counts.

        Returns:
            The ledger's record of the sample if this very record acknowledges it.
        """
        parsed = parse_rid(record.rid)
        pending = self._pending.get(parsed.key) if parsed and parsed.prefix == self._rid_prefix else None
        if pending is None:
            return None
        if isinstance(record, SampleRecord):
            if (record.length, record.end_hash) == (pending.record.length, pending.record.end_hash):
                return pending.record if pending.settle("") else None
            if record.rid == pending.rid:
                sent = pending.record.length
                pending.settle(f"the states stored are those of other tokens ({record.length} of them, {sent} sent)")
        elif record.rid == pending.rid:
            pending.settle(f"{record.reason}: {record.detail}")
        return None

    async def deliver(self, job: Job, computed: asyncio.Event | None = None) -> None:
        """Send a sample until it is acknowledged.

        Args:
            job: the sample.
            computed: set as soon as the server has computed the prompt, which is before its acknowledgement.

        Raises:
            RefusedError: the server does not take this prompt.
            DroppedError: all attempts failed.
            EngineError: the server cannot be reached any more.
            DiskFullError, StoreError: the engine's answer could not be kept.
        """
        reason = ""
        with self._answers.asking(job.record) as question:
            for attempt in range(self._settings.attempts):
                if attempt:
                    self.resent += 1
                    await asyncio.sleep(RESEND_PAUSE_S)
                with self._watching(job, attempt) as pending:
                    reason = await self._attempt(job, pending, computed, None if attempt else question)
                if not reason:
                    if question is not None:
                        question.answer = pending.answer
                    return
        raise DroppedError(f"not captured in {self._settings.attempts} attempts; the last one: {reason}")

    @contextlib.contextmanager
    def _watching(self, job: Job, attempt: int) -> Iterator[_Pending]:
        rid = make_rid(self._rid_prefix, job.record.key, attempt, job.record.end_hash)
        pending = _Pending(job.record, rid, attempt, asyncio.get_running_loop().create_future())
        self._pending[job.record.key] = pending
        try:
            yield pending
        finally:
            del self._pending[job.record.key]

    async def _attempt(
        self, job: Job, pending: _Pending, computed: asyncio.Event | None, question: Question | None
    ) -> str:
        """One attempt: "" when the sample is acknowledged, the reason when it is not."""
        try:
            await self._prefill(job, pending, question)
        except (RefusedError, RetryableError, ConnectionError) as error:
            if pending.verdict.done() and not pending.verdict.result():
                return ""  # the reply was lost, the states were not
            if isinstance(error, RefusedError):
                raise
            if isinstance(error, ConnectionError):
                await self._reconnect(error)
            return str(error)
        if computed is not None:
            computed.set()
        try:
            return await asyncio.wait_for(pending.verdict, self._settings.ack_timeout_s)
        except TimeoutError:
            return f"no acknowledgement within {self._settings.ack_timeout_s:g} s of the server's reply"

    async def _prefill(self, job: Job, pending: _Pending, question: Question | None) -> None:
        """Have the prompt computed; what the engine predicts on the way is the same request's, so it costs no other."""
        tokens = job.input_ids.tolist()
        if question is not None:
            with contextlib.suppress(RefusedError):
                pending.answer = await self._client.prefill(pending.rid, tokens, predict_from=question.start)
                if pending.answer is None:
                    self._answers.ask_no_more()
                return
        # Rows that could not be found or proven in the cache are computed anew.
        await self._client.prefill(pending.rid, tokens, bypass_cache=pending.attempt > 0)
        if question is not None:
            self._answers.ask_no_more()  # it was not the prompt that the server refused

    async def _reconnect(self, error: ConnectionError) -> None:
        # One request asks for all: the others find the server healthy, or the run is over.
        async with self._reconnecting:
            await regain(self._client, error, self._settings.grace_s)


async def regain(client: ServerClient | ServerPool, error: ConnectionError, grace_s: float) -> None:
    """Wait for a server that was lost.

    Raises:
        EngineError: it does not come back.
    """
    if not await client.wait_healthy(grace_s):
        raise EngineError(
            f"lost the server ({error}) and it did not come back within {grace_s:g} s; all acknowledged samples are "
            "safe, run again to go on"
        )
