"""``hs-capture verify``: whether a dataset is what was captured, byte for byte, and what its states look like."""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from sglang_hs_capture.driver.summary import GB
from sglang_hs_capture.errors import ConfigError, CorruptionError
from sglang_hs_capture.verify.check import CheckResult, CheckSettings, CheckView, check_dataset
from sglang_hs_capture.verify.findings import KINDS, Findings, Severity

SHOWN_PER_KIND = 3
LINE_INTERVAL_S = 5.0


def verify(
    directory: Annotated[Path, typer.Argument(metavar="DATASET", help="The dataset.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Look at the states of so many samples only, chosen at random.")
    ] = None,
    fraction: Annotated[
        float | None, typer.Option(min=0, max=1, help="Look at the states of such a share of the samples only.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses the samples.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that read.", show_default="processors")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as errors for the exit code.")] = False,
) -> None:
    """Check a dataset: its structure, every byte of its states, and that every sample is there.

    Exits with 0 only if nothing is wrong, else with 4. Reads each shard once, and writes nothing into the dataset.
    """
    if sample is not None and fraction is not None:
        raise ConfigError("--sample and --fraction: give one of them")
    directory = directory.expanduser()
    settings = CheckSettings(samples=sample, fraction=fraction, seed=seed, threads=threads)
    with make_view() as view:
        result = check_dataset(directory, settings, view)
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    else:
        for line in lines(result):
            typer.echo(line)
    findings = result.findings
    if findings.errors or (strict and findings.warnings):
        raise CorruptionError(f"{directory}: {_verdict(findings)}; {_advice(findings)}")


def _verdict(findings: Findings) -> str:
    errors = f"{findings.errors:,} error{'' if findings.errors == 1 else 's'}"
    return f"{errors} and {findings.warnings:,} warning{'' if findings.warnings == 1 else 's'}"


def _advice(findings: Findings) -> str:
    if findings.samples:
        return f"{len(findings.samples):,} samples are not to be used; each finding above says what to do"
    return "each finding above says what to do"


def lines(result: CheckResult) -> list[str]:
    """The result for a person, on one page."""
    info, findings = result.info, result.findings
    share = result.bytes_checked / result.bytes if result.bytes else 1.0
    journal_lines = sum(counts.lines for counts in result.journals.values())
    shown = [
        f"Dataset      {result.path}{', which is being captured' if result.live else ''}",
        f"Model        {info.model_path} ({info.architecture}), config {info.config_hash}",
        f"Samples      {result.samples:,} ({result.tokens:,} tokens), {result.asked:,} asked for",
        f"Structure    {len(result.journals):,} journals and ledger, {journal_lines:,} lines; {result.shards:,} shards",
        f"States       {result.rows_checked:,} of {result.rows:,} rows looked at ({share:.1%}), "
        f"{result.bytes_checked / GB:.3f} GB of {info.dtype} in {result.seconds:.1f} s",
        "",
        f"{'state':<16} {'norm: min':>11} {'1%':>11} {'median':>11} {'99%':>11} {'max':>11}",
    ]
    for number, name in enumerate(result.statistics.columns):
        low, median, high = result.statistics.quantiles(number, [0.01, 0.5, 0.99])
        values = (result.statistics.low[number], low, median, high, result.statistics.high[number])
        figures = " ".join(f"{value:>11.4g}" for value in values) if result.statistics.rows[number] else ""
        shown.append(f"{name:<16} {figures}".rstrip())
    shown.append("")
    listed = findings.listed()
    for kind, properties in KINDS.items():
        count = findings.counts[kind]
        if not count:
            continue
        label = "ERROR" if properties.severity is Severity.ERROR else "warning"
        shown.append(f"{label}: {kind}, {count:,} time{'' if count == 1 else 's'}. To do: {properties.remedy}")
        mine = [finding for finding in listed if finding.kind == kind]
        shown += [f"  {finding}" for finding in mine[:SHOWN_PER_KIND]]
        if count > SHOWN_PER_KIND:
            shown.append(f"  and {count - SHOWN_PER_KIND:,} more{'; --json lists them' if count <= len(mine) else ''}")
    verdict = "Sound: nothing is wrong" if result.sound else "NOT SOUND"
    partly = "" if result.rows_checked == result.rows else ", as far as it was looked at"
    shown.append(f"{verdict}{partly} ({_verdict(findings)}).")
    return shown


class _SilentExit(CheckView):
    """A view that is left in order."""

    def __enter__(self) -> "_SilentExit":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the screen in order."""


class BarView(_SilentExit):
    """A progress bar on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def begin(self, what: str, total: int, unit: str) -> None:
        self.close()
        amounts = (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(),)
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


class LineView(_SilentExit):
    """Plain lines every few seconds, for logs and pipes."""

    def __init__(self, interval_s: float = LINE_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._what, self._unit, self._total, self._done = "", "", 0, 0
        self._next = time.monotonic() + interval_s

    def begin(self, what: str, total: int, unit: str) -> None:
        self._what, self._unit, self._total, self._done = what, unit, total, 0

    def advance(self, amount: int) -> None:
        with self._lock:
            self._done += amount
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + self._interval_s
            if self._unit == "bytes":
                text = f"{self._done / GB:.2f} of {self._total / GB:.2f} GB"
            else:
                text = f"{self._done:,} of {self._total:,} {self._unit}"
            print(f"{self._what}: {text}", file=sys.stderr, flush=True)


def make_view() -> _SilentExit:
    """A bar where stderr is a terminal, lines elsewhere."""
    return BarView(Console(file=sys.stderr)) if sys.stderr.isatty() else LineView()
