"""Tokenises in several processes: in the input's order, in bounded memory, and only where there is enough to do."""

import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from multiprocessing import get_context, parent_process

from sglang_hs_capture.data.media import media_parts
from sglang_hs_capture.data.preparation import Preparation
from sglang_hs_capture.data.records import Conversation, InputProblem, Prepared, Record, Sample
from sglang_hs_capture.data.samples import SamplePreparer
from sglang_hs_capture.data.template import ChatTemplate
from sglang_hs_capture.errors import InputError

# Until so many seconds were spent on tokenising, no processes are started: by then they are worth their own start.
START_AFTER_S = 3.0
# What goes to a process at a time: so many conversations, of not many more characters than this.
BATCH_CONVERSATIONS = 32
BATCH_CHARACTERS = 2**19
# Rows tokenised before go nowhere; so many of them wait for a conversation in front of them.
BATCH_RECORDS = 256
BATCHES_A_WORKER = 3

Load = Callable[[], SamplePreparer]
Batch = list[Record | InputProblem]
Outcome = tuple[Record | InputProblem, list[Prepared]]


class PooledPreparer(SamplePreparer):
    """A preparer that is made when the first conversation comes, and gets processes to help it when there are many.

    What it gives is the same for any number of processes, and in the same order.
    """

    def __init__(
        self,
        load: Load,
        workers: int = 1,
        start_after_s: float = START_AFTER_S,
        preparation: Preparation | None = None,
        media_token: int | None = None,
    ) -> None:
        """
        Args:
            load: makes the preparer; it can be pickled if there is more than one worker.
            workers: the most processes; 1 for this one alone.
            start_after_s: seconds of tokenising after which they are started. Until the first is ready, this process
                goes on by itself.
            preparation, media_token: what ``load`` makes its preparer with, for rows tokenised before.
        """
        super().__init__(preparation=preparation, media_token=media_token)
        self._load, self._workers, self._start_after_s = load, workers, start_after_s
        self._loaded: SamplePreparer | None = None

    @property
    def loaded(self) -> SamplePreparer | None:
        """The preparer, once there was a conversation."""
        return self._loaded

    def prepare(self, record: Record) -> list[Prepared]:
        """See ``SamplePreparer.prepare``."""
        return super().prepare(record) if isinstance(record, Sample) else self._get().prepare(record)

    def prepare_all(self, records: Iterable[Record | InputProblem]) -> Iterator[Outcome]:
        """See ``SamplePreparer.prepare_all``.

        Raises:
            InputError: also where a process ended by itself.
        """
        rest = iter(records)
        pool: _Pool | None = None
        spent = 0.0
        try:
            for record in rest:
                if isinstance(record, Conversation):
                    self._get()
                begun = time.monotonic()
                prepared = self._here(record)
                if isinstance(record, Conversation):
                    spent += time.monotonic() - begun
                yield record, prepared
                if pool is None and self._workers > 1 and spent > self._start_after_s:
                    pool = _Pool(self._load, self._workers)
                if pool is not None and pool.is_ready():
                    yield from pool.prepare_all(rest, self._here)
        finally:
            if pool is not None:
                pool.close()

    def template_for(self, source: str) -> ChatTemplate:
        """See ``SamplePreparer.template_for``."""
        return self._get().template_for(source)

    def _here(self, record: Record | InputProblem) -> list[Prepared]:
        return [record] if isinstance(record, InputProblem) else self.prepare(record)

    def _get(self) -> SamplePreparer:
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded


class _Pool:
    """The processes, each with a preparer of its own."""

    def __init__(self, load: Load, workers: int) -> None:
        self._load = pickle.dumps(load)
        self._most_pending = BATCHES_A_WORKER * workers
        # A fork would copy the locks of threads that it does not copy, and CUDA's state where there is one.
        self._executor = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin)
        self._first = [self._submit([]) for _ in range(workers)]

    def is_ready(self) -> bool:
        """Whether there is a process that has its preparer."""
        return any(future.done() for future in self._first)

    def prepare_all(
        self, records: Iterator[Record | InputProblem], here: Callable[[Record | InputProblem], list[Prepared]]
    ) -> Iterator[Outcome]:
        """See ``SamplePreparer.prepare_all``; what is no conversation goes to ``here``."""
        pending: deque[tuple[Batch, Future[list[list[Prepared]]]]] = deque()
        for batch in _batches(records):
            pending.append((batch, self._submit([record for record in batch if isinstance(record, Conversation)])))
            while len(pending) >= self._most_pending or (pending and pending[0][1].done()):
                yield from _joined(*pending.popleft(), here)
        while pending:
            yield from _joined(*pending.popleft(), here)

    def close(self) -> None:
        """Let the processes end when they are through with what they are at."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _submit(self, conversations: list[Conversation]) -> Future[list[list[Prepared]]]:
        # What is blocked here stays so in a process started here: a Ctrl-C, which goes to the whole group, is for the
        # first process alone, which decides what is still to be done.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        try:
            return self._executor.submit(_prepare, self._load, conversations)
        except BrokenProcessPool as error:
            raise _broken() from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _joined(
    batch: Batch,
    future: Future[list[list[Prepared]]],
    here: Callable[[Record | InputProblem], list[Prepared]],
) -> Iterator[Outcome]:
    try:
        results = iter(future.result())
    except BrokenProcessPool as error:
        raise _broken() from error
    for record in batch:
        yield record, next(results) if isinstance(record, Conversation) else here(record)


def _broken() -> InputError:
    return InputError(
        "a process that tokenises ended by itself, perhaps for lack of memory; a smaller number of --workers needs less"
    )


def _batches(records: Iterable[Record | InputProblem]) -> Iterator[Batch]:
    batch: Batch = []
    conversations = characters = 0
    for record in records:
        batch.append(record)
        if isinstance(record, Conversation):
            conversations += 1
            characters += _characters(record)
        if conversations == BATCH_CONVERSATIONS or characters >= BATCH_CHARACTERS or len(batch) == BATCH_RECORDS:
            yield batch
            batch = []
            conversations = characters = 0
    if batch:
        yield batch


def _characters(conversation: Conversation) -> int:
    parts = [part for message in conversation.messages for part in media_parts(message)]
    values = (value for message in [*conversation.messages, *parts] for value in message.values())
    return sum(len(value) for value in values if isinstance(value, str))


def _begin() -> None:
    """In a new process: it ends with the one that started it, however that one ends."""
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _prepare(load: bytes, conversations: Sequence[Conversation]) -> list[list[Prepared]]:
    preparer = _preparer(load)
    return [preparer.prepare(conversation) for conversation in conversations]


@lru_cache(maxsize=1)
def _preparer(load: bytes) -> SamplePreparer:
    preparer: SamplePreparer = pickle.loads(load)()
    return preparer
