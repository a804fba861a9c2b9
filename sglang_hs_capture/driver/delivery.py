"""Brings one sample at a time to the server and waits until the journal says that its states are on disk."""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_hs_capture.driver.client import RefusedError, RetryableError, ServerClient
from sglang_hs_capture.driver.feed import Job
from sglang_hs_capture.driver.pool import MovedError, NoServerError, ServerPool
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

    def __init__(self, pool: ServerPool, rid_prefix: str, settings: DeliverySettings) -> None:
        self._pool = pool
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
        """Send a sample until it is acknowledged. That it is moved to another server does not count as a failure.

        Args:
            job: the sample.
            computed: set as soon as the server has computed the prompt, which is before its acknowledgement.

        Raises:
            RefusedError: the server does not take this prompt.
            DroppedError: all attempts failed.
            EngineError: the server cannot be reached any more.
        """
        failures = 0
        for number in itertools.count():
            self.resent += number > 0
            with self._watching(job, number) as pending:
                try:
                    # Rows that could not be found or proven in the cache are computed anew.
                    reason = await self._attempt(job, pending, computed, bypass_cache=failures > 0)
                except MovedError:
                    if pending.acknowledged:
                        return
                    continue
            if not reason:
                return
            failures += 1
            if failures == self._settings.attempts:
                raise DroppedError(f"not captured in {failures} attempts; the last one: {reason}")
            await asyncio.sleep(RESEND_PAUSE_S)

    @contextlib.contextmanager
    def _watching(self, job: Job, number: int) -> Iterator[_Pending]:
        rid = make_rid(self._rid_prefix, job.record.key, number, job.record.end_hash)
        pending = _Pending(job.record, rid, asyncio.get_running_loop().create_future())
        self._pending[job.record.key] = pending
        try:
            yield pending
        finally:
            del self._pending[job.record.key]

    async def _attempt(self, job: Job, pending: _Pending, computed: asyncio.Event | None, *, bypass_cache: bool) -> str:
        """One attempt: "" when the sample is acknowledged, the reason when it is not."""
        input_ids = job.input_ids.tolist()

        async def send(client: ServerClient) -> str:
            await client.prefill(pending.rid, input_ids, bypass_cache=bypass_cache)
            if computed is not None:
                computed.set()
            try:
                return await asyncio.wait_for(pending.verdict, self._settings.ack_timeout_s)
            except TimeoutError:
                return f"no acknowledgement within {self._settings.ack_timeout_s:g} s of the server's reply"

        try:
            return await self._pool.serve(input_ids, send)
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

    async def _reconnect(self, error: ConnectionError) -> None:
        # One request asks for all: the others find the server healthy, or the run is over.
        async with self._reconnecting:
            if not self._pool.usable and not await self._pool.wait_healthy(self._settings.grace_s):
                raise EngineError(
                    f"lost the server ({error}) and it did not come back within {self._settings.grace_s:g} s; all "
                    "acknowledged samples are safe, run again to go on"
                )
