"""What faults did: for each one how often it struck, what was lost, what was wrong, how long it took to go on."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path


class NotStruckError(Exception):
    """The fault did not come to pass in this try, such as a kill at a step that was never reached."""


class NotPossibleError(Exception):
    """This machine cannot produce the fault, such as a mount without being root."""


@dataclass(frozen=True)
class Outcome:
    """One try.

    Attributes:
        acknowledged: samples acknowledged before the fault, as whoever waits for them saw it.
        lost: those of them that the dataset does not give afterwards, before or after it was gone on with.
        wrong: samples that the dataset gives, before or after, and that are not what was captured.
        recover_s: from the moment at which whoever starts again begins, to when rows are taken (``store``) or the next
            sample is acknowledged; None where nothing has to be started again.
        message: what the user is shown, if the fault shows itself.
    """

    acknowledged: int
    lost: int
    wrong: int
    recover_s: float | None
    message: str = ""


@dataclass(frozen=True)
class Fault:
    """A fault that can be tried again and again.

    Attributes:
        name: in the table.
        where: ``store``, ``process``, ``run`` or ``engine``: what of the real thing is at work.
        times: how often it is tried by default.
        strike: tries it once in an empty folder; the number of the try stands for its seed.
    """

    name: str
    where: str
    times: int
    strike: Callable[[Path, int], Outcome]


@dataclass
class Account:
    """All tries of one fault."""

    fault: Fault
    outcomes: list[Outcome]
    not_struck: int = 0
    not_possible: str = ""

    @property
    def sound(self) -> bool:
        """Whether nothing acknowledged was lost, and nothing wrong was given."""
        return not any(outcome.lost or outcome.wrong for outcome in self.outcomes)

    def row(self) -> str:
        """The account as a line of the table."""
        if not self.outcomes:
            return f"| {self.fault.name} | {self.fault.where} | 0 | | | | | {self.not_possible} |"
        times = [outcome.recover_s for outcome in self.outcomes if outcome.recover_s is not None]
        cells = [
            self.fault.name,
            self.fault.where,
            f"{len(self.outcomes):,}",
            f"{sum(outcome.acknowledged for outcome in self.outcomes):,}",
            f"{sum(outcome.lost for outcome in self.outcomes):,}",
            f"{sum(outcome.wrong for outcome in self.outcomes):,}",
            f"{_seconds(statistics.median(times))}, {_seconds(max(times))}" if times else "goes on",
            self._message(),
        ]
        return f"| {' | '.join(cells)} |"

    def _message(self) -> str:
        shown = Counter(outcome.message for outcome in self.outcomes if outcome.message)
        return f"`{shown.most_common(1)[0][0].replace('|', '/')}`" if shown else ""


def table(accounts: Iterable[Account]) -> str:
    """All accounts as a Markdown table."""
    lines = [
        "| fault | at work | tried | acknowledged | lost | wrong | time to recover: median, longest | message |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(account.row() for account in accounts)]) + "\n"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"
