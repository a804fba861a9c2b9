"""The loss mask: the tokens that the assistant produces, the end of its turn included, and no others.

What the assistant said is found in the rendered text, either from the template's own ``{% generation %}`` markers or by
rendering growing prefixes of the conversation, and then carried over to the tokens.

Prefix rendering finds an assistant turn between the conversation up to it, with the header that asks for an answer
(``add_generation_prompt``), and the conversation up to and with it. Both must be how the whole conversation begins. A
template that renders earlier turns differently once later ones follow (Qwen3 drops their reasoning) breaks this; there
the mask cannot be told, and an error says so.
"""

from collections.abc import Callable, Sequence

import numpy as np

from sglang_hs_capture.data.media import last_text
from sglang_hs_capture.data.records import BadRow, Conversation, LossMask, Message, TokenIds, shown
from sglang_hs_capture.data.template import ChatTemplate, Offsets, Span

_REWRITES = (
    "the chat template renders earlier turns differently once later ones follow (at messages[{index}]), so the "
    "assistant's tokens cannot be told apart; split the conversation into one row per assistant turn, or use a chat "
    "template with generation markers"
)
_TAIL_CHARACTERS = 24


def tokenize(template: ChatTemplate, conversation: Conversation, stop_ids: frozenset[int]) -> tuple[TokenIds, LossMask]:
    """Token ids int64 ``[S]`` and loss mask uint8 ``[S]`` of a conversation.

    Args:
        template: the model's chat template.
        conversation: with any number of assistant turns; without one the mask is all zero.
        stop_ids: tokens that end an assistant's turn.

    Raises:
        BadRow: the template rejects the conversation, leaves tool calls out, or rewrites earlier turns.
    """
    marked = template.render_marked(conversation)
    if marked is not None and _plausible(*marked, conversation.messages):
        text, spans = marked
    else:
        text = template.render(conversation)
        spans = prefix_spans(template, conversation, text)
    _check_tool_calls(text, spans, conversation.messages)
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


def prefix_spans(template: ChatTemplate, conversation: Conversation, text: str) -> list[Span]:
    """Where the assistant's turns are in ``text``, the rendered conversation, found by rendering its prefixes.

    A span begins after the turn's header and ends where the turn does, with its end-of-turn marker.

    Raises:
        BadRow: the template rejects a prefix, or rewrites earlier turns.
    """
    messages = conversation.messages
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        whole = text if index + 1 == len(messages) else template.render(conversation, messages[: index + 1])
        if not text.startswith(whole):
            raise BadRow(_REWRITES.format(index=index))
        start = _turn_start(template, conversation, index, text)
        spans.append((start, max(start, len(whole))))
    return spans


def _turn_start(template: ChatTemplate, conversation: Conversation, index: int, text: str) -> int:
    """Where the words of message ``index``, an assistant's, begin: after what the engine would put there itself."""
    before = conversation.messages[:index]
    history = template.render(conversation, before) if before else ""
    if not text.startswith(history):
        raise BadRow(_REWRITES.format(index=index))
    prompted = template.render(conversation, before, generation_prompt=True) if before else history
    if prompted != history and text.startswith(prompted):
        return len(prompted)
    # The template ignores add_generation_prompt, has no header, or one that differs from a finished turn's (it opens a
    # reasoning block, say, that the turn lacks). Two turns that begin differently show what they all begin with.
    probes = [[*before, {"role": "assistant", "content": content}] for content in ("A", "B")]
    header = min(_common_prefix(template.render(conversation, probe), text) for probe in probes)
    return max(len(history), header, _common_prefix(prompted, text))


def _common_prefix(left: str, right: str) -> int:
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if right.startswith(left[:middle]):
            low = middle
        else:
            high = middle - 1
    return low


def _plausible(text: str, spans: Sequence[Span], messages: Sequence[Message]) -> bool:
    """Whether the marked spans hold what the assistant said, as far as spans and turns can be paired."""
    contents = [message["content"] for message in messages if message["role"] == "assistant"]
    if contents and not spans:
        return False
    if len(spans) != len(contents):
        return all(0 <= start <= end <= len(text) for start, end in spans)
    tails = [last_text(content).strip()[-_TAIL_CHARACTERS:] for content in contents]
    return all(tail in text[start:end] for tail, (start, end) in zip(tails, spans, strict=True))


def _check_tool_calls(text: str, spans: Sequence[Span], messages: Sequence[Message]) -> None:
    """Refuse a template that silently leaves tool calls out: an empty turn would be trained on in their place."""
    for index, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            name = call["function"]["name"]
            if not any(name in text[start:end] for start, end in spans):
                raise BadRow(
                    f"messages[{index}]: the chat template leaves out the call of the tool {shown(name)}; use one that "
                    "supports tool calls"
                )


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
