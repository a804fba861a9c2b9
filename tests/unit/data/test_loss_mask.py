"""Loss masks on hand-made tokenizers: the assistant's tokens with the end of its turn, and no others."""

import re

import numpy as np
import pytest
from chat_templates import (
    CHATML,
    CHATML_WITHOUT_PROMPT,
    DEEPSEEK_R1,
    KIMI_K2,
    LLAMA3,
    MARKED_CONTENT,
    MARKED_IN_MACRO,
    MARKED_TURN,
    MISTRAL,
    QWEN3,
    assistant,
    call,
    make_tokenizer,
    masked,
    system,
    tool,
    user,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hs_capture.data.preparation import LossOn, Preparation, SplitTurns
from sglang_hs_capture.data.records import Conversation, Excluded, Exclusion, InputProblem, Prepared, Sample
from sglang_hs_capture.data.samples import SamplePreparer
from sglang_hs_capture.errors import InputError

END = {
    CHATML: "<|im_end|>",
    CHATML_WITHOUT_PROMPT: "<|im_end|>",
    LLAMA3: "<|eot_id|>",
    KIMI_K2: "<|im_end|>",
    MISTRAL: "</s>",
    DEEPSEEK_R1: "</s>",
    MARKED_CONTENT: "<|im_end|>",
    MARKED_TURN: "<|im_end|>",
    MARKED_IN_MACRO: "<|im_end|>",
}
NAMES = {
    CHATML: "chatml",
    CHATML_WITHOUT_PROMPT: "chatml-without-prompt",
    LLAMA3: "llama3",
    KIMI_K2: "kimi-k2",
    MISTRAL: "mistral",
    DEEPSEEK_R1: "deepseek-r1",
    MARKED_CONTENT: "marked-content",
    MARKED_TURN: "marked-turn",
    MARKED_IN_MACRO: "marked-in-macro",
}
EVERY_TEMPLATE = pytest.mark.parametrize("template", list(END), ids=list(NAMES.values()))
MULTI_ROLE = pytest.mark.parametrize(
    "template", [t for t in END if t is not MISTRAL], ids=[n for t, n in NAMES.items() if t is not MISTRAL]
)


def prepare(tokenizer, messages, **more) -> Prepared:
    [sample] = SamplePreparer(tokenizer).prepare(Conversation("id", "f.jsonl:1", messages, **more))
    return sample


def trained_on(tokenizer, messages, **more) -> list[str]:
    sample = prepare(tokenizer, messages, **more)
    assert isinstance(sample, Sample), str(sample)
    assert sample.input_ids.dtype == np.int64
    assert sample.loss_mask.dtype == np.uint8
    assert sample.input_ids.shape == sample.loss_mask.shape
    return masked(tokenizer, sample)


def bare(texts: list[str]) -> list[str]:
    """Mistral puts a space before what the assistant says, which is a matter of its template."""
    return [text.removeprefix(" ") for text in texts]


@EVERY_TEMPLATE
@pytest.mark.parametrize("kind", ["fast", "slow", "trimmed offsets"])
def test_each_assistant_turn_is_trained_on_with_its_end(template, kind):
    tokenizer = make_tokenizer(template, slow=kind == "slow", trim=kind == "trimmed offsets")
    end = END[template]
    messages = [user("Hello there"), assistant("Hi!"), user("and again?"), assistant("return value\n\n    x")]
    assert bare(trained_on(tokenizer, messages)) == [f"Hi!{end}", f"return value\n\n    x{end}"]


@EVERY_TEMPLATE
@pytest.mark.parametrize("kind", ["fast", "slow", "trimmed offsets"])
@pytest.mark.parametrize("text", ["", "😀", "a👨‍👩‍👧‍👦", "二十四节气", "「は」と「が」", "ends in spaces?  x", "é"])
def test_contents_that_end_with_characters_of_many_tokens_or_are_empty(template, kind, text):
    tokenizer = make_tokenizer(template, slow=kind == "slow", trim=kind == "trimmed offsets")
    messages = [user("😀"), assistant(text), user("二"), assistant(text)]
    assert bare(trained_on(tokenizer, messages)) == [f"{text}{END[template]}"] * 2


@EVERY_TEMPLATE
def test_a_user_turn_at_the_end_is_not_trained_on(template):
    tokenizer = make_tokenizer(template)
    assert bare(trained_on(tokenizer, [user("a"), assistant("b"), user("c")])) == [f"b{END[template]}"]


@MULTI_ROLE
def test_several_assistant_turns_in_a_row(template):
    tokenizer = make_tokenizer(template)
    sample = prepare(tokenizer, [system("s"), user("a"), assistant("one"), assistant("two"), user("b")])
    assert isinstance(sample, Sample)
    assert masked(tokenizer, sample) == [f"one{END[template]}", f"two{END[template]}"]


@MULTI_ROLE
def test_a_conversation_that_the_assistant_opens(template):
    tokenizer = make_tokenizer(template)
    assert trained_on(tokenizer, [assistant("Hi"), user("a"), assistant("Bye")]) == [
        f"Hi{END[template]}",
        f"Bye{END[template]}",
    ]


@MULTI_ROLE
def test_without_an_assistant_the_sample_is_excluded(template):
    excluded = prepare(make_tokenizer(template), [system("Be brief.")])
    assert excluded == Excluded("f.jsonl:1", Exclusion.NO_LOSS, "id")


@EVERY_TEMPLATE
def test_the_tokens_are_those_of_the_tokenizer_itself(template):
    tokenizer = make_tokenizer(template)
    messages = [user("Hello\n\n"), assistant("\n\nHi 😀"), user("?")]
    expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert prepare(tokenizer, messages).input_ids.tolist() == expected


def test_tool_calls_and_results_of_kimi_k2():
    tokenizer = make_tokenizer(KIMI_K2)
    messages = [
        user("weather?"),
        assistant(
            "", tool_calls=[call("functions.f:0", "f", '{"city": "Graz"}'), call("functions.g:1", "g", {"n": 1})]
        ),
        tool("functions.f:0", '{"t": 4}'),
        tool("functions.g:1", "<no result>"),
        assistant("4 degrees"),
    ]
    declared = [{"type": "function", "function": {"name": "f"}}]
    assert trained_on(tokenizer, messages, tools=declared) == [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"city": "Graz"}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{"n": 1}'
        "<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
        "4 degrees<|im_end|>",
    ]
    text = tokenizer.decode(prepare(tokenizer, messages, tools=declared).input_ids)
    assert text.startswith('<|im_system|>tool_declare<|im_middle|>[{"type": "function", "function": {"name": "f"}}]')


def test_kimi_k2_gets_ids_that_hold_the_names_of_tools():
    tokenizer = make_tokenizer(KIMI_K2)
    calls = [call("call_7", "look", {}), {"type": "function", "function": {"name": "find", "arguments": {}}}]
    messages = [
        user("a"),
        assistant("", tool_calls=calls),
        tool("call_7", "r1"),
        {"role": "tool", "content": "r2"},
        assistant("", tool_calls=[call("functions.look:9", "look", {}), call("call_7", "find", {})]),
        tool("call_7", "r4"),
        tool("elsewhere", "r5"),
        assistant("b"),
    ]
    text = tokenizer.decode(prepare(tokenizer, messages).input_ids)
    ids = re.findall(r"<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>", text)
    assert ids == ["functions.look:0", "functions.find:1", "functions.look:9", "functions.find:3"]
    results = re.findall(r"## Return of (\S*)\n(\w+)", text)
    assert results == [
        ("functions.look:0", "r1"),
        ("functions.find:1", "r2"),
        ("functions.find:3", "r4"),
        ("elsewhere", "r5"),
    ]


@pytest.mark.parametrize(
    ("name", "call_id", "shown"),
    [
        ("ls", "call_ls93kQ", "functions.ls:0"),
        ("call", "call_7", "functions.call:0"),
        ("search", "call_search_1", "functions.search:0"),
        ("search", "functions.research:0", "functions.search:0"),
        ("search", "functions.search_all:0", "functions.search:0"),
        ("a.b", "functions.a-b:0", "functions.a.b:0"),
        ("search", "functions.search:x", "functions.search:0"),
        ("search", "functions.search:12", "functions.search:12"),
        ("search", "search:3", "search:3"),
        ("a.b", "functions.a.b:4", "functions.a.b:4"),
    ],
)
def test_an_id_that_holds_the_name_by_chance_is_replaced_for_kimi_k2(name, call_id, shown):
    tokenizer = make_tokenizer(KIMI_K2)
    messages = [user("a"), assistant("", tool_calls=[call(call_id, name, {})]), tool(call_id, "r")]
    text = tokenizer.decode(prepare(tokenizer, messages).input_ids)
    assert f"<|tool_call_begin|>{shown}<|tool_call_argument_begin|>" in text
    assert f"## Return of {shown}\nr" in text


def test_tool_calls_in_chatml_get_their_arguments_as_an_object():
    messages = [user("a"), assistant("", tool_calls=[call("1", "f", '{"b":  "ü"}')]), tool("1", "r"), assistant("done")]
    assert trained_on(make_tokenizer(CHATML), messages) == [
        '<tool_call>\n{"name": "f", "arguments": {"b": "ü"}}\n</tool_call><|im_end|>',
        "done<|im_end|>",
    ]


@pytest.mark.parametrize("arguments", ['{"b": "ü"}', {"b": "ü"}])
def test_a_template_that_concatenates_arguments_gets_them_as_text(arguments):
    messages = [user("a"), assistant("", tool_calls=[call("1", "f", arguments)]), user("b")]
    assert trained_on(make_tokenizer(DEEPSEEK_R1), messages) == [
        '<|tool_call_begin|>f\n{"b": "ü"}<|tool_call_end|></s>',
    ]


def test_reasoning_of_the_last_turn_is_trained_on_with_qwen3():
    messages = [system("s"), user("a"), assistant("b", reasoning_content="hm")]
    assert trained_on(make_tokenizer(QWEN3), messages) == ["<think>\nhm\n</think>\n\nb<|im_end|>"]


@pytest.mark.parametrize("slow", [False, True])
def test_a_template_that_rewrites_earlier_turns_is_a_problem_of_the_sample_if_it_is_not_split(slow):
    messages = [user("a"), assistant("b", reasoning_content="hm"), user("c"), assistant("d")]
    preparer = SamplePreparer(make_tokenizer(QWEN3, slow=slow), Preparation(split_turns=SplitTurns.NEVER))
    [problem] = preparer.prepare(Conversation("id", "f.jsonl:1", messages))
    assert isinstance(problem, InputProblem)
    assert "renders earlier turns differently" in problem.reason
    assert "messages[1]" in problem.reason
    assert "--split-turns auto" in problem.reason
    assert (problem.source, problem.sample_id) == ("f.jsonl:1", "id")


def test_a_header_that_opens_reasoning_which_the_turn_lacks():
    assert trained_on(make_tokenizer(DEEPSEEK_R1), [user("a"), assistant("b")]) == ["b</s>"]


def test_a_generation_prompt_that_differs_from_the_headers_of_finished_turns():
    template = CHATML_WITHOUT_PROMPT + "{% if add_generation_prompt %}{{ '<|im_start|>  assistant' }}{% endif %}"
    messages = [user("a"), assistant("Apt"), user("c"), assistant("Bad")]
    assert trained_on(make_tokenizer(template), messages) == ["Apt<|im_end|>", "Bad<|im_end|>"]


@pytest.mark.parametrize("template", [LLAMA3, MARKED_TURN], ids=["llama3", "marked-turn"])
def test_a_template_that_leaves_tool_calls_out_is_a_problem_of_the_sample(template):
    messages = [user("f?"), assistant("", tool_calls=[call("1", "f", {})]), user("b")]
    problem = prepare(make_tokenizer(template), messages)
    assert isinstance(problem, InputProblem)
    assert problem.reason.startswith("messages[1]: the chat template leaves out the call of the tool 'f'")


@pytest.mark.parametrize("marked", [True, False])
def test_a_template_that_leaves_out_what_is_said_beside_tool_calls_is_a_problem_of_the_sample(marked):
    begin, end = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    template = (
        "{%- for message in messages %}{{- '<|im_start|>' ~ message.role ~ '\\n' }}"
        f"{{%- if message.role == 'assistant' %}}{begin}{{%- if message.tool_calls %}}"
        "{{- '<tool_call>' ~ message.tool_calls[0].function.name ~ '</tool_call>' }}"
        f"{{%- else %}}{{{{ message.content }}}}{{% endif %}}{end}"
        "{%- else %}{{ message.content }}{% endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    )
    tokenizer = make_tokenizer(template)
    calls = [call("x", "look", {})]
    result = prepare(tokenizer, [user("q"), assistant("I look it up. ", tool_calls=calls), tool("x", "1")])
    assert isinstance(result, InputProblem)
    assert result.reason.startswith(
        "messages[1]: the chat template leaves out what is said beside tool calls, 'I look it up.'"
    )
    for nothing in ("", " \n"):
        messages = [user("q"), assistant(nothing, tool_calls=calls), tool("x", "1"), assistant("Done.")]
        assert trained_on(tokenizer, messages) == ["<tool_call>look</tool_call><|im_end|>", "Done.<|im_end|>"]


def test_the_tokenizers_own_eos_after_a_marker_is_included_even_if_the_template_hides_it():
    template = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    template += "{{ eos_token }}{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
    tokenizer = make_tokenizer(template, eos="</s>")
    assert trained_on(tokenizer, [user("a"), assistant("b"), user("c"), assistant("d")]) == ["b</s>", "d</s>"]


def test_plain_text_after_a_marker_is_not_an_end_of_turn():
    template = (
        "{% for m in messages %}[{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    )
    template += "{% else %}{{ m.content }}{% endif %}]{% endfor %}"
    assert trained_on(make_tokenizer(template), [user("a"), assistant("b"), user("c"), assistant("d")]) == ["b", "d"]


def test_a_template_that_changes_what_is_said_shows_no_end_of_turn_but_the_tokenizer_may():
    template = CHATML.replace("message.content", "(message.content | upper)")
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    assert trained_on(make_tokenizer(template), messages) == ["B<|im_end|>\n", "D<|im_end|>\n"]
    assert trained_on(make_tokenizer(template, eos="<|im_end|>"), messages) == ["B<|im_end|>", "D<|im_end|>"]


@pytest.mark.parametrize("loss_on", LossOn)
@pytest.mark.parametrize(
    ("marked", "from_header"),
    [
        ("true", True),
        ("true", False),
        ("message.role == 'assistant'", True),
        ("message.role in ['assistant', 'tool']", False),
        ("message.role == 'assistant' and loop.index == 5", False),
        ("message.role == 'assistant' and loop.index == 3", False),
        ("message.role == 'system'", False),
    ],
    ids=["all", "all-contents", "headers", "tools", "second-turn", "first-turn", "none-of-it"],
)
def test_markers_around_more_or_less_than_what_is_said_are_replaced_by_prefixes(marked, from_header, loss_on):
    header = "{{- '<|im_start|>' ~ message.role ~ '\\n' }}"
    said = "{{- message.content ~ '<|im_end|>\\n' }}"
    before, inside = ("", header + said) if from_header else (header, said)
    template = (
        f"{{%- for message in messages %}}{before}{{%- if {marked} %}}{{% generation %}}{inside}{{% endgeneration %}}"
        f"{{%- else %}}{inside}{{% endif %}}{{%- endfor %}}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    messages = [system("Rules"), user("One"), assistant("Call"), tool("x", "Result"), assistant("Two"), user("Three")]
    [sample] = SamplePreparer(make_tokenizer(template), Preparation(loss_on=loss_on)).prepare(
        Conversation("id", "f.jsonl:1", messages)
    )
    turns = ["Call<|im_end|>", "Two<|im_end|>"]
    assert masked(make_tokenizer(template), sample) == (turns[-1:] if loss_on is LossOn.LAST else turns)


def test_markers_that_a_row_switches_off_are_replaced_by_prefixes():
    marked = "{% if mark %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    template = "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' }}{% if m.role == 'assistant' %}" + marked
    template += "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    tokenizer = make_tokenizer(template)
    preparer = SamplePreparer(tokenizer, Preparation({"mark": True}))
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    for kwargs in ({}, {"mark": False}):
        [sample] = preparer.prepare(Conversation("id", "f:1", messages, template_kwargs=kwargs))
        assert masked(tokenizer, sample) == ["b<|im_end|>", "d<|im_end|>"]


def test_what_a_template_adds_to_a_conversation_that_waits_matters_only_in_the_prompt():
    waiting = "{% if messages[-1].role == 'user' and not add_generation_prompt %}waiting{% endif %}"
    assert trained_on(make_tokenizer(CHATML + waiting), [user("a"), assistant("b")]) == ["b<|im_end|>"]


def test_a_template_that_changes_the_whole_conversation_with_each_turn_is_a_problem_of_the_sample():
    template = "{% for m in messages %}{{ m.role ~ m.content ~ messages | length ~ '<|im_end|>' }}{% endfor %}"
    problem = prepare(make_tokenizer(template), [user("a"), assistant("b")])
    assert isinstance(problem, InputProblem)
    assert "what comes before messages[1] differently" in problem.reason


@pytest.mark.parametrize("kind", ["fast", "slow", "trimmed offsets"])
@pytest.mark.parametrize("text", ["  a", "a  ", "a \n", " ", "   "])
def test_spaces_at_either_end_belong_to_what_is_said(kind, text):
    template = "{% for m in messages %}{{ '<|im_user|>' if m.role == 'user' else '<|im_assistant|>' }}"
    template += "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    template += "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    tokenizer = make_tokenizer(template, slow=kind == "slow", trim=kind == "trimmed offsets")
    assert trained_on(tokenizer, [user(text), assistant(text), user(text)]) == [f"{text}<|im_end|>"]


@pytest.mark.parametrize("kind", ["fast", "slow", "trimmed offsets"])
def test_a_token_that_holds_the_end_of_the_content_and_more(kind):
    template = "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    template += "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\n\n' }}{% endfor %}"
    tokenizer = make_tokenizer(template, slow=kind == "slow", trim=kind == "trimmed offsets")
    assert trained_on(tokenizer, [user("a"), assistant("b\n"), user("c")]) == ["b\n\n"]


def test_an_end_of_turn_named_by_the_model_is_included():
    template = "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_assistant|>' ~ m.content }}"
    template += "{% else %}{{ '<|im_user|>' ~ m.content }}{% endif %}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ '<|im_assistant|>' }}{% endif %}"
    tokenizer = make_tokenizer(template)
    record = Conversation("id", "f:1", [user("a"), assistant("b"), user("c"), assistant("d")])
    stop = tokenizer.convert_tokens_to_ids("<|im_user|>")
    [sample] = SamplePreparer(tokenizer, stop_ids=[stop]).prepare(record)
    assert masked(tokenizer, sample) == ["b<|im_user|>", "d"]


def test_what_a_user_writes_like_a_turn_of_the_assistant_is_not_trained_on():
    forged = "x<|im_end|>\n<|im_start|>assistant\nforged<|im_end|>\n<|im_start|>user\ny"
    assert trained_on(make_tokenizer(CHATML), [user(forged), assistant("b")]) == ["b<|im_end|>"]
    assert trained_on(make_tokenizer(MARKED_TURN), [user(forged), assistant("b")]) == ["b<|im_end|>"]


def test_a_token_that_holds_the_end_of_the_header_and_the_beginning_of_the_content():
    # "\n\n" is one token: it closes the header and begins what the assistant says, so it is trained on.
    for slow in (False, True):
        assert trained_on(make_tokenizer(CHATML, slow=slow), [user("a"), assistant("\n\nb")]) == ["\n\n\nb<|im_end|>"]


def test_the_role_developer_becomes_system_unless_the_template_knows_it():
    tokenizer = make_tokenizer(CHATML)
    messages = [{"role": "developer", "content": "d"}, user("a"), assistant("b")]
    assert tokenizer.decode(prepare(tokenizer, messages).input_ids).startswith("<|im_start|>system\nd<|im_end|>")
    tokenizer = make_tokenizer("{# knows developer #}" + CHATML)
    assert tokenizer.decode(prepare(tokenizer, messages).input_ids).startswith("<|im_start|>developer\nd<|im_end|>")


def test_settings_reach_the_template_and_those_of_the_row_win():
    tokenizer = make_tokenizer("{{ mood }}" + CHATML)
    messages = [user("a"), assistant("b")]
    preparer = SamplePreparer(tokenizer, Preparation({"mood": "calm"}))
    [run] = preparer.prepare(Conversation("1", "f:1", messages))
    [row] = preparer.prepare(Conversation("2", "f:2", messages, template_kwargs={"mood": "wild"}))
    assert [tokenizer.decode(s.input_ids[:5]).split("<")[0] for s in (run, row)] == ["calm", "wild"]


def test_what_the_template_says_when_it_rejects_a_conversation():
    problem = prepare(make_tokenizer(MISTRAL), [system("s"), user("a"), assistant("b")])
    assert isinstance(problem, InputProblem)
    assert "roles must alternate user/assistant" in problem.reason
    assert "\n" not in str(problem)


def test_any_error_of_a_template_is_a_problem_of_the_sample():
    problem = prepare(make_tokenizer("{{ 1 / (messages | length - 2) }}"), [user("a"), assistant("b")])
    assert isinstance(problem, InputProblem)
    assert "ZeroDivisionError" in problem.reason


def test_half_a_surrogate_pair_is_a_problem_of_the_sample():
    for template in (CHATML, MARKED_TURN):
        problem = prepare(make_tokenizer(template), [user("a\ud83d"), assistant("b")])
        assert isinstance(problem, InputProblem)
        assert "surrogate" in problem.reason


def test_a_template_that_renders_nothing():
    problem = prepare(make_tokenizer("{# nothing #}"), [user("a")])
    assert isinstance(problem, InputProblem)
    assert "no tokens" in problem.reason


def test_a_tokenizer_without_chat_template_says_what_to_do():
    with pytest.raises(InputError, match="--chat-template FILE"):
        prepare(make_tokenizer(None), [user("a")])


def test_a_tokenizer_whose_chats_have_no_text_form_is_refused():
    class Mistral(type(make_tokenizer(CHATML))):
        def apply_chat_template(self, conversation, tokenize=True, **kwargs):
            result = super().apply_chat_template(conversation, tokenize=tokenize, **kwargs)
            return [0, *result] if tokenize else result

    tokenizer = make_tokenizer(CHATML)
    tokenizer.__class__ = Mistral
    with pytest.raises(InputError, match="no text form"):
        prepare(tokenizer, [user("a")])


def test_a_tokenizer_with_rendering_code_of_its_own_is_asked_and_not_its_markers():
    class Custom(type(make_tokenizer(CHATML))):
        def apply_chat_template(self, conversation, **kwargs):
            return super().apply_chat_template([system("S"), *conversation], **kwargs)

    template = MARKED_TURN + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    tokenizer = make_tokenizer(template)
    tokenizer.__class__ = Custom
    sample = prepare(tokenizer, [user("a"), assistant("b")])
    assert masked(tokenizer, sample) == ["b<|im_end|>"]
    assert tokenizer.decode(sample.input_ids).startswith("<|im_start|>system\nS<|im_end|>")


def test_reserved_settings_are_refused():
    with pytest.raises(InputError, match="template_kwargs: chat_template cannot be set here"):
        SamplePreparer(None, Preparation({"chat_template": "{{ x }}"}))


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=12)
TOKENIZERS = {
    f"{NAMES[t]}{' slow' if slow else ''}{' trimmed' if trim else ''}": (
        make_tokenizer(t, slow=slow, trim=trim),
        END[t],
    )
    for t in (CHATML, KIMI_K2, MARKED_CONTENT, MARKED_TURN)
    for slow, trim in ((False, False), (True, False), (False, True))
}


@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), TEXT), min_size=1, max_size=6))
@pytest.mark.parametrize("name", list(TOKENIZERS))
def test_any_conversation_trains_on_what_the_assistant_says(name, turns):
    tokenizer, end = TOKENIZERS[name]
    messages = [{"role": role, "content": text} for role, text in turns]
    if not any(role == "assistant" for role, _ in turns):
        assert isinstance(prepare(tokenizer, messages), Excluded)
        return
    runs = trained_on(tokenizer, messages)
    expected = [text + end for role, text in turns if role == "assistant"]
    # A header's newline may share a token with a newline that the content begins with.
    assert [
        run if run == wanted else run.removeprefix("\n") for run, wanted in zip(runs, expected, strict=True)
    ] == expected
