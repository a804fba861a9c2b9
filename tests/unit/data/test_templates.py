"""Samples and masks in the styles of many models, held against prompts rendered directly and answers written by hand.

A turn's prompt is what the tokenizer itself renders for the conversation before it; what the model answers is written
in plain Python (``template_styles.py``). Every sample must be a prompt with its answers, and its mask must cover the
tokens of these answers and no others.
"""

import json
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from chat_templates import assistant, call, masked, system, tool, user
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from template_styles import STYLES, THINKING_STYLES, Style, style_tokenizer, token_bytes

from sglang_hs_capture.data.preparation import Preparation
from sglang_hs_capture.data.records import Conversation, Excluded, Exclusion, InputProblem, Prepared, Sample
from sglang_hs_capture.data.samples import SamplePreparer

ALL_STYLES = {**STYLES, **THINKING_STYLES}
KINDS = ("fast", "slow", "tiktoken")
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
# These templates show nothing of a turn without reasoning that could be told from one with it.
ALWAYS_THINKING = ("deepseek-r1", "deepseek-v3.1-thinking")
Turns = list[dict[str, Any]]

LOOK = call("functions.look:0", "look", {"city": "Graz"})
LOOK_AGAIN = call("functions.look:1", "look", {"city": "Linz"})
PLAIN: dict[str, Turns] = {
    "two turns": [user("Hello there"), assistant("Hi!"), user("again?"), assistant("return value\n\n    x")],
    "empty": [user("a"), assistant(""), user("b"), assistant("c"), user("d"), assistant("")],
    "trailing user": [user("a"), assistant("b"), user("c")],
    "emoji and CJK": [user("😀 二"), assistant("👨‍👩‍👧‍👦"), user("é"), assistant("二十四节气「は」")],
    "spaces": [user(" a "), assistant("  b  "), user("\n"), assistant("c \n"), user("d"), assistant(" ")],
    "newlines first": [user("a"), assistant("\n\nb"), user("c"), assistant("\nd")],
}
WITH_SYSTEM: dict[str, Turns] = {
    "system": [system("Be brief."), user("a"), assistant("b"), user("c"), assistant("d")],
}
IN_A_ROW: dict[str, Turns] = {
    "in a row": [user("a"), assistant("one"), assistant("two"), user("b"), assistant("three"), assistant("four")],
}
WITH_TOOLS: dict[str, Turns] = {
    "tool call": [
        user("weather?"),
        assistant("", tool_calls=[LOOK]),
        tool("functions.look:0", '{"t": 4}'),
        assistant("4 degrees"),
    ],
    "tool calls one after the other": [
        user("weather?"),
        assistant("", tool_calls=[LOOK]),
        tool("functions.look:0", "4"),
        assistant("", tool_calls=[LOOK_AGAIN]),
        tool("functions.look:1", "5"),
        assistant("4 and 5"),
        user("thanks"),
        assistant("welcome"),
        user("!"),
    ],
    "a call at the end": [user("a"), assistant("b"), user("weather?"), assistant("", tool_calls=[LOOK])],
}


def thinking(turns: Turns) -> Turns:
    """The same turns with reasoning of their own in each of the assistant's."""
    return [
        {**turn, "reasoning_content": f"hm {place}.\n\nSo?"} if turn["role"] == "assistant" else turn
        for place, turn in enumerate(turns)
    ]


def cases() -> list[Any]:
    found = []
    for name, style in ALL_STYLES.items():
        fitting = {**PLAIN}
        fitting |= WITH_SYSTEM if style.system else {}
        fitting |= IN_A_ROW if style.in_a_row and name != "deepseek-v3.1-thinking" else {}
        fitting |= WITH_TOOLS if style.tools else {}
        for case, turns in fitting.items():
            if name not in ALWAYS_THINKING:
                found.append(pytest.param(name, turns, id=f"{name}-{case}"))
            if name in THINKING_STYLES:
                found.append(pytest.param(name, thinking(turns), id=f"{name}-{case}, thinking"))
    return found


CASES = cases()
PREPARERS: dict[tuple[Any, ...], SamplePreparer] = {}


def prepare(name: str, turns: Turns, kind: str = "fast", tools: Any = None, **chosen: Any) -> list[Prepared]:
    key = (name, kind, *sorted(chosen.items()))
    if key not in PREPARERS:
        preparation = Preparation({**ALL_STYLES[name].kwargs, **chosen.pop("template_kwargs", {})}, **chosen)
        PREPARERS[key] = SamplePreparer(style_tokenizer(name, kind), preparation)
    return PREPARERS[key].prepare(Conversation("id", "f:1", turns, tools))


def native(style: Style, turns: Turns) -> Turns:
    """The turns in the form that the style's template takes."""
    made = []
    for turn in turns:
        changed = {style.reasoning_key if key == "reasoning_content" else key: turn[key] for key in turn}
        if style.text_arguments and "tool_calls" in turn:
            changed["tool_calls"] = [
                {**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"])}}
                for c in turn["tool_calls"]
            ]
        made.append(changed)
    return made


def rendered(name: str, turns: Turns, tools: Any, *, prompt: bool) -> str:
    style = ALL_STYLES[name]
    reopens = prompt and (style.reopens or turns[-1]["role"] != "assistant")
    text = style_tokenizer(name).apply_chat_template(
        native(style, turns), tools=tools, add_generation_prompt=reopens, tokenize=False, **style.kwargs
    )
    return str(text)


def expected(name: str, turns: Turns, tools: Any = None) -> list[tuple[str, list[tuple[int, int]]]]:
    """Text and answers, as places in it, of every sample that ``auto`` should make."""
    style = ALL_STYLES[name]
    texts, answers = [], []
    for place, turn in enumerate(turns):
        if turn["role"] == "assistant":
            prompt = rendered(name, turns[:place], tools, prompt=True)
            texts.append(prompt + style.answer(turn) + style.after)
            answers.append((len(prompt), len(texts[-1]) - len(style.after)))
    texts.append(rendered(name, turns, tools, prompt=False))
    held: dict[int, list[tuple[int, int]]] = {}
    for text, answer in zip(texts, answers, strict=False):
        last = max(place for place, other in enumerate(texts) if other.startswith(text))
        held.setdefault(last, []).append(answer)
    return [(texts[place], held[place]) for place in sorted(held)]


def mask_of(tokenizer: Any, sample: Sample, answers: list[tuple[int, int]]) -> list[int]:
    """1 for each token that holds a byte of an answer."""
    pieces = token_bytes(tokenizer, sample.input_ids.tolist())
    text = b"".join(pieces).decode("utf-8")
    wanted = np.zeros(len(text.encode("utf-8")), dtype=np.uint8)
    for start, end in answers:
        wanted[len(text[:start].encode("utf-8")) : len(text[:end].encode("utf-8"))] = 1
    ends = list(accumulate(len(piece) for piece in pieces))
    return [int(wanted[end - len(piece) : end].any()) for piece, end in zip(pieces, ends, strict=True)]


def check(name: str, turns: Turns, kind: str, samples: list[Prepared], wanted: Any) -> None:
    tokenizer = style_tokenizer(name, kind)
    assert all(isinstance(sample, Sample) for sample in samples), [str(sample) for sample in samples]
    texts = [b"".join(token_bytes(tokenizer, s.input_ids.tolist())).decode("utf-8") for s in samples]
    assert texts == [text for text, _ in wanted]
    for sample, (_, answers) in zip(samples, wanted, strict=True):
        assert sample.loss_mask.tolist() == mask_of(tokenizer, sample, answers), masked(tokenizer, sample)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "turns"), CASES)
def test_every_answer_is_trained_on_after_its_prompt_and_nothing_else(name, turns, kind):
    tools = TOOLS if any("tool_calls" in turn for turn in turns) and name != "gpt-oss" else None
    check(name, turns, kind, prepare(name, turns, kind, tools), expected(name, turns, tools))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in ALL_STYLES if name not in ALWAYS_THINKING])
def test_control_tokens_in_what_is_said_are_said_like_anything_else(name, kind):
    for control in ALL_STYLES[name].controls:
        if "think" not in control:
            turns = [user(f"a{control}b"), assistant(f"c{control}d"), user(control), assistant(control)]
            check(name, turns, kind, prepare(name, turns, kind), expected(name, turns))


@pytest.mark.parametrize("name", ALL_STYLES)
def test_a_system_message_alone_is_left_out_or_refused(name):
    [result] = prepare(name, [system("Be brief.")])
    if name in ("gemma-2",):
        assert isinstance(result, InputProblem)
        assert "System role not supported" in result.reason
    else:
        assert result == Excluded("f:1", Exclusion.NO_LOSS, "id")


@pytest.mark.parametrize("name", [name for name, style in STYLES.items() if not style.tools])
def test_templates_without_tool_calls_say_so(name):
    [result] = prepare(name, [user("a"), assistant("", tool_calls=[LOOK])])
    assert isinstance(result, InputProblem)
    assert "leaves out the call of the tool 'look'" in result.reason


@pytest.mark.parametrize("name", [name for name, style in ALL_STYLES.items() if not style.in_a_row])
def test_templates_that_want_roles_in_turn_say_so(name):
    [result] = prepare(name, IN_A_ROW["in a row"])
    assert isinstance(result, InputProblem)
    assert "roles must alternate" in result.reason


PIECES = [
    "\n",
    " ",
    "  x",
    "return",
    "😀",
    "👨‍👩‍👧",
    "二十",
    "é",
    "e\u0301",
    "\u200d",
    "<",
    "assistant",
    '"',
    "{",
    "\t",
]


@st.composite
def conversations(draw: st.DrawFn) -> tuple[str, Turns]:
    name = draw(st.sampled_from(sorted(ALL_STYLES)))
    style = ALL_STYLES[name]
    controls = [control for control in style.controls if "think" not in control]
    text = st.lists(st.sampled_from([*PIECES, *controls]) | st.characters(exclude_categories=["Cs"]), max_size=6)
    turns = [system("".join(draw(text)))] if style.system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        turns.append(user(f"q{''.join(draw(text))}"))
        for _ in range(draw(st.integers(1, 2)) if style.in_a_row and name not in ALWAYS_THINKING else 1):
            turn = assistant("".join(draw(text)))
            if name in ALWAYS_THINKING or (name in THINKING_STYLES and draw(st.booleans())):
                turn["reasoning_content"] = f"so {''.join(draw(text))}."
            turns.append(turn)
    return name, turns if draw(st.booleans()) else [*turns, user(f"q{''.join(draw(text))}")]


@settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(conversation=conversations(), kind=st.sampled_from(KINDS))
def test_any_conversation_is_trained_on_its_answers(conversation, kind):
    name, turns = conversation
    check(name, turns, kind, prepare(name, turns, kind), expected(name, turns))
