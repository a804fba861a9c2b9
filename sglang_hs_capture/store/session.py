"""Session records: who captures into a dataset, in which state, and how far; the handshake between model and driver."""

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from sglang_hs_capture.errors import CorruptionError
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.jsonfile import read_object, write_object
from sglang_hs_capture.store.schema import FORMAT, VERSION, check_version, check_writer
from sglang_hs_capture.text import shown

State = Literal["starting", "ready", "stopped", "refused", "closed"]
_REMEDY = "it can be removed while nothing captures"


# The types of the fields that are no text.
_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("pid", "context_length", "max_prompt_tokens", "chunked_prefill_size"), int),
    **dict.fromkeys(("error", "error_kind"), (str, type(None))),
    "media_token": (int, type(None)),
    **dict.fromkeys(("model", "draft_ids", "counters"), dict),
    "columns": list,
    "prefix_cache": bool,
}
_MOST = 2**63


def utc_now() -> str:
    """The time as ISO 8601 in UTC, to the millisecond: ``2025-01-31T12:00:00.000Z``."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass
class Counters:
    """What a session has done so far; bytes and rows count states, times are seconds.

    ``blocked_s`` is how long the forward waited for room in the ring; ``disk_wait_s`` how long the store was in calls
    that write, and how long in calls that make durable, which go on beside each other. ``ring_bytes`` and
    ``slot_table_bytes`` are host memory: rows on their way to disk, where each KV slot's row went.
    """

    rows: int = 0
    bytes: int = 0
    samples: int = 0
    failed: int = 0
    incomplete: int = 0
    blocked_s: float = 0.0
    disk_wait_s: float = 0.0
    ring_bytes: int = 0
    slot_table_bytes: int = 0


@dataclass
class SessionRecord:
    """The content of ``session-<writer>.json``.

    Attributes:
        state: ``starting``; ``ready`` for requests; ``stopped`` capturing while the server lives on; ``refused`` by a
            guard at model start; ``closed`` in order. ``error`` says why in one line for ``stopped`` and ``refused``.
        error_kind: the class of that error in ``errors.py``; None for one that was not foreseen, and in the records of
            releases that did not write it.
        session_id: hexadecimal digits of a UUID, new with each start of the process.
        run_id: given by ``hs-capture run`` to recognise its own server; empty otherwise.
        prefix_cache: whether prefixes computed for one request are reused for another.
        model: the model's identity, as in ``dataset.json``.
        columns: those of the dataset's columns that this writer captures; none in records of older releases, which
            captured all.
        media_token: the token id that stands for an image in a prompt; None where the server takes no images.
        draft_ids: the captured boundaries in each convention.
    """

    writer: str
    session_id: str
    pid: int
    host: str
    run_id: str = ""
    state: State = "starting"
    error: str | None = None
    error_kind: str | None = None
    started_at: str = field(default_factory=utc_now)
    updated_at: str = ""
    sglang_version: str = ""
    torch_version: str = ""
    plugin_version: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)
    architecture_class: str = ""
    rid_prefix: str = ""
    context_length: int = 0
    max_prompt_tokens: int = 0
    chunked_prefill_size: int = 0
    prefix_cache: bool = False
    media_token: int | None = None
    draft_ids: dict[str, list[int]] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)

    def to_json(self) -> dict[str, Any]:
        """The object on disk."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], where: str) -> "SessionRecord":
        """Read the object on disk; fields that this release does not know are passed over.

        Raises:
            CorruptionError: who captures, or in which state, is missing, or a field is not of its type.
        """
        check_version(raw, where)
        missing = [name for name in ("writer", "session_id", "pid", "host", "state") if name not in raw]
        if missing:
            raise CorruptionError(f"{where}: the fields {', '.join(missing)} are missing; {_REMEDY}")
        values = {f.name: raw[f.name] for f in fields(cls) if f.name in raw}
        counters = raw.get("counters", {})
        for name, value in values.items():
            if not isinstance(value, _KINDS.get(name, str)):
                raise CorruptionError(f"{where}: {name} cannot be {shown(value)}; {_REMEDY}")
        if not all(isinstance(value, int | float) and 0 <= value < _MOST for value in counters.values()):
            raise CorruptionError(f"{where}: the counters cannot be {shown(counters)}; {_REMEDY}")
        values["counters"] = Counters(**{f.name: counters[f.name] for f in fields(Counters) if f.name in counters})
        return cls(**values)


def session_path(directory: Path, writer: str) -> Path:
    """The session record of a writer, such as ``dp0-pp0``."""
    return directory / f"session-{check_writer(writer)}.json"


def write_session(directory: Path, record: SessionRecord) -> None:
    """Put ``record`` in place of the writer's last one, in one step, and set its ``updated_at``.

    Raises:
        DiskFullError, StoreError: the old record is still there.
    """
    record.updated_at = utc_now()
    path = session_path(directory, record.writer)
    with fs.io_errors(path, "write"):
        fs.make_dir(directory)
    write_object(path, record.to_json())


def read_session(path: Path) -> SessionRecord | None:
    """A session record; None while there is none.

    Raises:
        CorruptionError: the file is not a session record.
        StoreError: it cannot be read, or is of a newer version.
    """
    raw = read_object(path, _REMEDY)
    return None if raw is None else SessionRecord.from_json(raw, str(path))


def missing_columns(sessions: Iterable[SessionRecord]) -> list[str]:
    """The dataset's columns that none of a server's writers captures, as where a pipeline stage is not up."""
    wanted: list[str] = []
    there: set[str] = set()
    for record in sessions:
        wanted = record.model.get("columns", wanted)
        there.update(record.columns or wanted)
    return [name for name in wanted if name not in there]


def replica_of(record: SessionRecord) -> str:
    """The server, or the data-parallel replica of one, that a writer belongs to: ``dp0`` of ``dp0-pp1``."""
    return record.writer.split("-", maxsplit=1)[0]


def replica_names(first: int, count: int) -> frozenset[str]:
    """The names of a server's replicas: ``dp4`` and ``dp5`` for two of them, the first of which has number 4."""
    return frozenset(f"dp{first + number}" for number in range(count))


def read_sessions(directory: Path) -> list[SessionRecord]:
    """The latest session of each writer, ordered by writer."""
    records = (read_session(path) for path in sorted(directory.glob("session-*.json")))
    return [record for record in records if record is not None]


def is_running(record: SessionRecord) -> bool | None:
    """Whether a process with a session's process id is there; None for one of another host, of which nothing is known.

    Process ids are used again: after a restart, also of a container, the id may be that of the process that asks.
    """
    if record.host != socket.gethostname():
        return None
    try:
        os.kill(record.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
