"""Draws a result file of a benchmark: a bar for each median, whiskers from the lowest to the highest round.

python -m benchmarks.plots benchmarks/results/decode_overhead-eight-layers-sglang0.5.23.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import report


class MissingMatplotlibError(RuntimeError):
    """Matplotlib, which nothing else needs, is not installed."""


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the series of a result as a PNG.

    Args:
        result: the object of a ``Report``'s JSON file.
        path: the image.

    Raises:
        MissingMatplotlibError: it says what to install.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingMatplotlibError(f"no plot ({error}): pip install matplotlib, or this project's [dev]") from None
    names = list(result["series"])
    spreads = [report.spread(values) for values in result["series"].values()]
    medians = [s["median"] for s in spreads]
    whiskers = [[s["median"] - s["lowest"] for s in spreads], [s["highest"] - s["median"] for s in spreads]]
    figure = Figure(figsize=(9, 1.2 + 0.55 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.barh(names, medians, xerr=whiskers, capsize=4, color="tab:blue", ecolor="black", height=0.6)
    for index, s in enumerate(spreads):
        axes.annotate(f"{s['median']:,.0f}", (s["highest"], index), (6, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{result['unit']}: median, lowest and highest round")
    machine = result["machine"]
    # Of the whole figure, which is wider than the axes beside their names.
    figure.suptitle(
        f"{result['benchmark']}, {result['label']}\n{machine['gpu']}, SGLang {machine['sglang']}, {machine['date']}",
        fontsize=9,
    )
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of benchmarks; the image goes beside each")
    for file in parser.parse_args().results:
        # Not with_suffix: a version has dots.
        draw(json.loads(file.read_text()), file.parent / f"{file.name.removesuffix('.json')}.png")


if __name__ == "__main__":
    main()
