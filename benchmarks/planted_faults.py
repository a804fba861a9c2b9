"""What ``hs-capture verify`` finds of faults planted in a captured dataset: single flipped bits, and wrong states.

Bits are flipped one at a time, in every kind of file, and flipped back. The other faults are those of a capture that
has gone wrong: the journal's checksums are brought up to date, so that they find nothing. Each is planted in a copy of
the dataset, and looked for by the check of structure and statistics, by the known answers, and by ``transformers``.

    hs-capture demo
    python -m benchmarks.planted_faults demo-output/dataset demo-output/model --flips 1000 --results benchmarks/results

The dataset is one writer's, in finished shards of float32; the model is small enough for ``transformers`` on the CPU.
Of a large dataset ``--samples`` takes some samples, as they were captured, into a dataset of their own.
"""

import argparse
import random
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from benchmarks.report import write_json
from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.cli.known_answers import check_known_answers
from sglang_hs_capture.errors import StoreError
from sglang_hs_capture.layers import Final
from sglang_hs_capture.store.hashing import prefix_hashes
from sglang_hs_capture.store.identity import DATASET_FILE, FINAL_NORM_FILE
from sglang_hs_capture.store.index import SampleEntry, load_index
from sglang_hs_capture.store.journal import decode_line, encode_line
from sglang_hs_capture.store.known_answers import KNOWN_ANSWERS_FILE, AnswerFile, load_known_answers
from sglang_hs_capture.store.replay import journal_path
from sglang_hs_capture.store.requests import LEDGER_FILE, RequestLedger, RequestRecord
from sglang_hs_capture.store.schema import make_rid, rle_encode, sample_key
from sglang_hs_capture.store.session import read_sessions, write_session
from sglang_hs_capture.store.shard import ShardLayout, ShardPaths
from sglang_hs_capture.store.writer import StoreWriter
from sglang_hs_capture.verify.check import CheckSettings, CheckView, check_dataset
from sglang_hs_capture.verify.parity import ReferenceModel
from sglang_hs_capture.verify.recapture import bound_of, compare

Region = tuple[Path, int, int]


def regions(directory: Path) -> dict[str, list[Region]]:
    """By kind of content, the pieces of files that hold it: file, begin, end.

    Left out are lock files, which hold the process id of whoever locked them last, logs, and the tokens of rows that
    belong to no sample, which nobody reads.
    """
    index = load_index(directory)
    found: defaultdict[str, list[Region]] = defaultdict(list)
    for entry in index.shards:
        layout = ShardLayout(index.info, entry.writer, entry.state.record)
        path = ShardPaths.of(directory, entry.writer, entry.shard).finished
        rows, offset = entry.state.rows, entry.state.record.data_offset
        found["shards: headers"].append((path, 0, offset))
        found["shards: states"].append((path, offset, layout.data_end(rows)))
        used = sorted(
            {
                row
                for sample in index.samples
                for part in sample.parts
                if part.writer == entry.writer
                for shard, start, count in part.extents
                if shard == entry.shard
                for row in range(start, start + count)
            }
        )
        for name in layout.row_tensors:
            tensor = layout.tensors(rows)[name]
            size = (tensor.end - tensor.begin) // rows
            begins = [offset + tensor.begin + row * size for row in used]
            found["shards: tokens, positions, hashes"] += [(path, begin, begin + size) for begin in begins]
    whole = {"journal": "journal-*.jsonl", "ledger": LEDGER_FILE, "known answers": KNOWN_ANSWERS_FILE}
    whole |= {"dataset.json": DATASET_FILE, "session records": "session-*.json", "final norm": FINAL_NORM_FILE}
    for kind, pattern in whole.items():
        found[kind] += [(path, 0, path.stat().st_size) for path in sorted(directory.glob(pattern))]
    return {kind: places for kind, places in found.items() if places}


def take_samples(dataset: Path, count: int, into: Path) -> None:
    """Store the shortest ``count`` samples of a dataset once more, those with known answers first, in a few shards.

    Each sample has rows of its own then, also where prefixes were shared.
    """
    source = HiddenStateDataset(dataset)
    answers = {answer.id: answer for answer in load_known_answers(dataset)}
    order = sorted(range(len(source)), key=lambda n: (source.samples[n].id not in answers, source.samples[n].length))
    rows = sum(source.samples[number].length for number in order[:count])
    (record, *_) = read_sessions(dataset)
    settings: dict[str, Any] = {"session_id": record.session_id, "shard_bytes": rows * source.info.row_bytes // 3}
    store = StoreWriter.open(into, record.writer, source.info, min_free_bytes=0, **settings)
    file = AnswerFile(into)
    with RequestLedger.open(into) as ledger:
        for number in order[:count]:
            entry, sample = source.samples[number], source[number]
            ids, mask = sample["input_ids"].numpy(), tuple(rle_encode(sample["loss_mask"]))
            key = sample_key(entry.id)
            ledger.append(RequestRecord(entry.id, key, entry.length, entry.end_hash, mask, entry.source or ""))
            states = torch.stack(sample["hidden_states"], dim=1).contiguous().view(torch.uint8).numpy()
            hashes = prefix_hashes(ids, 0, 0)
            extents = store.append(states.reshape(len(ids), -1), ids, np.arange(len(ids)), hashes)
            store.add_sample(make_rid(record.rid_prefix, key, 0, entry.end_hash), len(ids), extents, entry.end_hash)
            store.commit()
            if entry.id in answers:
                file.append(answers[entry.id])
    file.close()
    store.close()
    shutil.copy(dataset / FINAL_NORM_FILE, into)
    write_session(into, record)


@dataclass
class Flips:
    """How many bits of a kind of content were flipped, and what was found; ``missed`` names those that were not."""

    tried: int = 0
    found: int = 0
    missed: list[str] = field(default_factory=list)


def flip_bits(directory: Path, count: int, seed: int = 0) -> dict[str, Flips]:
    """Flip ``count`` random bits, one after the other, in each kind of content as many; the dataset stays as it was."""
    choose = random.Random(seed)
    places = regions(directory)
    kinds = list(places)
    outcome = {kind: Flips() for kind in kinds}
    for number in range(count):
        kind = kinds[number % len(kinds)]
        path, begin, end = choose.choices(places[kind], weights=[end - begin for _, begin, end in places[kind]])[0]
        offset, bit = choose.randrange(begin, end), choose.randrange(8)
        _flip(path, offset, bit)
        try:
            found = bool(_findings(directory))
        finally:
            _flip(path, offset, bit)
        outcome[kind].tried += 1
        outcome[kind].found += found
        if not found:
            outcome[kind].missed.append(f"bit {bit} of byte {offset} of {path.name}")
    return outcome


def _flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def _findings(directory: Path) -> list[str]:
    """The kinds of findings of the check of structure and statistics; or that it refuses the dataset as a whole."""
    try:
        result = check_dataset(directory, CheckSettings(threads=1), CheckView())
    except StoreError:
        return ["refused"]
    return sorted(kind for kind, count in result.findings.counts.items() if count)


class Copy:
    """A copy of a dataset, open for planting: states of float32, all of one writer's, in finished shards."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.index = load_index(directory)
        self.columns = self.index.info.columns
        self.samples = self.index.samples
        self._maps: dict[int, NDArray[np.float32]] = {}
        for entry in self.index.shards:
            path = ShardPaths.of(directory, entry.writer, entry.shard).finished
            shape = (entry.state.rows, len(self.columns), self.index.info.hidden_size)
            self._maps[entry.shard] = np.memmap(path, "<f4", "r+", entry.state.record.data_offset, shape)
        self._journal = journal_path(directory, self.index.shards[0].writer)

    def states(self, sample: SampleEntry) -> NDArray[np.float32]:
        """float32 [S, C, H], a copy."""
        return np.concatenate([self._maps[shard][start : start + count] for shard, start, count in sample.extents])

    def put(self, sample: SampleEntry, states: NDArray[np.float32]) -> None:
        """Store other states [S, C, H] in a sample's rows."""
        done = 0
        for shard, start, count in sample.extents:
            self._maps[shard][start : start + count] = states[done : done + count]
            done += count

    def change_all(self, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> None:
        """Replace every sample's states by ``change`` of them; shared rows count once, as what they were before."""
        changed = [(sample, change(self.states(sample))) for sample in self.samples]
        for sample, states in changed:
            self.put(sample, states)

    def tokens(self, sample: SampleEntry) -> list[int]:
        """A sample's tokens."""
        dataset = HiddenStateDataset(self.directory, check=False)
        return [int(token) for token in dataset[self.samples.index(sample)]["input_ids"]]

    def _records(self) -> list[dict[str, Any]]:
        return [decode_line(line) for line in self._journal.read_bytes().splitlines(keepends=True)]

    def edit_sample(self, sample: SampleEntry, **fields: Any) -> None:
        """Change a sample's record, and put it behind those of all rows, as that of a sample captured last."""
        mine = [record for record in self._records() if record.get("rid") == sample.rid]
        others = [record for record in self._records() if record.get("rid") != sample.rid]
        self._write([*others, *({**record, **fields} for record in mine)])

    def _write(self, records: Iterable[dict[str, Any]]) -> None:
        self._journal.write_bytes(b"".join(map(encode_line, records)))

    def reseal(self) -> None:
        """Bring the checksums of the states up to date."""

        def change(record: dict[str, Any]) -> dict[str, Any]:
            if record["t"] != "rows":
                return record
            rows = self._maps[record["shard"]][record["start"] : record["start"] + record["count"]]
            return {**record, "xxh3": xxhash.xxh3_64_hexdigest(np.ascontiguousarray(rows).data)}

        for states in self._maps.values():
            states.flush()  # type: ignore[attr-defined]  # they are memory maps
        self._write(map(change, self._records()))


class Reference:
    """``transformers``, with what it has computed kept."""

    def __init__(self, model: Path) -> None:
        self._model = ReferenceModel(model)
        self._states = lru_cache(maxsize=None)(self._compute)

    def _compute(self, tokens: tuple[int, ...], boundaries: tuple[int, ...], final: Final) -> list[torch.Tensor]:
        return self._model.states(tokens, boundaries, final)

    def states(self, tokens: Sequence[int], boundaries: Sequence[int], final: Final) -> list[torch.Tensor]:
        """As ``ReferenceModel.states``."""
        return self._states(tuple(tokens), tuple(boundaries), final)

    def findings(self, directory: Path) -> list[str]:
        """The columns in which a dataset differs from the reference."""
        dataset = HiddenStateDataset(directory)
        final = Final(dataset.columns[-1].removeprefix("final:"))
        other = _Computed(dataset, self, dataset.boundaries, final)
        pairs = [(place, place) for place in range(len(dataset))]
        problems = compare(dataset, other, pairs, bound_of("float32", "float32")).problems()
        return sorted({column for column, *_ in problems})


@dataclass
class _Computed:
    dataset: HiddenStateDataset
    reference: Reference
    boundaries: Sequence[int]
    final: Final

    @property
    def columns(self) -> Sequence[str]:
        return self.dataset.columns

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        tokens = self.dataset[index]["input_ids"]
        states = self.reference.states(tokens.tolist(), self.boundaries, self.final)
        return {"input_ids": tokens, "hidden_states": states}


Plant = Callable[[Copy, Reference], None]


def pair(copy: Copy) -> tuple[SampleEntry, SampleEntry]:
    """Two samples with known answers that begin differently, without a row in common; the first is the shorter one."""
    answered = {answer.id for answer in load_known_answers(copy.directory)}
    mine = sorted((sample for sample in copy.samples if sample.id in answered), key=lambda sample: sample.length)
    for first in mine:
        for second in mine[mine.index(first) + 1 :]:
            apart = first.length > 4 and not set(_rows(first)) & set(_rows(second))
            half = first.length // 2
            if apart and copy.tokens(first)[:half] != copy.tokens(second)[:half]:
                return first, second
    raise ValueError("no two samples have known answers, other beginnings and no rows in common: give more --samples")


def _rows(sample: SampleEntry) -> Iterator[tuple[int, int]]:
    return ((shard, row) for shard, start, count in sample.extents for row in range(start, start + count))


def swapped_states(copy: Copy, _reference: Reference) -> None:
    one, other = pair(copy)
    mine, theirs = copy.states(one), copy.states(other)
    copy.put(one, theirs[: one.length])
    copy.put(other, np.concatenate([mine, theirs[one.length :]]))


def swapped_records(copy: Copy, _reference: Reference) -> None:
    one, other = pair(copy)
    copy.edit_sample(one, extents=[list(extent) for extent in other.extents])
    copy.edit_sample(other, extents=[list(extent) for extent in one.extents])


def swapped_whole(copy: Copy, _reference: Reference) -> None:
    one, other = pair(copy)
    for sample, there in ((one, other), (other, one)):
        copy.edit_sample(
            sample, extents=[list(e) for e in there.extents], length=there.length, end_hash=f"{there.end_hash:016x}"
        )


def shifted_layer(copy: Copy, reference: Reference) -> None:
    """The boundary after the one that was asked for, in the middle column."""
    boundaries = copy.index.info.boundaries
    column = len(boundaries) // 2
    for sample in copy.samples:
        states = copy.states(sample)
        moved = reference.states(copy.tokens(sample), [boundaries[column] + 1], Final.PRE_NORM)[0]
        states[:, column] = moved.numpy()
        copy.put(sample, states)


def shifted_onto_the_next(copy: Copy, _reference: Reference) -> None:
    """The same where the next boundary is captured, too."""

    def change(states: NDArray[np.float32]) -> NDArray[np.float32]:
        states[:, 0] = states[:, 1]
        return states

    copy.change_all(change)


def shifted_final(copy: Copy, reference: Reference) -> None:
    """What enters the last layer, in the place of what leaves it."""
    last = copy.index.info.num_layers - 1
    for sample in copy.samples:
        states = copy.states(sample)
        states[:, -1] = reference.states(copy.tokens(sample), [last], Final.PRE_NORM)[0].numpy()
        copy.put(sample, states)


def post_norm_as_pre_norm(copy: Copy, _reference: Reference) -> None:
    weight, eps = HiddenStateDataset(copy.directory).final_norm()

    def change(states: NDArray[np.float32]) -> NDArray[np.float32]:
        x = torch.from_numpy(states[:, -1])
        states[:, -1] = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()).numpy()
        return states

    copy.change_all(change)


def missing_chunk(copy: Copy, _reference: Reference) -> None:
    """Of one sample the rows in its middle are in no extent."""
    _, sample = pair(copy)
    third = sample.length // 3
    copy.edit_sample(sample, extents=[*_cut(sample, 0, third), *_cut(sample, 2 * third, sample.length)])


def missing_chunk_in_a_shorter_sample(copy: Copy, _reference: Reference) -> None:
    """Likewise, with length and hash of what is left."""
    _, sample = pair(copy)
    third, tokens = sample.length // 3, copy.tokens(sample)
    left = tokens[:third] + tokens[2 * third :]
    copy.edit_sample(
        sample,
        extents=[*_cut(sample, 0, third), *_cut(sample, 2 * third, sample.length)],
        length=len(left),
        end_hash=f"{int(prefix_hashes(left, 0, 0)[-1]):016x}",
    )


def duplicated_chunk(copy: Copy, _reference: Reference) -> None:
    """One chunk's rows stand in the place of the next one's, too."""
    _, sample = pair(copy)
    third = sample.length // 3
    chunk = _cut(sample, 0, third)
    copy.edit_sample(sample, extents=[*chunk, *chunk, *_cut(sample, 2 * third, sample.length)])


def duplicated_states(copy: Copy, _reference: Reference) -> None:
    """Likewise, of the states alone: tokens and positions are right."""
    _, sample = pair(copy)
    states = copy.states(sample)
    half = sample.length // 2
    states[half : 2 * half] = states[:half]
    copy.put(sample, states)


def zeroed_row(copy: Copy, _reference: Reference) -> None:
    one, _ = pair(copy)
    states = copy.states(one)
    states[2] = 0
    copy.put(one, states)


def other_prompt(copy: Copy, reference: Reference) -> None:
    """States of another prompt of the same length, under the right tokens."""
    one, other = pair(copy)
    tokens = copy.tokens(other)[-one.length :]
    info = copy.index.info
    final = Final(info.columns[-1].removeprefix("final:"))
    states = reference.states(tokens, info.boundaries, final)
    copy.put(one, torch.stack(states, dim=1).numpy())


def other_prompt_whole(copy: Copy, _reference: Reference) -> None:
    """Rows of another prompt of the same length, with its tokens."""
    one, other = pair(copy)
    copy.edit_sample(one, extents=_cut(other, 0, one.length))


def stale_prefix(copy: Copy, _reference: Reference) -> None:
    """A sample's beginning is the rows that its cache slots had before, tokens and all."""
    one, other = pair(copy)
    half = one.length // 2
    copy.edit_sample(one, extents=[*_cut(other, 0, half), *_cut(one, half, one.length)])


def stale_states(copy: Copy, _reference: Reference) -> None:
    """Likewise, of the states alone."""
    one, other = pair(copy)
    half = one.length // 2
    states = copy.states(one)
    states[:half] = copy.states(other)[:half]
    copy.put(one, states)


def _cut(sample: SampleEntry, begin: int, end: int) -> list[list[int]]:
    """The extents of a sample's rows from ``begin`` to ``end - 1``."""
    found, position = [], 0
    for shard, start, count in sample.extents:
        first, last = max(begin, position), min(end, position + count)
        if first < last:
            found.append([shard, start + first - position, last - first])
        position += count
    return found


FAULTS: dict[str, Plant] = {
    "two samples' states swapped, tokens right": swapped_states,
    "two samples' rows swapped in the journal": swapped_records,
    "two samples' rows swapped in the journal, with length and hash": swapped_whole,
    "one boundary shifted by one layer": shifted_layer,
    "one boundary shifted onto the next one captured": shifted_onto_the_next,
    "final state of the layer before the last": shifted_final,
    "post-norm stored as pre-norm": post_norm_as_pre_norm,
    "one chunk missing": missing_chunk,
    "one chunk missing, length and hash of the rest": missing_chunk_in_a_shorter_sample,
    "a chunk's rows twice": duplicated_chunk,
    "a chunk's states twice, tokens right": duplicated_states,
    "a zeroed row": zeroed_row,
    "states of another prompt of the same length, tokens right": other_prompt,
    "rows of another prompt of the same length": other_prompt_whole,
    "a stale prefix": stale_prefix,
    "a stale prefix's states, tokens right": stale_states,
}


@dataclass(frozen=True)
class Outcome:
    """What each check found of a fault: kinds of findings, columns named by the known answers and by the reference.

    The latter two are None where the dataset was not sound before, and they are not asked.
    """

    structure: list[str]
    known_answer: list[str] | None
    reference: list[str] | None

    @property
    def found(self) -> bool:
        """Whether any of them did."""
        return bool(self.structure or self.known_answer or self.reference)


def plant(dataset: Path, model: Path, reference: Reference, fault: Plant | None) -> Outcome:
    """Plant a fault in a copy of the dataset, and look for it; None for no fault."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        directory = Path(shutil.copytree(dataset, Path(folder) / "dataset"))
        if fault is not None:
            copy = Copy(directory)
            fault(copy, reference)
            copy.reseal()
        result = check_dataset(directory, CheckSettings(threads=1), CheckView())
        structure = sorted(kind for kind, count in result.findings.counts.items() if count)
        if not result.sound:
            return Outcome(structure, None, None)
        answers = check_known_answers(directory, str(model), result.info, 10**6, None)
        return Outcome(structure, [column for column, _, _ in answers.problems()], reference.findings(directory))


def flips_table(flips: Mapping[str, Flips]) -> list[str]:
    """The rows of bits, as Markdown."""
    lines = ["| single flipped bits in | tried | found |", "|---|---|---|"]
    lines += [f"| {kind} | {outcome.tried:,} | {outcome.found:,} |" for kind, outcome in flips.items()]
    tried, found = (sum(getattr(outcome, name) for outcome in flips.values()) for name in ("tried", "found"))
    return [*lines, f"| all | {tried:,} | {found:,} |"]


def faults_table(outcomes: Mapping[str, Outcome]) -> list[str]:
    """The rows of planted faults, as Markdown."""
    lines = [
        "| planted, with checksums that fit | structure and statistics | `--known-answer` | the model |",
        "|---|---|---|---|",
    ]
    for name, outcome in outcomes.items():
        structure = ", ".join(f"`{kind}`" for kind in outcome.structure) or "-"
        others = ("not asked" if found is None else "found" if found else "-" for found in _others(outcome))
        lines.append(f"| {name} | {structure} | {' | '.join(others)} |")
    return lines


def _others(outcome: Outcome) -> tuple[list[str] | None, list[str] | None]:
    return outcome.known_answer, outcome.reference


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--samples", type=int, help="take so many samples of the dataset")
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args()


def measure(dataset: Path, arguments: argparse.Namespace) -> None:
    """Plant everything, write the outcome, and print the tables."""
    reference = Reference(arguments.model)
    unplanted = plant(dataset, arguments.model, reference, None)
    if unplanted.found:
        raise SystemExit(f"the dataset is not sound before anything is planted: {unplanted}")
    outcomes = {name: plant(dataset, arguments.model, reference, fault) for name, fault in FAULTS.items()}
    flips = flip_bits(dataset, arguments.flips, arguments.seed)
    samples = load_index(dataset).samples
    write_json(
        arguments.results,
        "planted_faults",
        "planted_faults",
        argparse.Namespace(flips=arguments.flips, seed=arguments.seed),
        samples=len(samples),
        tokens=sum(sample.length for sample in samples),
        flips={kind: vars(outcome) for kind, outcome in flips.items()},
        faults={name: {**vars(outcome), "found": outcome.found} for name, outcome in outcomes.items()},
    )
    print("\n".join([*flips_table(flips), "", *faults_table(outcomes)]))


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        dataset = Path(folder) / "dataset"
        if arguments.samples:
            take_samples(arguments.dataset, arguments.samples, dataset)
        else:
            shutil.copytree(arguments.dataset, dataset)
        measure(dataset, arguments)


if __name__ == "__main__":
    main()
