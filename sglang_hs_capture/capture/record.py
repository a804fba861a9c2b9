"""What a capturing process tells the world: its session record, and the final norm beside the dataset."""

import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import sglang_hs_capture
from sglang_hs_capture.errors import DatasetMismatchError, DiskFullError, HsCaptureError, kind_of
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.identity import FINAL_NORM_FILE
from sglang_hs_capture.store.session import (
    Counters,
    SessionRecord,
    State,
    is_running,
    read_session,
    session_path,
    write_session,
)

_REPORT_INTERVAL_S = 1.0
# Given up when the disk is full, so that the record that says so has room.
_RESERVE_BYTES = 2**16


class SessionReporter:
    """Keeps one writer's session record up to date, from any thread."""

    def __init__(self, directory: Path, writer: str, *, run_id: str, rid_prefix: str, sglang_version: str) -> None:
        self._directory = directory
        self._reserve = directory / f"reserve-{writer}"
        self._lock = threading.Lock()
        self._written_at = 0.0
        self._record = SessionRecord(
            writer=writer,
            session_id=uuid.uuid4().hex,
            pid=os.getpid(),
            host=socket.gethostname(),
            run_id=run_id,
            rid_prefix=rid_prefix,
            sglang_version=sglang_version,
            torch_version=torch.__version__,
            plugin_version=sglang_hs_capture.__version__,
        )

    @property
    def writer(self) -> str:
        """The writer's name."""
        return self._record.writer

    @property
    def session_id(self) -> str:
        """This session's id, new with each start."""
        return self._record.session_id

    def describe(self, **values: Any) -> None:
        """Fill in fields of the record; nothing is written yet."""
        for name, value in values.items():
            setattr(self._record, name, value)

    def ready(self) -> None:
        """The handshake: capture is set up in this process."""
        with fs.io_errors(self._reserve, "write"):
            fs.replace_file(self._reserve, bytes(_RESERVE_BYTES))
        self._change("ready")

    def refused(self, error: HsCaptureError) -> None:
        """Say why the model was not built; a live session of another process is left to stand."""
        other = read_session(session_path(self._directory, self.writer))
        if other is None or other.state != "ready" or not self._is_of_another_process(other):
            self._change("refused", str(error), kind_of(error))

    def stopped(self, error: Exception) -> None:
        """Say why capture has ended while the server lives on."""
        text = str(error) if isinstance(error, HsCaptureError) else f"{type(error).__name__}: {error}"
        self._change("stopped", text, kind_of(error))

    def closed(self) -> None:
        """Capture ended in order; the reason of an earlier stop stays."""
        if self._record.state == "ready":
            self._change("closed")

    def progress(self, counters: Counters, *, now: bool) -> None:
        """Bring the counters up to date on disk, at most once a second unless ``now``."""
        with self._lock:
            changed = counters != self._record.counters
            self._record.counters = counters
            due = time.monotonic() - self._written_at >= _REPORT_INTERVAL_S
            if (now and changed) or due:
                self._write()

    def _is_of_another_process(self, other: SessionRecord) -> bool:
        # This process's own id in an older record is that of a dead process, as in a restarted container.
        own = (self._record.host, self._record.pid)
        return (other.host, other.pid) != own and is_running(other) is not False

    def _change(self, state: State, error: str = "", kind: str | None = None) -> None:
        with self._lock:
            self._record.state = state
            self._record.error = " ".join(error.split()) or None
            self._record.error_kind = kind
            self._write()

    def _write(self) -> None:
        try:
            write_session(self._directory, self._record)
        except DiskFullError:
            self._reserve.unlink(missing_ok=True)
            write_session(self._directory, self._record)
        self._written_at = time.monotonic()

    def store_final_norm(self, norm: Any, eps: float) -> None:
        """Write the final norm's weight and epsilon beside the dataset, or check that they are those of the dataset.

        Raises:
            DatasetMismatchError: the dataset holds another norm: the weights differ, though the config does not.
        """
        path = self._directory / FINAL_NORM_FILE
        weight = norm.weight.detach().to("cpu").contiguous()
        if path.exists():
            _check_norm(path, weight, eps)
            return
        temporary = path.with_suffix(f".{self.session_id}.tmp")
        save_file({"weight": weight}, temporary, metadata={"eps": json.dumps(eps)})
        with fs.io_errors(path, "write"):
            fs.replace_file(path, temporary.read_bytes())
            temporary.unlink()


def _check_norm(path: Path, weight: torch.Tensor, eps: float) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as stored:
        old, old_eps = stored.get_tensor("weight"), json.loads(stored.metadata()["eps"])
    if old.shape != weight.shape or not torch.equal(old.float(), weight.float()) or old_eps != eps:
        raise DatasetMismatchError(
            f"{path}: the final norm there is not this model's, though its config is the same: the weights are of "
            "another model; choose another --output"
        )
