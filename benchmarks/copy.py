"""The ways of packed rows from the device to host memory, alone and beside matrix products.

By the copy engine, in pieces as staging issues them, from a device buffer ``[8192, 4, 7168]`` into an arena as the ring
has it (an anonymous mapping registered with the driver); or by the pack kernel, which stores straight into that arena
with a small grid. All are compared with one plain copy of the buffer into memory that torch has pinned.

Beside: bf16 products ``[8192, 7168] @ [7168, 7168]`` for at least 60 ms, on another stream, while copies run from
before the first to after the last of them. Counted are the bytes of pieces that were there when the products ended.
Rounds with each way, and one with products alone, take turns.

    python -m benchmarks.copy --results benchmarks/results
    python -m benchmarks.copy --cpu

Run it as a module: as a file it would stand in the way of Python's own ``copy``. ``--cpu`` tries the script with tiny
sizes, the kernel in Triton's interpreter, and without products; its times mean nothing.
"""

import argparse
import math
import mmap
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.pack_kernel import markdown, write_results

COLUMNS = 4
MIB = 2**20
# Products that run before the measured ones, while Python issues these and the copies.
HEAD_START = 16
# Copies are issued for this many times the duration of the products.
COVER = 2.0


@dataclass(frozen=True)
class Sizes:
    """What is measured: where, the buffer, pieces of copies in bytes, grids, the products' rows and time, rounds."""

    device: str
    rows: int
    hidden: int
    pieces: tuple[int, ...]
    kernel_piece: int
    programs: tuple[int, ...]
    product_rows: int
    products_s: float
    rounds: int


GPU = Sizes("cuda", 8192, 7168, (16 * MIB, 32 * MIB, 64 * MIB), 64 * MIB, (4, 8, 16, 32), 8192, 0.06, 5)
CPU = Sizes("cpu", 24, 100, (2**12, 2**13), 2**14, (2, 8), 0, 0.0, 2)


@dataclass(frozen=True)
class Buffers:
    """States and the same packed on the device, the arena and a pinned tensor on the host."""

    states: list[torch.Tensor]
    packed: torch.Tensor
    absmax: torch.Tensor
    arena: torch.Tensor
    pinned: torch.Tensor

    @property
    def row_bytes(self) -> int:
        return self.packed[0].nbytes


@dataclass(frozen=True)
class Way:
    """A way to the host, piece by piece: by the copy engine, or by a kernel of so many programs."""

    name: str
    piece: int
    programs: int | None = None
    plain: bool = False

    def issue(self, buffers: Buffers, nbytes: int) -> Iterator[int]:
        """Start copies of ``nbytes`` or a little more on the current stream; yields each piece's bytes once started."""
        n_rows = buffers.packed.shape[0]
        step = min(max(self.piece // buffers.row_bytes, 1), n_rows)
        started = 0
        while started < nbytes:
            for start in range(0, n_rows, step):
                if started >= nbytes:
                    return
                rows = slice(start, min(start + step, n_rows))
                self._copy(buffers, rows)
                moved = (rows.stop - rows.start) * buffers.row_bytes
                started += moved
                yield moved

    def _copy(self, buffers: Buffers, rows: slice) -> None:
        target = (buffers.pinned if self.plain else buffers.arena)[rows]
        if self.programs is None:
            target.copy_(buffers.packed[rows], non_blocking=True)
            return
        from sglang_hs_capture.kernels.pack import pack_state

        for column, state in enumerate(buffers.states):
            pack_state(state[rows], None, target, buffers.absmax[rows], column, programs=self.programs)


@contextmanager
def registered(nbytes: int, device: str) -> Iterator[torch.Tensor]:
    """uint8 ``[nbytes]`` of an anonymous mapping, registered with the driver as the ring's is.

    Raises:
        RuntimeError: the driver refused.
    """
    arena = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    if device == "cpu":
        yield arena
        return
    cudart = torch.cuda.cudart()
    result = int(cudart.cudaHostRegister(arena.data_ptr(), nbytes, 0))
    if result != 0:
        raise RuntimeError(f"cudaHostRegister of {nbytes} bytes: expected 0, got error {result}; see ulimit -l")
    try:
        yield arena
    finally:
        torch.cuda.synchronize()
        cudart.cudaHostUnregister(arena.data_ptr())


@contextmanager
def made(sizes: Sizes) -> Iterator[Buffers]:
    from sglang_hs_capture.kernels.pack import pack_state

    shape = (sizes.rows, COLUMNS, sizes.hidden)
    states = [torch.randn(sizes.rows, sizes.hidden, device=sizes.device, dtype=torch.bfloat16) for _ in range(COLUMNS)]
    packed = torch.empty(shape, device=sizes.device, dtype=torch.bfloat16)
    absmax = torch.empty(sizes.rows, COLUMNS, device=sizes.device)
    for column, state in enumerate(states):
        pack_state(state, None, packed, absmax, column)
    pinned = torch.empty(shape, dtype=torch.bfloat16, pin_memory=sizes.device == "cuda")
    with registered(packed.nbytes, sizes.device) as arena:
        yield Buffers(states, packed, absmax, arena.view(torch.bfloat16).view(shape), pinned)


def synchronize(sizes: Sizes) -> None:
    if sizes.device == "cuda":
        torch.cuda.synchronize()


def check(way: Way, buffers: Buffers, sizes: Sizes, expected: torch.Tensor) -> None:
    """The way brings every byte.

    Raises:
        RuntimeError: it does not.
    """
    target = buffers.pinned if way.plain else buffers.arena
    target.zero_()
    for _ in way.issue(buffers, buffers.packed.nbytes):
        pass
    synchronize(sizes)
    if not torch.equal(target.view(torch.uint8), expected.view(torch.uint8)):
        raise RuntimeError(f"{way.name}: what arrived is not what was sent")


def alone(way: Way, buffers: Buffers, sizes: Sizes) -> float:
    """GB/s of the whole buffer."""
    synchronize(sizes)
    if sizes.device == "cpu":
        started = time.perf_counter()
        moved = sum(way.issue(buffers, buffers.packed.nbytes))
        return moved / (time.perf_counter() - started) / 1e9
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    moved = sum(way.issue(buffers, buffers.packed.nbytes))
    after.record()
    torch.cuda.synchronize()
    return moved / before.elapsed_time(after) / 1e6


@dataclass
class Products:
    """Matrix products in a loop."""

    left: torch.Tensor
    right: torch.Tensor
    out: torch.Tensor
    count: int = 1

    @classmethod
    def of(cls, sizes: Sizes) -> "Products":
        """As many as take ``products_s`` or a little longer."""
        left = torch.randn(sizes.product_rows, sizes.hidden, device="cuda", dtype=torch.bfloat16)
        right = torch.randn(sizes.hidden, sizes.hidden, device="cuda", dtype=torch.bfloat16) / sizes.hidden**0.5
        products = cls(left, right, torch.empty_like(left), 20)
        for _ in range(2):
            seconds = products.beside(None, None, 0)[0]
            products.count = math.ceil(1.1 * sizes.products_s * products.count / seconds)
        return products

    def _run(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self.left, self.right, out=self.out)

    def beside(self, way: Way | None, buffers: Buffers | None, nbytes: int) -> tuple[float, float, float]:
        """Seconds of the products, GB/s of the copies meanwhile, and which part of that time copies were running."""
        torch.cuda.synchronize()
        gate, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._run(HEAD_START)
        gate.record()
        self._run(self.count)
        end.record()
        pieces: list[tuple[torch.cuda.Event, int]] = []
        side = torch.cuda.Stream()
        side.wait_event(gate)
        if way is not None and buffers is not None:
            with torch.cuda.stream(side):
                for moved in way.issue(buffers, nbytes):
                    event = torch.cuda.Event(enable_timing=True)
                    event.record()
                    pieces.append((event, moved))
        torch.cuda.synchronize()
        elapsed = gate.elapsed_time(end)
        arrived = [(gate.elapsed_time(event), moved) for event, moved in pieces]
        there = [(at, moved) for at, moved in arrived if at <= elapsed]
        rate = sum(moved for _, moved in there) / there[-1][0] / 1e6 if there else 0.0
        covered = min(1.0, arrived[-1][0] / elapsed) if arrived else 0.0
        return elapsed / 1e3, rate, covered


def ways(sizes: Sizes) -> list[Way]:
    unit, name = (MIB, "MiB") if sizes.device == "cuda" else (2**10, "KiB")
    return [
        Way("plain copy to pinned memory", sizes.rows * COLUMNS * sizes.hidden * 2, plain=True),
        *(Way(f"copy engine, pieces of {piece // unit} {name}", piece) for piece in sizes.pieces),
        *(Way(f"kernel, {programs} programs", sizes.kernel_piece, programs) for programs in sizes.programs),
    ]


def run(sizes: Sizes) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The table, and every round."""
    rounds: dict[str, Any] = {"alone, GB/s": {}, "products, s": [], "beside": {}}
    with made(sizes) as buffers:
        compared, expected = ways(sizes), buffers.packed.cpu()
        for way in compared:
            check(way, buffers, sizes, expected)
            rounds["alone, GB/s"][way.name] = [alone(way, buffers, sizes) for _ in range(sizes.rounds)]
        if sizes.device == "cuda":
            rounds["products, s"], rounds["beside"] = _beside(compared, buffers, sizes, rounds["alone, GB/s"])
    return _table(compared, rounds), rounds


def _beside(
    compared: Sequence[Way], buffers: Buffers, sizes: Sizes, rates: dict[str, list[float]]
) -> tuple[list[float], dict[str, list[tuple[float, float, float]]]]:
    products = Products.of(sizes)
    idle: list[float] = []
    found: dict[str, list[tuple[float, float, float]]] = {way.name: [] for way in compared}
    for _ in range(sizes.rounds):
        idle.append(products.beside(None, None, 0)[0])
        for way in compared:
            nbytes = int(COVER * idle[0] * max(rates[way.name]) * 1e9)
            found[way.name].append(products.beside(way, buffers, nbytes))
    return idle, found


def _table(compared: Sequence[Way], rounds: dict[str, Any]) -> list[dict[str, Any]]:
    plain = statistics.median(rounds["alone, GB/s"][compared[0].name])
    table = []
    for way in compared:
        rate = statistics.median(rounds["alone, GB/s"][way.name])
        row: dict[str, Any] = {"way": way.name, "alone, GB/s": rate, "of plain": rate / plain}
        if rounds["beside"]:
            seconds, beside, covered = (
                statistics.median(part) for part in zip(*rounds["beside"][way.name], strict=True)
            )
            row["beside products, GB/s"] = beside
            row["of plain, beside"] = beside / plain
            row["products, ms"] = seconds * 1e3
            row["products, slower by"] = seconds / statistics.median(rounds["products, s"]) - 1
            row["time with copies"] = covered
        table.append(row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--cpu", action="store_true", help="try the script without a GPU")
    arguments = parser.parse_args()
    if arguments.cpu:
        # Before Triton is imported, which decides then.
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        raise SystemExit("copy: expected a CUDA device; try the script without one by --cpu")
    sizes, started = CPU if arguments.cpu else GPU, time.monotonic()
    table, rounds = run(sizes)
    if rounds["products, s"]:
        print(f"products alone: {statistics.median(rounds['products, s']) * 1e3:.1f} ms\n")
    print(markdown(table))
    write_results(
        arguments, "copy", sizes=asdict(sizes), table=table, rounds=rounds, seconds=time.monotonic() - started
    )


if __name__ == "__main__":
    main()
