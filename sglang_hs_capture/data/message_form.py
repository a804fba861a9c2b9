"""Puts messages into the form that one chat template takes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_hs_capture.data.messages import with_names_in_ids
from sglang_hs_capture.data.reasoning import lifted
from sglang_hs_capture.data.records import Message

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class MessageForm:
    """The form that a template takes.

    Attributes:
        keep_developer: the template knows the role ``developer``; for others it becomes ``system``.
        names_in_ids: the template shows the ids of tool calls and not their names, so the ids are to hold these.
        reasoning_key: where the template looks for reasoning.
        lift_reasoning: reasoning written out in the content is to be given as reasoning.
        breaks_lines: the template breaks the line around reasoning itself, as what is written out does.
    """

    keep_developer: bool
    names_in_ids: bool = False
    reasoning_key: str = REASONING_KEYS[0]
    lift_reasoning: bool = False
    breaks_lines: bool = False

    def apply(self, messages: Sequence[Message], *, arguments_as_text: bool) -> list[Message]:
        """The messages in this form, with the arguments of tool calls as objects or as JSON text."""
        if self.names_in_ids:
            messages = with_names_in_ids(messages)
        return [self._formed(message, arguments_as_text) for message in messages]

    def _formed(self, message: Message, arguments_as_text: bool) -> Message:
        formed = dict(message)
        if self.lift_reasoning and message["role"] == "assistant":
            formed = dict(lifted(message, trim=self.breaks_lines))
        if message["role"] == "developer" and not self.keep_developer:
            formed["role"] = "system"
        if "tool_calls" in message:
            formed["tool_calls"] = [_formed_call(call, arguments_as_text) for call in message["tool_calls"]]
        if "reasoning_content" in formed:
            formed[self.reasoning_key] = formed.pop("reasoning_content")
        return formed


def _formed_call(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**call["function"], "arguments": arguments}}
