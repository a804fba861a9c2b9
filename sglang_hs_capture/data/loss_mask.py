"""The loss mask: the tokens that the assistant produces, the end of its turn included, and no others.

What is trained on comes as places in a text (``passages.py``) and is carried over to the text's tokens here.
"""

from collections.abc import Callable, Iterable

import numpy as np

from sglang_hs_capture.data.records import BadRow, LossMask, TokenIds
from sglang_hs_capture.data.template import ChatTemplate, Offsets, Span


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
        runs = [_run_by_prefixes(template, text, span, input_ids) for span in spans]
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


def _run_by_prefixes(template: ChatTemplate, text: str, span: Span, input_ids: TokenIds) -> Span:
    """The tokens that share a character with ``span``, for a tokenizer that does not tell where its tokens are."""
    first, _ = _tokens_before(template, text[: span[0]], input_ids)
    last, exact = _tokens_before(template, text[: span[1]], input_ids)
    return first, max(first, last if exact else last + 1)


def _tokens_before(template: ChatTemplate, head: str, input_ids: TokenIds) -> tuple[int, bool]:
    """How many of ``input_ids`` lie wholly in ``head``, the beginning of their text, and whether they make it up.

    The beginning alone may end with other tokens than the same characters do in the whole text (two newlines before a
    word are two tokens, and one at the end), so the last few are compared by their text.
    """
    alone = template.encode(head)
    length = min(len(alone), len(input_ids))
    differing = np.flatnonzero(alone[:length] != input_ids[:length])
    same = int(differing[0]) if len(differing) else length
    rest = template.decode(alone[same:])
    if not rest:
        return same, True
    most = min(len(input_ids), same + len(rest.encode("utf-8")))
    for count in range(most, same, -1):
        if rest.startswith(piece := template.decode(input_ids[same:count])):
            return count, piece == rest
    return same, False


def _settle_end(
    input_ids: TokenIds, start: int, end: int, stop_ids: frozenset[int], is_blank: Callable[[int], bool]
) -> int:
    """Let a run end with the turn's end token: drop whitespace after it, or take it in if it comes next."""
    last = end
    while last > start and int(input_ids[last - 1]) not in stop_ids and is_blank(int(input_ids[last - 1])):
        last -= 1
    if last > start and int(input_ids[last - 1]) in stop_ids:
        return last
    return end + 1 if end < len(input_ids) and int(input_ids[end]) in stop_ids else end
