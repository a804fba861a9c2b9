"""A dataset's check as one HTML file that a person looks at: what it is, what was found, and how its norms lie.

The file holds everything itself, loads nothing, and runs no script.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log2, log10
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sglang_hs_capture.errors import StoreError
from sglang_hs_capture.verify.check import CheckResult
from sglang_hs_capture.verify.findings import Finding, Severity
from sglang_hs_capture.verify.statistics import (
    POSITION_BUCKETS,
    Statistics,
    bin_edges,
    bucket_start,
    histogram_quantiles,
)

WIDTH, HEIGHT = 420, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 34
# Where the ticks of a logarithmic axis stand within a decade, for axes of less than so many decades.
_TICKS: tuple[tuple[float, tuple[float, ...]], ...] = (
    (0.4, (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)),
    (1, (1, 1.5, 2, 3, 5, 7)),
    (2.5, (1, 2, 5)),
    (float("inf"), (1,)),
)
BANDS = ((0.01, 0.99), (0.25, 0.75))
_BEGIN = '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>Check of '
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 84em; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2em; } h3 { font-size: 1em; margin: 1em 0 .3em; }
table { border-collapse: collapse; } td, th { padding: .2em .8em .2em 0; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } tr { border-bottom: 1px solid #ddd; }
.error { color: #b00020; font-weight: 600; } .warning { color: #8a5a00; font-weight: 600; }
.sound { color: #1b6e2c; font-weight: 600; } .charts { display: flex; flex-wrap: wrap; gap: 1em; }
td.wide { overflow-wrap: anywhere; } figure { margin: 0; } figcaption { font-size: .9em; color: #555; }
svg text { font: 11px system-ui, sans-serif; fill: #444; }
"""


def write_report(path: Path, result: CheckResult, comparisons: Sequence[str] = ()) -> None:
    """Write the report; ``comparisons`` are the lines of what was compared with the model, if anything was.

    Raises:
        StoreError: the file cannot be written.
    """
    try:
        path.write_text(html_report(result, comparisons), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise StoreError(f"{path}: the report could not be written: {error.strerror or error}") from error


def is_report(path: Path) -> bool:
    """Whether a file is a report as ``write_report`` makes them.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return file.read(len(_BEGIN)) == _BEGIN.encode()


def html_report(result: CheckResult, comparisons: Sequence[str] = ()) -> str:
    """The whole page; see ``write_report``."""
    parts = [
        f"<h1>{escape(result.path)}</h1>",
        _verdict(result),
        "<h2>Dataset</h2>",
        _identity(result),
        "<h2>Findings</h2>",
        _findings(result),
        *([f"<h2>Compared with the model</h2>\n<pre>{escape(chr(10).join(comparisons))}</pre>"] if comparisons else []),
        "<h2>Norms of the states</h2>",
        "<p>Each row of a state has one Euclidean norm. Zero rows and rows that are not finite are not among them.</p>",
        _table(result.statistics),
    ]
    for column, name in enumerate(result.statistics.columns):
        parts += [f"<h3>{escape(name)}</h3>", _charts(result.statistics, column)]
    body = "\n".join(parts)
    title = escape(result.path)
    return f"{_BEGIN}{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"


def _verdict(result: CheckResult) -> str:
    findings = result.findings
    share = result.rows_checked / result.rows if result.rows else 1.0
    word = '<span class="sound">Sound</span>' if result.sound else '<span class="error">Not sound</span>'
    return (
        f"<p>{word}: {findings.errors:,} errors, {findings.warnings:,} warnings; {result.rows_checked:,} of "
        f"{result.rows:,} rows ({share:.1%}) were looked at.</p>"
    )


def _identity(result: CheckResult) -> str:
    info = result.info
    rows = [
        ("model", f"{info.model_path} ({info.architecture})"),
        ("config hash", info.config_hash),
        ("layers, hidden size", f"{info.num_layers}, {info.hidden_size}"),
        ("states", ", ".join(info.columns)),
        ("dtype", info.dtype),
        ("captured by", f"SGLang {info.sglang_version}, from {info.created_at}"),
        ("samples", f"{result.samples:,} of {result.asked:,} asked for; {result.tokens:,} tokens"),
        ("rows, shards", f"{result.rows:,}, {result.shards:,}"),
        ("bytes of states", f"{result.bytes:,}"),
    ]
    cells = "".join(f'<tr><th>{escape(name)}</th><td class="wide">{escape(value)}</td></tr>' for name, value in rows)
    return f"<table>{cells}</table>"


def _findings(result: CheckResult) -> str:
    listed = result.findings.listed()
    if not listed:
        return "<p>None.</p>"
    head = "".join(f"<th>{name}</th>" for name in ("kind", "where", "what", "what to do"))
    body = "".join(map(_finding, listed))
    rest = sum(result.findings.counts.values()) - len(listed)
    more = f"<p>And {rest:,} more of these kinds.</p>" if rest else ""
    return f"<table><tr>{head}</tr>{body}</table>{more}"


def _finding(finding: Finding) -> str:
    places = [finding.file, finding.column or ""]
    places += [f"sample {finding.sample}"] if finding.sample is not None else []
    places += [f"position {finding.position}"] if finding.position is not None else []
    where = "<br>".join(escape(place) for place in places if place)
    style = "error" if finding.severity is Severity.ERROR else "warning"
    return (
        f'<tr><td class="{style}">{escape(finding.kind)}</td><td class="wide">{where}</td>'
        f'<td class="wide">{escape(finding.what)}</td><td>{escape(finding.remedy)}</td></tr>'
    )


def _table(statistics: Statistics) -> str:
    head = '<th>state</th><th class="n">rows</th>'
    head += "".join(f'<th class="n">{name}</th>' for name in ("min", "1%", "median", "99%", "max"))
    lines = [f"<tr>{head}</tr>"]
    for column, name in enumerate(statistics.columns):
        if not statistics.norms[column].any():
            lines.append(f'<tr><td>{escape(name)}</td><td class="n">0</td></tr>')
            continue
        quantiles = statistics.quantiles(column, [0.01, 0.5, 0.99])
        values = (statistics.low[column], *quantiles, statistics.high[column])
        cells = "".join(f'<td class="n">{value:.4g}</td>' for value in values)
        lines.append(f'<tr><td>{escape(name)}</td><td class="n">{statistics.rows[column]:,}</td>{cells}</tr>')
    return f"<table>{''.join(lines)}</table>"


def _charts(statistics: Statistics, column: int) -> str:
    figures = [
        _figure(histogram_svg(statistics.norms[column].sum(axis=0)), "rows by norm"),
        _figure(histogram_svg(statistics.largest[column]), "rows by largest absolute value"),
        _figure(position_svg(statistics.norms[column]), "norm by position: median, 25% to 75%, 1% to 99%"),
    ]
    return f'<div class="charts">{"".join(figures)}</div>'


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


@dataclass(frozen=True)
class Axis:
    """A logarithmic or linear axis from ``low`` to ``high``, drawn from pixel ``begin`` to pixel ``end``."""

    low: float
    high: float
    begin: float
    end: float
    logarithmic: bool = True

    def place(self, value: float) -> float:
        """The pixel of a value."""
        low, high, at = (
            (log2(v) for v in (self.low, self.high, value))
            if self.logarithmic
            else (
                self.low,
                self.high,
                value,
            )
        )
        return self.begin + (at - low) / (high - low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Round values within the axis: powers of ten, with 2 and 5 between them where there is room."""
        if not self.logarithmic:
            step = 10.0 ** floor(log10(self.high - self.low))
            step = next(step * f for f in (0.2, 0.5, 1, 2, 5) if (self.high - self.low) / (step * f) <= 5)
            return [step * n for n in range(ceil(self.low / step), floor(self.high / step) + 1)]
        decades = log10(self.high / self.low)
        factors = next(factors for most, factors in _TICKS if decades < most)
        skip = max(1, ceil(decades / 6))
        exponents = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        ticks = [f * 10.0**e for e in exponents if e % skip == 0 for f in factors]
        return [tick for tick in ticks if self.low <= tick <= self.high]


def histogram_svg(counts: NDArray[np.int64]) -> str:
    """Bars over a logarithmic axis.

    Args:
        counts: int64 [BINS].
    """
    used = np.flatnonzero(counts)
    if not len(used):
        return _frame(["<text x='60' y='100'>no rows</text>"])
    edges = bin_edges()
    first, last = max(0, int(used[0]) - 2), min(len(counts), int(used[-1]) + 3)
    x = Axis(float(edges[first]), float(edges[last]), LEFT, WIDTH - RIGHT)
    y = Axis(0, float(counts.max()) * 1.05, HEIGHT - BOTTOM, TOP, logarithmic=False)
    bars = [
        f'<rect x="{x.place(edges[n]):.1f}" y="{y.place(counts[n]):.1f}" '
        f'width="{max(0.8, x.place(edges[n + 1]) - x.place(edges[n]) - 0.4):.1f}" '
        f'height="{max(0.5, y.place(0) - y.place(counts[n])):.1f}" fill="#3b6ea5">'
        f"<title>{edges[n]:.4g} to {edges[n + 1]:.4g}: {counts[n]:,} rows</title></rect>"
        for n in used.tolist()
    ]
    return _frame([*_grid(x, y), *bars])


def position_svg(norms: NDArray[np.int64]) -> str:
    """Median and quantile bands over the position in the prompt, both axes logarithmic; position 0 stands at 0.5.

    Args:
        norms: int64 [POSITION_BUCKETS, BINS].
    """
    used = [bucket for bucket in range(POSITION_BUCKETS) if norms[bucket].any()]
    if not used:
        return _frame(["<text x='60' y='100'>no rows</text>"])
    places = [_middle(bucket) for bucket in used]
    shares = [share for band in BANDS for share in band] + [0.5]
    values = np.array([histogram_quantiles(norms[bucket], shares) for bucket in used])
    x = Axis(0.4, max(2.0, places[-1] * 1.3), LEFT, WIDTH - RIGHT)
    y = Axis(float(values.min()) / 1.2, float(values.max()) * 1.2, HEIGHT - BOTTOM, TOP)
    shown = list(_grid(x, y, zero=x.place(0.5)))
    for band, colour in enumerate(("#d3e1f0", "#9dbfe0")):
        low, high = values[:, 2 * band], values[:, 2 * band + 1]
        points = [*zip(places, high, strict=True), *reversed(list(zip(places, low, strict=True)))]
        shown.append(f'<polygon points="{_points(points, x, y)}" fill="{colour}" stroke="{colour}"/>')
    middle = list(zip(places, values[:, -1], strict=True))
    shown.append(f'<polyline points="{_points(middle, x, y)}" fill="none" stroke="#12406e" stroke-width="1.5"/>')
    for bucket, (place, value), row in zip(used, middle, values, strict=True):
        text = (
            f"positions from {bucket_start(bucket)}: median {value:.4g}, 1% {row[0]:.4g}, 99% {row[1]:.4g}, "
            f"{int(norms[bucket].sum()):,} rows"
        )
        shown.append(
            f'<circle cx="{x.place(place):.1f}" cy="{y.place(value):.1f}" r="2.5" fill="#12406e">'
            f"<title>{text}</title></circle>"
        )
    return _frame(shown)


def _middle(bucket: int) -> float:
    return 0.5 if bucket == 0 else float(np.sqrt(bucket_start(bucket) * bucket_start(bucket + 1)))


def _points(points: Sequence[tuple[float, float]], x: Axis, y: Axis) -> str:
    return " ".join(f"{x.place(a):.1f},{y.place(b):.1f}" for a, b in points)


def _grid(x: Axis, y: Axis, zero: float | None = None) -> list[str]:
    """Lines and labels; ``zero`` is the pixel that stands for position 0, which a logarithm does not have."""
    lines = []
    below = HEIGHT - BOTTOM
    for tick in x.ticks():
        if zero is not None and tick < 1:
            continue
        at = x.place(tick)
        lines.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{below}" stroke="#e4e4e4"/>')
        lines.append(f'<text x="{at:.1f}" y="{below + 15}" text-anchor="middle">{_label(tick)}</text>')
    if zero is not None:
        lines.append(f'<text x="{zero:.1f}" y="{below + 15}" text-anchor="middle">0</text>')
    for tick in y.ticks():
        at = y.place(tick)
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e4e4e4"/>')
        lines.append(f'<text x="{LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">{_label(tick)}</text>')
    lines.append(
        f'<path d="M{LEFT},{TOP} V{below} H{WIDTH - RIGHT}" fill="none" stroke="#888"/>',
    )
    return lines


def _label(value: float) -> str:
    return f"{value:g}" if 1e-3 <= value < 1e5 or value == 0 else f"{value:.0e}"


def _frame(content: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(content)}</svg>'
    )
