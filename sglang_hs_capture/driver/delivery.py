"""Brings one sample at a time to the server and waits until the journal says that its states are on disk."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_hs_capture.data.records import BadRow
from sglang_hs_capture.driver.client import RefusedError, RetryableError, ServerClient
from sglang_hs_capture.driver.feed import Job
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

    def settle(self, verdict: str) -> bool:
        if self.verdict.done():
            return False
        self.verdict.set_result(verdict)
        return True


class Delivery:
    """Sends samples to servers, each as often as it needs, and matches the journals' records with them."""

    def __init__(self, client: ServerClient | ServerPool, rid_prefix: str, settings: DeliverySettings) -> None:
        self._client = client
        self._rid_prefix = rid_prefix
        self._settings = settings
        self._pending: dict[str, _Pending] = {}
        self._reconnecting = asyncio.Lock()
        self.resent = 0

    def offer(self, record: SampleRecord | FailureRecord) -> int:
        """Take one record of a journal; those of other requests are passed over.

        A sample counts as acknowledged only if it is the one asked for, by its length and its hash; a late
        acknowledgement of an earlier attempt is as good as one of the latest. Of failures only the latest attempt's
        counts.

        Returns:
            The tokens of the sample if this very record acknowledges one, else 0.
        """
        parsed = parse_rid(record.rid)
        pending = self._pending.get(parsed.key) if parsed and parsed.prefix == self._rid_prefix else None
        if pending is None:
            return 0
        if isinstance(record, SampleRecord):
            if pending.record.is_met_by(record.length, record.end_hash, record.media):
                return record.length if pending.settle("") else 0
            if record.rid == pending.rid:
                pending.settle(_other_tokens(pending.record, record))
        elif record.rid == pending.rid:
            pending.settle(f"{record.reason}: {record.detail}")
        return 0

    async def deliver(self, job: Job, computed: asyncio.Event | None = None) -> None:
        """Send a sample until it is acknowledged.

        Args:
            job: the sample.
            computed: set as soon as the server has computed the prompt, which is before its acknowledgement.

        Raises:
            RefusedError: the server does not take this prompt.
            DroppedError: all attempts failed.
            EngineError: the server cannot be reached any more.
        """
        reason = ""
        for attempt in range(self._settings.attempts):
            if attempt:
                self.resent += 1
                await asyncio.sleep(RESEND_PAUSE_S)
            with self._watching(job, attempt) as pending:
                reason = await self._attempt(job, pending, computed)
            if not reason:
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

    async def _attempt(self, job: Job, pending: _Pending, computed: asyncio.Event | None) -> str:
        """One attempt: "" when the sample is acknowledged, the reason when it is not."""
        try:
            images = await asyncio.to_thread(_payloads, job) if job.images else ()
            # Rows that could not be found or proven in the cache are computed anew.
            await self._client.prefill(
                pending.rid,
                job.input_ids.tolist(),
                images=images,
                routing_ids=job.routing_ids,
                bypass_cache=pending.attempt > 0,
            )
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

    async def _reconnect(self, error: ConnectionError) -> None:
        # One request asks for all: the others find the server healthy, or the run is over.
        async with self._reconnecting:
            if not await self._client.wait_healthy(self._settings.grace_s):
                raise EngineError(
                    f"lost the server ({error}) and it did not come back within {self._settings.grace_s:g} s; all "
                    "acknowledged samples are safe, run again to go on"
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
