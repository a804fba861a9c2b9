"""Reasoning that a chat template leaves out of a finished turn, put back as the model wrote it.

A message has its reasoning in ``reasoning_content``, or written out in its content as ``<think>...</think>``. The
templates of Kimi-K2-Thinking, Kimi-K2.5, DeepSeek-R1 and DeepSeek-V3.1 leave it out of every finished answer, so that a
conversation rendered by them does not hold what the model wrote. Their prompts and their empty reasoning blocks show
where it belongs.
"""

import re

from sglang_hs_capture.data.records import Message

OPEN, CLOSE = "<think>", "</think>"
_OPENED = re.compile(rf"{OPEN}(\s*)$")
_TAG = re.compile(rf"{OPEN}\s*({CLOSE}\s*)?$")
_WRITTEN = re.compile(rf"\s*{OPEN}(.*?){CLOSE}(.*)", re.DOTALL)
_PROBE = "probe0of0the0reasoning"


def reasons(message: Message) -> bool:
    """Whether a message has reasoning that is not blank."""
    if message.get("reasoning_content", "").strip():
        return True
    content = _text(message)
    return bool(content.partition(CLOSE)[0].removeprefix(OPEN).strip()) and CLOSE in content


def lifted(message: Message, *, trim: bool = False) -> Message:
    """The message with reasoning that opens its content moved to ``reasoning_content``.

    Args:
        message: any.
        trim: leave out the line breaks around the reasoning and after it.
    """
    written = _WRITTEN.fullmatch(_text(message))
    if written is None or message.get("reasoning_content", "").strip():
        return message
    reasoning, answer = written.groups()
    if trim:
        reasoning, answer = reasoning.strip("\n"), answer.lstrip("\n")
    return {**message, "reasoning_content": reasoning, "content": answer}


def closes_reasoning(opening: str) -> bool:
    """Whether the header that asks for an answer says that there is to be no reasoning."""
    return opening.rstrip().endswith(CLOSE)


def reasoning_tag(opening: str) -> str:
    """The end of a header that opens reasoning, or opens and closes it; empty if the header does neither."""
    found = _TAG.search(opening)
    return found.group() if found else ""


def without_reasoning(message: Message) -> Message:
    """The message with nothing but its answer."""
    return {key: value for key, value in lifted(message, trim=True).items() if key != "reasoning_content"}


def probed(message: Message) -> tuple[Message, str]:
    """The message with other reasoning, and the text by which that is found in what is rendered."""
    if message.get("reasoning_content", "").strip():
        return {**message, "reasoning_content": _PROBE}, _PROBE
    answer = _text(message).partition(CLOSE)[2]
    return {**message, "content": f"{OPEN}{_PROBE}{CLOSE}{answer}"}, _PROBE


def with_reasoning(message: Message, opening: str, answer: str | None, body: str) -> str | None:
    """What the model wrote after a prompt, with its reasoning.

    Args:
        message: a turn with reasoning that its template left out.
        opening: the header that asks for an answer, with which the prompt ends.
        answer: what the template shows after the prompt; None if the finished turn does not begin with it.
        body: the turn as the template shows it, without any header.

    Returns:
        None if nothing shows where the reasoning belongs.
    """
    opened = _OPENED.search(opening)
    if answer is None:
        return _before(message, str(opened.group(1)), body) if opened else None
    if answer.startswith(OPEN + CLOSE):
        return OPEN + _reasoning(message) + answer.removeprefix(OPEN)
    if opened and answer.startswith(CLOSE):
        return _reasoning(message) + answer
    return None


def _text(message: Message) -> str:
    """The content in which reasoning may be written out; empty for one with images."""
    content = message["content"]
    return content if isinstance(content, str) else ""


def _reasoning(message: Message) -> str:
    return str(lifted(message).get("reasoning_content", ""))


def _before(message: Message, space: str, body: str) -> str | None:
    """Reasoning before an answer, after a prompt that opened it with ``<think>`` and ``space``."""
    if message.get("reasoning_content", "").strip():
        # Models whose prompt breaks the line after the tag do so before and after the closing one too.
        closing = f"\n{CLOSE}\n\n" if "\n" in space else CLOSE
        return str(message["reasoning_content"]).strip("\n" if space else "") + closing + body
    content = _text(message)
    for found in re.finditer(CLOSE, content):
        answer = content[found.end() :]
        if body.lstrip().startswith(answer.strip()):
            gap = answer[: len(answer) - len(answer.lstrip())]
            thought = str(content[: found.start()]).lstrip().removeprefix(OPEN).removeprefix(space)
            # Templates keep all of the space before the answer, the end of it, or none.
            lost = next(end for end in range(len(gap) + 1) if body.startswith(gap[end:]))
            return thought + CLOSE + gap[:lost] + body
    return None
