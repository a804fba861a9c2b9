"""Finds a turn of the assistant: the text that ends with it, and where in this text its words begin.

The turn is looked for between the conversation up to it, with the header that asks for an answer
(``add_generation_prompt``), and the conversation up to and with it. Some templates show a finished turn otherwise than
the model wrote it: they leave its reasoning out, or they change what comes before it. The text is then put together
from the prompt that a server would have sent and the turn as far as the template shows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_hs_capture.data.media import first_text, last_text
from sglang_hs_capture.data.reasoning import (
    CLOSE,
    closes_reasoning,
    probed,
    reasoning_tag,
    reasons,
    with_reasoning,
    without_reasoning,
)
from sglang_hs_capture.data.records import BadRow, Conversation, Message
from sglang_hs_capture.data.template import ChatTemplate
from sglang_hs_capture.text import shown

_ANCHOR_CHARACTERS = 64
_TAIL_CHARACTERS = 24
_REWRITTEN = (
    "the chat template renders what comes before messages[{index}] differently once that turn is there, so the "
    "assistant's tokens cannot be told apart; use another chat template, or split the conversation into one row per "
    "assistant turn"
)


@dataclass(frozen=True)
class Turn:
    """One of the assistant's turns.

    Attributes:
        number: counted over the assistant's turns of the conversation, from 1.
        index: its place in the messages.
        text: the conversation up to the turn's end.
        start: where in ``text`` the turn's words begin, after what a server would put there itself.
    """

    number: int
    index: int
    text: str
    start: int


def assistant_indices(messages: Sequence[Message]) -> list[int]:
    """The places of the assistant's turns."""
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def find_turns(template: ChatTemplate, conversation: Conversation, *, as_served: bool, last_only: bool) -> list[Turn]:
    """The assistant's turns, or the last of them.

    Args:
        template: the model's chat template.
        conversation: with any number of turns.
        as_served: give the texts as a server and its model would write them, with the reasoning that the template
            leaves out; otherwise as the template shows them.
        last_only: only the last turn.

    Raises:
        BadRow: the template rejects the beginning of the conversation, changes it in a way that cannot be followed, or
            leaves tool calls out.
    """
    numbered = list(enumerate(assistant_indices(conversation.messages), start=1))
    turns = [_find(template, conversation, *place, as_served) for place in numbered[-1 if last_only else 0 :]]
    for turn in turns:
        check_tool_calls(conversation.messages[turn.index], turn.index, [turn.text[turn.start :]])
    return turns


def check_tool_calls(message: Message, index: int, trained: Sequence[str]) -> None:
    """Refuse a template that silently leaves tool calls out, or what is said beside them.

    An empty turn, or half of one, would be trained on in its place.
    """
    for call in message.get("tool_calls", ()):
        name = call["function"]["name"]
        if not any(name in text for text in trained):
            raise BadRow(
                f"messages[{index}]: the chat template leaves out the call of the tool {shown(name)}; use one that "
                "supports tool calls"
            )
    said = last_text(message["content"]).rpartition(CLOSE)[2].strip()[-_TAIL_CHARACTERS:]
    if message.get("tool_calls") and not any(said in text for text in trained):
        raise BadRow(
            f"messages[{index}]: the chat template leaves out what is said beside tool calls, {shown(said)}; use "
            "another one, or take it out of the message"
        )


def _find(template: ChatTemplate, conversation: Conversation, number: int, index: int, as_served: bool) -> Turn:
    before, message = conversation.messages[:index], conversation.messages[index]
    history = template.render(conversation, before) if before else ""
    prompt = template.render(conversation, before, generation_prompt=True) if before else ""
    opening = _opening(template, conversation, history, prompt)
    if as_served and closes_reasoning(opening):
        message = without_reasoning(message)
    finished = template.render(conversation, [*before, message])
    opens = prompt != history and finished.startswith(prompt)
    if opens and not _looks_like(template, conversation, before, message, prompt, opening):
        text, start = finished, len(prompt)
    elif finished.startswith(history):
        # The template ignores add_generation_prompt, has no header, or one that differs from a finished turn's.
        text, start = finished, _words_start(template, conversation, before, finished, len(history))
    else:
        tag = reasoning_tag(opening)
        bare = prompt.removesuffix(tag)
        anchor = opening.removesuffix(tag) or _end_of(bare, before)
        place = _turn_place(template, conversation, before, finished, anchor)
        if place is None or not as_served:
            raise BadRow(_REWRITTEN.format(index=index))
        if opening and finished.startswith(tag, place):
            text, start = prompt + finished[place + len(tag) :], len(prompt)
        else:
            # A turn without the block that the prompt opens is taken as the template shows it.
            words = _words_start(template, conversation, before, finished, place)
            text, start = bare + finished[place:], len(bare) + words - place
    if as_served and reasons(message) and not _shows_reasoning(template, conversation, before, message):
        answer = text[len(prompt) :] if text.startswith(prompt) else None
        restored = with_reasoning(message, opening, answer, text[start:])
        if restored is not None:
            text, start = prompt + restored, len(prompt)
    return Turn(number, index, text, start)


def _opening(template: ChatTemplate, conversation: Conversation, history: str, prompt: str) -> str:
    """The header with which a prompt ends; empty if it has none."""
    if prompt.startswith(history):
        return prompt[len(history) :]
    # The turn before it ends otherwise when it is the last one, so that both texts do not show where a header begins.
    header, _ = template.answer_frame(conversation)
    return header if prompt.endswith(header) else ""


def _looks_like(
    template: ChatTemplate,
    conversation: Conversation,
    before: list[Message],
    message: Message,
    prompt: str,
    opening: str,
) -> bool:
    """Whether a turn without the prompt's header only seems to have it, as its content begins with the same text."""
    if not first_text(message["content"]).lstrip().startswith(opening.strip()):
        return False
    other = {**message, "content": "A"}
    return not template.render(conversation, [*before, other]).startswith(prompt)


def _words_start(
    template: ChatTemplate, conversation: Conversation, before: list[Message], finished: str, place: int
) -> int:
    """Where the words of a turn begin that begins at ``place``: after its header, if it has one."""
    header = _header_end(template, conversation, before, finished)
    # Spaces that no prompt ends with are the model's to write.
    return header if finished[place:header].strip() else place


def _end_of(prompt: str, before: Sequence[Message]) -> str:
    """How a prompt ends that has no header for an answer: with the last message, or the end of it if it is long."""
    said = last_text(before[-1]["content"]).strip() if before else ""
    return prompt[max(prompt.rfind(said), len(prompt) - _ANCHOR_CHARACTERS) :] if said else ""


def _turn_place(
    template: ChatTemplate, conversation: Conversation, before: list[Message], finished: str, anchor: str
) -> int | None:
    """What of ``finished`` comes after the prompt, when that begins otherwise but ends with ``anchor`` in both."""
    header = _header_end(template, conversation, before, finished)
    found = finished.rfind(anchor, 0, header) if anchor else -1
    return found + len(anchor) if found >= 0 else None


def _header_end(template: ChatTemplate, conversation: Conversation, before: list[Message], finished: str) -> int:
    """Where the header of the last turn of ``finished`` ends: two that begin differently show what all begin with."""
    probes = [[*before, {"role": "assistant", "content": content}] for content in ("A", "B")]
    return min(_common_prefix(template.render(conversation, probe), finished) for probe in probes)


def _shows_reasoning(
    template: ChatTemplate, conversation: Conversation, before: list[Message], message: Message
) -> bool:
    changed, probe = probed(message)
    return probe in template.render(conversation, [*before, changed])


def _common_prefix(left: str, right: str) -> int:
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if right.startswith(left[:middle]):
            low = middle
        else:
            high = middle - 1
    return low
