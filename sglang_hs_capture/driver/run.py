"""A capture run from beginning to end: what is there is kept, what is missing is captured, and an account is given."""

import asyncio
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals

from sglang_hs_capture.data.records import Prepared
from sglang_hs_capture.driver.delivery import Delivery, DeliverySettings
from sglang_hs_capture.driver.ending import Ending
from sglang_hs_capture.driver.feed import Feed, Judge
from sglang_hs_capture.driver.intake import Intake, OnBadInput
from sglang_hs_capture.driver.known_answers import AnswerBook
from sglang_hs_capture.driver.progress import ProgressView
from sglang_hs_capture.driver.pump import Pump, PumpSettings
from sglang_hs_capture.driver.regenerate import AnsweringServers, Regeneration
from sglang_hs_capture.driver.summary import Summary
from sglang_hs_capture.driver.target import Target
from sglang_hs_capture.driver.watch import JournalWatch, SessionWatch
from sglang_hs_capture.errors import EngineError, HsCaptureError, InputError
from sglang_hs_capture.store.identity import DATASET_FILE, read_info
from sglang_hs_capture.store.index import load_index
from sglang_hs_capture.store.requests import RequestLedger
from sglang_hs_capture.store.session import SessionRecord, replica_of

LOCK_TIMEOUT_S = 1.0
SPARE_FILES = 256
KNOWN_ANSWERS = 8
_GO_ON = "all acknowledged samples are safe, run again to go on"
# Each prompt in flight has a connection, and more servers may come while the run goes on.
SERVERS = 64
Samples = Iterable[Prepared]


@dataclass(frozen=True)
class RunSettings:
    """How a run behaves.

    Attributes:
        output: the dataset's directory; it must exist.
        on_bad_input: stop at the first line or sample that cannot be captured, or leave such ones out.
        limit: look at no more than so many samples of the input.
        known_answers: keep the engine's own predictions for so many prompts of each server.
        delivery: how often and how long a sample is tried.
        pump: how much is in flight.
    """

    output: Path
    on_bad_input: OnBadInput = OnBadInput.STOP
    limit: int | None = None
    known_answers: int = KNOWN_ANSWERS
    delivery: DeliverySettings = field(default_factory=DeliverySettings)
    pump: PumpSettings = field(default_factory=PumpSettings)


class CaptureRun:
    """One run over one input."""

    def __init__(
        self,
        target: Target,
        samples: Samples,
        settings: RunSettings,
        view: ProgressView,
        regeneration: Regeneration | None = None,
    ) -> None:
        self._target, self._samples, self._settings, self._view = target, samples, settings, view
        self._regeneration = regeneration
        self._sessions: list[SessionRecord] | None = None
        self._ending = Ending()
        self._summary = Summary(output=str(settings.output))
        self._working = False

    async def run(self) -> Summary:
        """Do all of it.

        Returns:
            The account; its ``ended`` and ``exit_code`` say whether and why the run ended early.

        Raises:
            DatasetLockedError: another run works on this dataset.
            CorruptionError: the dataset is damaged.
        """
        with RequestLedger.open(self._settings.output, lock_timeout_s=LOCK_TIMEOUT_S) as ledger:
            # What the journals hold by now is read from the index, what comes later from the watch: nothing is missed.
            journals = JournalWatch(self._settings.output)
            journals.poll()
            judge = Judge(ledger, self._captured())
            again = self._regeneration
            samples = again.of_this_run(self._samples) if again else self._samples
            feed = Feed(samples, judge, None if again else self._settings.limit)
            intake = Intake(feed, judge, ledger, self._settings.on_bad_input, self._summary, self._ending)
            with self._ending.signals(self._tell, self._target.kill):
                await self._guarded(intake, journals, judge)
        self._conclude()
        return self._summary

    def _captured(self) -> set[str]:
        """Ids of the samples that the dataset holds, of those that were asked for by id."""
        if not (self._settings.output / DATASET_FILE).exists():
            return set()
        index = load_index(self._settings.output)
        return {sample.id for sample in index.samples if sample.id in index.requested}

    async def _guarded(self, intake: Intake, journals: JournalWatch, judge: Judge) -> None:
        try:
            if self._regeneration:
                await self._answer(self._regeneration, intake, judge)
            if await self._ending.unless_stopped(intake.find_work()):
                sessions = await self._open()
                if sessions is not None:
                    await self._pump(intake, journals, sessions)
        except HsCaptureError as error:
            self._ending.fail(error)
        finally:
            try:
                await self._target.close()
            except HsCaptureError as error:
                self._ending.fail(error)

    async def _open(self) -> list[SessionRecord] | None:
        """The server's sessions, once it is up; None if the run ends before."""
        if self._sessions is None:
            self._sessions = await self._ending.unless_stopped(self._target.open(self._view.say))
        return self._sessions

    async def _answer(self, regeneration: Regeneration, intake: Intake, judge: Judge) -> None:
        async def server() -> AnsweringServers | None:
            sessions = await self._open()
            if sessions is None:
                return None
            return AnsweringServers(self._target.pool, sessions[0].rid_prefix, shortest_limit(sessions))

        try:
            await regeneration.run(server, intake.note, self._ending, self._view, judge.captured_from)
        except InputError as error:
            # What was answered before the input broke off is captured all the same.
            self._ending.stop(error, send_accepted=True)
        finally:
            self._summary.answered = regeneration.answered

    async def _pump(self, intake: Intake, journals: JournalWatch, sessions: list[SessionRecord]) -> None:
        takes_images = all(record.media_token is not None for record in sessions)
        intake.limit_prompts(shortest_limit(sessions), takes_images=takes_images)
        replicas = {replica_of(record) for record in sessions}
        answers = AnswerBook(self._settings.output, self._settings.known_answers * len(replicas))
        delivery = Delivery(self._target.pool, sessions[0].rid_prefix, self._settings.delivery, answers)
        watch = SessionWatch(self._settings.output, sessions)
        pump = Pump(
            intake=intake,
            delivery=delivery,
            target=self._target,
            journals=journals,
            sessions=watch,
            settings=self._settings.pump,
            ending=self._ending,
            view=self._view,
            prefix_cache=any(record.prefix_cache for record in sessions),
        )
        started, self._working = time.monotonic(), True
        try:
            await pump.run()
        finally:
            answers.close()
        self._summary.known_answers = answers.kept
        self._summary.seconds = time.monotonic() - started
        self._summary.bytes = self._summary.tokens * read_info(self._settings.output).row_bytes

    def _tell(self, caught: Signals) -> None:
        self._view.say(f"{caught.name}: finishing what is in flight; a second {caught.name} ends at once.")

    def _conclude(self) -> None:
        """Say in the account how the run ended; an error that nobody foresaw goes on to the caller."""
        error, caught = self._ending.error, self._ending.signal
        if error is not None:
            if not isinstance(error, HsCaptureError):
                raise error
            # Whoever says that a server died does not know whether there was work by then.
            unsaid = isinstance(error, EngineError) and self._working and "acknowledged" not in str(error)
            self._summary.ended = f"{error}; {_GO_ON}" if unsaid else str(error)
            self._summary.exit_code = error.exit_code
        elif caught is not None:
            self._summary.ended = f"ended by {caught.name}; {_GO_ON}"
            self._summary.exit_code = 128 + caught


def run_capture(
    target: Target,
    samples: Samples,
    settings: RunSettings,
    view: ProgressView,
    regeneration: Regeneration | None = None,
) -> Summary:
    """Run to the end, from the main thread of a program; see ``CaptureRun``."""

    _allow_open_files(settings.pump.max_prompts * SERVERS + SPARE_FILES)

    async def main() -> Summary:
        return await CaptureRun(target, samples, settings, view, regeneration).run()

    return asyncio.run(main())


def shortest_limit(sessions: Iterable[SessionRecord]) -> int | None:
    """The longest prompt that all of the servers take, in tokens; None if none of them tells."""
    return min((record.max_prompt_tokens for record in sessions if record.max_prompt_tokens), default=None)


def _allow_open_files(wanted: int) -> None:
    """Raise this process's limit of open files, as far as it may: each prompt in flight has a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
