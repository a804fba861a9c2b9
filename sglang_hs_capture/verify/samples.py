"""The samples of a dataset: each asked for present once, and its tokens, positions and hashes agreeing."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_hs_capture.store.hashing import prefix_hashes
from sglang_hs_capture.store.index import SampleEntry, SamplePart, join_all
from sglang_hs_capture.store.media import prompt_hash
from sglang_hs_capture.store.replay import Replay
from sglang_hs_capture.store.requests import LEDGER_FILE, Requests
from sglang_hs_capture.store.schema import DatasetInfo, Extent, RequestName, parse_rid, to_hex
from sglang_hs_capture.store.stages import Joined
from sglang_hs_capture.verify.findings import Finding, Findings
from sglang_hs_capture.verify.shards import ShardFile

OpenShard = Callable[[str, int], ShardFile | None]


def join(info: DatasetInfo, replays: Sequence[Replay], ledger: Requests, findings: Findings) -> list[SampleEntry]:
    """Put acknowledgements and ledger together.

    Returns:
        Every whole acknowledgement, also of samples acknowledged twice or with other tokens than those asked for.
    """
    names = {record.key: record.id for record in ledger.requests.values()}
    found: list[SampleEntry] = []
    present: defaultdict[str, list[SampleEntry]] = defaultdict(list)
    others: defaultdict[str, list[SampleEntry]] = defaultdict(list)
    incomplete: list[tuple[str, Joined[SamplePart]]] = []
    for joined in join_all(info, replays):
        (rid, length, end_hash, media), parts = joined.name, tuple(joined.parts)
        parsed = parse_rid(rid)
        id = names.get(parsed.key) if parsed else None
        request = ledger.requests.get(id if id is not None else rid)
        if not joined.whole:
            incomplete.append((request.id if request else rid, joined))
            continue
        if request is None:
            entry = SampleEntry.by_hand(rid, length, end_hash, parts, media)
            if parsed is not None:
                _unclaimed(entry, parsed, findings)
            else:
                present[entry.id].append(entry)
        else:
            entry = SampleEntry.of_request(request, rid, length, end_hash, parts, media)
            same = request.is_met_by(length, end_hash, media)
            (present if same else others)[request.id].append(entry)
        found.append(entry)
    for id, joined in incomplete:
        # What a pipeline began before it died means nothing once the sample was captured again.
        if id not in present:
            text = f"the columns {', '.join(sorted(joined.missing))} of this acknowledgement are in no journal"
            findings.add(Finding("incomplete", text, _journal(joined.parts[0].writer), id))
    _count(ledger, present, others, findings)
    return found


def _unclaimed(entry: SampleEntry, name: RequestName, findings: Findings) -> None:
    text = f"the request {entry.rid!r} is acknowledged, and {LEDGER_FILE} has no record with the key {name.key}"
    findings.add(Finding("unclaimed", text, LEDGER_FILE, entry.id))


def _count(
    ledger: Requests,
    present: dict[str, list[SampleEntry]],
    others: dict[str, list[SampleEntry]],
    findings: Findings,
) -> None:
    for id, entries in present.items():
        if len(entries) > 1:
            different = len({(entry.length, entry.end_hash) for entry in entries}) > 1
            text = f"it is acknowledged {len(entries)} times{', with different tokens' if different else ''}"
            findings.add(Finding("duplicate", text, _journal(entries[1].writer), id))
    for id, entries in others.items():
        request, entry = ledger.requests[id], entries[0]
        text = f"{_prompt(request.length, request.end_hash, len(request.images))} are asked for, and "
        if entry.media is None:
            text += f"{_prompt(entry.length, entry.end_hash, 0)} are acknowledged"
        else:
            length, images = entry.media.prompt_length(entry.length), len(entry.media.runs)
            text += f"{_prompt(length, entry.media.prompt_hash, images)} are acknowledged"
        if id not in present:
            findings.add(Finding("other-tokens", text, _journal(entry.writer), id))
    for id, record in ledger.requests.items():
        if id in present or id in others:
            continue
        if id in ledger.dropped:
            text = f"given up: {ledger.dropped[id].reason} ({record.source})"
            findings.add(Finding("dropped", text, LEDGER_FILE, id))
        else:
            text = f"asked for ({record.source}), and neither acknowledged nor given up"
            findings.add(Finding("missing", text, LEDGER_FILE, id))
    for id, dropped in ledger.dropped.items():
        if id not in ledger.requests and id not in present:
            findings.add(Finding("dropped", f"given up: {dropped.reason} ({dropped.source})", LEDGER_FILE, id))


def _prompt(length: int, end_hash: int, images: int) -> str:
    of_images = f", {images} of them images," if images else ""
    return f"{length} tokens{of_images} with the hash {to_hex(end_hash)}"


def _journal(writer: str) -> str:
    return f"journal-{writer}.jsonl"


def check_tokens(sample: SampleEntry, open_shard: OpenShard, findings: Findings) -> None:
    """Compute a sample's positions and chained hashes anew from its stored token ids, and compare all of them.

    Rows that cannot be read are passed over: that is a finding of its own.
    """
    for part in sample.parts:
        pieces = []
        for extent in part.extents:
            shard = open_shard(part.writer, extent.shard)
            if shard is None or extent.start + extent.count > shard.token_rows:
                findings.add(
                    Finding("tokens", f"the tokens of {_rows(extent)} cannot be read", _journal(part.writer), sample.id)
                )
                break
            try:
                pieces.append(shard.read_tokens(extent.start, extent.count))
            except (OSError, EOFError) as error:
                findings.add(Finding("unreadable", str(error), shard.name, sample.id))
                break
        else:
            tokens, positions, hashes = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
            _check_part(sample, part, tokens, positions, hashes, open_shard, findings)


def _check_part(
    sample: SampleEntry,
    part: SamplePart,
    tokens: NDArray[np.int64],
    positions: NDArray[np.int64],
    hashes: NDArray[np.uint64],
    open_shard: OpenShard,
    findings: Findings,
) -> None:
    expected = prefix_hashes(tokens, 0, 0)
    wrong = np.flatnonzero((positions != np.arange(len(tokens))) | (hashes != expected))
    if len(wrong):
        first = int(wrong[0])
        extent, row = _place(part.extents, first)
        shard = open_shard(part.writer, extent.shard)
        text = (
            f"row {row} has position {positions[first]} and hash {to_hex(int(hashes[first]))}; expected position "
            f"{first} and hash {to_hex(int(expected[first]))}, computed from the stored tokens; {len(wrong)} of "
            f"{len(tokens)} rows differ"
        )
        findings.add(Finding("tokens", text, shard.tokens_name if shard else "", sample.id, first))
    if int(expected[-1]) != sample.end_hash:
        text = (
            f"its stored tokens have the hash {to_hex(int(expected[-1]))}, and it is acknowledged with "
            f"{to_hex(sample.end_hash)}"
        )
        findings.add(Finding("tokens", text, _journal(part.writer), sample.id))
    if sample.media is not None and (found := prompt_hash(tokens, sample.media)) != sample.media.prompt_hash:
        text = (
            f"with a placeholder for each image its stored tokens have the hash {to_hex(found)}, and it is "
            f"acknowledged with {to_hex(sample.media.prompt_hash)}"
        )
        findings.add(Finding("tokens", text, _journal(part.writer), sample.id))


def _place(extents: Sequence[Extent], position: int) -> tuple[Extent, int]:
    """The extent that a position lies in, and its row."""
    for extent in extents:
        if position < extent.count:
            return extent, extent.start + position
        position -= extent.count
    raise IndexError(position)


def _rows(extent: Extent) -> str:
    return f"rows {extent.start} to {extent.start + extent.count - 1} of shard {extent.shard}"
