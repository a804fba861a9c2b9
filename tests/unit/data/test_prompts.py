"""What comes before each answer, of conversations and of rows tokenised before."""

import numpy as np
import pytest
from chat_templates import CHATML, KIMI_K2, LLAMA3, assistant, call, make_tokenizer, system, tool, user

from sglang_hs_capture.data.prompts import Prompt, iter_prompts
from sglang_hs_capture.data.records import Conversation, InputProblem, Sample
from sglang_hs_capture.data.template import ChatTemplate


def prompts(record, template=None, *, last_only=False, vocab_size=None) -> list[Prompt | InputProblem]:
    return list(iter_prompts([record], lambda source: template, last_only=last_only, vocab_size=vocab_size))


def sample(mask: list[int]) -> Sample:
    return Sample("s", "f:1", np.arange(10, 10 + len(mask)), np.array(mask, dtype=np.uint8))


@pytest.mark.parametrize(
    ("mask", "heads"),
    [
        ([0, 0, 1, 1], {"s": 2}),
        ([0, 1, 1, 0, 0, 1, 0], {"s#turn-1": 1, "s#turn-2": 5}),
        ([1, 1, 1], {"s": 3}),
        ([0, 0, 0], {"s": 3}),
    ],
)
def test_rows_tokenised_before(mask, heads):
    found = prompts(sample(mask))
    assert {prompt.id: len(prompt.input_ids) for prompt in found} == heads
    for prompt in found:
        assert prompt.input_ids.tolist() == list(range(10, 10 + len(prompt.input_ids)))


def test_only_the_last_answer_of_a_row():
    (found,) = prompts(sample([0, 1, 0, 1, 0]), last_only=True)
    assert (found.id, len(found.input_ids)) == ("s", 3)


def test_a_row_whose_first_token_is_answered():
    (problem,) = prompts(sample([1, 0, 1]))
    assert "no prompt stands before it" in problem.reason


def test_a_token_outside_the_vocabulary():
    (problem,) = prompts(sample([0, 0, 1]), vocab_size=11)
    assert "token id 11 at position 1" in problem.reason


@pytest.mark.parametrize("source", [CHATML, LLAMA3, KIMI_K2])
def test_each_turn_is_asked_for_as_a_server_would(source):
    template = ChatTemplate(make_tokenizer(source))
    messages = [
        system("Be kind."),
        user("One?"),
        assistant("1"),
        assistant("and one"),
        user("Two?"),
        assistant("2"),
        user("Three?"),
    ]
    found = prompts(Conversation("c", "f:1", messages), template)
    for prompt, end in zip(found, (2, 5, 7), strict=True):
        text = template.tokenizer.apply_chat_template(messages[:end], tokenize=False, add_generation_prompt=True)
        assert prompt.input_ids.tolist() == template.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert prompt.stop_ids == template.stop_ids
    assert [prompt.id for prompt in found] == ["c#turn-1", "c#turn-2", "c#turn-3"]
    (last,) = prompts(Conversation("c", "f:1", messages), template, last_only=True)
    assert (last.id, last.input_ids.tolist()) == ("c", found[-1].input_ids.tolist())


def test_results_of_tools_are_answered():
    template = ChatTemplate(make_tokenizer(KIMI_K2))
    asked = call("functions.add:0", "add", {"a": 1})
    messages = [user("1 + 1?"), assistant("", tool_calls=[asked]), tool("functions.add:0", "2"), assistant("2")]
    found = prompts(Conversation("c", "f:1", messages), template)
    assert [prompt.id for prompt in found] == ["c#turn-1", "c#turn-2"]
    assert "functions.add:0" in template.decode(found[1].input_ids)


def test_nobody_speaks_before_the_assistant():
    template = ChatTemplate(make_tokenizer(CHATML))
    (problem,) = prompts(Conversation("c", "f:1", [assistant("Hello.")]), template)
    assert "nothing to answer" in problem.reason


def test_a_row_with_the_id_of_an_earlier_one_is_a_problem_however_many_turns_each_has():
    template = ChatTemplate(make_tokenizer(CHATML))
    one, more = [user("One?"), assistant("1")], [user("Two?"), assistant("2"), user("Three?"), assistant("3")]
    records = [Conversation("c", f"f:{n}", messages) for n, messages in enumerate([one + more, more, one], start=1)]
    found = list(iter_prompts(records, lambda source: template, last_only=False, vocab_size=None))
    assert [item.id for item in found[:3]] == ["c#turn-1", "c#turn-2", "c#turn-3"]
    assert [str(item) for item in found[3:]] == [f"f:{n}: an earlier line has the same id, 'c'" for n in (2, 3)]
