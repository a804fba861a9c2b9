"""Files that hold one JSON object and are replaced in one step: ``dataset.json`` and the session records.

The object's last key is ``"crc"``: the CRC-32 of the others, as JSON with sorted keys and without spaces. Files of
releases that wrote none are read without it.
"""

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_hs_capture.errors import CorruptionError
from sglang_hs_capture.store import fs

# What an object ends with that has a checksum, whatever its key has become.
_SEAL = re.compile(rb'[:,{]\s*"[0-9a-f]{8}"\s*\}\s*\Z')


def read_object(path: Path, remedy: str) -> dict[str, Any] | None:
    """The object that a file holds; None where there is no such file.

    Args:
        path: the file.
        remedy: what to do where it holds no object; the error ends with it.

    Raises:
        CorruptionError: it holds something else.
        StoreError: the file system refuses.
    """
    with fs.io_errors(path, "read"):
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{path}: not JSON ({error}); {remedy}") from None
    if not isinstance(raw, dict):
        raise CorruptionError(f"{path}: expected an object, got {type(raw).__name__}; {remedy}")
    crc = raw.pop("crc", None)
    if crc != _crc(raw) if crc is not None else _SEAL.search(text):
        raise CorruptionError(f"{path}: the checksum is wrong; the file was damaged or edited: {remedy}")
    return raw


def write_object(path: Path, content: Mapping[str, Any]) -> None:
    """Put an object in the place of a file's content, durably and in one step.

    Raises:
        DiskFullError, StoreError: the old content is still there.
    """
    with fs.io_errors(path, "write"):
        fs.replace_file(path, (json.dumps({**content, "crc": _crc(content)}, indent=2) + "\n").encode())


def _crc(content: Mapping[str, Any]) -> str:
    """Eight hexadecimal digits."""
    return f"{zlib.crc32(json.dumps(content, sort_keys=True, separators=(',', ':')).encode()):08x}"
