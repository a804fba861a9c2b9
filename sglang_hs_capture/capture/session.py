"""One rank's capture: from a prefill batch to rows on their way to disk, and the record that says how it goes."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_hs_capture import compat
from sglang_hs_capture.capture.committer import BatchHeader, Committer
from sglang_hs_capture.capture.record import SessionReporter
from sglang_hs_capture.capture.rows import RowPlan, batch_metadata, plan_rows
from sglang_hs_capture.capture.taps import Taps
from sglang_hs_capture.config import CaptureConfig
from sglang_hs_capture.errors import HsCaptureError
from sglang_hs_capture.kernels import reference
from sglang_hs_capture.layers import Column
from sglang_hs_capture.staging.copier import Staged, Staging
from sglang_hs_capture.staging.ring import HostRing, RingClosedError
from sglang_hs_capture.store.schema import DatasetInfo
from sglang_hs_capture.store.session import Counters
from sglang_hs_capture.store.writer import StoreWriter

logger = logging.getLogger(__name__)

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def _pack_for(device: torch.device) -> Callable[..., None]:
    if device.type != "cuda":
        return reference.pack_state
    from sglang_hs_capture.kernels import pack

    return pack.pack_state


def _discard(_column: int, _state: torch.Tensor) -> None:
    """The sink of a rank that takes part in the gathering of states and writes nothing."""


class Capture:
    """Capture on a rank that writes nothing: its taps are armed like the writing rank's, and what comes is let go."""

    def __init__(self, taps: Taps, rid_prefix: str) -> None:
        self._taps, self._rid_prefix = taps, rid_prefix
        self._prefills = 0

    @contextmanager
    def forward(self, forward_batch: Any) -> Iterator[None]:
        """Wrap one forward of the model."""
        batch = compat.prefill_batch(forward_batch)
        self._prefills += batch is not None
        plan = plan_rows(batch, self._rid_prefix) if batch is not None else None
        if batch is None or plan is None:
            yield
            return
        self._taps.arm(self._sink_for(batch, plan))
        try:
            yield
        finally:
            self._taps.disarm()
        self._finish()

    def _sink_for(self, _batch: compat.PrefillBatch, _plan: RowPlan) -> Any:
        return _discard

    def _finish(self) -> None:
        """Called after a captured forward."""


@dataclass
class _Current:
    """The forward being captured."""

    header_parts: tuple[int, RowPlan, int, int]
    metadata: torch.Tensor
    row_index: torch.Tensor | None
    staged: Staged
    seen: set[int]


class WritingCapture(Capture):
    """Capture on the rank that writes."""

    def __init__(
        self,
        taps: Taps,
        config: CaptureConfig,
        info: DatasetInfo,
        columns: tuple[Column, ...],
        *,
        reporter: SessionReporter,
        device: torch.device,
        staging_rows: int,
        norm: torch.nn.Module,
    ) -> None:
        """Open the dataset and allocate the buffers.

        Raises:
            StoreError: the dataset cannot be written, or is of another model or other settings.
            ConfigError: the ring is too small.
        """
        super().__init__(taps, config.rid_prefix)
        self._columns, self._device, self._norm, self._info = columns, device, norm, info
        self._directory = Path(config.output_dir)
        self._store = StoreWriter.open(
            self._directory,
            reporter.writer,
            info,
            session_id=reporter.session_id,
            shard_bytes=config.shard_bytes,
            min_free_bytes=config.min_free_bytes,
        )
        self._ring = HostRing(config.ring_bytes, info.row_bytes, pinned=device.type == "cuda")
        self._staging = Staging(
            device, staging_rows, len(columns), info.hidden_size, TORCH_DTYPES[config.dtype], self._ring
        )
        self._committer = Committer(
            self._store,
            self._ring,
            commit_interval_s=config.commit_interval_s,
            on_commit=self._report,
            on_error=self._stop,
        )
        self._reporter = reporter
        self._stopped = threading.Event()
        self._norm_stored = False
        self._current: _Current | None = None
        self._pack = _pack_for(device)
        self._committer.start()

    def _sink_for(self, batch: compat.PrefillBatch, plan: RowPlan) -> Any:
        if self._stopped.is_set():
            return _discard
        try:
            self._begin(batch, plan)
        except Exception as error:  # the server must live on; the session record tells
            self._fail(error)
            return _discard
        return self._take

    def _begin(self, batch: compat.PrefillBatch, plan: RowPlan) -> None:
        if not self._norm_stored:
            self._reporter.store_final_norm(self._norm, self._info.final_norm_eps)
            self._norm_stored = True
        index = plan.row_index()
        row_index = None
        if index is not None:
            host = torch.from_numpy(index)
            host = host.pin_memory() if self._device.type == "cuda" else host
            row_index = host.to(self._device, non_blocking=True)
        self._current = _Current(
            (self._prefills, plan, int(sum(batch.seq_lens)), len(batch.rids)),
            batch_metadata(batch, plan, compat.req_to_token()),
            row_index,
            self._staging.begin(plan.n_rows),
            set(),
        )

    def _take(self, column: int, state: torch.Tensor) -> None:
        current = self._current
        if current is None:
            return
        try:
            self._pack(state, current.row_index, current.staged.states, current.staged.absmax, column)
            current.seen.add(column)
        except Exception as error:
            self._current = None
            self._fail(error)

    def _finish(self) -> None:
        current, self._current = self._current, None
        if current is None:
            return
        try:
            if len(current.seen) != len(self._columns):
                missing = [c.name for number, c in enumerate(self._columns) if number not in current.seen]
                raise HsCaptureError(
                    f"expected {len(self._columns)} states of a prefill forward, {', '.join(missing)} did not come: "
                    "this SGLang or one of its modes does not run the layers as the plugin knows them"
                )
            (metadata, absmax), wait = self._staging.to_host([current.metadata, current.staged.absmax])
            self._committer.put(BatchHeader(*current.header_parts, metadata, absmax, wait))
            for piece in self._staging.drain(current.staged):
                self._committer.put(piece)
        except RingClosedError:
            return  # the committer has stopped, and told why
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        logger.exception("hs_capture: capture stopped, the server goes on")
        self._ring.close()
        self._stop(error)

    def _stop(self, error: Exception) -> None:
        self._stopped.set()
        self._reporter.stopped(error)

    def _report(self, now: bool) -> None:
        tallies = self._committer.tallies
        counters = Counters(
            rows=self._store.rows,
            bytes=self._store.bytes,
            samples=tallies.samples,
            failed=tallies.failed,
            incomplete=tallies.incomplete,
            blocked_s=round(self._ring.blocked_s, 6),
            disk_wait_s=round(self._store.disk_wait_s, 6),
            ring_bytes=self._ring.nbytes,
            slot_table_bytes=self._committer.slot_table_bytes,
        )
        self._reporter.progress(counters, now=now)

    def close(self, timeout_s: float = 30.0) -> None:
        """Store what is under way and finish the shard."""
        self._committer.stop(timeout_s)
        self._reporter.closed()
