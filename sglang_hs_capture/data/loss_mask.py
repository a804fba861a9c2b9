"""The loss mask: the tokens that the assistant produces, the end of its turn included, and no others.

What is trained on comes as places in a text (``passages.py``) and is carried over to the text's tokens here.
"""

from collections.abc import Callable, Iterable

import numpy as np

from sglang_hs_capture.data.records import BadRow, LossMask, TokenIds
from sglang_hs_capture.data.template import ChatTemplate, Offsets, Span

_MOST_DIFFERING = 16


def tokenize(
    template: ChatTemplate, text: str, spans: Iterable[Span], stop_ids: frozenset[int]
) -> tuple[TokenIds, LossMask]:
    """Token ids int64 ``[S]`` and loss mask uint8 ``[S]`` of a text.

    Args:
        template: the model's chat template, with its tokenizer.
        text: what it rendered.
        spans: what of the text is trained on, in characters.
        stop_ids: tokens that end an assistant's turn.

    Raises:
        BadRow: the text cannot be encoded, or has no tokens.
    """
    input_ids, offsets = template.encode_with_offsets(text)
    if not len(input_ids):
        raise BadRow("the chat template renders the conversation to no tokens")
    if offsets is None:
        prefixes = _Prefixes(template, text, input_ids)
        runs = [prefixes.run(span) for span in spans]
    else:
        runs = [_run_by_offsets(offsets, span) for span in spans]
    mask = np.zeros(len(input_ids), dtype=np.uint8)
    for start, end in runs:
        mask[start : _settle_end(input_ids, start, end, stop_ids, template.is_blank)] = 1
    return input_ids, mask


def _run_by_offsets(offsets: Offsets, span: Span) -> Span:
    """The tokens that share a character with ``span``."""
    first = int(np.searchsorted(offsets[:, 1], span[0], side="right"))
    last = int(np.searchsorted(offsets[:, 0], span[1], side="left"))
    return first, max(first, last)


class _Prefixes:
    """Finds tokens by their text, for a tokenizer that does not tell where its tokens are.

    A beginning of the text is encoded anew and compared with the tokens of the whole. That goes on from the last place
    at which both were alike, so that a text with many turns is not encoded over and over.
    """

    def __init__(self, template: ChatTemplate, text: str, input_ids: TokenIds) -> None:
        self._template, self._text, self._input_ids = template, text, input_ids
        self._place, self._tokens = 0, 0

    def run(self, span: Span) -> Span:
        """The tokens that share a character with ``span``."""
        first, _ = self._before(span[0])
        last, exact = self._before(span[1])
        return first, max(first, last if exact else last + 1)

    def _before(self, place: int) -> tuple[int, bool]:
        """How many tokens lie wholly before ``place``, and whether they make up all that is before it."""
        if place < self._place:
            self._place, self._tokens = 0, 0
        alone = self._template.encode(self._text[self._place : place])
        same = _length_in_common(alone, self._input_ids[self._tokens :])
        if self._place and len(alone) - same > _MOST_DIFFERING:
            # What came before has a say in how the text that follows it is divided.
            self._place, self._tokens = 0, 0
            alone = self._template.encode(self._text[:place])
            same = _length_in_common(alone, self._input_ids)
        count, exact = _reached(self._template, alone[same:], self._input_ids[self._tokens + same :])
        count += self._tokens + same
        if exact:
            self._place, self._tokens = place, count
        return count, exact


def _length_in_common(left: TokenIds, right: TokenIds) -> int:
    length = min(len(left), len(right))
    differing = np.flatnonzero(left[:length] != right[:length])
    return int(differing[0]) if len(differing) else length


def _reached(template: ChatTemplate, rest: TokenIds, input_ids: TokenIds) -> tuple[int, bool]:
    """How many of ``input_ids`` lie wholly in the text of ``rest``, with which theirs begins, and whether they fill it.

    A beginning alone may end with other tokens than the same characters do in the whole text: two newlines before a
    word are two tokens, and one at the end.
    """
    text = template.decode(rest)
    if not text:
        return 0, True
    for count in range(min(len(input_ids), len(text.encode("utf-8"))), 0, -1):
        if text.startswith(piece := template.decode(input_ids[:count])):
            return count, piece == text
    return 0, False


def _settle_end(
    input_ids: TokenIds, start: int, end: int, stop_ids: frozenset[int], is_blank: Callable[[int], bool]
) -> int:
    """Let a run end with the turn's end token: drop whitespace after it, or take in that before it and itself."""
    last = end
    while last > start and int(input_ids[last - 1]) not in stop_ids and is_blank(int(input_ids[last - 1])):
        last -= 1
    if last > start and int(input_ids[last - 1]) in stop_ids:
        return last
    stop = end
    while stop < len(input_ids) and int(input_ids[stop]) not in stop_ids and is_blank(int(input_ids[stop])):
        stop += 1
    return stop + 1 if stop < len(input_ids) and int(input_ids[stop]) in stop_ids else end
