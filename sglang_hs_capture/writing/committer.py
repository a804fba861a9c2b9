"""Batches in the order of their forwards in, stored rows and acknowledged samples out."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from sglang_hs_capture.errors import HsCaptureError
from sglang_hs_capture.float8 import scales_from_absmax
from sglang_hs_capture.staging.ring import Lease
from sglang_hs_capture.store.hashing import prefix_hashes
from sglang_hs_capture.store.schema import Extent, Media, merge_extents, parse_rid, split_extents
from sglang_hs_capture.store.writer import StoreWriter
from sglang_hs_capture.writing.images import prove_images
from sglang_hs_capture.writing.inflight import InFlight, RequestState
from sglang_hs_capture.writing.plan import BatchHeader, HostMetadata, KeptRequest
from sglang_hs_capture.writing.slots import Prefix, SlotTable

logger = logging.getLogger(__name__)

_IDLE_S = 1.0
# A request whose prefix is being computed for another one waits so long for that one's end.
_LENDER_PATIENCE_S = 30.0
_SOUND = ("", "")


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
    scales: np.ndarray | None
    prefix: Prefix
    problem: tuple[str, str] | None
    media: Media | None
    extents: list[Extent] = field(default_factory=list)
    stored: int = 0


@dataclass(frozen=True)
class _Part:
    """Rows of one request within a piece: from the piece's row ``start`` on, the request's own ``rows``."""

    request: _OpenRequest
    start: int
    rows: slice

    @property
    def count(self) -> int:
        return int(self.rows.stop - self.rows.start)


@dataclass
class Tallies:
    """What was done so far: samples acknowledged, given up for unusable rows, and for rows not found."""

    samples: int = 0
    failed: int = 0
    incomplete: int = 0


class Committer:
    """Stores what was captured. All methods are for one thread, the writing process's own; none raises.

    After an error nothing more is stored, and ``on_error`` is called with it, again and again until it returns; what is
    handed over from then on is let go, so that the server lives on.
    """

    def __init__(
        self,
        store: StoreWriter,
        *,
        commit_interval_s: float,
        placeholder: Sequence[int],
        media_token: int | None = None,
        on_commit: Callable[[bool], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """Begin with an open store.

        Args:
            store: where rows go.
            commit_interval_s: rows are durable, and samples acknowledged, at least this often.
            placeholder: the prompt that SGLang runs in place of one that it refused.
            media_token: what stands for an image in a prompt as it is sent.
            on_commit: called after each commit was begun with False, and with True once all is quiet for a second.
            on_error: called with the error that ended capture, until it returns.
        """
        self._store, self._placeholder, self._media_token = store, tuple(placeholder), media_token
        self._interval, self._on_commit, self._on_error = commit_interval_s, on_commit, on_error
        self._slots = SlotTable()
        self._open: list[_OpenRequest] = []
        self._row = 0
        # The last prefill forward, and the first one from which on all requests of all forwards were captured.
        self._number = self._all_seen = -1
        self._inflight = InFlight()
        self._deferred: list[tuple[float, _OpenRequest]] = []
        self._dirty_since: float | None = None
        self._quiet_since: float | None = None
        self._untold: Exception | None = None
        self._tell_at = 0.0
        self.failed = False
        self.tallies = Tallies()

    @property
    def slot_table_bytes(self) -> int:
        """Host memory of the slot table."""
        return self._slots.nbytes

    def begin(self, header: BatchHeader, metadata: np.ndarray, absmax: np.ndarray) -> None:
        """A forward's rows will follow.

        Args:
            header: which.
            metadata: int64, as :class:`HostMetadata` reads it.
            absmax: float32 ``[T, C]``, the largest magnitude in each state of each kept row; not finite where the
                state has such a value. For a dataset in float8 the rows' scales are computed from it.
        """
        self._guarded(lambda: self._begin(header, metadata, absmax))

    def take(self, data: memoryview, n_rows: int, lease: Lease) -> None:
        """The next ``n_rows`` rows of the forward, uint8 ``[n_rows * row_bytes]``.

        The bytes are used until the store has called back; ``lease`` is shared for so long.
        """
        self._guarded(lambda: self._take(data, n_rows, lease))

    def tick(self) -> float | None:
        """Do what is due, and say in how many seconds something will be; None if nothing until more is handed over."""
        if self._untold is not None and time.monotonic() >= self._tell_at:
            self._tell()
        self._guarded(self._work)
        if self.failed:
            return None if self._untold is None else _IDLE_S
        if self._dirty_since is not None:
            return max(0.0, self._interval - (time.monotonic() - self._dirty_since))
        return _IDLE_S if self._quiet_since is not None or self._deferred else None

    def finish(self) -> None:
        """Make all durable and close the store; after an error, what was acknowledged until then."""
        if self.failed:
            self._save(self._store.close)
            return
        self._guarded(self._commit)
        self._guarded(self._close)

    def fail(self, error: Exception) -> None:
        """End capture for an error of somebody else's."""
        if self.failed:
            return
        self.failed = True
        self._dirty_since = None
        self._save(self._store.commit)
        log = logger.error if isinstance(error, HsCaptureError) else logger.exception
        log("hs_capture: capture stopped, the server goes on: %s", error)
        self._untold = error
        self._tell()

    def _guarded(self, step: Callable[[], object]) -> None:
        if self.failed:
            return
        try:
            step()
        except Exception as error:
            self.fail(error)

    def _work(self) -> None:
        self._count(self._store.acknowledged())
        self._settle_deferred()
        now = time.monotonic()
        if self._dirty_since is not None and now - self._dirty_since >= self._interval:
            self._store.begin_commit()
            self._dirty_since, self._quiet_since = None, now
            self._on_commit(False)
        elif self._quiet_since is not None and now - self._quiet_since >= _IDLE_S:
            self._quiet_since = None
            self._on_commit(True)

    def _tell(self) -> None:
        """Pass the error on; where that fails, as on a full disk, it is tried again every second."""
        self._tell_at = time.monotonic() + _IDLE_S
        try:
            if self._untold is not None:
                self._on_error(self._untold)
            self._untold = None
        except Exception:
            logger.exception("hs_capture: could not say that capture has stopped; trying again")

    def _save(self, step: Callable[[], Sequence[object]]) -> None:
        """Acknowledge what was sound before an error: a full disk refuses new rows, not records of rows it has."""
        try:
            self._count(step())
        except Exception as error:
            logger.error("hs_capture: the last samples could not be acknowledged and will be captured again: %s", error)
            with suppress(Exception):
                self._count(self._store.acknowledged())

    def _commit(self) -> None:
        self._settle_deferred()
        self._count(self._store.commit())
        self._dirty_since = None
        self._on_commit(False)

    def _close(self) -> None:
        self._count(self._store.close())
        self._on_commit(True)

    def _count(self, samples: Sequence[object]) -> None:
        self.tallies.samples += len(samples)

    def _touch(self) -> None:
        self._dirty_since = self._dirty_since or time.monotonic()

    def _begin(self, header: BatchHeader, metadata: np.ndarray, absmax: np.ndarray) -> None:
        meta = HostMetadata(metadata, header)
        if header.number != self._number + 1:
            self._all_seen = header.number
        self._number = header.number
        self._row = 0
        self._open = [self._open_request(kept, meta, absmax, header.number) for kept in header.plan.requests]
        if len(header.plan.requests) != header.n_requests:
            self._all_seen = header.number + 1

    def _open_request(self, kept: KeptRequest, meta: HostMetadata, absmax: np.ndarray, number: int) -> _OpenRequest:
        rows = slice(kept.source, kept.source + kept.length)
        tokens, slots = meta.input_ids[rows], meta.slots[rows]
        positions = np.arange(kept.prefix_len, kept.prefix_len + kept.length, dtype=np.int64)
        state, name = self._inflight.enter(kept.rid, kept.prefix_len), parse_rid(kept.rid)
        found = self._slots.lookup(meta.prefix_slots(kept), state.serial, own_only=name is None)
        problem = state.problem
        if name is None and kept.prefix_len and isinstance(found, Prefix) and state.last_prefill + 1 < self._all_seen:
            # Between a prompt's chunks come at most forwards of captured requests, and with pipeline parallelism only.
            # Else this may be another request of the same id, the first one was aborted, and its slots may hold rows
            # of a prompt that was not seen.
            found = "its chunks were interrupted: the id was used before, by a request that was aborted"
        state.last_prefill = number
        prompt_len, media = int(meta.prompt_lens[kept.index]), None
        if kept.images and isinstance(found, Prefix) and kept.prefix_len + kept.length == prompt_len:
            whole = np.concatenate([self._slots.tokens(meta.prefix_slots(kept)), tokens])
            proven = prove_images(whole, kept.images, self._media_token)
            media, found = (None, proven) if isinstance(proven, str) else (proven, found)
        if isinstance(found, str):
            problem, found = problem or ("incomplete", found), Prefix((), 0)
        largest = absmax[kept.target : kept.target + kept.length]
        scales = scales_from_absmax(largest) if self._store.info.scaled else None
        # A scale may be 0 though the largest value is not quite: such a row was stored as zeros, too.
        problem = problem or _unusable(largest if scales is None else scales, kept.prefix_len)
        hashes = prefix_hashes(tokens, kept.prefix_len, found.end_hash)
        if prompt_len == len(self._placeholder) and tuple(tokens.tolist()) == self._placeholder:
            problem = problem or ("refused", "SGLang refused the request and ran a placeholder prompt in its place")
        expected = name.end_hash if name is not None else None
        return _OpenRequest(
            kept, state, prompt_len, expected, tokens, positions, slots, hashes, scales, found, problem, media
        )

    def _take(self, data: memoryview, n_rows: int, lease: Lease) -> None:
        first, end = self._row, self._row + n_rows
        self._row = end
        run: list[_Part] = []
        for request in self._open:
            kept = request.kept
            start, stop = max(kept.target, first), min(kept.target + kept.length, end)
            if start >= stop:
                continue
            part = _Part(request, start - first, slice(start - kept.target, stop - kept.target))
            if request.problem is None:
                run.append(part)
                continue
            self._store_run(run, data, n_rows, lease)
            run = []
            # A row that is bad, or whose place in a prompt is unknown, is never linked to: it is not stored at all.
            self._slots.forget(request.slots[part.rows])
            self._advance(part)
        self._store_run(run, data, n_rows, lease)
        self._touch()

    def _store_run(self, run: list[_Part], data: memoryview, n_rows: int, lease: Lease) -> None:
        """Store parts of requests that lie behind each other, in one write."""
        if not run:
            return
        row_bytes = len(data) // n_rows
        counts = [part.count for part in run]
        view = data[run[0].start * row_bytes : (run[-1].start + counts[-1]) * row_bytes]
        tokens, positions, hashes = (
            np.concatenate([getattr(part.request, name)[part.rows] for part in run])
            for name in ("tokens", "positions", "hashes")
        )
        scales = [part.request.scales[part.rows] for part in run if part.request.scales is not None]
        done = lease.share()
        try:
            extents = self._store.append(
                view, tokens, positions, hashes, done, np.concatenate(scales) if scales else None
            )
        except BaseException:
            done()
            raise
        cuts = np.cumsum([0, *counts])
        for part, mine, (a, b) in zip(run, split_extents(extents, counts), pairwise(cuts), strict=True):
            request, slots = part.request, part.request.slots[part.rows]
            self._slots.record(slots, mine, tokens[a:b], positions[a:b], hashes[a:b], request.state.serial)
            request.state.slots.append(slots)
            request.extents.extend(mine)
            self._advance(part)

    def _advance(self, part: _Part) -> None:
        part.request.stored += part.count
        if part.request.stored == part.request.kept.length:
            self._finish(part.request)

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
        got = request.media.prompt_hash if request.media is not None else int(request.hashes[-1])
        if request.expected_hash not in (None, got):
            return "incomplete", "the stored rows add up to another prompt: a KV slot was rewritten unseen"
        lent = self._inflight.all_proven(request.prefix.lenders)
        if lent is False or (lent is None and late):
            return "incomplete", "a prefix row was computed for a request that did not end in the right hash, or at all"
        return _SOUND if lent else None

    def _settle(self, request: _OpenRequest, verdict: tuple[str, str]) -> None:
        state, rid = request.state, request.kept.rid
        # The next commit is due also where nothing else is stored.
        self._touch()
        self._inflight.leave(state, proven=verdict is _SOUND)
        if verdict is not _SOUND:
            self._slots.forget_of(state.all_slots(), state.serial)
            self._give_up(rid, *verdict)
            return
        self._slots.prove(state.all_slots(), state.serial)
        length = request.kept.prefix_len + request.kept.length
        extents = merge_extents([*request.prefix.extents, *request.extents])
        self._store.add_sample(rid, length, extents, int(request.hashes[-1]), request.media)

    def _give_up(self, rid: str, reason: str, detail: str) -> None:
        self.tallies.incomplete += reason == "incomplete"
        self.tallies.failed += reason != "incomplete"
        logger.warning("hs_capture: request %r was not captured: %s: %s", rid, reason, detail)
        self._store.add_failure(rid, reason, detail)


def _unusable(largest: np.ndarray, first_position: int) -> tuple[str, str] | None:
    """Look for rows that must not be trained on; ``largest`` is float32 ``[T, C]``, absmax or scales."""
    for reason, bad in (("non_finite", ~np.isfinite(largest)), ("zero_row", largest == 0)):
        if bad.any():
            row, column = np.argwhere(bad)[0]
            return (
                reason,
                f"state {column} at position {first_position + row}, and {int(bad.any(axis=1).sum()) - 1} more rows",
            )
    return None
