"""Where a writer's shards were written, if not in the dataset that they are in: ``origin-<writer>.json``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hs_capture.errors import CorruptionError
from sglang_hs_capture.store.jsonfile import read_object, write_object
from sglang_hs_capture.store.schema import FORMAT, RESTORE, VERSION, DatasetInfo, check_version
from sglang_hs_capture.store.shard import ShardLayout


@dataclass(frozen=True)
class Origin:
    """What the headers of some of a writer's shards say in place of the dataset's own account.

    Attributes:
        writer: the writer's name there.
        below: the shards with a smaller number are from there, unless an origin before this one has them.
        info: the content of ``dataset.json`` there.
    """

    writer: str
    below: int
    info: DatasetInfo


def origin_path(directory: Path, writer: str) -> Path:
    """The file that says where a writer's shards come from."""
    return directory / f"origin-{writer}.json"


def read_origins(directory: Path, writer: str) -> tuple[Origin, ...]:
    """Where a writer's shards were written; nothing for those that were written here.

    Raises:
        CorruptionError: the file is damaged.
        StoreError: it cannot be read, or is of a newer version.
    """
    path = origin_path(directory, writer)
    raw = read_object(path, RESTORE)
    if raw is None:
        return ()
    check_version(raw, str(path))
    try:
        return tuple(
            Origin(str(each["writer"]), int(each["below"]), DatasetInfo.from_json(each["dataset"], str(path)))
            for each in raw["origins"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{path}: {error!r}; {RESTORE}") from None


def write_origins(directory: Path, writer: str, origins: Sequence[Origin]) -> None:
    """Say where a writer's shards were written, durably and in one step.

    Raises:
        DiskFullError, StoreError: the disk refuses.
    """
    listed: list[dict[str, Any]] = [
        {"writer": origin.writer, "below": origin.below, "dataset": origin.info.to_json()} for origin in origins
    ]
    write_object(origin_path(directory, writer), {"format": FORMAT, "version": VERSION, "origins": listed})


def layout_as_written(layout: ShardLayout, origins: Sequence[Origin]) -> ShardLayout:
    """A shard's layout with the account of itself that its header has."""
    for origin in origins:
        if layout.record.shard < origin.below:
            return ShardLayout(origin.info, origin.writer, layout.record)
    return layout
