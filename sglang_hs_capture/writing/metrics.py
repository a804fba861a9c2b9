"""A capture's counters among SGLang's Prometheus metrics.

With ``--enable-metrics`` SGLang uses prometheus_client's multiprocess mode: the launcher names a directory in the
environment, every process below it keeps its values in files there, and the HTTP server's ``/metrics`` adds these up.
So a process that inherits the environment need only create metrics of its own. This module imports neither torch nor
SGLang, so that a process which does nothing but write can use it.
"""

import logging
import os
from pathlib import Path
from typing import Self

from sglang_hs_capture.store.session import Counters

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
LABELS = ("model_name", "writer")

# Field of Counters -> name and help of the metric.
METRICS = {
    "rows": ("hs_capture_rows_total", "Rows of hidden states written."),
    "bytes": ("hs_capture_bytes_total", "Bytes of hidden states written."),
    "samples": ("hs_capture_samples_total", "Samples acknowledged."),
    "failed": ("hs_capture_failed_total", "Requests whose capture failed."),
    "incomplete": ("hs_capture_incomplete_total", "Requests of whose prompt rows were missing."),
    "blocked_s": ("hs_capture_ring_blocked_seconds_total", "Seconds the forward waited because the ring was full."),
    "disk_wait_s": ("hs_capture_disk_wait_seconds_total", "Seconds spent in waiting for the disk."),
}


class CaptureMetrics:
    """One writer's counters as Prometheus metrics, each labelled with ``model_name``, as SGLang's own, and ``writer``.

    Values are kept by process id and added up when they are scraped, so what a process that has ended counted stays,
    and its successor counts on. One process has one of these for a writer.
    """

    def __init__(self, writer: str, model_name: str) -> None:
        """Create the metrics; they show as 0 at once.

        Raises:
            OSError: the directory of ``DIRECTORY_VARIABLE`` cannot be written.
        """
        # Not at the module's head: prometheus_client decides for its multiprocess mode when it is first imported.
        from prometheus_client import CollectorRegistry, Counter

        # Of its own, since the process's default registry is SGLang's; where the values are kept is the same.
        registry = CollectorRegistry()
        self._metrics = {
            field: Counter(name, text, LABELS, registry=registry).labels(model_name=model_name, writer=writer)
            for field, (name, text) in METRICS.items()
        }
        self._counted = dict.fromkeys(METRICS, 0.0)

    @classmethod
    def if_enabled(cls, writer: str, model_name: str) -> Self | None:
        """The metrics of ``writer`` where SGLang collects metrics, and None where it does not.

        Args:
            writer: as in the session record, such as ``dp0-pp0``.
            model_name: SGLang's served model name.
        """
        directory = os.environ.get(DIRECTORY_VARIABLE)
        if not directory or not Path(directory).is_dir():
            return None
        try:
            return cls(writer, model_name)
        except OSError as error:  # a capture does not depend on its metrics
            logger.warning("hs_capture: no metrics: %s=%s cannot be written: %s", DIRECTORY_VARIABLE, directory, error)
            return None

    def update(self, counters: Counters) -> None:
        """Bring the metrics up to ``counters``, those of one session from its beginning; none of them ever falls."""
        for field, metric in self._metrics.items():
            value = float(getattr(counters, field))
            if value > self._counted[field]:
                metric.inc(value - self._counted[field])
                self._counted[field] = value
