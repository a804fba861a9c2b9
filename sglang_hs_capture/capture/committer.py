"""The writing thread: batches in the order of their forwards in, stored rows and acknowledged samples out."""

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from sglang_hs_capture.capture.inflight import InFlight, RequestState
from sglang_hs_capture.capture.rows import HostMetadata, KeptRequest, RowPlan
from sglang_hs_capture.capture.slots import Prefix, SlotTable
from sglang_hs_capture.compat import REFUSED_PROMPT
from sglang_hs_capture.errors import DiskFullError, HsCaptureError
from sglang_hs_capture.staging.copier import Piece
from sglang_hs_capture.staging.ring import HostRing
from sglang_hs_capture.store.hashing import prefix_hashes
from sglang_hs_capture.store.schema import Extent, merge_extents, parse_rid
from sglang_hs_capture.store.writer import StoreWriter

logger = logging.getLogger(__name__)

_IDLE_S = 1.0
_SWITCH_INTERVAL_S = 2e-4
# A request whose prefix is being computed for another one waits so long for that one's end.
_LENDER_PATIENCE_S = 30.0
_SOUND = ("", "")


@dataclass(frozen=True)
class BatchHeader:
    """Announces the pieces of one forward.

    Attributes:
        number: counts this process's prefill forwards, those without captured requests included.
        plan: which requests and rows.
        n_forward_rows: rows of the whole forward, captured or not.
        n_requests: requests of the whole forward.
        metadata: int64, the host's copy of ``batch_metadata``; there once ``wait`` returns.
        absmax: float32 ``[T, C]`` on the host; likewise.
        wait: returns when both have been copied.
    """

    number: int
    plan: RowPlan
    n_forward_rows: int
    n_requests: int
    metadata: torch.Tensor
    absmax: torch.Tensor
    wait: Callable[[], None]


@dataclass(eq=False)
class _OpenRequest:
    """A captured request's rows of the current batch, as far as they have been stored."""

    kept: KeptRequest
    state: RequestState
    prompt_len: int
    expected_hash: int | None
    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    hashes: np.ndarray
    prefix: Prefix
    problem: tuple[str, str] | None
    extents: list[Extent] = field(default_factory=list)
    stored: int = 0


@dataclass
class Tallies:
    """What the thread has done so far: samples acknowledged, given up for unusable rows, and for rows not found."""

    samples: int = 0
    failed: int = 0
    incomplete: int = 0


class Committer:
    """Stores batches on a thread of its own.

    After an error nothing more is stored and the ring is closed, but the thread keeps emptying its queue, so that the
    server lives on; ``on_error`` is called once with the error.
    """

    def __init__(
        self,
        store: StoreWriter,
        ring: HostRing,
        *,
        commit_interval_s: float,
        on_commit: Callable[[bool], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """Make the thread; ``start`` starts it.

        Args:
            store: where rows go; from now on used by this thread alone.
            ring: where pieces lie.
            commit_interval_s: rows are durable, and samples acknowledged, at least this often.
            on_commit: called after each commit with False, and with True once the queue has been empty for a second.
            on_error: called with the error that ended capture, until it returns.
        """
        self._store, self._ring = store, ring
        self._interval, self._on_commit, self._on_error = commit_interval_s, on_commit, on_error
        self._idle_reported = True
        self._queue: queue.SimpleQueue[BatchHeader | Piece | None] = queue.SimpleQueue()
        self._slots = SlotTable()
        self._open: list[_OpenRequest] = []
        self._inflight = InFlight()
        self._deferred: list[tuple[float, _OpenRequest]] = []
        self._dirty_since: float | None = None
        self._failed = False
        self._untold: Exception | None = None
        self.tallies = Tallies()
        self._thread = threading.Thread(target=self._run, name="hs-capture-committer", daemon=True)

    def start(self) -> None:
        """Start the thread.

        The scheduler's thread polls without a pause, and a thread that comes back from a write waits for the
        interpreter's lock up to the switch interval, each time; at Python's own 5 ms that, and not the disk, is what
        bounds the store.
        """
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
        self._thread.start()

    def put(self, item: BatchHeader | Piece) -> None:
        """Hand over a batch's header, then each of its pieces, from the forward's thread."""
        self._queue.put(item)

    def stop(self, timeout_s: float | None = None) -> None:
        """Store what was handed over, commit, close the store and end the thread."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    @property
    def slot_table_bytes(self) -> int:
        """Host memory of the slot table."""
        return self._slots.nbytes

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=self._until_commit())
            except queue.Empty:
                self._tell()
                self._guarded(self._idle if self._dirty_since is None else self._commit)
                self._guarded(self._settle_deferred)
                continue
            if item is None:
                self._guarded(self._commit)
                self._guarded(self._store.close)
                return
            if isinstance(item, BatchHeader):
                self._guarded(partial(self._begin, item))
            else:
                self._guarded(partial(self._take, item))
                # A slot is given back also after an error: a forward may be waiting for it.
                self._ring.release(item.slot)
            if self._dirty_since is not None and time.monotonic() - self._dirty_since >= self._interval:
                self._guarded(self._commit)

    def _until_commit(self) -> float | None:
        if self._dirty_since is None:
            waiting = not self._idle_reported or self._deferred or self._untold is not None
            return _IDLE_S if waiting else None
        return max(0.0, self._interval - (time.monotonic() - self._dirty_since))

    def _guarded(self, step: Callable[[], object]) -> None:
        if self._failed:
            self._dirty_since, self._idle_reported = None, True
            return
        try:
            step()
        except Exception as error:
            self._failed = True
            self._dirty_since, self._idle_reported = None, True
            self._ring.close()
            if isinstance(error, DiskFullError):
                self._commit_what_fits()
            log = logger.error if isinstance(error, HsCaptureError) else logger.exception
            log("hs_capture: capture stopped, the server goes on: %s", error)
            self._untold = error
            self._tell()

    def _tell(self) -> None:
        """Pass the error on; where that fails, as on a full disk, it is tried again every second."""
        try:
            if self._untold is not None:
                self._on_error(self._untold)
            self._untold = None
        except Exception:
            logger.exception("hs_capture: could not say that capture has stopped; trying again")

    def _commit_what_fits(self) -> None:
        # A full disk refuses new rows, not the records of rows that are on it already.
        try:
            self.tallies.samples += len(self._store.commit())
        except HsCaptureError as error:
            logger.error("hs_capture: the last samples could not be acknowledged and will be captured again: %s", error)

    def _begin(self, header: BatchHeader) -> None:
        header.wait()
        meta = HostMetadata(header.metadata.numpy(), header.plan, header.n_forward_rows, header.n_requests)
        absmax = header.absmax.numpy()
        self._open = [self._open_request(kept, meta, absmax, header.number) for kept in header.plan.requests]

    def _open_request(self, kept: KeptRequest, meta: HostMetadata, absmax: np.ndarray, number: int) -> _OpenRequest:
        rows = slice(kept.source, kept.source + kept.length)
        tokens, slots = meta.input_ids[rows], meta.slots[rows]
        positions = np.arange(kept.prefix_len, kept.prefix_len + kept.length, dtype=np.int64)
        state, name = self._inflight.enter(kept.rid, kept.prefix_len), parse_rid(kept.rid)
        found = self._slots.lookup(meta.prefix_slots(kept), state.serial, own_only=name is None)
        problem = state.problem
        if name is None and kept.prefix_len and isinstance(found, Prefix) and state.last_prefill != number - 1:
            # SGLang computes a prompt's chunks in one prefill forward after the other. What comes later is another
            # request of the same id, the first one was aborted, and its slots may hold another prompt's rows by now.
            found = "its chunks were interrupted: the id was used before, by a request that was aborted"
        state.last_prefill = number
        if isinstance(found, str):
            problem, found = problem or ("incomplete", found), Prefix((), 0)
        problem = problem or _unusable(absmax[kept.target : kept.target + kept.length], kept.prefix_len)
        hashes = prefix_hashes(tokens, kept.prefix_len, found.end_hash)
        prompt_len = int(meta.prompt_lens[kept.index])
        if prompt_len == len(REFUSED_PROMPT) and tuple(tokens) == REFUSED_PROMPT:
            problem = problem or ("refused", "SGLang refused the request and ran a placeholder prompt in its place")
        expected = name.end_hash if name is not None else None
        return _OpenRequest(kept, state, prompt_len, expected, tokens, positions, slots, hashes, found, problem)

    def _take(self, piece: Piece) -> None:
        piece.wait()
        data = memoryview(self._ring.rows(piece.slot, piece.count).numpy().data)
        row_bytes = len(data) // piece.count
        end = piece.start + piece.count
        for request in self._open:
            first = max(request.kept.target, piece.start)
            last = min(request.kept.target + request.kept.length, end)
            if first < last:
                part = data[(first - piece.start) * row_bytes : (last - piece.start) * row_bytes]
                self._store_part(request, part, slice(first - request.kept.target, last - request.kept.target))
        self._dirty_since = self._dirty_since or time.monotonic()

    def _store_part(self, request: _OpenRequest, data: memoryview, rows: slice) -> None:
        slots = request.slots[rows]
        if request.problem is None:
            tokens, positions, hashes = request.tokens[rows], request.positions[rows], request.hashes[rows]
            extents = self._store.append(data, tokens, positions, hashes)
            self._slots.record(slots, extents, tokens, positions, hashes, request.state.serial)
            request.state.slots.append(slots)
            request.extents.extend(extents)
        else:
            # A row that is bad, or whose place in a prompt is unknown, is never linked to: it is not stored at all.
            self._slots.forget(slots)
        request.stored += rows.stop - rows.start
        if request.stored == request.kept.length:
            self._finish(request)

    def _finish(self, request: _OpenRequest) -> None:
        if request.kept.prefix_len + request.kept.length < request.prompt_len:
            request.state.problem = request.problem
            return
        self._deferred.append((time.monotonic() + _LENDER_PATIENCE_S, request))
        self._settle_deferred()

    def _settle_deferred(self) -> None:
        """Settle the requests whose rows are all proven; one that is may be what another waits for."""
        settled = True
        while settled:
            settled = False
            for deadline, request in list(self._deferred):
                verdict = self._verdict(request, time.monotonic() >= deadline)
                if verdict is not None:
                    self._deferred.remove((deadline, request))
                    self._settle(request, verdict)
                    settled = True

    def _verdict(self, request: _OpenRequest, late: bool) -> tuple[str, str] | None:
        """Why a request's sample is none, or nothing to say so; None while a row of its prefix is not proven."""
        if request.problem is not None:
            return request.problem
        if request.expected_hash not in (None, int(request.hashes[-1])):
            return "incomplete", "the stored rows add up to another prompt: a KV slot was rewritten unseen"
        lent = self._inflight.all_proven(request.prefix.lenders)
        if lent is False or (lent is None and late):
            return "incomplete", "a prefix row was computed for a request that did not end in the right hash, or at all"
        return _SOUND if lent else None

    def _settle(self, request: _OpenRequest, verdict: tuple[str, str]) -> None:
        state, rid = request.state, request.kept.rid
        # The next commit is due also where nothing else is stored.
        self._dirty_since = self._dirty_since or time.monotonic()
        self._inflight.leave(state, proven=verdict is _SOUND)
        if verdict is not _SOUND:
            self._slots.forget_of(state.all_slots(), state.serial)
            self._give_up(rid, *verdict)
            return
        self._slots.prove(state.all_slots(), state.serial)
        length = request.kept.prefix_len + request.kept.length
        extents = merge_extents([*request.prefix.extents, *request.extents])
        self._store.add_sample(rid, length, extents, int(request.hashes[-1]))

    def _give_up(self, rid: str, reason: str, detail: str) -> None:
        self.tallies.incomplete += reason == "incomplete"
        self.tallies.failed += reason != "incomplete"
        logger.warning("hs_capture: request %r was not captured: %s: %s", rid, reason, detail)
        self._store.add_failure(rid, reason, detail)

    def _commit(self) -> None:
        self.tallies.samples += len(self._store.commit())
        self._dirty_since, self._idle_reported = None, False
        self._on_commit(False)

    def _idle(self) -> None:
        self._idle_reported = True
        self._on_commit(True)


def _unusable(absmax: np.ndarray, first_position: int) -> tuple[str, str] | None:
    """Look for rows that must not be trained on; ``absmax`` is float32 ``[T, C]``."""
    for reason, bad in (("non_finite", ~np.isfinite(absmax)), ("zero_row", absmax == 0)):
        if bad.any():
            row, column = np.argwhere(bad)[0]
            return (
                reason,
                f"state {column} at position {first_position + row}, and {int(bad.any(axis=1).sum()) - 1} more rows",
            )
    return None
