"""Files that hold one JSON object and are replaced in one step: ``dataset.json`` and the session records.

The object's last key is ``"crc"``: the CRC-32 of the bytes before it and its comma. Files of releases that wrote none
are read without it.
"""

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_hs_capture.errors import CorruptionError
from sglang_hs_capture.store import fs

_SEAL = re.compile(rb',\n  "crc": "([0-9a-f]{8})"\n\}\n\Z')
# What an object ends with that had a checksum, whatever its key has become.
_LIKE_A_SEAL = re.compile(rb':\s*"[0-9a-f]{8}"\s*\}\s*\Z')


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
            text = fs.read_bytes(path)
        except FileNotFoundError:
            return None
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{path}: not JSON ({error}); {remedy}") from None
    if not isinstance(raw, dict):
        raise CorruptionError(f"{path}: expected an object, got {type(raw).__name__}; {remedy}")
    seal = _SEAL.search(text)
    if int(seal[1], 16) != zlib.crc32(text[: seal.start()]) if seal else "crc" in raw or _LIKE_A_SEAL.search(text):
        raise CorruptionError(f"{path}: the checksum is wrong; the file was damaged or edited: {remedy}")
    raw.pop("crc", None)
    return raw


def write_object(path: Path, content: Mapping[str, Any]) -> None:
    """Put an object, which is not empty, in the place of a file's content, durably and in one step.

    Raises:
        DiskFullError, StoreError: the old content is still there.
    """
    with fs.io_errors(path, "write"):
        body = json.dumps(content, indent=2).encode().removesuffix(b"\n}")
        fs.replace_file(path, b'%s,\n  "crc": "%08x"\n}\n' % (body, zlib.crc32(body)))
