"""The index of a dataset: which samples it holds, joined from all journals and the driver's ledger."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sglang_hs_capture.errors import CorruptionError, StoreError
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.identity import read_info
from sglang_hs_capture.store.media import expand_loss_mask
from sglang_hs_capture.store.replay import Replay, ShardState, journal_writers, replay_journal
from sglang_hs_capture.store.requests import DroppedRecord, RequestRecord, Requests, load_requests
from sglang_hs_capture.store.schema import RESTORE, DatasetInfo, Extent, Media, parse_rid, rle_decode
from sglang_hs_capture.store.shard import ShardLayout, ShardPaths
from sglang_hs_capture.store.stages import Acknowledged, Joined, StageJoin


@dataclass(frozen=True, slots=True)
class SamplePart:
    """A sample's rows at one writer; ``columns`` are those of a row there: all, or those of a pipeline stage."""

    writer: str
    columns: tuple[str, ...]
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class SampleEntry:
    """One sample, whole.

    Attributes:
        id: the user's name of it; the request id for a request sent by hand.
        length: number of tokens S.
        end_hash: chained hash of all tokens.
        parts: one per pipeline stage, together having every column of the dataset.
        loss_mask_rle: run lengths of the loss mask [S]; None for all ones, as of a request sent by hand.
        source: ``file:line``; None for a request sent by hand.
        media: where its images are; None without any.
    """

    id: str
    rid: str
    length: int
    end_hash: int
    parts: tuple[SamplePart, ...]
    loss_mask_rle: tuple[int, ...] | None = None
    source: str | None = None
    media: Media | None = None

    @classmethod
    def by_hand(
        cls, rid: str, length: int, end_hash: int, parts: tuple[SamplePart, ...], media: Media | None
    ) -> "SampleEntry":
        """The sample of a request that the driver did not send: every token counts, but for positions of images."""
        mask = expand_loss_mask((0, media.prompt_length(length)), media) if media else None
        return cls(rid, rid, length, end_hash, parts, mask, media=media)

    @classmethod
    def of_request(
        cls,
        request: RequestRecord,
        rid: str,
        length: int,
        end_hash: int,
        parts: tuple[SamplePart, ...],
        media: Media | None,
    ) -> "SampleEntry":
        """The sample of a request in the ledger; without a loss mask where it is another than the one asked for."""
        mask: tuple[int, ...] | None = None
        if request.is_met_by(length, end_hash, media):
            mask = expand_loss_mask(request.loss_mask, media) if media else request.loss_mask
        return cls(request.id, rid, length, end_hash, parts, mask, request.source, media)

    def loss_mask(self) -> NDArray[np.int64]:
        """The loss mask, int64 [S]: all ones for a request sent by hand."""
        return np.ones(self.length, np.int64) if self.loss_mask_rle is None else rle_decode(self.loss_mask_rle)

    @property
    def loss_tokens(self) -> int:
        """How many tokens the loss mask has ones for."""
        return self.length if self.loss_mask_rle is None else sum(self.loss_mask_rle[1::2])

    @property
    def writer(self) -> str:
        """The writer of the first part."""
        return self.parts[0].writer

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The extents of the first part."""
        return self.parts[0].extents


@dataclass(frozen=True, slots=True)
class FailedEntry:
    """A request that failed and whose sample was not captured since."""

    id: str
    rid: str
    writer: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """A shard of a writer; its first ``state.rows`` rows are durable."""

    writer: str
    shard: int
    state: ShardState


@dataclass(frozen=True)
class DatasetIndex:
    """All that a dataset holds.

    Attributes:
        samples: each sample once, in the ledger's order, then those sent by hand in the journals' order.
        requested: the ledger's records, by id.
        dropped: samples given up by the driver.
        failed: failures of samples that were not captured since.
        mismatched: acknowledged, but with other tokens than the ledger's record of that id; not among ``samples``.
        unclaimed: acknowledged, of requests as the driver names them, but unknown to the ledger: their ids and loss
            masks are lost with its record; not among ``samples``.
        shards: those with durable rows, by writer and number.
    """

    info: DatasetInfo
    samples: tuple[SampleEntry, ...]
    requested: dict[str, RequestRecord]
    dropped: tuple[DroppedRecord, ...]
    failed: tuple[FailedEntry, ...]
    mismatched: tuple[SampleEntry, ...]
    unclaimed: tuple[SampleEntry, ...]
    shards: tuple[ShardEntry, ...]

    @property
    def pending(self) -> tuple[str, ...]:
        """Ids asked for that are neither captured nor dropped, in the ledger's order."""
        done = {sample.id for sample in self.samples} | {record.id for record in self.dropped}
        return tuple(id for id in self.requested if id not in done)


def load_index(directory: Path) -> DatasetIndex:
    """Read a dataset's journals and ledger, also while it is being written.

    Of a sample acknowledged several times the first one counts that has the tokens of the ledger's record.

    Raises:
        StoreError: there is no dataset.
        CorruptionError: a file is damaged, or a shard is missing or cut.
    """
    directory = Path(directory)
    info = read_info(directory)
    # The ledger last: a sample must be in it before it can be in a journal.
    replays = [replay_journal(directory, writer) for writer in journal_writers(directory)]
    ledger = load_requests(directory)
    for replay in replays:
        for number, state in replay.shards.items():
            if state.rows:
                _check_file(directory, ShardLayout(info, replay.writer, state.record), number, state)
    samples, mismatched, unclaimed = _join(info, replays, ledger)
    known = {sample.id for sample in samples}
    names = {record.key: record.id for record in ledger.requests.values()}
    failures = [(r.writer, f, _sample_id(f.rid, names)) for r in replays for f in r.failures]
    return DatasetIndex(
        info=info,
        samples=samples,
        requested=ledger.requests,
        dropped=tuple(record for record in ledger.dropped.values() if record.id not in known),
        failed=tuple(FailedEntry(i, f.rid, w, f.reason, f.detail) for w, f, i in failures if i not in known),
        mismatched=mismatched,
        unclaimed=unclaimed,
        shards=tuple(
            ShardEntry(r.writer, n, state) for r in replays for n, state in sorted(r.shards.items()) if state.rows
        ),
    )


def _check_file(directory: Path, layout: ShardLayout, number: int, state: ShardState) -> None:
    """See that a shard's file is there and long enough, under the name it has now or is just being given."""
    paths = ShardPaths.of(directory, layout.writer, number)
    needed = layout.file_size(state.rows) if state.finished else layout.data_end(state.rows)
    for path in (paths.finished, paths.partial, paths.finished):
        try:
            with fs.io_errors(path, "look at"):
                size = path.stat().st_size
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                continue
            raise
        if size < needed:
            raise CorruptionError(
                f"{path}: expected at least {needed} bytes for {state.rows} rows, got {size}; {RESTORE}"
            )
        return
    raise CorruptionError(
        f"{paths.finished}: the journal has {state.rows} rows in this shard, and it is not there; {RESTORE}"
    )


def _sample_id(rid: str, names: dict[str, str]) -> str:
    parsed = parse_rid(rid)
    return names.get(parsed.key, rid) if parsed else rid


def _join(
    info: DatasetInfo, replays: list[Replay], ledger: Requests
) -> tuple[tuple[SampleEntry, ...], tuple[SampleEntry, ...], tuple[SampleEntry, ...]]:
    names = {record.key: record.id for record in ledger.requests.values()}
    found: dict[str, SampleEntry] = {}
    mismatched, unclaimed = [], []
    for joined in _whole(info, replays):
        (rid, length, end_hash, media), parts = joined.name, tuple(joined.parts)
        request = ledger.requests.get(_sample_id(rid, names))
        if request is None:
            entry = SampleEntry.by_hand(rid, length, end_hash, parts, media)
            if parse_rid(rid) is None:
                found.setdefault(rid, entry)
            else:
                unclaimed.append(entry)
            continue
        entry = SampleEntry.of_request(request, rid, length, end_hash, parts, media)
        if request.is_met_by(length, end_hash, media):
            found.setdefault(entry.id, entry)
        else:
            mismatched.append(entry)
    by_ledger = [found.pop(id) for id in ledger.requests if id in found]
    return (*by_ledger, *found.values()), tuple(mismatched), tuple(unclaimed)


def _whole(info: DatasetInfo, replays: list[Replay]) -> list[Joined[SamplePart]]:
    """What is acknowledged with every column; of what is acknowledged several times under one name, the first."""
    found: dict[Acknowledged, Joined[SamplePart]] = {}
    for joined in join_all(info, replays):
        if joined.whole:
            found.setdefault(joined.name, joined)
    return list(found.values())


def join_all(info: DatasetInfo, replays: Iterable[Replay]) -> list[Joined[SamplePart]]:
    """Put the acknowledgements of all journals together: each once, whole or not, in the order in which they begin."""
    join: StageJoin[SamplePart] = StageJoin(info.columns)
    every = []
    for replay in replays:
        for sample in replay.samples:
            columns = replay.columns(sample)
            joined = join.add(sample, columns, SamplePart(replay.writer, columns, sample.extents))
            if len(joined.parts) == 1:
                every.append(joined)
    return every
