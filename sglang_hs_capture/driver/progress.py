"""Shows how a run goes on: a bar on a terminal, a plain line every few seconds elsewhere."""

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import IO, ClassVar, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from sglang_hs_capture.driver.summary import GB
from sglang_hs_capture.text import printable

PLAIN_INTERVAL_S = 5.0
RATE_WINDOW_S = 10.0


@dataclass(frozen=True)
class Snapshot:
    """How far a run is.

    Attributes:
        done: samples captured, there already, skipped, excluded or dropped.
        in_flight: samples sent and not yet acknowledged.
        tokens: tokens captured so far.
        rows: rows written so far; fewer than tokens where prefixes are shared.
        bytes: bytes written so far.
        blocked_s: time the model's forward waited because the ring was full.
        disk_wait_s: time the writing side waited for the disk.
    """

    done: int
    in_flight: int
    tokens: int
    rows: int
    bytes: int
    blocked_s: float
    disk_wait_s: float

    def detail(self, tokens_per_s: float, bytes_per_s: float) -> str:
        """What is told besides the number of samples."""
        return (
            f"{self.rows:,} rows, {self.bytes / GB:.2f} GB, {tokens_per_s:,.0f} tok/s, "
            f"{bytes_per_s / GB:.3f} GB/s, {self.in_flight:,} in flight, "
            f"ring full {self.blocked_s:.1f} s, disk wait {self.disk_wait_s:.1f} s"
        )


@dataclass(frozen=True)
class AnswerSnapshot:
    """How far the answering of prompts is, before a capture.

    Attributes:
        done: prompts answered so far.
        in_flight: prompts sent and not yet answered.
        tokens: tokens of the answers so far.
    """

    done: int
    in_flight: int
    tokens: int

    # Nothing is captured yet.
    bytes: ClassVar[int] = 0

    def detail(self, tokens_per_s: float, _: float) -> str:
        """What is told besides the number of prompts."""
        return f"answering: {self.tokens:,} tokens, {tokens_per_s:,.0f} tok/s, {self.in_flight:,} in flight"


class Rates:
    """Tokens and bytes a second over the last moments, so that a slow start does not weigh on the figure for hours."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, int, int]] = []

    def update(self, now: float, tokens: int, nbytes: int) -> tuple[float, float]:
        """Take a new reading.

        Returns:
            Tokens a second and bytes a second.
        """
        self._marks.append((now, tokens, nbytes))
        while len(self._marks) > 2 and now - self._marks[1][0] >= RATE_WINDOW_S:
            del self._marks[0]
        begin, first_tokens, first_bytes = self._marks[0]
        span = now - begin
        return ((tokens - first_tokens) / span, (nbytes - first_bytes) / span) if span > 0 else (0.0, 0.0)


def _at_least(total: int, snapshot: Snapshot | AnswerSnapshot) -> int:
    """The total, or more where conversations became several samples each: what is in flight belongs to it."""
    return max(total, snapshot.done + snapshot.in_flight)


class ProgressView:
    """Where a run reports to; this one keeps silent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def say(self, text: str) -> None:
        """Show one line that stays."""

    def update(self, snapshot: Snapshot | AnswerSnapshot) -> None:
        """Show how far the run is."""

    def close(self) -> None:
        """Leave the screen in order."""


class _BarAndDetail(Progress):
    """A progress bar with a text of its own below, which may be longer than what a terminal has room for beside it."""

    detail = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.detail)


class BarView(ProgressView):
    """A progress bar on a terminal, and what is measured below it."""

    def __init__(self, console: Console, total: int | None) -> None:
        self._rates = Rates()
        self._total = total
        self._bar = _BarAndDetail(
            TextColumn("samples"),
            MofNCompleteColumn(),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task("samples", total=total, start=True, visible=False)
        self._bar.start()

    def say(self, text: str) -> None:
        self._bar.console.print(printable(text), markup=False, highlight=False)

    def update(self, snapshot: Snapshot | AnswerSnapshot) -> None:
        tokens_per_s, bytes_per_s = self._rates.update(time.monotonic(), snapshot.tokens, snapshot.bytes)
        self._bar.detail = snapshot.detail(tokens_per_s, bytes_per_s)
        total = None if self._total is None else _at_least(self._total, snapshot)
        self._bar.update(self._task, total=total, completed=snapshot.done, visible=True)

    def close(self) -> None:
        self._bar.stop()


class LineView(ProgressView):
    """Plain lines, for logs and pipes."""

    def __init__(self, stream: IO[str], total: int | None, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self._stream = stream
        self._total = total
        self._interval_s = interval_s
        self._rates = Rates()
        self._next = 0.0

    def say(self, text: str) -> None:
        print(printable(text), file=self._stream, flush=True)

    def update(self, snapshot: Snapshot | AnswerSnapshot) -> None:
        now = time.monotonic()
        tokens_per_s, bytes_per_s = self._rates.update(now, snapshot.tokens, snapshot.bytes)
        if now < self._next:
            return
        self._next = now + self._interval_s
        total = "" if self._total is None else f" of {_at_least(self._total, snapshot):,}"
        self.say(f"{snapshot.done:,}{total} samples, {snapshot.detail(tokens_per_s, bytes_per_s)}")


def make_view(total: int | None = None, stream: IO[str] | None = None) -> ProgressView:
    """A bar where the stream is a terminal, lines elsewhere.

    Args:
        total: number of samples of the input, or fewer if conversations are split; None if it is not known.
        stream: stderr by default.
    """
    stream = sys.stderr if stream is None else stream
    return BarView(Console(file=stream), total) if stream.isatty() else LineView(stream, total)
