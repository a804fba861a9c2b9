"""Shows how work on a dataset or an input goes on: a bar on a terminal, a plain line every few seconds elsewhere."""

import sys
import threading
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from sglang_hs_capture.driver.progress import PLAIN_INTERVAL_S
from sglang_hs_capture.driver.summary import GB
from sglang_hs_capture.verify.check import CheckView


class ClosingView(CheckView):
    """A view that is left in order, and also of work whose amount is not known."""

    def begin(self, what: str, total: int | None, unit: str) -> None:
        """See ``CheckView.begin``; ``total`` is None if it is not known."""

    def __enter__(self) -> "ClosingView":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the screen in order."""


class BarView(ClosingView):
    """A progress bar on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def begin(self, what: str, total: int | None, unit: str) -> None:
        self.close()
        amounts: tuple[ProgressColumn, ...] = (MofNCompleteColumn(),)
        if unit == "bytes":
            amounts = (DownloadColumn(), TransferSpeedColumn())
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), *amounts, TimeElapsedColumn(), console=self._console
        )
        self._task = self._bar.add_task(what, total=total)
        self._bar.start()

    def advance(self, amount: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, amount)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class LineView(ClosingView):
    """Plain lines every few seconds, for logs and pipes."""

    def __init__(self, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._what, self._unit, self._done = "", "", 0
        self._total: int | None = 0
        self._next = time.monotonic() + interval_s

    def begin(self, what: str, total: int | None, unit: str) -> None:
        self._what, self._unit, self._total, self._done = what, unit, total, 0

    def advance(self, amount: int) -> None:
        with self._lock:
            self._done += amount
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + self._interval_s
            if self._total is None:
                text = f"{self._done:,} {self._unit}"
            elif self._unit == "bytes":
                text = f"{self._done / GB:.2f} of {self._total / GB:.2f} GB"
            else:
                text = f"{self._done:,} of {self._total:,} {self._unit}"
            print(f"{self._what}: {text}", file=sys.stderr, flush=True)


def make_check_view() -> ClosingView:
    """A bar where stderr is a terminal, lines elsewhere."""
    return BarView(Console(file=sys.stderr)) if sys.stderr.isatty() else LineView()
