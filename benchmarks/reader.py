"""``HiddenStateDataset``: samples of many extents, as prefix reuse makes them, against samples of one.

Two datasets of the same samples: in one each sample's rows lie together, in the other they are cut at random places and
the pieces of all samples are shuffled. Both are read once before, so that the file cache serves them and the disk does
not decide; then in turn, samples in random order, several rounds. With ``--dtype float8_e4m3`` states are multiplied by
their scales as they are read; what is counted are bytes on disk.

    python -m benchmarks.reader --directory /tmp/reader --results benchmarks/results
"""

import argparse
import json
import random
import shutil
import statistics
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.report import write_json
from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.store.hashing import end_hash, prefix_hashes
from sglang_hs_capture.store.schema import FLOAT8, DatasetInfo, Extent
from sglang_hs_capture.store.writer import StoreWriter

HIDDEN, COLUMNS = 7168, ("boundary:3", "boundary:31", "boundary:59", "final:pre_norm")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="where the datasets go; emptied")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--length", type=int, default=1024, help="tokens a sample")
    parser.add_argument("--extents", type=int, default=24, help="pieces of a sample in the second dataset")
    parser.add_argument("--dtype", choices=("bfloat16", FLOAT8), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def write(directory: Path, arguments: argparse.Namespace, extents: int) -> None:
    """Write the samples, each cut into ``extents`` pieces, all pieces in random order."""
    info = DatasetInfo(
        boundaries=(3, 31, 59),
        columns=COLUMNS,
        num_layers=61,
        hidden_size=HIDDEN,
        dtype=arguments.dtype,
        model_path="none",
        architecture="none",
        config_hash="0",
        final_norm_eps=1e-6,
        created_at="none",
        sglang_version="none",
    )
    generator = random.Random(5)
    store = StoreWriter.open(directory, "dp0-pp0", info, session_id="s", shard_bytes=2**30, min_free_bytes=0)
    random_bytes = np.random.default_rng(0)
    # No code of a NaN is among them, in either dtype.
    rows = random_bytes.integers(0, 0x7F, (arguments.length, info.row_bytes), dtype=np.uint8)
    scales = random_bytes.random((arguments.length, len(COLUMNS)), np.float32) if info.scaled else None
    tokens = [np.arange(arguments.length) + 7 * number for number in range(arguments.samples)]
    pieces = []
    for number in range(arguments.samples):
        cuts = [0, *sorted(generator.sample(range(1, arguments.length), extents - 1)), arguments.length]
        pieces += [(number, a, b) for a, b in pairwise(cuts)]
    if extents > 1:
        generator.shuffle(pieces)
    found: dict[int, list[tuple[int, list[Extent]]]] = {}
    for number, a, b in pieces:
        hashes = prefix_hashes(tokens[number], 0, 0)
        mine = None if scales is None else scales[a:b]
        where = store.append(rows[a:b].reshape(-1), tokens[number][a:b], np.arange(a, b), hashes[a:b], None, mine)
        found.setdefault(number, []).append((a, where))
    for number, parts in found.items():
        ordered = [extent for _, where in sorted(parts, key=lambda part: part[0]) for extent in where]
        store.add_sample(f"hs-{number}", arguments.length, ordered, end_hash(tokens[number]))
    store.close()


def read(directory: Path, seed: int) -> float:
    """Read all samples in random order; returns GB/s of states as they are stored."""
    dataset = HiddenStateDataset(directory)
    order = random.Random(seed).sample(range(len(dataset)), len(dataset))
    started, rows = time.monotonic(), 0
    for index in order:
        rows += len(dataset[index]["hidden_states"][0])
    return rows * dataset.info.row_bytes / 1e9 / (time.monotonic() - started)


def main() -> None:
    arguments = parse_arguments()
    shutil.rmtree(arguments.directory, ignore_errors=True)
    kinds = {"one": 1, "many": arguments.extents}
    for kind, extents in kinds.items():
        write(arguments.directory / kind, arguments, extents)
        read(arguments.directory / kind, -1)
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(arguments.rounds):
        for kind in kinds:
            rates[kind].append(read(arguments.directory / kind, number))
    shutil.rmtree(arguments.directory)
    ratio = statistics.median(many / one for one, many in zip(rates["one"], rates["many"], strict=True))
    found = {"GB/s": {kind: statistics.median(rounds) for kind, rounds in rates.items()}, "many/one": ratio}
    write_json(arguments.results, f"reader-{arguments.dtype}", "reader", arguments, **found, rounds=rates)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
