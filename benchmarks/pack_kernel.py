"""The pack kernel's bandwidth: bytes read and written a second, beside a plain copy on the device and plain torch.

A unit of work is what one forward of T tokens does: four states ``[N, 7168]``, one launch each, into ``[T, 4, 7168]``.
With gather, T rows in random order out of N = 1.25 T; without, all N = T. Units take turns on as many sets of tensors
as exceed the L2 cache several times over, recorded in one CUDA graph, so that neither the cache nor Python's launches
are measured. The plain torch form of the same is index_select, stack and cast, without largest absolute values; for
float8 it computes and divides by the same scales. Both are charged the bytes that have to move at least.

    python -m benchmarks.pack_kernel --results benchmarks/results
    python -m benchmarks.pack_kernel --sweep
    python -m benchmarks.pack_kernel --cpu

``--sweep`` compares launches at T = 8192 with gather in the place of all this; ``--cpu`` tries the script with tiny
sizes in Triton's interpreter, whose times mean nothing.
"""

import argparse
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.report import write_json

if TYPE_CHECKING:
    from sglang_hs_capture.kernels.pack import Launch

COLUMNS = 4
FLOAT8 = torch.float8_e4m3fn
PAIRS = [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.bfloat16, FLOAT8)]


@dataclass(frozen=True)
class Sizes:
    """What is measured: where, numbers of rows, the states' width, bytes that exceed any cache, and rounds."""

    device: str
    rows: tuple[int, ...]
    sweep_rows: int
    hidden: int
    working_set: int
    copy_bytes: int
    rounds: int


GPU = Sizes("cuda", (512, 2048, 8192, 16384), 8192, 7168, 2**30, 2**30, 20)
CPU = Sizes("cpu", (3, 8), 5, 160, 1, 2**16, 2)


@dataclass(frozen=True)
class Unit:
    """The tensors of one unit of work."""

    states: list[torch.Tensor]
    rows: torch.Tensor | None
    out: torch.Tensor
    absmax: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes read and written at least: the rows kept, their numbers for each state, the packed rows, absmax."""
        read = self.out.numel() * self.states[0].itemsize
        index = 0 if self.rows is None else COLUMNS * self.rows.nbytes
        return read + index + self.out.nbytes + self.absmax.nbytes


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--sweep", action="store_true", help="compare launches, and nothing else")
    parser.add_argument("--cpu", action="store_true", help="try the script without a GPU")
    return parser.parse_args()


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table of rows with the same keys."""
    cells = [[_cell(value) for value in row.values()] for row in rows]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
    return str(value)


def write_results(arguments: argparse.Namespace, benchmark: str, **content: Any) -> None:
    """Write ``<benchmark>.json`` with arguments and machine; a trial on a CPU goes to ``<benchmark>-cpu.json``."""
    if arguments.cpu:
        benchmark += "-cpu"
    write_json(arguments.results, benchmark, benchmark, arguments, **content)


def make_unit(source: torch.dtype, stored: torch.dtype, n_rows: int, gather: bool, sizes: Sizes) -> Unit:
    available, hidden, device = n_rows + n_rows // 4 if gather else n_rows, sizes.hidden, sizes.device
    return Unit(
        [torch.randn(available, hidden, device=device, dtype=source) for _ in range(COLUMNS)],
        torch.randperm(available, device=device)[:n_rows] if gather else None,
        torch.empty(n_rows, COLUMNS, hidden, device=device, dtype=stored),
        torch.empty(n_rows, COLUMNS, device=device),
    )


def pack(unit: Unit, launch: "Launch | None" = None) -> None:
    from sglang_hs_capture.kernels.pack import pack_state

    for column, state in enumerate(unit.states):
        pack_state(state, unit.rows, unit.out, unit.absmax, column, launch=launch)


def plain_torch(unit: Unit) -> torch.Tensor:
    states = unit.states if unit.rows is None else [state.index_select(0, unit.rows) for state in unit.states]
    stacked = torch.stack(states, dim=1)
    if unit.out.dtype != FLOAT8:
        return stacked.to(unit.out.dtype)
    wide = stacked.float()
    scales = wide.abs().amax(dim=-1, keepdim=True) / 448.0
    return (wide / scales).to(FLOAT8)


def check(unit: Unit) -> None:
    """The kernel's result is the reference's.

    Raises:
        RuntimeError: it is not.
    """
    from sglang_hs_capture.kernels.reference import pack_state

    pack(unit)
    out, absmax = torch.zeros_like(unit.out[:, :1]), torch.zeros_like(unit.absmax[:, :1])
    for column, state in enumerate(unit.states):
        pack_state(state, unit.rows, out, absmax, 0)
        same = torch.equal(unit.out[:, column].view(torch.uint8), out[:, 0].view(torch.uint8))
        if not same or not torch.equal(unit.absmax[:, column], absmax[:, 0]):
            raise RuntimeError(f"column {column}, {state.dtype} to {out.dtype}: the kernel differs from the reference")


def measure(works: Sequence[Callable[[], Any]], sizes: Sizes) -> list[float]:
    """Seconds of one work, for each round in which all are done once, one after another."""
    if sizes.device == "cpu":
        return [_timed(works) / len(works) for _ in range(sizes.rounds)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        works[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Results are kept, so that each work has memory of its own to write to.
        results = [work() for work in works]
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(sizes.rounds)]
    for before, after in events:
        before.record()
        graph.replay()
        after.record()
    torch.cuda.synchronize()
    del results
    return [before.elapsed_time(after) / 1e3 / len(works) for before, after in events]


def _timed(works: Sequence[Callable[[], Any]]) -> float:
    started = time.perf_counter()
    for work in works:
        work()
    return time.perf_counter() - started


def copy_rate(nbytes: int, sizes: Sizes) -> list[float]:
    """GB/s of copies that read and write ``nbytes`` together, within two buffers of ``copy_bytes``."""
    half = min(nbytes // 2, sizes.copy_bytes)
    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=sizes.device)
    target = torch.empty_like(source)
    starts = range(0, sizes.copy_bytes - half + 1, half)
    works = [partial(target[a : a + half].copy_, source[a : a + half]) for a in starts]
    return [2 * half / seconds / 1e9 for seconds in measure(works, sizes)]


def best_copy(sizes: Sizes) -> float:
    """The device's copy bandwidth in GB/s, read and written: the best median of several lengths.

    The rate of a copy depends on where and how long it is (2.6 to 4.2 TB/s on the same H200): the best one is the
    yardstick.
    """
    lengths = (2 * sizes.copy_bytes >> shift for shift in range(5))
    return max(statistics.median(copy_rate(nbytes, sizes)) for nbytes in lengths)


def units(source: torch.dtype, stored: torch.dtype, n_rows: int, gather: bool, sizes: Sizes) -> list[Unit]:
    first = make_unit(source, stored, n_rows, gather, sizes)
    check(first)
    more = math.ceil(sizes.working_set / first.nbytes) - 1
    return [first, *(make_unit(source, stored, n_rows, gather, sizes) for _ in range(more))]


def release() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compare(sizes: Sizes) -> list[dict[str, Any]]:
    """One row for each pair of dtypes, number of rows, and gather or not."""
    table = []
    for (source, stored), n_rows, gather in itertools.product(PAIRS, sizes.rows, (False, True)):
        work = units(source, stored, n_rows, gather, sizes)
        kernel = statistics.median(measure([partial(pack, unit) for unit in work], sizes))
        plain = statistics.median(measure([partial(plain_torch, unit) for unit in work], sizes))
        same = statistics.median(copy_rate(work[0].nbytes, sizes))
        rate = work[0].nbytes / kernel / 1e9
        table.append(
            {
                "from": name(source),
                "to": name(stored),
                "T": n_rows,
                "gather": "yes" if gather else "no",
                "kernel, us": kernel * 1e6,
                "kernel, GB/s": rate,
                "copy of as many bytes, GB/s": same,
                "torch, GB/s": work[0].nbytes / plain / 1e9,
                "torch / kernel, time": plain / kernel,
            }
        )
        del work
        release()
    return table


def launches(hidden: int, stored: torch.dtype) -> list["Launch"]:
    """What the sweep tries: blocks that give a thread 8 elements or more, and for float8 hold a row."""
    from sglang_hs_capture.kernels.pack import Launch, default_launch

    whole = default_launch(hidden).block
    blocks = [whole] if stored == FLOAT8 else sorted({min(1024, whole), min(2048, whole), whole})
    fitting = [(b, w) for b, w in itertools.product(blocks, (4, 8, 16)) if b // (32 * w) >= 8 or w == 4]
    return [Launch(b, w, rows, cache) for b, w in fitting for cache in (".cs", "") for rows in (1, 2, 4)]


def sweep(sizes: Sizes) -> list[dict[str, Any]]:
    """One row for each pair of dtypes and launch, the fastest first."""
    table = []
    for source, stored in PAIRS:
        work = units(source, stored, sizes.sweep_rows, True, sizes)
        for launch in launches(sizes.hidden, stored):
            seconds = statistics.median(measure([partial(pack, unit, launch) for unit in work], sizes))
            rate = work[0].nbytes / seconds / 1e9
            table.append(
                {
                    "from": name(source),
                    "to": name(stored),
                    **asdict(launch),
                    "kernel, GB/s": rate,
                }
            )
        del work
        release()
    return sorted(table, key=lambda row: (row["from"], row["to"], -row["kernel, GB/s"]))


def main() -> None:
    arguments = parse_arguments()
    if arguments.cpu:
        # Before Triton is imported, which decides then.
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        raise SystemExit("pack_kernel: expected a CUDA device; try the script without one by --cpu")
    sizes = CPU if arguments.cpu else GPU
    started = time.monotonic()
    ceiling = best_copy(sizes)
    release()
    table = sweep(sizes) if arguments.sweep else compare(sizes)
    ceiling = max([ceiling, *(row.get("copy of as many bytes, GB/s", 0.0) for row in table)])
    for row in table:
        row["of copy"] = row["kernel, GB/s"] / ceiling
    print(f"copy on the device: {ceiling:,.0f} GB/s, read and written\n")
    print(markdown(table))
    if arguments.sweep:
        best = {(row["from"], row["to"]): row for row in reversed(table)}
        print("\nbest:\n\n" + markdown(list(best.values())))
    write_results(
        arguments,
        "pack_kernel_sweep" if arguments.sweep else "pack_kernel",
        sizes=asdict(sizes),
        **{"copy, GB/s": ceiling, "table": table, "seconds": time.monotonic() - started},
    )


if __name__ == "__main__":
    main()
