"""OpenAI and ShareGPT messages to the form that chat templates take."""

import json
import re
from collections.abc import Sequence
from typing import Any

from sglang_hs_capture.data.media import IMAGE_TYPES, image_part
from sglang_hs_capture.data.records import BadRow, Message
from sglang_hs_capture.text import shown

ROLES = ("system", "developer", "user", "assistant", "tool")

# By what other tools leave a turn of the assistant out of the loss. All of them are trained on here, so a row that asks
# for something else must not pass.
_SHARE_KEYS = ("weight", "train", "loss")

_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


def parse_messages(raw: Any, key: str = "messages") -> list[Message]:
    """Check a list of OpenAI messages; text parts are joined, absent content of a tool call becomes the empty string.

    A content with images stays a list of parts, of the types ``text`` and ``image``, see ``data/media.py``.

    Raises:
        BadRow: naming the message and what is wrong with it.
    """
    return [_parse_message(item, f"{key}[{index}]") for index, item in enumerate(_message_list(raw, key))]


def parse_sharegpt(raw: Any, system: Any = None) -> list[Message]:
    """Turn ShareGPT turns (``from`` and ``value``) into OpenAI messages.

    Turns that already have ``role`` and ``content`` are taken as they are. A ``function_call`` turn becomes an
    assistant message with tool calls, numbered as Kimi-K2 expects (``functions.NAME:N``), and the tool results that
    follow refer to them in order. ``system`` is the row's own system prompt, which goes first.

    Raises:
        BadRow: naming the turn and what is wrong with it.
    """
    turns = _message_list(raw, "conversations")
    if all(isinstance(turn, dict) and "role" in turn for turn in turns):
        messages = parse_messages(turns, "conversations")
    else:
        messages = _parse_turns(turns)
    return _with_system(system, messages)


def parse_prompt(prompt: Any, answer: Any, answer_key: str, system: Any = None) -> list[Message]:
    """Turn a prompt and the answer to it into OpenAI messages.

    Each is a text or, as TRL has them, a list of messages. ``system`` is the row's own system prompt, which goes first.

    Raises:
        BadRow: one of them is neither, or a message in them is wrong.
    """
    asked = _text_or_messages(prompt, "prompt", "user")
    return _with_system(system, [*asked, *_text_or_messages(answer, answer_key, "assistant")])


def with_names_in_ids(messages: Sequence[Message]) -> list[Message]:
    """The same messages with Kimi-K2's ids of tool calls, ``functions.NAME:N`` with N counted over the conversation.

    Kimi's templates show a call's id and not its function's name, so any other id would lose the name. An id of this
    form that has the name is kept. Tool results follow their calls; one without an id is the next unanswered call's.
    """
    renamed: dict[str, str] = {}
    unanswered: list[str] = []
    calls_made = 0
    result = []
    for message in messages:
        changed = dict(message)
        if "tool_calls" in message:
            changed["tool_calls"] = calls = [
                _with_name_in_id(call, number) for number, call in enumerate(message["tool_calls"], start=calls_made)
            ]
            calls_made += len(calls)
            unanswered.extend(call["id"] for call in calls)
            renamed.update(
                (old.get("id", ""), new["id"]) for old, new in zip(message["tool_calls"], calls, strict=True)
            )
        elif message["role"] == "tool":
            old_id = message.get("tool_call_id") or ""
            new_id = renamed.get(old_id, old_id) if old_id else next(iter(unanswered), "")
            if new_id in unanswered:
                unanswered.remove(new_id)
            changed["tool_call_id"] = new_id
        result.append(changed)
    return result


def _with_name_in_id(call: dict[str, Any], number: int) -> dict[str, Any]:
    name = call["function"]["name"]
    # Any other id may hold the name by chance, as call_cat7 does, or in a form that no model was taught to write.
    named = re.fullmatch(rf"(functions\.)?{re.escape(name)}:\d+", call.get("id", ""))
    return call if named else {**call, "id": f"functions.{name}:{number}"}


def parse_tools(raw: Any) -> list[dict[str, Any]] | None:
    """Tool declarations in OpenAI's form, from a list or its JSON text; None where there are none.

    Raises:
        BadRow: it is neither.
    """
    if isinstance(raw, str) and raw.strip():
        raw = _json(raw, "tools")
    if not raw:
        return None
    if not isinstance(raw, list) or not all(isinstance(tool, dict) for tool in raw):
        raise BadRow(f"tools: expected a list of objects; got {shown(raw)}")
    return [
        tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool} for tool in raw
    ]


def _with_system(system: Any, messages: list[Message]) -> list[Message]:
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise BadRow(f"system: expected a string; got {type(system).__name__}")
    return [{"role": "system", "content": system}, *messages]


def _text_or_messages(raw: Any, key: str, role: str) -> list[Message]:
    if isinstance(raw, str):
        return [{"role": role, "content": raw}]
    if isinstance(raw, list):
        return parse_messages(raw, key)
    raise BadRow(f"{key}: expected a text or a list of messages; got {type(raw).__name__}")


def _message_list(raw: Any, key: str) -> list[Any]:
    if not isinstance(raw, list):
        raise BadRow(f"{key}: expected a list of messages; got {type(raw).__name__}")
    if not raw:
        raise BadRow(f"{key}: the conversation is empty")
    return raw


def _parse_message(raw: Any, where: str) -> Message:
    if not isinstance(raw, dict):
        raise BadRow(f"{where}: expected an object with role and content; got {type(raw).__name__}")
    role = raw.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(f"{where}: unknown role {shown(role)}; expected one of {', '.join(ROLES)}")
    message = {key: value for key, value in raw.items() if value is not None}
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = _tool_calls(calls, role, where)
    reasoning = message.pop("reasoning", None)
    if reasoning is not None:
        message.setdefault("reasoning_content", reasoning)
    if role == "assistant":
        _check_share(message, where)
    if message.get("function_call"):
        raise BadRow(
            f"{where}: function_call: expected the call in tool_calls, a list; got {shown(raw['function_call'])}"
        )
    for key in ("reasoning_content", "tool_call_id", "name"):
        if not isinstance(message.get(key, ""), str):
            raise BadRow(f"{where}: {key}: expected a string; got {type(message[key]).__name__}")
    if "content" in message:
        message["content"] = _content(message["content"], where)
    elif calls:
        message["content"] = ""
    else:
        raise BadRow(f"{where}: content is missing or null; only an assistant message with tool_calls may have none")
    return message


def _check_share(message: dict[str, Any], where: str) -> None:
    """Refuse a turn of the assistant that is to have less of the loss than the others, or none."""
    for key in _SHARE_KEYS:
        if (share := message.get(key)) is not None and share != 1:
            raise BadRow(
                f"{where}: {key}: expected 1 or true, as each of the assistant's turns is trained on; got "
                f"{shown(share)}; remove it, with --loss-on last if only the last turn is wanted, or give the row as "
                "input_ids and loss_mask"
            )


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRow(f"{where}: content: expected a string or a list of text parts; got {type(content).__name__}")
    parts = [_part(part, f"{where}: content[{index}]") for index, part in enumerate(content)]
    if all(isinstance(part, str) for part in parts):
        return "".join(part for part in parts if isinstance(part, str))
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _part(part: Any, where: str) -> str | dict[str, Any]:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise BadRow(f"{where}: expected a text part; got {shown(part)}")
    if kind in IMAGE_TYPES:
        return image_part(part, where)
    if kind != "text":
        raise BadRow(f"{where}: parts of type {shown(kind)} are not supported, only text and images")
    if not isinstance(part.get("text"), str):
        raise BadRow(f"{where}: text: expected a string; got {type(part.get('text')).__name__}")
    return str(part["text"])


def _tool_calls(raw: Any, role: str, where: str) -> list[dict[str, Any]]:
    if role != "assistant":
        raise BadRow(f"{where}: tool_calls: only an assistant message may have them; the role is {role}")
    if not isinstance(raw, list):
        raise BadRow(f"{where}: tool_calls: expected a list; got {type(raw).__name__}")
    return [_tool_call(item, f"{where}: tool_calls[{index}]") for index, item in enumerate(raw)]


def _tool_call(raw: Any, where: str) -> dict[str, Any]:
    function = raw.get("function", raw) if isinstance(raw, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow(f"{where}: expected a function with a name and arguments; got {shown(raw)}")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, str | dict):
        raise BadRow(f"{where}: arguments: expected an object or its JSON text; got {type(arguments).__name__}")
    call_id = {"id": raw["id"]} if isinstance(raw.get("id"), str) else {}
    return {**call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _parse_turns(turns: Sequence[Any]) -> list[Message]:
    messages: list[Message] = []
    open_calls: list[str] = []
    calls_made = 0
    for index, turn in enumerate(turns):
        speaker, value = _turn(turn, f"conversations[{index}]")
        message: Message = {"role": _SHAREGPT_ROLES[speaker], "content": value}
        if speaker == "function_call":
            calls = _function_calls(value, f"conversations[{index}]", calls_made)
            calls_made += len(calls)
            open_calls.extend(call["id"] for call in calls)
            message = {"role": "assistant", "content": "", "tool_calls": calls}
        elif message["role"] == "tool" and open_calls:
            message["tool_call_id"] = open_calls.pop(0)
        messages.append(message)
    return messages


def _turn(turn: Any, where: str) -> tuple[str, str]:
    if not isinstance(turn, dict):
        raise BadRow(f"{where}: expected an object with from and value; got {type(turn).__name__}")
    speaker, value = turn.get("from"), turn.get("value")
    if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
        raise BadRow(f"{where}: unknown role {shown(speaker)}; expected one of {', '.join(_SHAREGPT_ROLES)}")
    if not isinstance(value, str):
        raise BadRow(f"{where}: value: expected a string; got {type(value).__name__}")
    if _SHAREGPT_ROLES[speaker] == "assistant":
        _check_share(turn, where)
    return speaker, value


def _function_calls(value: str, where: str, first: int) -> list[dict[str, Any]]:
    parsed = _json(value, f"{where}: value")
    calls = [_tool_call(item, f"{where}: value") for item in (parsed if isinstance(parsed, list) else [parsed])]
    if not calls:
        raise BadRow(f"{where}: value: expected at least one function call; got an empty list")
    return [
        {**call, "id": f"functions.{call['function']['name']}:{number}"}
        for number, call in enumerate(calls, start=first)
    ]


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadRow(f"{where}: expected JSON; got {shown(text)} ({error})") from None
