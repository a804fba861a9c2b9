"""Takes samples in: what is there is passed over, what cannot be captured dealt with, and the rest asked for."""

from collections.abc import Sequence
from enum import StrEnum

from sglang_hs_capture.data.records import Excluded, InputProblem
from sglang_hs_capture.driver.ending import Ending
from sglang_hs_capture.driver.feed import Done, Feed, Job, Judge, Verdict
from sglang_hs_capture.driver.summary import Summary
from sglang_hs_capture.errors import EngineError, InputError
from sglang_hs_capture.store.requests import DroppedRecord, RequestLedger, RequestRecord
from sglang_hs_capture.store.schema import all_zero

# So many samples given up in a row, none captured between them, is no matter of single samples any more.
DROPS_IN_A_ROW = 16


class OnBadInput(StrEnum):
    """What to do with a line or a sample that cannot be captured."""

    STOP = "stop"
    SKIP = "skip"


class Intake:
    """Keeps the ledger and the account of one run."""

    def __init__(
        self, feed: Feed, judge: Judge, ledger: RequestLedger, policy: OnBadInput, summary: Summary, ending: Ending
    ) -> None:
        self._feed, self._judge, self._ledger = feed, judge, ledger
        self._policy, self._ending = policy, ending
        self._drops_in_a_row = 0
        self.summary = summary

    async def find_work(self) -> bool:
        """Go through the input up to the first sample that is still to be captured; False if there is none.

        Raises:
            InputError: the input cannot be read on.
        """
        while batch := await self._feed.next_batch():
            for index, verdict in enumerate(batch):
                if isinstance(verdict, Job):
                    self._feed.put_back(batch[index:])
                    return True
                self.note(verdict)
                if self._ending.stopped:
                    return False
            self._ledger.fsync()
        return False

    async def next_jobs(self) -> list[Job] | None:
        """The next samples to send, durably asked for; None at the end of the input, or of the run."""
        try:
            batch = await self._feed.next_batch()
        except InputError as error:
            self._ending.stop(error, send_accepted=True)
            return None
        if not batch or self._ending.stopped:
            return None
        jobs = self._accept(batch)
        for job in jobs:
            if self._judge.needs_request(job.record):
                self._ledger.append(job.record)
        self._ledger.fsync()
        return jobs

    def limit_prompts(self, max_tokens: int | None, *, takes_images: bool) -> None:
        """Set what the server takes: the longest prompt, as far as it is known, and whether one may have images."""
        self._judge.server_limit = max_tokens
        self._judge.takes_images = takes_images

    def _accept(self, batch: Sequence[Verdict]) -> list[Job]:
        jobs: list[Job] = []
        for verdict in batch:
            # What was read ahead was judged before the server told its limit.
            found = self._judge.problem(verdict) or verdict if isinstance(verdict, Job) else verdict
            if isinstance(found, Job):
                self.summary.asked += 1
                self.summary.truncated += found.cut > 0
                jobs.append(found)
                continue
            self.note(found)
            if self._ending.stopped:
                break
        return jobs

    def note(self, verdict: InputProblem | Excluded | Done) -> None:
        """Count one that is not to be sent."""
        self.summary.asked += 1
        if isinstance(verdict, InputProblem):
            self._leave_out(verdict, send_accepted=True)
            return
        if isinstance(verdict, Excluded):
            self.summary.excluded[verdict.reason] = self.summary.excluded.get(verdict.reason, 0) + 1
            return
        self.summary.already += 1
        self.summary.truncated += verdict.cut > 0
        if verdict.record is not None:
            self._ledger.append(verdict.record)
            self.summary.remasked += 1

    def _leave_out(self, problem: InputProblem, *, send_accepted: bool = False) -> None:
        if self._policy is OnBadInput.STOP:
            error = InputError(f"{problem} (--on-bad-input skip leaves such samples out)")
            self._ending.stop(error, send_accepted=send_accepted)
        self.summary.skipped.append(problem)

    def captured(self, record: RequestRecord, tokens: int) -> None:
        """Count a sample of so many tokens, those of its images included, as captured."""
        self.summary.captured += 1
        self.summary.tokens += tokens
        self.summary.zero_masks += all_zero(record.loss_mask)
        self._drops_in_a_row = 0

    def refuse(self, job: Job, reason: str) -> None:
        """Give up a sample that the server does not take."""
        self._record_drop(job, reason)
        self._leave_out(InputProblem(job.record.source, reason, job.record.id))

    def drop(self, job: Job, reason: str) -> None:
        """Give up a sample that was not captured in all its attempts."""
        self._record_drop(job, reason)
        problem = InputProblem(job.record.source, reason, job.record.id)
        self.summary.dropped.append(problem)
        self._drops_in_a_row += 1
        if self._policy is OnBadInput.STOP:
            self._ending.stop(EngineError(f"{problem} (--on-bad-input skip leaves such samples out)"))
        elif self._drops_in_a_row >= DROPS_IN_A_ROW:
            self._ending.fail(EngineError(f"{self._drops_in_a_row} samples in a row could not be captured; {problem}"))

    def _record_drop(self, job: Job, reason: str) -> None:
        self._ledger.append(DroppedRecord(job.record.id, job.record.source, reason))
        self._ledger.fsync()
