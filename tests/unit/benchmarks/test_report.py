"""What a benchmark writes: the same figures as JSON, as a table, and as a plot."""

import json
import subprocess
import sys

import pytest

from benchmarks import plots
from benchmarks.report import Report, spread

PNG = b"\x89PNG\r\n\x1a\n"


def make_report(**changes):
    fields = {
        "benchmark": "toy_overhead",
        "label": "two-layers",
        "unit": "tokens/s",
        "machine": {"gpu": "none", "sglang": "0.5.23", "date": "2026-01-01 00:00 UTC"},
        "arguments": {"rounds": 3},
        "series": {"off": [1000.0, 1300.0, 1100.0], "on": [990.0]},
        "ratios": {"on / off": [0.9, 0.95]},
        "figures": {"extra memory, GB": 0.94, "unknown": None},
        "details": {"rounds": [1, 2]},
    }
    return Report(**{**fields, **changes})


def test_spread_of_an_odd_and_of_an_even_number_of_rounds():
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "lowest": 1.0, "highest": 3.0}
    assert spread([4.0, 1.0]) == {"median": 2.5, "lowest": 1.0, "highest": 4.0}


def test_the_table_has_medians_and_spread():
    lines = make_report().markdown().splitlines()
    assert lines[0] == "`toy_overhead`, two-layers: gpu none, sglang 0.5.23, date 2026-01-01 00:00 UTC."
    assert "| what | tokens/s, median | lowest | highest | rounds |" in lines
    assert "| off | 1,100 | 1,000 | 1,300 | 3 |" in lines
    assert "| on | 990 | 990 | 990 | 1 |" in lines
    assert "| on / off | 0.925 | 0.900 | 0.950 | 2 |" in lines
    assert "| extra memory, GB | 0.940 |" in lines
    assert "| unknown | not measured |" in lines


def test_a_report_without_ratios_and_figures_has_one_table():
    assert make_report(ratios={}, figures={}).markdown().count("| what |") == 1


def test_the_files_hold_every_round(tmp_path):
    report = make_report()
    path = report.write(tmp_path / "results")
    assert path.name == "toy_overhead-two-layers-sglang0.5.23.json"
    stored = json.loads(path.read_text())
    assert stored["series"] == report.series
    assert stored["details"] == {"rounds": [1, 2]}
    assert stored["summary"]["off"] == {"median": 1100.0, "lowest": 1000.0, "highest": 1300.0}
    assert (path.parent / "toy_overhead-two-layers-sglang0.5.23.md").read_text() == report.markdown()


def test_the_plot_is_drawn_beside_and_can_be_drawn_again(tmp_path):
    pytest.importorskip("matplotlib")
    path = make_report().write(tmp_path)
    image = tmp_path / "toy_overhead-two-layers-sglang0.5.23.png"
    assert image.read_bytes().startswith(PNG)
    image.unlink()
    subprocess.run([sys.executable, "-m", "benchmarks.plots", path], check=True)
    assert image.read_bytes().startswith(PNG)


def test_bars_are_medians_and_whiskers_reach_from_the_lowest_to_the_highest(tmp_path, monkeypatch):
    figure_module = pytest.importorskip("matplotlib.figure")
    kept = []
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda figure, path, **_: kept.append(figure))
    plots.draw(make_report().to_json(), tmp_path / "plot.png")
    (axes,) = kept[0].axes
    assert [bar.get_width() for bar in axes.patches] == [1100.0, 990.0]
    (whiskers,) = axes.containers[0].lines[2]
    assert [segment[:, 0].tolist() for segment in whiskers.get_segments()] == [[1000.0, 1300.0], [990.0, 990.0]]


def test_without_matplotlib_the_figures_are_kept_and_the_remedy_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = make_report().write(tmp_path)
    assert path.exists()
    assert not list(tmp_path.glob("*.png"))
    said = capsys.readouterr().out
    assert "pip install matplotlib" in said
    assert f"python -m benchmarks.plots {path}" in said
