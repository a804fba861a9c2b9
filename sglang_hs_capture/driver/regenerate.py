"""Lets the target answer prompts before they are captured: a draft model learns best from what its target says."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sglang_hs_capture.data.prompts import Prompt
from sglang_hs_capture.data.records import InputProblem, Prepared, Sample
from sglang_hs_capture.data.samples import repeated
from sglang_hs_capture.driver.answers import Answers
from sglang_hs_capture.driver.client import RefusedError, RetryableError, ServerClient, Window
from sglang_hs_capture.driver.delivery import RESEND_PAUSE_S, DeliverySettings, DroppedError, regain
from sglang_hs_capture.driver.ending import Ending
from sglang_hs_capture.driver.pool import MovedError, Server, ServerPool
from sglang_hs_capture.driver.progress import AnswerSnapshot, ProgressView
from sglang_hs_capture.store.schema import sample_key
from sglang_hs_capture.text import shown

Note = Callable[[InputProblem], None]
CapturedFrom = Callable[[str], str | None]

SYNC_S = 1.0
SHOW_S = 0.5
BATCH_PROMPTS = 64
FLUSH_PATIENCE_S = 60.0
MAX_TOKENS_IN_FLIGHT = 2**21


@dataclass(frozen=True)
class AnswerSettings:
    """How the model answers.

    Attributes:
        max_new_tokens: longest answer, in tokens.
        temperature: 0 for the likeliest token each time.
        top_p: share of the probability that tokens are drawn from.
    """

    max_new_tokens: int = 2048
    temperature: float = 1.0
    top_p: float = 1.0

    def to_json(self) -> dict[str, Any]:
        """As a line of ``answers.jsonl`` has it."""
        return asdict(self)


@dataclass(frozen=True)
class AnsweringServers:
    """Servers that are up.

    Attributes:
        pool: to talk to them.
        rid_prefix: what ids of requests that they capture begin with.
        max_tokens: the longest prompt that they capture; None if they do not tell.
    """

    pool: ServerPool
    rid_prefix: str
    max_tokens: int | None


OpenServer = Callable[[], Awaitable[AnsweringServers | None]]


class Regeneration:
    """Answers what is not answered yet, and knows which answers belong to this run's input."""

    def __init__(
        self,
        prompts: Iterable[Prompt | InputProblem],
        directory: Path,
        settings: AnswerSettings,
        *,
        max_length: int | None,
        max_prompts: int,
        delivery: DeliverySettings,
    ) -> None:
        """
        Args:
            prompts: what is to be answered.
            directory: the dataset, where answers are kept.
            settings: how the model answers.
            max_length: longest prompt and answer together that the user wants, in tokens.
            max_prompts: most prompts in flight, for each server.
            delivery: how often a prompt is tried, and how long a lost server is waited for.
        """
        self.settings, self.max_length, self.max_prompts, self.delivery = settings, max_length, max_prompts, delivery
        self.answered = 0
        self._prompts, self._directory = prompts, directory
        self._wanted: set[str] = set()

    async def run(
        self, open_server: OpenServer, note: Note, ending: Ending, view: ProgressView, captured_from: CapturedFrom
    ) -> None:
        """Go through the prompts; the server is opened when the first one has no answer.

        Args:
            open_server: gives None if the run ends before the server is up.
            note: takes a prompt that cannot be answered.
            captured_from: says for an id where the sample came from that the dataset holds, or None.

        Raises:
            InputError: the input cannot be read on.
            ConfigError: there are answers of other settings, or one that belongs to another prompt.
        """
        answers = Answers(self._directory, self.settings.to_json())
        server: AnsweringServers | None = None
        work: _Work | None = None
        try:
            async for prompt in self._missing(answers, note, ending, captured_from):
                if work is None:
                    server = await open_server()
                    if server is None:
                        break
                    work = _Work(self, answers, server, note, ending, view)
                await work.begin(prompt)
            if work is not None:
                await work.finish()
        finally:
            if work is not None:
                await work.close()
                self.answered = work.answered
            answers.close()
        # What the answers left in the cache are rows that nobody stored.
        if server is not None and not ending.stopped and not await server.pool.flush_cache(FLUSH_PATIENCE_S):
            view.say("The server's prefix cache could not be emptied: prompts found in it are computed a second time.")

    def of_this_run(self, samples: Iterable[Prepared]) -> Iterator[Prepared]:
        """Of the answers' samples, those whose prompts this run has seen."""
        for sample in samples:
            if not isinstance(sample, Sample) or sample_key(sample.id) in self._wanted:
                yield sample

    async def _missing(
        self, answers: Answers, note: Note, ending: Ending, captured_from: CapturedFrom
    ) -> AsyncIterator[Prompt]:
        """The prompts that are not answered yet, tokenised on a thread."""
        prompts = iter(self._prompts)
        while not ending.stopped and (batch := await asyncio.to_thread(lambda: list(islice(prompts, BATCH_PROMPTS)))):
            for prompt in batch:
                if ending.stopped:
                    return
                if isinstance(prompt, InputProblem):
                    note(prompt)
                    continue
                if sample_key(prompt.id) in self._wanted:
                    note(InputProblem(prompt.source, repeated(prompt.id), prompt.id))
                    continue
                known = answers.holds(prompt)
                if not known and (source := captured_from(prompt.id)) is not None:
                    # Answering first would take hours and end with an answer that cannot be captured under this id.
                    reason = (
                        f"the id {shown(prompt.id)} was captured already, with the answer in {source}; for answers of "
                        "the model's own choose another --output, or give the sample another id"
                    )
                    note(InputProblem(prompt.source, reason, prompt.id))
                    continue
                self._wanted.add(sample_key(prompt.id))
                if not known:
                    yield prompt


class _Work:
    """Prompts on their way to one server and back."""

    def __init__(
        self,
        plan: Regeneration,
        answers: Answers,
        server: AnsweringServers,
        note: Note,
        ending: Ending,
        view: ProgressView,
    ) -> None:
        self._plan, self._answers, self._server = plan, answers, server
        self._note, self._ending, self._view = note, ending, view
        self._window = Window(lambda: (server.pool.size * plan.max_prompts, MAX_TOKENS_IN_FLIGHT))
        self._tasks: set[asyncio.Task[None]] = set()
        self._longest = min((end for end in (plan.max_length, server.max_tokens) if end is not None), default=None)
        self._synced_at = time.monotonic()
        self.answered = 0
        self.tokens = 0

    async def begin(self, prompt: Prompt) -> None:
        """Send one prompt, once there is room for it."""
        length = len(prompt.input_ids)
        # No longer than can be captured behind its prompt.
        limit = min(self._plan.settings.max_new_tokens, (self._longest or sys.maxsize) - length)
        if limit < 1:
            self._leave_out(prompt, f"prompt of {length} tokens leaves no room for an answer within {self._longest}")
            return
        await self._ending.unless_stopped(self._window.enter(length + limit))
        if self._ending.stopped:
            return
        task = asyncio.create_task(self._answer(prompt, limit))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._show()

    async def finish(self) -> None:
        """Wait for what is on its way, unless the run ends."""
        while self._tasks and not self._ending.stopped:
            await asyncio.wait(self._tasks, timeout=SHOW_S)
            self._show()

    async def close(self) -> None:
        """Give up what is on its way, and make durable what has come back."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._answers.sync()

    async def _answer(self, prompt: Prompt, limit: int) -> None:
        try:
            answer, finish = await self._ask(prompt, limit)
            self._answers.append(prompt, answer, finish)
            self.answered += 1
            self.tokens += len(answer)
            if time.monotonic() - self._synced_at >= SYNC_S:
                self._answers.sync()
                self._synced_at = time.monotonic()
        except RefusedError as error:
            self._leave_out(prompt, f"the server refuses this prompt: {error}")
        except DroppedError as error:
            self._leave_out(prompt, str(error))
        except Exception as error:
            self._ending.fail(error)
        finally:
            self._window.leave(len(prompt.input_ids) + limit)

    async def _ask(self, prompt: Prompt, limit: int) -> tuple[list[int], str]:
        sampling = {
            **self._plan.settings.to_json(),
            "max_new_tokens": limit,
            "stop_token_ids": sorted(prompt.stop_ids),
        }
        # The prompt alone is not to be captured, so its request's id must not begin as those do that are.
        name = "regenerate" if self._server.rid_prefix.startswith("a") else "answer"
        tokens = prompt.input_ids.tolist()

        async def send(client: ServerClient) -> tuple[list[int], str]:
            rid = f"{name}-{sample_key(prompt.id)}-{time.monotonic_ns():x}"
            return await client.answer(rid, tokens, sampling)

        delivery, failures = self._plan.delivery, 0
        tried: set[Server] = set()
        while True:
            try:
                return await self._server.pool.serve(tokens, send, tried)
            except MovedError:
                continue
            except (RetryableError, ConnectionError) as error:
                if isinstance(error, ConnectionError):
                    await regain(self._server.pool, error, delivery.grace_s)
                failures += 1
                if failures == delivery.attempts:
                    raise DroppedError(f"not answered in {failures} attempts; the last one: {error}") from None
                await asyncio.sleep(RESEND_PAUSE_S)

    def _leave_out(self, prompt: Prompt, reason: str) -> None:
        self._note(InputProblem(prompt.source, reason, prompt.id))

    def _show(self) -> None:
        self._view.update(AnswerSnapshot(self.answered, self._window.prompts, self.tokens))
