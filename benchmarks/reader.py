"""``HiddenStateDataset``: samples of many extents, as prefix reuse makes them, against samples of one.

Two datasets of the same samples: in one each sample's rows lie together, in the other they are cut at random places and
the pieces of all samples are shuffled. Both are read once before, so that the file cache serves them and the disk does
not decide; then in turn, samples in random order, several rounds.

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

from benchmarks.load import machine
from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.store.hashing import end_hash, prefix_hashes
from sglang_hs_capture.store.schema import DatasetInfo, Extent
from sglang_hs_capture.store.writer import StoreWriter

HIDDEN, COLUMNS = 7168, ("boundary:3", "boundary:31", "boundary:59", "final:pre_norm")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="where the datasets go; emptied")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--length", type=int, default=1024, help="tokens a sample")
    parser.add_argument("--extents", type=int, default=24, help="pieces of a sample in the second dataset")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def write(directory: Path, arguments: argparse.Namespace, extents: int) -> None:
    """Write the samples, each cut into ``extents`` pieces, all pieces in random order."""
    info = DatasetInfo(
        boundaries=(3, 31, 59),
        columns=COLUMNS,
        num_layers=61,
        hidden_size=HIDDEN,
        dtype="bfloat16",
        model_path="none",
        architecture="none",
        config_hash="0",
        final_norm_eps=1e-6,
        created_at="none",
        sglang_version="none",
    )
    generator = random.Random(5)
    store = StoreWriter.open(directory, "dp0-pp0", info, session_id="s", shard_bytes=2**30, min_free_bytes=0)
    rows = np.random.default_rng(0).integers(0, 2**15, (arguments.length, len(COLUMNS) * HIDDEN), dtype=np.uint16)
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
        data = rows[a:b].view(np.uint8).reshape(-1).data
        where = store.append(data, tokens[number][a:b], np.arange(a, b), hashes[a:b])
        found.setdefault(number, []).append((a, where))
    for number, parts in found.items():
        ordered = [extent for _, where in sorted(parts, key=lambda part: part[0]) for extent in where]
        store.add_sample(f"hs-{number}", arguments.length, ordered, end_hash(tokens[number]))
    store.close()


def read(directory: Path, seed: int) -> float:
    """Read all samples in random order; returns GB/s of states."""
    dataset = HiddenStateDataset(directory)
    order = random.Random(seed).sample(range(len(dataset)), len(dataset))
    started, nbytes = time.monotonic(), 0
    for index in order:
        nbytes += sum(state.nbytes for state in dataset[index]["hidden_states"])
    return nbytes / 1e9 / (time.monotonic() - started)


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
    result = {
        "benchmark": "reader",
        "machine": machine(),
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()},
        "GB/s": {kind: statistics.median(found) for kind, found in rates.items()},
        "many/one": ratio,
        "rounds": rates,
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / "reader.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({key: result[key] for key in ("GB/s", "many/one")}, indent=2))


if __name__ == "__main__":
    main()
