"""Conversations to the texts of samples, with what of each is trained on.

A text is rendered by the chat template. The template's own ``{% generation %}`` markers tell what the assistant says,
as long as they mark all of that and no more, and the conversation begins with each of its turns as a server and its
model would have written them. Otherwise the turns as they are found one by one (``turns.py``) tell it, and those that
the whole conversation shows otherwise get texts of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sglang_hs_capture.data.media import last_text
from sglang_hs_capture.data.preparation import LossOn, Preparation, SplitTurns
from sglang_hs_capture.data.records import BadRow, Conversation, Message
from sglang_hs_capture.data.template import ChatTemplate, Span
from sglang_hs_capture.data.turns import Turn, find_turns

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
    """The texts of a conversation's samples, in the order of the messages that they end with; at least one.

    Raises:
        BadRow: the template rejects the conversation, leaves tool calls out, or rewrites earlier turns in a way that
            cannot be followed or, with ``SplitTurns.NEVER``, at all.
    """
    split = preparation.split_turns
    turns = find_turns(
        template,
        conversation,
        as_served=split is not SplitTurns.NEVER,
        last_only=preparation.loss_on is LossOn.LAST,
    )
    if split is SplitTurns.ALWAYS and len(turns) > 1:
        return [_passage(turn.text, [turn], turn.index + 1) for turn in turns]
    marked = None if split is SplitTurns.ALWAYS else _marked(template, conversation, turns, split)
    if marked is not None:
        return [marked]
    whole = template.render(conversation)
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


def _marked(
    template: ChatTemplate, conversation: Conversation, turns: Sequence[Turn], split: SplitTurns
) -> Passage | None:
    """The whole conversation as the template's markers tell it; None where they cannot be relied on."""
    marked = template.render_marked(conversation)
    if marked is None or not turns:
        return None
    text, spans = marked
    header, closing = template.answer_frame(conversation)
    spans = [(_after_header(text, span, header), span[1]) for span in spans]
    if all(text.startswith(turn.text) for turn in turns):
        # With fewer turns to train on than there are, what is marked before the first of them does not matter.
        first = turns[0].start if turns[0].number > 1 else 0
        spans = [span for span in spans if span[0] >= first]
        if not _agree(text, spans, turns, closing):
            return None
    elif split is SplitTurns.NEVER and _one_each(text, spans, conversation.messages):
        spans = spans[-len(turns) :]
    else:
        return None
    return Passage(text, spans, turns[-1].number, len(conversation.messages))


def _agree(text: str, spans: Sequence[Span], turns: Sequence[Turn], closing: str) -> bool:
    """Whether what is marked is each turn from its first word to its last, and no more.

    A template may mark headers, what tools return, whole conversations or the last turn alone, or leave out reasoning
    or tool calls.

    Args:
        text: the whole conversation.
        spans: what is marked.
        turns: those to train on, with which ``text`` begins.
        closing: what the template puts after any answer, marked or not.
    """
    found = 0
    for turn in turns:
        own = [span for span in spans if turn.start <= span[0] and span[1] <= len(turn.text)]
        if not own or text[turn.start : own[0][0]].strip():
            return False
        if any(start > end for (_, end), (start, _) in pairwise(own)):
            return False
        rest = text[own[-1][1] : len(turn.text)]
        if rest.strip() and not closing.endswith(rest):
            return False
        found += len(own)
    return found == len(spans)


def _after_header(text: str, span: Span, header: str) -> int:
    """Where a marked span begins behind what a server puts before an answer, of which templates mark a part."""
    start, end = span
    found = text.find(header, max(0, start - len(header)), start + len(header)) if header else -1
    return min(found + len(header), end) if found >= 0 else start


def _one_each(text: str, spans: Sequence[Span], messages: Sequence[Message]) -> bool:
    """Whether each of the assistant's turns has one marked span, which holds the end of what it says."""
    contents = [message["content"] for message in messages if message["role"] == "assistant"]
    return len(spans) == len(contents) and all(
        last_text(content).strip()[-_TAIL_CHARACTERS:] in text[start:end]
        for content, (start, end) in zip(contents, spans, strict=True)
    )
