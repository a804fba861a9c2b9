"""``hs-capture export`` against ``cp`` of the same shards on the same file system.

All read the same dataset and write beside it, in turn, several rounds, every other one in the opposite order. Before
each the shards are taken out of the page cache, where the file system can do that, and what was written is removed. The
time goes from the start to when everything is durable: an export makes its files durable itself, behind ``cp`` each
file is given an ``fsync``. Rates are bytes of states as they are stored, for all kinds.

    python -m benchmarks.export --directory /data/export-benchmark --results benchmarks/results --label disk
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.load import machine
from benchmarks.reader import HIDDEN, write
from benchmarks.report import Report, plain
from sglang_hs_capture.export.options import ExportOptions, Format
from sglang_hs_capture.export.run import export_dataset
from sglang_hs_capture.store.identity import FINAL_NORM_FILE
from sglang_hs_capture.store.index import load_index


class Silent:
    """Shows nothing."""

    def begin(self, what: str, total: int, unit: str) -> None:
        pass

    def advance(self, amount: int) -> None:
        pass


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="where the files go; emptied")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--label", required=True, help="of the file system; becomes part of the result's file name")
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--length", type=int, default=2048, help="tokens a sample")
    parser.add_argument("--extents", type=int, default=1, help="pieces of a sample, in random order")
    parser.add_argument("--dtype", choices=("bfloat16", "float8_e4m3"), default="bfloat16")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--formats", nargs="+", choices=[f.value for f in Format], default=[f.value for f in Format])
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def copy(dataset: Path, out: Path) -> None:
    """Copy the shards with ``cp`` and make the copies durable."""
    subprocess.run(["cp", "-r", dataset / "shards", out], check=True)
    for path in [*out.iterdir(), out]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def export(dataset: Path, out: Path, layout: str, workers: int) -> None:
    """Export the dataset."""
    export_dataset(dataset, out, ExportOptions(format=Format(layout), workers=workers), Silent())


def forget(folder: Path) -> None:
    """Take the files of a folder out of the page cache; tmpfs keeps them."""
    os.sync()
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def cpu_seconds() -> float:
    """Of this process and of those that it waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(
    arguments: argparse.Namespace, kinds: dict[str, Callable[[Path, Path], None]]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """MB/s, and seconds of the processors for a GB, of each kind in each round."""
    dataset, out = arguments.directory / "dataset", arguments.directory / "out"
    index = load_index(dataset)
    size = sum(sample.length for sample in index.samples) * index.info.row_bytes
    series: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(arguments.rounds):
        for kind, run in list(kinds.items())[:: -1 if number % 2 else 1]:
            shutil.rmtree(out, ignore_errors=True)
            forget(dataset / "shards")
            started, used = time.monotonic(), cpu_seconds()
            run(dataset, out)
            series[kind].append(size / 1e6 / (time.monotonic() - started))
            cpu[kind].append((cpu_seconds() - used) / (size / 1e9))
            print(f"round {number}: {kind}: {series[kind][-1]:,.0f} MB/s", flush=True)
    return series, cpu


def main() -> None:
    arguments = parse_arguments()
    shutil.rmtree(arguments.directory, ignore_errors=True)
    write(arguments.directory / "dataset", arguments, arguments.extents)
    norm = arguments.directory / "dataset" / FINAL_NORM_FILE
    save_file({"weight": torch.ones(HIDDEN, dtype=torch.bfloat16)}, norm, {"eps": "1e-06"})
    kinds: dict[str, Callable[[Path, Path], None]] = {"cp": copy}
    for layout in arguments.formats:
        for workers in arguments.workers if layout == Format.SAFETENSORS else arguments.workers[-1:]:
            name = f"{layout}, {workers} worker{'' if workers == 1 else 's'}"
            kinds[name] = partial(export, layout=layout, workers=workers)
    series, cpu = measure(arguments, kinds)
    shutil.rmtree(arguments.directory)
    ratios = {
        f"{kind} / cp": [one / other for one, other in zip(rates, series["cp"], strict=True)]
        for kind, rates in series.items()
        if kind != "cp"
    }
    figures = {f"{kind}, CPU seconds a GB": statistics.median(values) for kind, values in cpu.items()}
    report = Report(
        "export", arguments.label, "MB/s", machine(), plain(arguments), series, ratios, figures, {"CPU s/GB": cpu}
    )
    report.write(arguments.results)
    print(report.markdown())


if __name__ == "__main__":
    main()
