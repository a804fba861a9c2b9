"""A dataset with all that an export has to deal with: many extents, shared prefixes, pipeline stages, hostile ids."""

from pathlib import Path

import made_dataset
import numpy as np
import torch
from toy_store import append_tokens, make_info, open_store

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.export.options import ExportOptions, ExportResult, Format
from sglang_hs_capture.export.run import export_dataset
from sglang_hs_capture.store.hashing import end_hash
from sglang_hs_capture.store.requests import RequestLedger, RequestRecord
from sglang_hs_capture.store.schema import DatasetInfo, Extent, Media, make_rid, rle_encode, sample_key, split_extents
from sglang_hs_capture.store.writer import StoreWriter

HIDDEN = made_dataset.HIDDEN
PRE_NORM, POST_NORM = "final:pre_norm", "final:post_norm"
HOSTILE = "../../etc/passwd\x00\n\ud800" + "x" * 300
# "shared" begins with the first four tokens of "long"; the last two differ in case only.
PROMPTS = {
    "one": [11, 12, 13],
    "long": list(range(21, 44)),
    "shared": [21, 22, 23, 24, 35, 36],
    HOSTILE: [7, 7, 7, 8],
    "single": [51],
    "Case": [61, 62, 63],
    "case": [61, 62, 64],
}
BY_HAND, BY_HAND_TOKENS = "hs-by-hand", [90, 91]
MEDIA_TOKEN = 99
MORE = {"more": [71, 72, 73, 74, 75], "and more": [81]}


def info_of(
    dtype: str = "bfloat16", boundaries: tuple[int, ...] = (1, 2, 4), finals: tuple[str, ...] = (PRE_NORM,)
) -> DatasetInfo:
    columns = (*(f"boundary:{b}" for b in boundaries), *finals)
    return make_info(boundaries=boundaries, columns=columns, hidden_size=HIDDEN, num_layers=6, dtype=dtype)


def mask_of(tokens: list[int]) -> list[int]:
    """The loss is on the second half; on none of a single token."""
    return [int(place >= len(tokens) / 2) for place in range(len(tokens))]


def make(directory: Path, info: DatasetInfo | None = None, *, stages: bool = False, by_hand: bool = True) -> Path:
    """Capture the prompts, each column by a pipeline stage of its own if ``stages``."""
    info = info or info_of()
    directory.mkdir(parents=True)
    with RequestLedger.open(directory) as ledger:
        for id, tokens in PROMPTS.items():
            ask(ledger, id, tokens)
    parts = [(column,) for column in info.columns] if stages else [info.columns]
    for number, columns in enumerate(parts):
        store = open_store(directory, f"dp0-pp{number}", info, columns=columns)
        found = {}
        for id, tokens in PROMPTS.items():
            if id != "shared":
                found[id] = capture(store, id, tokens)
            append_tokens(store, [5] * (number + 1))
        rest, end = append_tokens(store, PROMPTS["shared"], start=4)
        both = [*split_extents(found["long"], [4])[0], *rest]
        store.add_sample(rid_of("shared", PROMPTS["shared"]), 6, both, end)
        if by_hand:
            extents, end = append_tokens(store, BY_HAND_TOKENS)
            store.add_sample(BY_HAND, len(BY_HAND_TOKENS), extents, end)
        store.close()
    made_dataset.write_norm(directory)
    return directory


def add(directory: Path, prompts: dict[str, list[int]], info: DatasetInfo | None = None) -> None:
    """Capture further prompts."""
    with RequestLedger.open(directory) as ledger:
        for id, tokens in prompts.items():
            ask(ledger, id, tokens)
    store = open_store(directory, "dp0-pp0", info or info_of())
    for id, tokens in prompts.items():
        capture(store, id, tokens)
    store.close()


def add_image(directory: Path, id: str) -> Media:
    """Capture one more prompt, whose second token stands for an image of three positions."""
    asked, stored, images = [41, MEDIA_TOKEN, 42, 43], [41, 10**15, 10**16, 10**15, 42, 43], ("sha256:a",)
    media = Media(((1, 3),), MEDIA_TOKEN, end_hash(asked))
    with RequestLedger.open(directory) as ledger:
        key = sample_key(id, images)
        runs = tuple(rle_encode(np.array([0, 0, 1, 1])))
        ledger.append(RequestRecord(id, key, len(asked), media.prompt_hash, runs, "data.jsonl:9", images))
    store = open_store(directory, "dp0-pp0", info_of())
    extents, end = append_tokens(store, stored)
    store.add_sample(make_rid("hs-", key, 0, media.prompt_hash), len(stored), extents, end, media)
    store.close()
    return media


def ask(ledger: RequestLedger, id: str, tokens: list[int], mask: list[int] | None = None) -> None:
    runs = tuple(rle_encode(np.array(mask_of(tokens) if mask is None else mask)))
    ledger.append(RequestRecord(id, sample_key(id), len(tokens), end_hash(tokens), runs, "data.jsonl:1"))


def capture(store: StoreWriter, id: str, tokens: list[int]) -> list[Extent]:
    extents, end = append_tokens(store, tokens)
    store.add_sample(rid_of(id, tokens), len(tokens), extents, end)
    return extents


def rid_of(id: str, tokens: list[int]) -> str:
    return make_rid("hs-", sample_key(id), 0, end_hash(tokens))


class Watching:
    """A view that remembers what it was shown."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self._what = ""

    def begin(self, what: str, total: int, unit: str) -> None:
        self._what = what
        self.totals[what], self.done[what] = total, 0

    def advance(self, amount: int) -> None:
        self.done[self._what] += amount


def export(directory: Path, out: Path, layout: str, **options: object) -> ExportResult:
    """Export with options as the command line would give them."""
    return export_dataset(directory, out, ExportOptions(format=Format(layout), **options), Watching())  # type: ignore[arg-type]


def normed(directory: Path, states: torch.Tensor) -> torch.Tensor:
    """What the model's final norm makes of states, computed in float64 and rounded to float32."""
    weight, eps = HiddenStateDataset(directory).final_norm()
    wide = states.double()
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()).float()


def content(out: Path) -> dict[str, bytes]:
    """Every file of an export but the lock, which names a process, and what has the time in it."""
    files = (path for path in out.rglob("*") if path.is_file() and path.name not in ("lock-export", "data_config.json"))
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in files}
