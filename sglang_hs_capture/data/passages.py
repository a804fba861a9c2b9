"""Conversations to the texts of samples, with what of each is trained on.

A text is rendered by the chat template. The template's own ``{% generation %}`` markers tell what the assistant says,
as long as they mark that and no more, the conversation begins with each of its turns as that turn was when it was the
last, and none of them is one that the prompt of a server rules out. Otherwise the turns are found one by one
(``turns.py``), and those that the whole conversation shows otherwise get texts of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_hs_capture.data.media import last_text
from sglang_hs_capture.data.preparation import LossOn, Preparation, SplitTurns
from sglang_hs_capture.data.reasoning import closes_reasoning, reasons
from sglang_hs_capture.data.records import BadRow, Conversation, Message
from sglang_hs_capture.data.template import ChatTemplate, Span
from sglang_hs_capture.data.turns import Turn, check_tool_calls, find_turns

_REWRITES = (
    "the chat template renders earlier turns differently once later ones follow (at messages[{index}]), so one sample "
    "cannot hold them all; --split-turns auto makes a sample of each such turn"
)
_TAIL_CHARACTERS = 24


@dataclass(frozen=True)
class Passage:
    """The text of one sample.

    Attributes:
        text: what is tokenised.
        spans: what of it is trained on, in characters.
        turn: the number of the last turn trained on, counted over the assistant's turns from 1; 0 if there is none.
        messages: how many of the conversation's messages it shows, from the first on.
    """

    text: str
    spans: list[Span]
    turn: int
    messages: int


def find_passages(template: ChatTemplate, conversation: Conversation, preparation: Preparation) -> list[Passage]:
    """The texts of a conversation's samples, in the order of their last turns; at least one.

    Raises:
        BadRow: the template rejects the conversation, leaves tool calls out, or rewrites earlier turns in a way that
            cannot be followed or, with ``SplitTurns.NEVER``, at all.
    """
    split, last_only = preparation.split_turns, preparation.loss_on is LossOn.LAST
    marked = _marked(template, conversation, split, last_only)
    if marked is not None:
        return [marked]
    whole = template.render(conversation)
    turns = find_turns(template, conversation, as_served=split is not SplitTurns.NEVER, last_only=last_only)
    if split is SplitTurns.ALWAYS and len(turns) > 1:
        return [_passage(turn.text, [turn], turn.index + 1) for turn in turns]
    passages = _grouped(turns, whole, len(conversation.messages))
    if split is SplitTurns.NEVER and passages[0].text != whole:
        index = next(turn.index for turn in turns if not whole.startswith(turn.text))
        raise BadRow(_REWRITES.format(index=index))
    return passages


def _grouped(turns: Sequence[Turn], whole: str, messages: int) -> list[Passage]:
    """As few texts as there can be: each turn is trained on in the last text that begins with it."""
    texts = [*(turn.text for turn in turns), whole]
    ends = [*(turn.index + 1 for turn in turns), messages]
    groups: dict[int, list[Turn]] = {}
    for turn in turns:
        last = next(place for place in reversed(range(len(texts))) if texts[place].startswith(turn.text))
        groups.setdefault(last, []).append(turn)
    found = [_passage(texts[place], group, ends[place]) for place, group in sorted(groups.items())]
    return found or [Passage(whole, [], 0, messages)]


def _passage(text: str, turns: Sequence[Turn], messages: int) -> Passage:
    return Passage(text, [(turn.start, len(turn.text)) for turn in turns], turns[-1].number, messages)


def _marked(template: ChatTemplate, conversation: Conversation, split: SplitTurns, last_only: bool) -> Passage | None:
    """The whole conversation as the template's markers tell it; None where they cannot be relied on."""
    marked = template.render_marked(conversation)
    if marked is None or split is SplitTurns.ALWAYS or not _plausible(*marked, conversation.messages):
        return None
    text, spans = marked
    try:
        turns = find_turns(template, conversation, as_served=False, last_only=last_only)
    except BadRow:
        return None  # as there are no turns to hold the markers against; who looks for them again says why
    header = template.answer_header(conversation)
    reasoning = any(reasons(conversation.messages[turn.index]) for turn in turns)
    if split is SplitTurns.AUTO and closes_reasoning(header) and reasoning:
        return None
    spans = [(_after_header(text, span, header), span[1]) for span in spans]
    if last_only:
        spans = [span for span in spans if all(span[1] > turn.start for turn in turns)]
    if all(text.startswith(turn.text) for turn in turns):
        if not _pair_up(text, spans, turns, conversation.messages):
            return None
    elif split is SplitTurns.AUTO:
        return None
    trained = [text[start:end] for start, end in spans]
    for turn in turns:
        check_tool_calls(conversation.messages[turn.index], turn.index, trained)
    return Passage(text, spans, turns[-1].number if turns else 0, len(conversation.messages))


def _pair_up(text: str, spans: Sequence[Span], turns: Sequence[Turn], messages: Sequence[Message]) -> bool:
    """Whether all that is marked is the assistant's words, and each turn's words are marked to their end.

    A template may mark headers, what tools return, whole conversations or the last turn alone.
    """
    found = 0
    for turn in turns:
        own = [text[start:end] for start, end in spans if turn.start <= start and end <= len(turn.text)]
        tail = _tail(messages[turn.index]["content"])
        if not any(tail in marked for marked in own):
            return False
        found += len(own)
    return found == len(spans)


def _after_header(text: str, span: Span, header: str) -> int:
    """Where a marked span begins behind what a server puts before an answer, of which templates mark a part."""
    start, end = span
    found = text.find(header, max(0, start - len(header)), start + len(header)) if header else -1
    return min(found + len(header), end) if found >= 0 else start


def _plausible(text: str, spans: Sequence[Span], messages: Sequence[Message]) -> bool:
    """Whether the marked spans hold what the assistant said, as far as spans and turns can be paired."""
    contents = [message["content"] for message in messages if message["role"] == "assistant"]
    if contents and not spans:
        return False
    if len(spans) != len(contents):
        return all(0 <= start <= end <= len(text) for start, end in spans)
    return all(_tail(content) in text[start:end] for content, (start, end) in zip(contents, spans, strict=True))


def _tail(content: Any) -> str:
    return last_text(content).strip()[-_TAIL_CHARACTERS:]
