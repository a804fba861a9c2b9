"""The records of a dataset: its identity, extents, journal records, and the names derived from a sample's id."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_hs_capture.errors import CorruptionError, StoreError
from sglang_hs_capture.layers import CONVENTION
from sglang_hs_capture.text import shown

FORMAT = "sglang-hs-capture"
VERSION = 1
# What to do about damage, at the end of a message.
RESTORE = "restore it from a copy, or capture anew into another directory"
FLOAT8 = "float8_e4m3"
ELEMENT_SIZE = {"bfloat16": 2, "float16": 2, "float32": 4, FLOAT8: 1}
SAFETENSORS_DTYPE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", FLOAT8: "F8_E4M3"}
# The other way round, for those whose elements need no scale beside them.
DTYPE_OF_SAFETENSORS = {theirs: ours for ours, theirs in SAFETENSORS_DTYPE.items() if ours != FLOAT8}

_IDENTITY = ("boundaries", "columns", "num_layers", "hidden_size", "dtype", "config_hash")
_RID = re.compile(r"(?P<prefix>.*)(?P<key>[0-9a-f]{24})-(?P<attempt>[0-9]+)-(?P<end_hash>[0-9a-f]{16})", re.DOTALL)
_HASH = re.compile(r"[0-9a-f]{1,16}")
# More rows or bytes than any file has.
_MOST = 2**62
_MOST_ELEMENTS = 2**31
Runs = tuple[tuple[int, int], ...]
_WRITER = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class Extent(NamedTuple):
    """``count`` rows of one writer's shard, from row ``start``."""

    shard: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls on an extent


@dataclass(frozen=True)
class DatasetInfo:
    """What a dataset holds, and of which model: the content of ``dataset.json``.

    ``columns`` names the states of a row in order, each of ``hidden_size`` elements of ``dtype``. With ``float8_e4m3``
    each of them is to be multiplied by a scale of its own, in float32.
    """

    boundaries: tuple[int, ...]
    columns: tuple[str, ...]
    num_layers: int
    hidden_size: int
    dtype: str
    model_path: str
    architecture: str
    config_hash: str
    final_norm_eps: float
    created_at: str
    sglang_version: str
    convention: str = CONVENTION

    def __post_init__(self) -> None:
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        object.__setattr__(self, "columns", tuple(self.columns))
        if self.dtype not in ELEMENT_SIZE:
            raise StoreError(f"dtype: expected one of {', '.join(ELEMENT_SIZE)}; got {self.dtype!r}")
        if not self.columns or self.hidden_size < 1:
            raise StoreError(f"a row needs columns; got {len(self.columns)} of {self.hidden_size} elements each")

    @property
    def column_bytes(self) -> int:
        """Bytes of one state of one token."""
        return self.hidden_size * ELEMENT_SIZE[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's states, all columns together, without their scales."""
        return len(self.columns) * self.column_bytes

    @property
    def scaled(self) -> bool:
        """Whether each state of a row has a scale."""
        return self.dtype == FLOAT8

    @property
    def scale_bytes(self) -> int:
        """Bytes of one state's scale."""
        return 4 if self.scaled else 0

    def differences(self, other: "DatasetInfo") -> list[str]:
        """Name each field that makes ``other`` a different dataset, with both values.

        The model's path and all versions may differ: a model that was moved is the same model.
        """
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in _IDENTITY]
        return [f"{name}: {_plain(mine)} there, {_plain(theirs)} now" for name, mine, theirs in pairs if mine != theirs]

    def to_json(self) -> dict[str, Any]:
        """The object stored in ``dataset.json``."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], where: str) -> "DatasetInfo":
        """Read the object of ``dataset.json``.

        Raises:
            CorruptionError: a field is missing, or not of its type.
            StoreError: it is of another format, or of a newer version than this release reads.
        """
        check_version(raw, where)
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in raw]
        if missing:
            raise CorruptionError(f"{where}: the fields {', '.join(missing)} are missing; {RESTORE}")
        if wrong := _ill_typed(raw):
            raise CorruptionError(f"{where}: {wrong} cannot be {shown(raw[wrong])}; {RESTORE}")
        return cls(**{name: raw[name] for name in names})


_TEXT_FIELDS = ("dtype", "model_path", "architecture", "config_hash", "created_at", "sglang_version", "convention")


def _ill_typed(raw: Mapping[str, Any]) -> str:
    """Which field of ``dataset.json`` is not of its type; empty if all are."""
    right = {name: isinstance(raw[name], str) for name in _TEXT_FIELDS}
    right |= {name: type(raw[name]) is int and 0 < raw[name] < _MOST_ELEMENTS for name in ("num_layers", "hidden_size")}
    right["final_norm_eps"] = type(raw["final_norm_eps"]) in (int, float)
    for name, kind in (("boundaries", int), ("columns", str)):
        right[name] = isinstance(raw[name], list | tuple) and all(type(value) is kind for value in raw[name])
    right["columns"] = right["columns"] and len(set(raw["columns"])) == len(raw["columns"])
    return next((name for name, fits in right.items() if not fits), "")


def count_of(raw: Mapping[str, Any], name: str) -> int:
    """A record's number of things, or the place of one.

    Raises:
        KeyError, ValueError: there is none.
    """
    value = raw[name]
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"{name}: expected a whole number from 0 up, got {shown(value)}")
    return value


def text_of(raw: Mapping[str, Any], name: str) -> str:
    """A record's text, which may be any.

    Raises:
        KeyError, ValueError: there is none.
    """
    value = raw[name]
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected a text, got {shown(value)}")
    return value


def hash_of(raw: Mapping[str, Any], name: str) -> int:
    """A record's hash or checksum.

    Raises:
        KeyError, ValueError: there is none.
    """
    value = raw[name]
    if not isinstance(value, str) or not _HASH.fullmatch(value):
        raise ValueError(f"{name}: expected hexadecimal digits, 16 at most, got {shown(value)}")
    return int(value, 16)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def check_version(raw: Mapping[str, Any], where: str) -> None:
    """Refuse another format, or a version that this release cannot know.

    Raises:
        StoreError: as said.
    """
    if raw.get("format") != FORMAT or not isinstance(raw.get("version"), int):
        raise StoreError(f"{where}: expected the format {FORMAT!r} with a version; got {shown(raw.get('format'))}")
    if raw["version"] > VERSION:
        raise StoreError(
            f"{where}: written in version {raw['version']} of the format, this release reads up to {VERSION}; upgrade"
        )


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A partial shard exists: where its rows begin, and which columns each has."""

    shard: int
    data_offset: int
    columns: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The record as a line of the journal has it."""
        return {"t": "shard", "shard": self.shard, "data_offset": self.data_offset, "columns": list(self.columns)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "ShardRecord":
        """Read such a record.

        Raises:
            KeyError, TypeError, ValueError: it is malformed.
        """
        columns = raw["columns"]
        if not isinstance(columns, list) or not columns or not all(isinstance(name, str) for name in columns):
            raise ValueError(f"columns: expected a list of names, got {shown(columns)}")
        if len(set(columns)) < len(columns):
            raise ValueError(f"columns: expected each once, got {shown(columns)}")
        return cls(count_of(raw, "shard"), count_of(raw, "data_offset"), tuple(columns))


@dataclass(frozen=True, slots=True)
class RowsRecord:
    """Rows ``start`` to ``start + count`` of a shard are durable.

    Attributes:
        xxh3: the checksum of their states' bytes.
        scales_xxh3: the checksum of their scales' bytes; None where rows have none.
    """

    shard: int
    start: int
    count: int
    xxh3: int
    scales_xxh3: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The record as a line of the journal has it."""
        record = {"t": "rows", "shard": self.shard, "start": self.start, "count": self.count, "xxh3": to_hex(self.xxh3)}
        return record if self.scales_xxh3 is None else {**record, "scales_xxh3": to_hex(self.scales_xxh3)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "RowsRecord":
        """Read such a record.

        Raises:
            KeyError, TypeError, ValueError: it is malformed.
        """
        scales = hash_of(raw, "scales_xxh3") if "scales_xxh3" in raw else None
        return cls(count_of(raw, "shard"), count_of(raw, "start"), count_of(raw, "count"), hash_of(raw, "xxh3"), scales)


@dataclass(frozen=True, slots=True)
class Media:
    """The images of one sample.

    Attributes:
        runs: for each image, in order, its first position and how many it takes.
        token: the placeholder's id.
        prompt_hash: chained hash of the prompt with one placeholder in the place of each run.
    """

    runs: Runs
    token: int
    prompt_hash: int

    def __post_init__(self) -> None:
        end = 0
        for start, count in self.runs:
            if start < end or count < 1:
                raise ValueError(f"image positions: expected runs in order, each of 1 or more; got {shown(self.runs)}")
            end = start + count
        if not self.runs:
            raise ValueError("image positions: expected at least one run")

    @property
    def positions(self) -> int:
        """How many positions the images take together."""
        return sum(count for _, count in self.runs)

    def prompt_length(self, length: int) -> int:
        """Tokens of the prompt as it was asked for, of a sample of ``length`` tokens."""
        return length - self.positions + len(self.runs)

    def fits(self, length: int) -> bool:
        """Whether all runs lie within a sample of ``length`` tokens."""
        return sum(self.runs[-1]) <= length

    def to_json(self) -> dict[str, Any]:
        """The object under ``media`` of a sample's record."""
        return {
            "runs": [list(run) for run in self.runs],
            "token": self.token,
            "prompt_hash": to_hex(self.prompt_hash),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "Media":
        """Read such an object.

        Raises:
            KeyError, TypeError, ValueError: it is malformed.
        """
        runs = tuple((start, count) for start, count in raw["runs"])
        if not all(type(number) is int and 0 <= number <= _MOST for run in runs for number in run):
            raise ValueError(f"image positions: expected whole numbers from 0 up, got {shown(raw['runs'])}")
        return cls(runs, count_of(raw, "token"), hash_of(raw, "prompt_hash"))


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """A sample is acknowledged: its rows, in order, the chained hash of its tokens, and where its images are."""

    rid: str
    length: int
    extents: tuple[Extent, ...]
    end_hash: int
    session: str
    media: Media | None = None

    def to_json(self) -> dict[str, Any]:
        """The record as a line of the journal has it."""
        record = {
            "t": "sample",
            "rid": self.rid,
            "length": self.length,
            "extents": [list(extent) for extent in self.extents],
            "end_hash": to_hex(self.end_hash),
            "session": self.session,
        }
        return record if self.media is None else {**record, "media": self.media.to_json()}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "SampleRecord":
        """Read such a record.

        Raises:
            KeyError, TypeError, ValueError: it is malformed.
        """
        extents = tuple(Extent(shard, start, count) for shard, start, count in raw["extents"])
        if not all(type(number) is int and number >= 0 for extent in extents for number in extent):
            raise ValueError(f"extents: expected whole numbers from 0 up, got {shown(raw['extents'])}")
        length, end_hash = count_of(raw, "length"), hash_of(raw, "end_hash")
        media = Media.from_json(raw["media"]) if "media" in raw else None
        if media is not None and not media.fits(length):
            raise ValueError(f"images at {shown(media.runs)} of a sample of {length} tokens")
        return cls(text_of(raw, "rid"), length, extents, end_hash, text_of(raw, "session"), media)


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """A request was seen, and its sample is not stored: why."""

    rid: str
    reason: str
    detail: str

    def to_json(self) -> dict[str, Any]:
        """The record as a line of the journal has it."""
        return {"t": "failed", "rid": self.rid, "reason": self.reason, "detail": self.detail}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "FailureRecord":
        """Read such a record.

        Raises:
            KeyError, TypeError, ValueError: it is malformed.
        """
        return cls(text_of(raw, "rid"), text_of(raw, "reason"), text_of(raw, "detail"))


def to_hex(value: int) -> str:
    """A uint64 as 16 hexadecimal digits."""
    return f"{value:016x}"


def check_writer(name: str) -> str:
    """Return a writer's name, which becomes part of file names.

    Raises:
        ValueError: it holds anything but small letters, digits and single hyphens.
    """
    if not _WRITER.fullmatch(name):
        raise ValueError(f"writer: expected a name such as dp0-pp0; got {name!r}")
    return name


def sample_key(sample_id: str, images: Iterable[str] = ()) -> str:
    """24 hexadecimal digits that stand for a sample's id in request ids: safe in any place, of constant length.

    They depend on the images asked for too: a late acknowledgement of a request with other images is another sample's.
    """
    name = "\0".join((sample_id, *images))
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


class RequestName(NamedTuple):
    """The parts of a request id that ``make_rid`` made."""

    prefix: str
    key: str
    attempt: int
    end_hash: int


def make_rid(rid_prefix: str, key: str, attempt: int, end_hash: int) -> str:
    """The request id of one attempt, from 0, at capturing the sample with this key.

    ``end_hash``, the chained hash of the whole prompt as it is asked for, travels along: it tells whoever stores the
    rows which prompt they must add up to, also where a part of them was computed for another request.
    """
    return f"{rid_prefix}{key}-{attempt}-{to_hex(end_hash)}"


def parse_rid(rid: str) -> RequestName | None:
    """Split a request id into its parts; None if ``make_rid`` did not make it."""
    match = _RID.fullmatch(rid)
    if match is None:
        return None
    return RequestName(match["prefix"], match["key"], int(match["attempt"]), int(match["end_hash"], 16))


def merge_extents(extents: Iterable[Extent]) -> tuple[Extent, ...]:
    """Join extents that follow each other in the same shard; the rows and their order stay the same."""
    merged: list[Extent] = []
    for extent in extents:
        last = merged[-1] if merged else None
        if last and last.shard == extent.shard and last.start + last.count == extent.start:
            merged[-1] = Extent(last.shard, last.start, last.count + extent.count)
        else:
            merged.append(Extent(*extent))
    return tuple(merged)


def split_extents(extents: Iterable[Extent], counts: Iterable[int]) -> list[list[Extent]]:
    """Cut a list of extents into lists of ``counts[i]`` rows each; the counts add up to the extents' rows."""
    rest = [Extent(*extent) for extent in reversed(list(extents))]
    lists = []
    for count in counts:
        mine: list[Extent] = []
        missing = count
        while missing:
            shard, start, available = rest.pop()
            taken = min(missing, available)
            mine.append(Extent(shard, start, taken))
            if taken < available:
                rest.append(Extent(shard, start + taken, available - taken))
            missing -= taken
        lists.append(mine)
    return lists


def extents_from_rows(shards: NDArray[np.int64], rows: NDArray[np.int64]) -> tuple[Extent, ...]:
    """The shortest list of extents that names these rows in this order.

    Args:
        shards: int64 [n], each row's shard.
        rows: int64 [n], each row's number in its shard.
    """
    if not len(rows):
        return ()
    breaks = np.flatnonzero((np.diff(shards) != 0) | (np.diff(rows) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((starts, [len(rows)])))
    return tuple(Extent(int(shards[s]), int(rows[s]), int(n)) for s, n in zip(starts, counts, strict=True))


def rle_encode(mask: ArrayLike) -> list[int]:
    """Run lengths of a mask of zeros and ones, alternating; the first counts zeros, and is 0 before a leading one.

    Args:
        mask: integers or booleans [S].
    """
    bits = np.asarray(mask).astype(np.int8)
    if bits.ndim != 1 or np.any((bits != 0) & (bits != 1)):
        raise ValueError("mask: expected one dimension of zeros and ones")
    if not len(bits):
        return []
    edges = np.flatnonzero(np.diff(bits)) + 1
    runs = np.diff(np.concatenate(([0], edges, [len(bits)]))).tolist()
    return [0, *runs] if bits[0] else runs


def all_zero(runs: Sequence[int] | None) -> bool:
    """Whether a mask that ``rle_encode`` encoded has no one; None stands for a mask of ones."""
    return runs is not None and not any(runs[1::2])


def rle_decode(runs: Sequence[int]) -> NDArray[np.int64]:
    """The mask that ``rle_encode`` encoded.

    Returns:
        int64 [S], zeros and ones.
    """
    return np.repeat(np.arange(len(runs), dtype=np.int64) % 2, np.asarray(runs, dtype=np.int64))
