"""Keeps the servers busy: ledger first, then the prompt, then the wait for its acknowledgement, many at a time."""

import asyncio
import time
from dataclasses import dataclass

from sglang_hs_capture.driver.client import RefusedError, Window
from sglang_hs_capture.driver.delivery import Delivery, DroppedError
from sglang_hs_capture.driver.ending import Ending
from sglang_hs_capture.driver.feed import Job
from sglang_hs_capture.driver.intake import Intake
from sglang_hs_capture.driver.prefix_order import Step, prefix_order
from sglang_hs_capture.driver.progress import ProgressView, Snapshot
from sglang_hs_capture.driver.target import Target
from sglang_hs_capture.driver.watch import JournalWatch, SessionWatch
from sglang_hs_capture.errors import EngineError, HsCaptureError

WATCH_INTERVAL_S = 0.1
SESSION_INTERVAL_S = 0.5


@dataclass(frozen=True)
class PumpSettings:
    """How much to keep in flight, and when to lose patience.

    Attributes:
        max_prompts: most prompts in flight, for each server.
        max_tokens: most tokens in flight ...
        max_server_tokens: ... or so many for each server, if that is more.
        order_prompts: so many prompts are looked at together, to bring those that share a prefix one after another.
        order_seconds: no longer than so long is waited for that many.
        held_bytes: fewer are looked at together where the input itself holds so many bytes of their images.
        stall_timeout_s: give up when nothing at all has moved for so long.
        drain_timeout_s: after a signal, how long to wait for what is in flight.
    """

    max_prompts: int = 512
    max_tokens: int = 2**21
    max_server_tokens: int = 2**18
    order_prompts: int = 1024
    order_seconds: float = 1.0
    held_bytes: int = 2**28
    stall_timeout_s: float = 900.0
    drain_timeout_s: float = 60.0


class Pump:
    """Moves the samples of a feed to the servers until the feed or the run ends."""

    def __init__(
        self,
        *,
        intake: Intake,
        delivery: Delivery,
        target: Target,
        journals: JournalWatch,
        sessions: SessionWatch,
        settings: PumpSettings,
        ending: Ending,
        view: ProgressView,
        prefix_cache: bool,
    ) -> None:
        self._intake, self._delivery, self._target = intake, delivery, target
        self._journals, self._sessions = journals, sessions
        self._settings, self._ending, self._view = settings, ending, view
        self._prefix_cache = prefix_cache
        self._window = Window(self._limits)
        target.pool.max_prompts = settings.max_prompts
        self._tasks: set[asyncio.Task[None]] = set()
        self._moved_at = time.monotonic()
        self._rows = 0

    async def run(self) -> None:
        """Send everything and wait for it; returns early when the run ends early."""
        watcher = asyncio.create_task(self._watch())
        try:
            await self._ending.unless_cut(self._send())
            await self._ending.unless_stopped(self._drain())
            limit = self._settings.drain_timeout_s if self._ending.signal else None
            await self._ending.unless_failed(self._drain(), limit)
            # What was acknowledged up to now counts, also when its request is about to be given up.
            self._read_journals()
        except HsCaptureError as error:
            self._ending.fail(error)
        finally:
            for task in (watcher, *self._tasks):
                task.cancel()
            await asyncio.gather(watcher, *self._tasks, return_exceptions=True)
            self._show()

    def _limits(self) -> tuple[int, int]:
        servers, settings = self._target.pool.size, self._settings
        tokens = settings.max_tokens if servers == 1 else max(settings.max_tokens, servers * settings.max_server_tokens)
        return servers * settings.max_prompts, tokens

    async def _send(self) -> None:
        gathering = asyncio.create_task(self._gather())
        try:
            while jobs := await gathering:
                gathering = asyncio.create_task(self._gather())
                computed = [asyncio.Event() for _ in jobs]
                for step in await asyncio.to_thread(self._order, jobs):
                    await self._window.enter(jobs[step.index].load)
                    after = None if step.after is None else computed[step.after]
                    task = asyncio.create_task(self._deliver(jobs[step.index], computed[step.index], after))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        finally:
            gathering.cancel()

    async def _gather(self) -> list[Job]:
        """The next samples to put in order; while they are sent, the next ones are tokenised."""
        deadline = time.monotonic() + self._settings.order_seconds
        jobs: list[Job] = []
        while len(jobs) < self._settings.order_prompts and (not jobs or time.monotonic() < deadline):
            more = await self._intake.next_jobs()
            if more is None:
                break
            jobs.extend(more)
            if sum(image.held for job in jobs for image in job.images) > self._settings.held_bytes:
                break
        return jobs

    def _order(self, jobs: list[Job]) -> list[Step]:
        if not self._prefix_cache:
            return [Step(index, None, 0) for index in range(len(jobs))]
        return prefix_order([job.routing_ids for job in jobs])

    async def _drain(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _deliver(self, job: Job, computed: asyncio.Event, after: asyncio.Event | None) -> None:
        try:
            if after is not None:
                await after.wait()
            await self._delivery.deliver(job, computed)
        except RefusedError as error:
            self._intake.refuse(job, f"the server refuses this prompt: {error}")
        except DroppedError as error:
            self._intake.drop(job, str(error))
        except Exception as error:
            self._ending.fail(error)
        finally:
            computed.set()  # also after a failure: whoever waits computes the prefix instead
            self._moved_at = time.monotonic()
            self._window.leave(job.load)

    async def _watch(self) -> None:
        sessions_due = 0.0
        try:
            while True:
                self._read_journals()
                if time.monotonic() >= sessions_due:
                    sessions_due = time.monotonic() + SESSION_INTERVAL_S
                    self._check_health()
                self._show()
                await asyncio.sleep(WATCH_INTERVAL_S)
        except Exception as error:
            self._ending.fail(error)

    def _read_journals(self) -> None:
        for record in self._journals.poll():
            if captured := self._delivery.offer(record):
                self._intake.captured(*captured)

    def _check_health(self) -> None:
        self._target.check_alive()
        self._sessions.poll()
        pool = self._target.pool
        pool.note_stops(self._sessions.stops())
        pool.note_ends(self._sessions.ends())
        pool.look_for_leaving()
        pool.rebalance()
        rows = self._sessions.counters().rows
        if rows != self._rows or not self._window.prompts:
            self._rows, self._moved_at = rows, time.monotonic()
        idle = time.monotonic() - self._moved_at
        if idle > self._settings.stall_timeout_s:
            raise EngineError(
                f"nothing has moved for {idle:.0f} s with {self._window.prompts} prompts in flight: the server hangs; "
                "see its log"
            )

    def _show(self) -> None:
        summary, counters = self._intake.summary, self._sessions.counters()
        summary.resent = self._delivery.resent
        summary.blocked_s = counters.blocked_s
        left_out = len(summary.skipped) + len(summary.dropped) + sum(summary.excluded.values())
        self._view.update(
            Snapshot(
                done=summary.captured + summary.already + left_out,
                in_flight=self._window.prompts - self._delivery.acknowledged,
                tokens=summary.tokens,
                rows=counters.rows,
                bytes=counters.bytes,
                blocked_s=counters.blocked_s,
                disk_wait_s=counters.disk_wait_s,
            )
        )
