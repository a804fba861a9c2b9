"""Conversation files: one JSON object a line, read as records that keep their place in the file.

Three forms are told apart line by line, so one file may mix them. The first of these keys that is not null decides:

- ``input_ids``, with an optional ``loss_mask``: tokenised before; without a mask every token is trained on;
- ``messages``: OpenAI's form, with ``tools`` and ``chat_template_kwargs`` beside it;
- ``conversations``: ShareGPT's form, with ``tools`` and ``system`` beside it.

Each may have images, in the messages or in a list of its own, ``images``; see ``data/media.py``.

A row's ``id`` may be a string or a whole number. A row without one is named by its content (``sha256-`` and 32 hex
digits), not by its line: a shuffled, filtered or split file then gives the same ids, and a capture goes on where it
stopped. When the same content comes again without an id, the second is given the suffix ``-2``, the third ``-3``; which
of them is which does not matter, as they are the same.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sglang_hs_capture.data.images import load_images
from sglang_hs_capture.data.lines import LINE_LIMIT, check_files, read_lines
from sglang_hs_capture.data.media import IMAGE_KEYS, OTHER_MEDIA_KEYS, place_images, row_images
from sglang_hs_capture.data.messages import parse_messages, parse_sharegpt, parse_tools
from sglang_hs_capture.data.records import (
    BadRow,
    Conversation,
    InputProblem,
    LossMask,
    Record,
    Sample,
    TokenIds,
    folder_of,
    shown,
)

MAX_ID_CHARACTERS = 4096

_FORMS = ("input_ids", "messages", "conversations")
_CONTENT_KEYS = (*_FORMS, *IMAGE_KEYS, "loss_mask", "tools", "system", "chat_template_kwargs")
# What a row may not pass to the template, because it belongs to the call itself.
_RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


def iter_records(
    paths: str | Path | Iterable[str | Path], *, line_limit: int = LINE_LIMIT
) -> Iterator[Record | InputProblem]:
    """Read conversation files, plain or gzip-compressed, one after the other.

    Blank lines are skipped and a UTF-8 byte order mark is tolerated. Memory is bounded by the longest line and a few
    dozen bytes for each row without an id.

    Args:
        paths: the files.
        line_limit: a longer line, in bytes, is a problem.

    Yields:
        a ``Conversation``, a ``Sample`` for a row tokenised before, or an ``InputProblem`` for a line that cannot be
        used.

    Raises:
        InputError: at the call, a file is missing or cannot be opened; later, the operating system cannot read on.
    """
    return _records(check_files(paths), line_limit)


def check_template_kwargs(raw: Any, where: str = "chat_template_kwargs") -> dict[str, Any]:
    """Settings that may be passed on to a chat template.

    Raises:
        BadRow: they are no object, or name an argument that is not the template's.
    """
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise BadRow(f"{where}: expected an object; got {type(raw).__name__}")
    reserved = sorted(_RESERVED_KWARGS.intersection(raw))
    if reserved:
        raise BadRow(f"{where}: {', '.join(reserved)} cannot be set here")
    return raw


def _records(files: list[Path], line_limit: int) -> Iterator[Record | InputProblem]:
    names = _ContentNames()
    for file in files:
        for number, line in read_lines(file, line_limit):
            source = f"{file}:{number}"
            sample_id = None
            try:
                if isinstance(line, BadRow):
                    raise line
                if not line or line.isspace():
                    continue
                row = _parse_line(line, number)
                sample_id = _own_id(row)
                record = _parse_row(row, sample_id or "", source)
                yield record if sample_id else _renamed(record, names.name(row))
            except BadRow as problem:
                yield InputProblem(source, str(problem), sample_id)
            except RecursionError:
                yield InputProblem(source, "the JSON is nested too deeply", sample_id)


class _ContentNames:
    """Names rows by their content and counts how often each came."""

    def __init__(self) -> None:
        self._seen: Counter[bytes] = Counter()

    def name(self, row: dict[str, Any]) -> str:
        content = {key: row[key] for key in _CONTENT_KEYS if row.get(key) is not None}
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(canonical.encode("ascii")).digest()[:16]
        self._seen[digest] += 1
        count = self._seen[digest]
        return f"sha256-{digest.hex()}" + (f"-{count}" if count > 1 else "")


def _renamed(record: Record, sample_id: str) -> Record:
    return replace(record, id=sample_id)


def _parse_line(line: bytes, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8: byte {line[error.start]:#04x} at byte {error.start + 1} of the line") from None
    except ValueError as error:
        cut = "" if line.endswith(b"\n") else "; the file ends here without a newline, so it may be cut off"
        array = (
            "; one object a line is expected, not one array for the whole file" if _opens_array(line, number) else ""
        )
        raise BadRow(f"not JSON: {error}{cut}{array}") from None
    if not isinstance(row, dict):
        array = ", not one array for the whole file" if _opens_array(line, number) else ""
        raise BadRow(f"expected a JSON object a line{array}; got {type(row).__name__}")
    return row


def _opens_array(line: bytes, number: int) -> bool:
    return number == 1 and line.lstrip().startswith(b"[")


def _own_id(row: dict[str, Any]) -> str | None:
    raw = row.get("id")
    if raw is None:
        return None
    if isinstance(raw, int) and not isinstance(raw, bool):
        raw = str(raw)
    if not isinstance(raw, str):
        raise BadRow(f"id: expected a string or a whole number; got {type(raw).__name__}")
    if not 1 <= len(raw) <= MAX_ID_CHARACTERS:
        raise BadRow(f"id: expected 1 to {MAX_ID_CHARACTERS} characters; got {len(raw)}")
    return raw


def _parse_row(row: dict[str, Any], sample_id: str, source: str) -> Record:
    form = next((key for key in _FORMS if row.get(key) is not None), None)
    if form is None:
        raise BadRow(f"unknown form: expected one of the keys {', '.join(_FORMS)}; got {shown(sorted(row))}")
    media = [key for key in OTHER_MEDIA_KEYS if row.get(key)]
    if media:
        raise BadRow(f"{media[0]}: only images are supported, no other media")
    if form == "input_ids":
        input_ids = _token_ids(row["input_ids"])
        images = load_images(row_images(row), folder_of(source))
        return Sample(sample_id, source, input_ids, _loss_mask(row.get("loss_mask"), len(input_ids)), images)
    messages = (
        parse_messages(row["messages"])
        if form == "messages"
        else parse_sharegpt(row["conversations"], row.get("system"))
    )
    messages = place_images(messages, row)
    kwargs = check_template_kwargs(row.get("chat_template_kwargs"))
    return Conversation(sample_id, source, messages, parse_tools(row.get("tools")), kwargs)


def _token_ids(raw: Any) -> TokenIds:
    if not isinstance(raw, list):
        raise BadRow(f"input_ids: expected a list of token ids; got {type(raw).__name__}")
    if not raw:
        raise BadRow("input_ids: the list is empty")
    for position, token in enumerate(raw):
        if type(token) is not int or not 0 <= token < 2**63:
            raise BadRow(f"input_ids[{position}]: expected a whole number from 0 up; got {shown(token)}")
    return np.array(raw, dtype=np.int64)


def _loss_mask(raw: Any, length: int) -> LossMask:
    if raw is None:
        return np.ones(length, dtype=np.uint8)
    if not isinstance(raw, list):
        raise BadRow(f"loss_mask: expected a list of 0 and 1; got {type(raw).__name__}")
    if len(raw) != length:
        raise BadRow(f"loss_mask: expected {length} values, one for each of input_ids; got {len(raw)}")
    for position, value in enumerate(raw):
        if not isinstance(value, int) or value not in (0, 1):
            raise BadRow(f"loss_mask[{position}]: expected 0 or 1; got {shown(value)}")
    return np.array(raw, dtype=np.uint8)
