"""Rows of files and tables, read as records that keep their place: conversations, or samples tokenised before.

Four forms are told apart row by row, so one file may mix them. The first of these keys that is not null decides:

- ``input_ids``: tokenised before, with its mask as ``loss_mask``, a list of 0 and 1; as ``loss_mask_rle``, the lengths
  of its runs as the ledger has them (``store.schema.rle_encode``); or as ``assistant_masks``, which is what
  ``transformers`` and TRL call such a list. Without a mask every token is trained on;
- ``messages``: OpenAI's form, with ``tools`` and ``chat_template_kwargs`` beside it;
- ``conversations``: ShareGPT's form, with ``tools`` and ``system`` beside it;
- ``prompt``, with ``response`` or ``completion``: texts or lists of messages, with what the two above have beside them.

Each may have images, in the messages or in a list of its own, ``images``; see ``data/media.py``.

A row's ``id`` may be a string or a whole number. A row without one is named by its content (``sha256-`` and 32 hex
digits), not by its line: a shuffled, filtered or split file then gives the same ids, and a capture goes on where it
stopped; and so does a table of the same rows, since null fields do not count. When the same content comes again without
an id, the second is given the suffix ``-2``, the third ``-3``; which of them is which does not matter, as they are the
same.
"""

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import numpy as np

from sglang_hs_capture.data.files import Row, find_files, read_rows
from sglang_hs_capture.data.images import load_images
from sglang_hs_capture.data.lines import LINE_LIMIT
from sglang_hs_capture.data.media import IMAGE_KEYS, OTHER_MEDIA_KEYS, place_images, row_images
from sglang_hs_capture.data.messages import parse_messages, parse_prompt, parse_sharegpt, parse_tools
from sglang_hs_capture.data.records import (
    BadRow,
    Conversation,
    InputProblem,
    LossMask,
    Message,
    Record,
    Sample,
    TokenIds,
    folder_of,
)
from sglang_hs_capture.data.shuffle import shuffled_rows
from sglang_hs_capture.store.schema import rle_decode
from sglang_hs_capture.text import shown

MAX_ID_CHARACTERS = 4096

_MASK_KEYS = ("loss_mask", "loss_mask_rle", "assistant_masks")
_MASK_VALUES = dict.fromkeys(_MASK_KEYS, "0 and 1") | {"loss_mask_rle": "lengths of runs"}
# Where other tools have what is trained on. Passing over one would train on every token.
_OTHER_MASK_KEYS = ("labels", "completion_mask", "assistant_mask", "label_mask", "mask")
_ANSWER_KEYS = ("response", "completion")
_NOT_AN_ARRAY = "not one array for the whole file (jq -c '.[]' FILE makes lines of one)"
# The forms by the key that decides, each with what else of a row is its content.
_FORMS = {
    "input_ids": (*_MASK_KEYS, *IMAGE_KEYS),
    "messages": ("tools", "chat_template_kwargs", *IMAGE_KEYS),
    "conversations": ("tools", "system", "chat_template_kwargs", *IMAGE_KEYS),
    "prompt": (*_ANSWER_KEYS, "tools", "system", "chat_template_kwargs", *IMAGE_KEYS),
}
_COLUMNS = frozenset({"id", *_FORMS, *OTHER_MEDIA_KEYS, *_OTHER_MASK_KEYS, "attention_mask"}.union(*_FORMS.values()))
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
    paths: str | Path | Iterable[str | Path], *, line_limit: int = LINE_LIMIT, shuffle_seed: int | None = None
) -> Iterator[Record | InputProblem]:
    """Read conversation files one after the other, or their rows in a random order.

    Blank lines are skipped and a UTF-8 byte order mark is tolerated. Memory is bounded by the longest line or a batch
    of rows, a few dozen bytes for each row without an id, and those that shuffling takes (``shuffle.shuffled_rows``).

    Args:
        paths: files, folders and patterns (``files.find_files``).
        line_limit: a longer line or row, in bytes, is a problem.
        shuffle_seed: chooses the order; the same input and seed give the same order. None for the files' own.

    Yields:
        a ``Conversation``, a ``Sample`` for a row tokenised before, or an ``InputProblem`` for a line that cannot be
        used.

    Raises:
        InputError: at the call, a file is missing or cannot be opened; later, the operating system cannot read on.
    """
    files = find_files(paths)
    if shuffle_seed is not None:
        return _records(shuffled_rows(files, _rows_of, shuffle_seed, line_limit))
    return _records((file, number, row) for file in files for number, row in _rows_of(file, line_limit))


def _rows_of(file: Path, line_limit: int) -> Iterator[tuple[int, Row]]:
    return read_rows(file, _COLUMNS, tuple(_FORMS), line_limit)


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


def _records(rows: Iterable[tuple[Path, int, Row]]) -> Iterator[Record | InputProblem]:
    names = _ContentNames()
    for file, number, raw in rows:
        source = f"{file}:{number}"
        sample_id = None
        try:
            if isinstance(raw, BadRow):
                raise raw
            if isinstance(raw, bytes) and (not raw or raw.isspace()):
                continue
            row = _parse_line(raw, number) if isinstance(raw, bytes) else raw
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
        """
        Raises:
            BadRow: a table has something in the row that JSON has no form for.
        """
        form = _form_of(row)
        content = _without_nulls({key: row.get(key) for key in (form, *_FORMS[form])})
        try:
            canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), default=_in_base64)
        except TypeError as error:
            raise BadRow(f"the row holds a value of a type that JSON does not have: {error}") from None
        digest = hashlib.sha256(canonical.encode("ascii")).digest()[:16]
        self._seen[digest] += 1
        count = self._seen[digest]
        return f"sha256-{digest.hex()}" + (f"-{count}" if count > 1 else "")


def _in_base64(value: Any) -> str:
    """An image's bytes in a table, as a line of JSON has them."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    raise TypeError(type(value).__name__)


def _without_nulls(value: Any) -> Any:
    """A value without its null fields, which tell nothing: a table has one wherever a row of it has no such field."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and not (value and isinstance(value[0], int)):  # token ids are many, and numbers
        return [_without_nulls(item) for item in value]
    return value


def _renamed(record: Record, sample_id: str) -> Record:
    return replace(record, id=sample_id)


def _parse_line(line: bytes, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8: byte {line[error.start]:#04x} at byte {error.start + 1} of the line") from None
    except ValueError as error:
        cut = "" if line.endswith(b"\n") else "; the file ends here without a newline, so it may be cut off"
        array = f"; one object a line is expected, {_NOT_AN_ARRAY}" if _opens_array(line, number) else ""
        # json counts lines of its own, which a reader would take for those of the file.
        told = f"{error.msg} at character {error.pos + 1} of the line" if isinstance(error, JSONDecodeError) else error
        raise BadRow(f"not JSON: {told}{cut}{array}") from None
    if not isinstance(row, dict):
        array = f", {_NOT_AN_ARRAY}" if _opens_array(line, number) else ""
        raise BadRow(f"expected a JSON object a line{array}; got {type(row).__name__}")
    return row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, of which each key says one thing."""
    read = dict(pairs)
    if len(read) < len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise BadRow(f"the key {shown(repeated)} comes more than once in one object; nobody can say which is meant")
    return read


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


def _form_of(row: dict[str, Any]) -> str:
    form = next((key for key in _FORMS if row.get(key) is not None), None)
    if form is None:
        raise BadRow(f"unknown form: expected one of the keys {', '.join(_FORMS)}; got {shown(sorted(row))}")
    return form


def _parse_row(row: dict[str, Any], sample_id: str, source: str) -> Record:
    form = _form_of(row)
    media = [key for key in OTHER_MEDIA_KEYS if row.get(key)]
    if media:
        raise BadRow(f"{media[0]}: only images are supported, no other media")
    if form == "input_ids":
        input_ids = _token_ids(row["input_ids"])
        _refuse_padding(row.get("attention_mask"))
        images = load_images(row_images(row), folder_of(source))
        return Sample(sample_id, source, input_ids, _mask_of(row, len(input_ids)), images)
    messages = place_images(_messages_of(row, form), row)
    kwargs = check_template_kwargs(row.get("chat_template_kwargs"))
    return Conversation(sample_id, source, messages, parse_tools(row.get("tools")), kwargs)


def _messages_of(row: dict[str, Any], form: str) -> list[Message]:
    if form == "messages":
        return parse_messages(row["messages"])
    if form == "conversations":
        return parse_sharegpt(row["conversations"], row.get("system"))
    answer = _only_one(row, _ANSWER_KEYS)
    if answer is None:
        raise BadRow(f"prompt: expected one of {', '.join(_ANSWER_KEYS)} beside it; got {shown(sorted(row))}")
    return parse_prompt(row["prompt"], row[answer], answer, row.get("system"))


def _only_one(row: dict[str, Any], keys: Sequence[str]) -> str | None:
    """Which of some keys a row has; None for none of them."""
    present = [key for key in keys if row.get(key) is not None]
    if len(present) > 1:
        raise BadRow(f"{present[0]} and {present[1]}: expected one of them, as both say the same")
    return next(iter(present), None)


def _token_ids(raw: Any) -> TokenIds:
    if not isinstance(raw, list):
        raise BadRow(f"input_ids: expected a list of token ids; got {type(raw).__name__}")
    if not raw:
        raise BadRow("input_ids: the list is empty")
    for position, token in enumerate(raw):
        if type(token) is not int or not 0 <= token < 2**63:
            raise BadRow(f"input_ids[{position}]: expected a whole number from 0 up; got {shown(token)}")
    return np.array(raw, dtype=np.int64)


def _refuse_padding(attention_mask: Any) -> None:
    if isinstance(attention_mask, list) and 0 in attention_mask:
        raise BadRow(
            f"attention_mask: expected ones alone; got 0 at position {attention_mask.index(0)}: the row is padded; "
            "leave the padding out of input_ids and of the mask"
        )


def _refuse_other_masks(row: dict[str, Any]) -> None:
    found = next((key for key in _OTHER_MASK_KEYS if row.get(key) is not None), None)
    if found is not None:
        raise BadRow(
            f"{found}: expected what is trained on as one of {', '.join(_MASK_KEYS)}; without one every token would "
            "be; give loss_mask, 1 for each token that is trained on and 0 for each other one"
        )


def _mask_of(row: dict[str, Any], length: int) -> LossMask:
    key = _only_one(row, _MASK_KEYS)
    if key is None:
        _refuse_other_masks(row)
        return np.ones(length, dtype=np.uint8)
    raw = row[key]
    if not isinstance(raw, list):
        raise BadRow(f"{key}: expected a list of {_MASK_VALUES[key]}; got {type(raw).__name__}")
    return _from_runs(raw, length) if key == "loss_mask_rle" else _loss_mask(raw, length, key)


def _loss_mask(raw: list[Any], length: int, key: str) -> LossMask:
    if len(raw) != length:
        raise BadRow(f"{key}: expected {length} values, one for each of input_ids; got {len(raw)}")
    for position, value in enumerate(raw):
        if not isinstance(value, int) or value not in (0, 1):
            raise BadRow(f"{key}[{position}]: expected 0 or 1; got {shown(value)}")
    return np.array(raw, dtype=np.uint8)


def _from_runs(raw: list[Any], length: int) -> LossMask:
    for place, run in enumerate(raw):
        if type(run) is not int or not 0 <= run <= length:
            raise BadRow(f"loss_mask_rle[{place}]: expected the length of a run, from 0 to {length}; got {shown(run)}")
    if sum(raw) != length:
        raise BadRow(f"loss_mask_rle: expected runs of {length} tokens together, as input_ids has; got {sum(raw)}")
    return rle_decode(raw).astype(np.uint8)
