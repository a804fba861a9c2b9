"""``hs-capture inspect --watch``: a dataset while it is being captured, read again every few seconds."""

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from sglang_hs_capture.driver.progress import Rates
from sglang_hs_capture.driver.summary import GB
from sglang_hs_capture.driver.watch import JournalWatch
from sglang_hs_capture.errors import StoreError
from sglang_hs_capture.store.identity import DATASET_FILE, read_info
from sglang_hs_capture.store.journal import JournalTail
from sglang_hs_capture.store.requests import LEDGER_FILE
from sglang_hs_capture.store.schema import FailureRecord, parse_rid
from sglang_hs_capture.store.session import SessionRecord, is_running, read_sessions, replica_of
from sglang_hs_capture.text import printable

SHOWN_FAILURES = 5
Pause = Callable[[float], None]


@dataclass
class Account:
    """What is known of a dataset so far; ``failures`` are the last few, whose requests may have been captured since."""

    asked: set[str] = field(default_factory=set)
    acknowledged: set[str] = field(default_factory=set)
    tokens: int = 0
    failed: int = 0
    failures: deque[FailureRecord] = field(default_factory=lambda: deque(maxlen=SHOWN_FAILURES))
    sessions: list[SessionRecord] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows written by the latest sessions; the stages of a pipeline write the same ones."""
        rows: defaultdict[str, int] = defaultdict(int)
        for record in self.sessions:
            rows[replica_of(record)] = max(rows[replica_of(record)], record.counters.rows)
        return sum(rows.values())

    def total(self, counter: str) -> float:
        """A counter of the latest sessions, summed."""
        return float(sum(getattr(record.counters, counter) for record in self.sessions))


class LiveDataset:
    """Follows a dataset's journals, ledger and session records; each call reads only what is new in them."""

    def __init__(self, directory: Path) -> None:
        """
        Raises:
            StoreError: there is no dataset.
        """
        self.info = read_info(directory)
        self._directory = directory
        self._journals = JournalWatch(directory)
        self._ledger = JournalTail(directory / LEDGER_FILE)
        self._rates = Rates()
        self.account = Account()

    def poll(self) -> None:
        """Read on.

        Raises:
            CorruptionError: a file is damaged.
            StoreError: the dataset is not there any more, or is another one.
        """
        account = self.account
        if (created_at := read_info(self._directory).created_at) != self.info.created_at:
            raise StoreError(
                f"{self._directory}: another dataset, created at {created_at}, has taken the place of that created at "
                f"{self.info.created_at}; watch anew"
            )
        account.asked.update(str(raw.get("id")) for raw in self._ledger.poll() if raw["t"] == "request")
        for record in self._journals.poll():
            if isinstance(record, FailureRecord):
                account.failed += 1
                account.failures.append(record)
                continue
            # A sample that was sent again, as when a run goes on, has another request id and the same key.
            parsed = parse_rid(record.rid)
            name = parsed.key if parsed else record.rid
            if name not in account.acknowledged:
                account.acknowledged.add(name)
                account.tokens += record.length
        account.sessions = read_sessions(self._directory)

    def lines(self, now: float) -> list[str]:
        """What to show; ``now`` is a time in seconds, from which rates are computed."""
        account = self.account
        size = int(account.total("bytes"))
        rows_per_s, bytes_per_s = self._rates.update(now, account.rows, size)
        asked = f" of {len(account.asked):,} asked for" if account.asked else ""
        shown = [
            f"Dataset      {self._directory}",
            f"Samples      {len(account.acknowledged):,} acknowledged{asked} ({account.tokens:,} tokens), "
            f"{account.failed:,} times one failed",
            f"Rows         {account.rows:,} ({size / GB:.3f} GB) in the latest sessions, {rows_per_s:,.0f} rows/s, "
            f"{bytes_per_s / GB:.3f} GB/s",
            f"Waited       {account.total('blocked_s'):.1f} s for room in the ring, "
            f"{account.total('disk_wait_s'):.1f} s for the disk",
        ]
        shown += [self._session(record) for record in account.sessions]
        shown += [f"Failed       {failure.reason}: {failure.detail} ({failure.rid})" for failure in account.failures]
        return [printable(line) for line in shown]

    @staticmethod
    def _session(record: SessionRecord) -> str:
        counters = record.counters
        return (
            f"Session      {record.writer} {record.state}{reason(record.state, record.error, is_running(record))} "
            f"({counters.rows:,} rows, {counters.samples:,} samples, ring full {counters.blocked_s:.1f} s, "
            f"{record.updated_at})"
        )


def reason(state: str, error: str | None, running: bool | None) -> str:
    """What is to be said behind a session's state: its error, or that nobody was left to say one."""
    if state in {"starting", "ready"} and running is False:
        return ", but its process has ended"
    return f": {error}" if error else ""


def _wait_for_dataset(directory: Path, console: Console, interval_s: float, pause: Pause) -> None:
    """Wait where a capture has begun whose model is not loaded yet, since only the model makes a dataset of it."""
    if (directory / DATASET_FILE).exists() or not (directory / LEDGER_FILE).exists():
        return
    console.print(
        f"Waiting for {printable(str(directory / DATASET_FILE))}, which is written when the model is loaded ...",
        markup=False,
        soft_wrap=True,
    )
    while not (directory / DATASET_FILE).exists():
        pause(interval_s)


def watch(directory: Path, console: Console, interval_s: float, pause: Pause = time.sleep) -> None:
    """Show a dataset until Ctrl-C: in place on a terminal, elsewhere one line at a time.

    Where a capture has begun and there is no dataset yet, it is waited for.

    Args:
        interval_s: between two looks at it.
        pause: waits so many seconds.

    Raises:
        StoreError: there is no dataset, and no capture that is to make one; or it is not the same one any more.
        CorruptionError: a file of it is damaged.
    """
    try:
        _wait_for_dataset(directory, console, interval_s, pause)
        dataset = LiveDataset(directory)
        dataset.poll()
        if not console.is_terminal:
            while True:
                console.print("; ".join(dataset.lines(time.monotonic())[1:4]), markup=False, soft_wrap=True)
                pause(interval_s)
                dataset.poll()
        with Live(console=console, auto_refresh=False) as screen:
            while True:
                screen.update(Text("\n".join(dataset.lines(time.monotonic()))), refresh=True)
                pause(interval_s)
                dataset.poll()
    except KeyboardInterrupt:
        return
