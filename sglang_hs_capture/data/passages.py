"""Conversations to the texts of samples, with what of each is trained on.

A text is rendered by the chat template. The template's own ``{% generation %}`` markers tell what the assistant says,
as long as the conversation begins with each of its turns as that turn was when it was the last, and shows none that the
prompt of a server rules out. Otherwise the turns are found one by one (``turns.py``), and those that the whole
conversation shows otherwise get texts of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_hs_capture.data.media import last_text
from sglang_hs_capture.data.preparation import LossOn, Preparation, SplitTurns
from sglang_hs_capture.data.reasoning import closes_reasoning, reasons
from sglang_hs_capture.data.records import BadRow, Conversation, Message
from sglang_hs_capture.data.template import ChatTemplate, Span
from sglang_hs_capture.data.turns import Turn, assistant_indices, check_tool_calls, find_turns

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
    indices = assistant_indices(conversation.messages)
    trained_turns = indices[-1 if last_only else 0 :]
    header = template.answer_header(conversation)
    if split is SplitTurns.AUTO:
        if closes_reasoning(header) and any(reasons(conversation.messages[index]) for index in trained_turns):
            return None
        if not _is_stable(template, conversation, trained_turns, text):
            return None
    spans = [(_after_header(text, span, header), span[1]) for span in spans]
    if last_only:
        starts = [turn.start for turn in find_turns(template, conversation, as_served=False, last_only=True)]
        spans = [span for span in spans if all(span[1] > start for start in starts)]
    trained = [text[start:end] for start, end in spans]
    for index in trained_turns:
        check_tool_calls(conversation.messages[index], index, trained)
    return Passage(text, spans, len(indices), len(conversation.messages))


def _is_stable(template: ChatTemplate, conversation: Conversation, indices: Sequence[int], text: str) -> bool:
    """Whether ``text`` begins with the conversation up to each of some turns."""
    ends = [index + 1 for index in indices if index + 1 < len(conversation.messages)]
    return all(text.startswith(template.render(conversation, conversation.messages[:end])) for end in ends)


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
    tails = [last_text(content).strip()[-_TAIL_CHARACTERS:] for content in contents]
    return all(tail in text[start:end] for tail, (start, end) in zip(tails, spans, strict=True))
