"""One rank's capture: from a prefill batch to rows on their way to disk, and the record that says how it goes."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_hs_capture import compat
from sglang_hs_capture.capture.rows import batch_metadata, plan_rows
from sglang_hs_capture.capture.taps import Taps
from sglang_hs_capture.capture.writer import Writer
from sglang_hs_capture.config import CaptureConfig
from sglang_hs_capture.errors import EngineError, GuardError, HsCaptureError
from sglang_hs_capture.kernels import reference
from sglang_hs_capture.layers import Column
from sglang_hs_capture.staging.copier import Staged, Staging
from sglang_hs_capture.staging.ring import Producer, RingClosedError, RingMemory
from sglang_hs_capture.store.schema import DatasetInfo
from sglang_hs_capture.store.session import SessionRecord, read_session, session_path
from sglang_hs_capture.writing.messages import Content, NormNotice, PieceNotice, Setup, failure_of
from sglang_hs_capture.writing.plan import BatchHeader, RowPlan
from sglang_hs_capture.writing.reporter import SessionReporter

logger = logging.getLogger(__name__)

_TELL_AGAIN_S = 1.0

_NORM_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3": torch.float8_e4m3fn,
}


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

    header: BatchHeader
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
        session: SessionRecord,
        served_name: str,
        device: torch.device,
        staging_rows: int,
        norm: torch.nn.Module | None,
        media_token: int | None = None,
    ) -> None:
        """Allocate the buffers and start the writing process, which opens the dataset.

        Args:
            taps: hand over the states of ``columns``.
            config: the settings.
            info: what the dataset holds.
            columns: those of its columns that come in this process.
            session: the record to be kept up to date; complete but for the counters.
            served_name: the model's name in SGLang's metrics.
            device: where states come from.
            staging_rows: rows of the largest forward that is expected.
            norm: the final norm, whose weight is stored beside the dataset; None where another stage has it.
            media_token: what stands for an image in a prompt as it is sent; None where images are not taken.

        Raises:
            StoreError: the dataset cannot be written, or is of another model or other settings.
            ConfigError: the ring is too small.
            EngineError: the writing process did not start.
        """
        super().__init__(taps, config.rid_prefix)
        self._columns, self._device, self._norm, self._info = columns, device, norm, info
        self._directory = Path(config.output_dir)
        memory = self._memory = RingMemory.create(config.ring_bytes, len(columns) * info.column_bytes)
        self._staging = Staging(
            device,
            staging_rows,
            len(columns),
            info.hidden_size,
            TORCH_DTYPES[config.dtype],
            Producer(memory, check_consumer=self._check_writer),
        )
        self._stopped = threading.Event()
        self._norm_sent = False
        self._current: _Current | None = None
        self._pack = _pack_for(device)
        self._session = session
        setup = Setup(
            config.to_mapping(),
            info.to_json(),
            session.to_json(),
            [column.name for column in columns],
            list(compat.REFUSED_PROMPT),
            served_name,
            media_token,
        )
        self._writer = Writer(memory, setup, self._writer_ended)

    def _check_writer(self) -> None:
        self._writer.check()

    def _sink_for(self, batch: compat.PrefillBatch, plan: RowPlan) -> Any:
        if self._stopped.is_set():
            return _discard
        try:
            self._begin(batch, plan)
        except RingClosedError:
            self._stopped.set()
            return _discard
        except Exception as error:  # the server must live on; the session record tells
            self._fail(error)
            return _discard
        return self._take

    def _begin(self, batch: compat.PrefillBatch, plan: RowPlan) -> None:
        if self._norm is not None and not self._norm_sent:
            self._send_norm(self._norm)
        index = plan.row_index()
        row_index = None
        if index is not None:
            host = torch.from_numpy(index)
            host = host.pin_memory() if self._device.type == "cuda" else host
            row_index = host.to(self._device, non_blocking=True)
        self._current = _Current(
            BatchHeader(self._prefills, plan, int(sum(batch.seq_lens)), len(batch.rids)),
            batch_metadata(batch, plan, compat.req_to_token()),
            row_index,
            self._staging.begin(plan.n_rows),
            set(),
        )

    def _send_norm(self, norm: torch.nn.Module) -> None:
        # Only now, at the first batch: the weights are loaded after the model is built.
        weight: torch.Tensor = norm.weight.detach()  # type: ignore[operator]
        if weight.dtype not in _NORM_DTYPES:
            weight = weight.float()
        self._writer.send(NormNotice(_NORM_DTYPES[weight.dtype], weight.nbytes, self._info.final_norm_eps))
        self._send("norm", weight)
        self._norm_sent = True

    def _send(self, content: Content, source: torch.Tensor) -> None:
        for piece in self._staging.send(source):
            self._writer.send(PieceNotice(content, piece.number, piece.span))

    def _take(self, column: int, state: torch.Tensor) -> None:
        current = self._current
        if current is None:
            return
        try:
            if state.shape[0] < current.header.n_forward_rows:
                raise GuardError(
                    f"expected the {current.header.n_forward_rows} rows of a prefill forward at "
                    f"{self._columns[column].name}, {state.shape[0]} came: this mode of SGLang spreads the rows of a "
                    "prompt over ranks; remove --moe-a2a-backend and --moe-dense-tp-size, or other flags that do so"
                )
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
                raise GuardError(
                    f"expected {len(self._columns)} states of a prefill forward, {', '.join(missing)} did not come: "
                    "this SGLang or one of its modes does not run the layers as the plugin knows them"
                )
            self._writer.send(current.header)
            self._send("metadata", current.metadata)
            self._send("absmax", current.staged.absmax)
            self._send("rows", current.staged.states)
            self._staging.sent()
        except RingClosedError:
            self._stopped.set()  # the writing process has stopped, and told why
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Stop capturing for an error on this side, and have the writing process say so."""
        logger.exception("hs_capture: capture stopped, the server goes on")
        self._stopped.set()
        # If it is gone, its end was noticed and is told by ``_writer_ended``.
        with suppress(EngineError):
            self._writer.send(failure_of(error))

    def _writer_ended(self, error: HsCaptureError) -> None:
        self._stopped.set()
        logger.error("hs_capture: capture stopped, the server goes on: %s", error)
        # A driver waits for samples until it reads this, and what hinders the writing of it may pass, as a full disk.
        while not self._tell_end(error):
            time.sleep(_TELL_AGAIN_S)

    def _tell_end(self, error: HsCaptureError) -> bool:
        """Have the session record say that capture has stopped, unless it says so already; whether that was done."""
        try:
            written = read_session(session_path(self._directory, self._session.writer))
            if written is not None and written.session_id == self._session.session_id and written.state == "ready":
                SessionReporter(self._directory, written).stopped(error, written.counters)
        except (HsCaptureError, OSError) as problem:
            logger.error("hs_capture: could not say that capture has stopped, trying again: %s", problem)
            return False
        return True

    def close(self, timeout_s: float = 30.0) -> None:
        """Store what is under way and finish the shard."""
        self._stopped.set()
        self._writer.stop(timeout_s)
