"""A benchmark's outcome: medians and spread of its series, as JSON, as a Markdown table, and as a plot."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.load import machine


@dataclass
class Report:
    """What a benchmark measured.

    Attributes:
        benchmark: its name.
        label: the model measured.
        unit: of the series.
        machine: hardware, versions and date.
        arguments: the command line's.
        series: each measured round, by what was measured.
        ratios: of one series to another, one value for each round or pair of rounds.
        figures: single values, each named with its unit.
        details: everything else worth keeping, for the JSON file only.
    """

    benchmark: str
    label: str
    unit: str
    machine: dict[str, str]
    arguments: dict[str, Any]
    series: dict[str, list[float]]
    ratios: dict[str, list[float]] = field(default_factory=dict)
    figures: dict[str, float | None] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The object of the JSON file: the fields, with the series' and ratios' medians and spread first."""
        fields = asdict(self)
        summary = {name: spread(values) for name, values in {**self.series, **self.ratios}.items()}
        return {"benchmark": self.benchmark, "label": self.label, "summary": summary, **fields}

    def markdown(self) -> str:
        """The tables, under a line that says on what and with which arguments."""
        lines = [
            f"`{self.benchmark}`, {self.label}: " + ", ".join(f"{k} {v}" for k, v in self.machine.items()) + ".",
            "",
            "Arguments: " + ", ".join(f"{k} `{v}`" for k, v in self.arguments.items()) + ".",
            "",
            *_table(f"{self.unit}", self.series, ",.0f"),
        ]
        if self.ratios:
            lines += ["", *_table("ratio", self.ratios, ".3f")]
        if self.figures:
            lines += ["", "| figure | value |", "|---|---|"]
            lines += [f"| {name} | {_figure(value)} |" for name, value in self.figures.items()]
        return "\n".join(lines) + "\n"

    def write(self, directory: Path) -> Path:
        """Write ``<benchmark>-<label>-sglang<version>`` as .json, .md and, where matplotlib is installed, .png.

        Returns:
            The JSON file, which ``benchmarks.plots`` can draw later too.
        """
        directory.mkdir(parents=True, exist_ok=True)
        result = self.to_json()
        # Not with_suffix: a version has dots.
        stem = f"{self.benchmark}-{self.label}-sglang{self.machine['sglang']}"
        path = directory / f"{stem}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
        (directory / f"{stem}.md").write_text(self.markdown())
        try:
            plots.draw(result, directory / f"{stem}.png")
        except plots.MissingMatplotlibError as error:
            print(f"{error}; then: python -m benchmarks.plots {path}")
        return path


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest of at least one value."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def plain(arguments: Any) -> dict[str, Any]:
    """A parsed command line as values that JSON knows."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}


def write_json(results: Path, name: str, benchmark: str, arguments: Any, **content: Any) -> None:
    """Write ``<name>.json`` with the machine and the arguments before the content."""
    result = {"benchmark": benchmark, "machine": machine(), "arguments": plain(arguments), **content}
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")


def _table(unit: str, series: dict[str, list[float]], style: str) -> list[str]:
    lines = [f"| what | {unit}, median | lowest | highest | rounds |", "|---|---|---|---|---|"]
    for name, values in series.items():
        cells = [format(value, style) for value in spread(values).values()]
        lines.append(f"| {name} | {' | '.join(cells)} | {len(values)} |")
    return lines


def _figure(value: float | None) -> str:
    return "not measured" if value is None else f"{value:,.3f}"
