"""The writing process: takes what the model's process announces, waits until the device has copied it, and stores it.

It runs beside the model's process, with an interpreter of its own: nothing here competes with SGLang's scheduler for
the interpreter's lock. It ends when told to, and when the model's process has ended; what that had copied until then is
still stored.
"""

import logging
import os
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from sglang_hs_capture.config import CaptureConfig
from sglang_hs_capture.staging.ring import Consumer, Lease, RingMemory
from sglang_hs_capture.store.schema import DatasetInfo
from sglang_hs_capture.store.session import Counters, SessionRecord
from sglang_hs_capture.store.writer import SPILL_SHARE, StoreWriter
from sglang_hs_capture.writing.committer import Committer
from sglang_hs_capture.writing.final_norm import store_final_norm
from sglang_hs_capture.writing.messages import (
    Assembly,
    Channel,
    Failure,
    NormNotice,
    Opened,
    PieceNotice,
    Setup,
    Stop,
    error_of,
    failure_of,
)
from sglang_hs_capture.writing.metrics import CaptureMetrics
from sglang_hs_capture.writing.plan import BatchHeader
from sglang_hs_capture.writing.reporter import SessionReporter

logger = logging.getLogger(__name__)

# How long pieces that were announced are waited for once the process that announced them is gone.
_LAST_COPIES_S = 1.0
_FIRST_POLL_S, _LONGEST_POLL_S = 5e-5, 1e-3


class WritingProcess:
    """Everything this process does after the dataset is open."""

    def __init__(self, setup: Setup, channel: Channel, memory: RingMemory) -> None:
        """Open the dataset and say so in the session record.

        Raises:
            HsCaptureError: the dataset cannot be written, or is of another model or other settings.
        """
        config, info = (
            CaptureConfig.from_mapping(setup.config),
            DatasetInfo.from_json(setup.info, "the model's process"),
        )
        self._directory = Path(config.output_dir)
        self._channel, self._memory, self._consumer = channel, memory, Consumer(memory)
        session = SessionRecord.from_json(setup.session, "the model's process")
        self._parent = session.pid
        self._metrics = CaptureMetrics.if_enabled(session.writer, setup.served_name)
        self._reporter = SessionReporter(self._directory, session)
        self._store = StoreWriter.open(
            self._directory,
            self._reporter.writer,
            info,
            session_id=self._reporter.session_id,
            shard_bytes=config.shard_bytes,
            min_free_bytes=config.min_free_bytes,
            columns=setup.columns,
            max_open_shards=config.max_open_shards,
            spill_bytes=memory.capacity // SPILL_SHARE,
        )
        self._committer = Committer(
            self._store,
            commit_interval_s=config.commit_interval_s,
            placeholder=setup.placeholder,
            media_token=setup.media_token,
            on_commit=self._report,
            on_error=self._stopped,
        )
        self._row_bytes, self._n_columns = self._store.row_bytes, len(setup.columns)
        self._header: BatchHeader | None = None
        self._metadata: np.ndarray | None = None
        self._norm: NormNotice | None = None
        self._assembly: Assembly | None = None
        self._orphan_since: float | None = None
        self._reporter.ready()

    def run(self) -> None:
        """Serve until told to stop, or until the model's process has ended."""
        while True:
            try:
                message = self._channel.receive(self._committer.tick())
            except (EOFError, OSError):
                break
            except Exception as error:
                self._fail(error)
                continue
            if isinstance(message, Stop):
                break
            if message is not None:
                try:
                    self._handle(message)
                except Exception as error:
                    self._fail(error)
        self._committer.finish()
        with suppress(Exception):
            self._reporter.closed()

    def _fail(self, error: Exception) -> None:
        """End capture, not this process: what was stored is acknowledged, and the session record says why."""
        self._consumer.close()
        self._committer.fail(error)

    def _handle(self, message: object) -> None:
        match message:
            case PieceNotice():
                self._piece(message)
            case BatchHeader():
                self._header = message
                self._assembly = Assembly("metadata", 8 * message.metadata_words)
            case NormNotice():
                self._norm = message
                self._assembly = Assembly("norm", message.nbytes)
            case Failure():
                self._fail(error_of(message))
            case _:
                raise TypeError(f"expected a message for the writing process, got {message!r}")

    def _piece(self, piece: PieceNotice) -> None:
        lease = self._consumer.lease(piece.span)
        try:
            if self._arrived(piece.number):
                self._use(piece, self._consumer.data(piece.span), lease)
        finally:
            # Given back also after an error: a forward may be waiting for it.
            lease.done()

    def _arrived(self, number: int) -> bool:
        """Wait for the device; meanwhile what is due is done. False if the copy will never come."""
        pause = _FIRST_POLL_S
        while not self._consumer.is_ready(number):
            self._committer.tick()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)
            if os.getppid() != self._parent:
                self._orphan_since = self._orphan_since or time.monotonic()
                # Counted once for all pieces: if one does not come, none behind it does.
                if time.monotonic() - self._orphan_since > _LAST_COPIES_S:
                    return False
        return True

    def _use(self, piece: PieceNotice, data: memoryview, lease: Lease) -> None:
        if piece.content == "rows":
            self._committer.take(data, len(data) // self._row_bytes, lease)
            return
        if self._assembly is None or self._assembly.content != piece.content:
            raise ValueError(f"expected a piece of {self._assembly}, got {piece}")
        whole = self._assembly.add(data)
        if whole is None:
            return
        if piece.content == "norm":
            self._store_norm(whole)
            return
        header = self._header
        assert header is not None
        if piece.content == "metadata":
            self._metadata = np.frombuffer(whole, dtype=np.int64)
            self._assembly = Assembly("absmax", 4 * header.plan.n_rows * self._n_columns)
            return
        assert self._metadata is not None
        absmax = np.frombuffer(whole, dtype=np.float32).reshape(header.plan.n_rows, self._n_columns)
        self._committer.begin(header, self._metadata, absmax)

    def _store_norm(self, weight: bytes) -> None:
        assert self._norm is not None
        store_final_norm(self._directory, self._norm.dtype, weight, self._norm.eps)

    def _counters(self) -> Counters:
        tallies = self._committer.tallies
        return Counters(
            rows=self._store.rows,
            bytes=self._store.bytes,
            samples=tallies.samples,
            failed=tallies.failed,
            incomplete=tallies.incomplete,
            blocked_s=round(self._memory.blocked_s, 6),
            disk_wait_s=round(self._store.write_s + self._store.sync_s, 6),
            ring_bytes=self._memory.capacity,
            slot_table_bytes=self._committer.slot_table_bytes,
        )

    def _report(self, now: bool) -> None:
        counters = self._counters()
        if self._metrics is not None:
            self._metrics.update(counters)
        self._reporter.progress(counters, now=now)

    def _stopped(self, error: Exception) -> None:
        self._consumer.close()
        self._reporter.stopped(error, self._counters())


def main(ring_fd: int, channel_fd: int) -> int:
    """Run the writing process on inherited descriptors; the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    # Ctrl-C reaches the whole group: the model's process decides when this one ends.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    channel = Channel(Connection(channel_fd))
    setup = channel.receive(None)
    if not isinstance(setup, Setup):
        raise TypeError(f"expected the settings first, got {setup!r}")
    try:
        process = WritingProcess(setup, channel, RingMemory.attach(ring_fd))
    except Exception as error:
        channel.send(failure_of(error))
        return 1
    channel.send(Opened())
    process.run()
    return 0
