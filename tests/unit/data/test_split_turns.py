"""Conversations that are split by turn: when, into what, with what ids, and what the model wrote in each."""

import copy
import json
import pickle
from itertools import combinations

import pytest
from chat_templates import CHATML, QWEN3, assistant, call, make_tokenizer, masked, system, tool, user
from template_styles import DEEPSEEK_R1, THINKING_STYLES, style_tokenizer

from sglang_hs_capture.data.preparation import LossOn, Overflow, Preparation, SplitTurns
from sglang_hs_capture.data.records import Conversation, Excluded, Exclusion, InputProblem, Sample
from sglang_hs_capture.data.samples import SamplePreparer, iter_samples

ALWAYS = Preparation(split_turns=SplitTurns.ALWAYS)
NEVER = Preparation(split_turns=SplitTurns.NEVER)
LAST = Preparation(loss_on=LossOn.LAST)
TALK = [user("a"), assistant("b", reasoning_content="hm"), user("c"), assistant("d", reasoning_content="so")]
LOOK = call("functions.look:0", "look", {"city": "Graz"})
HEADER = "<|im_assistant|>assistant<|im_middle|>"
KIMI = "<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>"
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


def prepare(style, messages, preparation=None, sample_id="id", **kwargs):
    preparation = preparation or Preparation(kwargs)
    return SamplePreparer(style_tokenizer(style), preparation).prepare(Conversation(sample_id, "f:1", messages))


def shown(style, samples):
    """Id, text, and what of it is trained on."""
    tokenizer = style_tokenizer(style)
    assert all(isinstance(sample, Sample) for sample in samples), [str(sample) for sample in samples]
    return [(s.id, tokenizer.decode(s.input_ids), masked(tokenizer, s)) for s in samples]


def test_a_tool_loop_of_kimi_k25_keeps_its_reasoning_until_it_is_answered():
    messages = [
        user("weather?"),
        assistant("", tool_calls=[LOOK], reasoning_content="look"),
        tool("functions.look:0", "4"),
        assistant("4 degrees", reasoning_content="fine"),
        user("thanks"),
        assistant("welcome", reasoning_content="polite"),
    ]
    called = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
        '{"city": "Graz"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
    )
    asked = f"{KIMI}<|im_user|>user<|im_middle|>weather?<|im_end|>{HEADER}<think>"
    result = "<|im_system|>tool<|im_middle|>## Return of functions.look:0\n4<|im_end|>"
    loop = f"{asked}look</think>{called}{result}{HEADER}<think>fine</think>4 degrees<|im_end|>"
    settled = f"{asked}</think>{called}{result}{HEADER}<think></think>4 degrees<|im_end|>"
    thanks = f"<|im_user|>user<|im_middle|>thanks<|im_end|>{HEADER}<think>polite</think>welcome<|im_end|>"
    assert shown("kimi-k2.5", prepare("kimi-k2.5", messages)) == [
        ("id#turn-2", loop, [f"look</think>{called}", "fine</think>4 degrees<|im_end|>"]),
        ("id#turn-3", settled + thanks, ["polite</think>welcome<|im_end|>"]),
    ]
    found = shown("kimi-k2.5", prepare("kimi-k2.5", messages, ALWAYS))
    assert [name for name, _, _ in found] == ["id#turn-1", "id#turn-2", "id#turn-3"]
    assert found[0][1:] == (f"{asked}look</think>{called}", [f"look</think>{called}"])
    assert found[1][1:] == (loop, ["fine</think>4 degrees<|im_end|>"])


def test_without_thinking_kimi_k25_answers_after_an_empty_block():
    first = f"{KIMI}<|im_user|>user<|im_middle|>a<|im_end|>{HEADER}<think></think>b<|im_end|>"
    whole = f"{first}<|im_user|>user<|im_middle|>c<|im_end|>{HEADER}<think></think>d<|im_end|>"
    wanted = [("id", whole, ["b<|im_end|>", "d<|im_end|>"])]
    assert shown("kimi-k2.5", prepare("kimi-k2.5", TALK, thinking=False)) == wanted


@pytest.mark.parametrize(
    ("style", "kwargs", "written", "answer"),
    [
        ("deepseek-r1", {}, "<think>\nhm\n</think>\n\nb", f"hm\n</think>\n\nb{EOS}"),
        ("deepseek-r1", {}, "<think>hm</think>b", f"hm</think>b{EOS}"),
        ("deepseek-r1", {}, "hm\n</think>\n\nb", f"hm\n</think>\n\nb{EOS}"),
        ("deepseek-v3.1-thinking", {"thinking": True}, "<think>hm</think>b", f"hm</think>b{EOS}"),
        ("deepseek-v3.1-thinking", {"thinking": True}, "hm</think>b </think> c", f"hm</think>b </think> c{EOS}"),
        ("kimi-k2.5", {}, "<think>hm</think>b", "hm</think>b<|im_end|>"),
        ("kimi-k2-thinking", {}, "<think> hm\n</think>b", "<think> hm\n</think>b<|im_end|>"),
        ("qwen3", {}, "<think>\nhm\n</think>\n\nb", "<think>\nhm\n</think>\n\nb<|im_end|>"),
        ("gpt-oss", {}, "<think>hm</think>b", "<|channel|>analysis<|message|>hm<|end|>"),
    ],
)
def test_reasoning_written_out_in_the_content_is_what_the_model_wrote(style, kwargs, written, answer):
    [(name, _, [trained])] = shown(style, prepare(style, [user("a"), assistant(written)], **kwargs))
    assert name == "id"
    if style.startswith(("kimi", "deepseek")):
        blank = [user("a"), assistant(written, reasoning_content="")]
        assert shown(style, prepare(style, blank, **kwargs)) == [(name, _, [trained])]
    assert trained.startswith(answer) if style == "gpt-oss" else trained == answer


def test_a_template_that_trims_the_answer_does_not_trim_what_the_model_wrote():
    trimming = DEEPSEEK_R1.replace("m.content.split('</think>')[-1]", "(m.content.split('</think>')[-1] | trim)")
    assert trimming != DEEPSEEK_R1
    tokenizer = copy.copy(style_tokenizer("deepseek-r1"))
    tokenizer.chat_template = trimming
    record = Conversation("id", "f:1", [user("a"), assistant("<think>\nhm\n</think>\n\nb")])
    [sample] = SamplePreparer(tokenizer).prepare(record)
    assert masked(tokenizer, sample) == [f"hm\n</think>\n\nb{EOS}"]


def test_a_header_that_no_prompt_asks_for_is_not_trained_on_where_the_history_changes():
    template = (
        "{% for m in messages %}{{ '<|im_start|>' ~ loop.revindex ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}"
    )
    tokenizer = make_tokenizer(template + "{% endfor %}")
    samples = SamplePreparer(tokenizer).prepare(Conversation("id", "f:1", TALK))
    assert [tokenizer.decode(sample.input_ids) for sample in samples] == [
        "<|im_start|>1user\na<|im_end|>\n<|im_start|>1assistant\nb<|im_end|>\n",
        "<|im_start|>3user\na<|im_end|>\n<|im_start|>2assistant\nb<|im_end|>\n<|im_start|>1user\nc<|im_end|>\n"
        "<|im_start|>1assistant\nd<|im_end|>\n",
    ]
    assert [masked(tokenizer, sample) for sample in samples] == [["b<|im_end|>"], ["d<|im_end|>"]]


def test_content_that_looks_like_the_header_is_content():
    messages = [user("a"), assistant("b"), assistant("<｜Assistant｜>")]
    whole = f"{BOS}<｜User｜>a<｜Assistant｜>b{EOS}<｜Assistant｜>{EOS}"
    [(name, text, [trained])] = shown("deepseek-v3", prepare("deepseek-v3", messages))
    assert (name, text, trained) == ("id", whole, f"b{EOS}<｜Assistant｜>{EOS}")


def test_the_history_of_deepseek_r1_is_shown_without_reasoning():
    asked = f"{BOS}<｜User｜>a<｜Assistant｜>"
    assert shown("deepseek-r1", prepare("deepseek-r1", TALK)) == [
        ("id#turn-1", f"{asked}<think>\nhm\n</think>\n\nb{EOS}", [f"hm\n</think>\n\nb{EOS}"]),
        (
            "id#turn-2",
            f"{asked}b{EOS}<｜User｜>c<｜Assistant｜><think>\nso\n</think>\n\nd{EOS}",
            [f"so\n</think>\n\nd{EOS}"],
        ),
    ]


def test_a_turn_without_reasoning_is_shown_as_the_template_does():
    messages = [user("a"), assistant("b"), user("c"), assistant("d", reasoning_content="  ")]
    whole = f"{BOS}<｜User｜>a<｜Assistant｜></think>b{EOS}<｜User｜>c<｜Assistant｜></think>d{EOS}"
    wanted = [("id", whole, [f"b{EOS}", f"d{EOS}"])]
    assert shown("deepseek-v3.1-thinking", prepare("deepseek-v3.1-thinking", messages, thinking=True)) == wanted


def test_the_tool_call_of_a_thinking_deepseek_v31_follows_its_reasoning():
    messages = [user("a"), assistant("", tool_calls=[LOOK], reasoning_content="hm")]
    [(_, text, [trained])] = shown("deepseek-v3.1", prepare("deepseek-v3.1", messages, thinking=True))
    assert trained.startswith("hm</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>")
    assert text == f"{BOS}<｜User｜>a<｜Assistant｜><think>{trained}"


def test_reasoning_has_no_place_where_the_prompt_closes_it():
    whole = f"{BOS}<｜User｜>a<｜Assistant｜></think>b{EOS}<｜User｜>c<｜Assistant｜></think>d{EOS}"
    assert shown("deepseek-v3.1", prepare("deepseek-v3.1", TALK)) == [("id", whole, [f"b{EOS}", f"d{EOS}"])]


def test_a_model_that_knows_no_reasoning_is_trained_on_its_answers():
    tokenizer = make_tokenizer(CHATML)
    [sample] = SamplePreparer(tokenizer).prepare(Conversation("id", "f:1", TALK))
    assert masked(tokenizer, sample) == ["b<|im_end|>", "d<|im_end|>"]


@pytest.mark.parametrize("style", ["kimi-k2.5", "kimi-k2-thinking", "deepseek-r1"])
def test_never_trains_on_what_the_template_shows(style):
    [sample] = prepare(style, TALK, NEVER)
    tokenizer = style_tokenizer(style)
    assert sample.id == "id"
    assert tokenizer.decode(sample.input_ids) == tokenizer.apply_chat_template(TALK, tokenize=False)
    assert not any("hm" in run or "so" in run for run in masked(tokenizer, sample))
    assert [run.split("</think>")[-1][0] for run in masked(tokenizer, sample)] == ["b", "d"]


@pytest.mark.parametrize("style", ["qwen3", "gpt-oss"])
def test_never_refuses_what_one_sample_cannot_hold(style):
    [problem] = prepare(style, TALK, NEVER)
    assert isinstance(problem, InputProblem)
    assert "(at messages[1])" in problem.reason
    assert "--split-turns auto" in problem.reason


def test_never_refuses_a_tool_loop_whose_reasoning_goes_with_the_answer():
    messages = [user("a"), assistant("", tool_calls=[LOOK], reasoning_content="hm"), tool("functions.look:0", "4")]
    [problem] = prepare("kimi-k2.5", [*messages, assistant("b")], NEVER)
    assert isinstance(problem, InputProblem)
    assert "differently" in problem.reason


def test_always_makes_a_sample_of_each_turn_of_any_template():
    messages = [system("s"), user("a"), assistant("b"), user("c"), assistant("d"), user("e")]
    tokenizer = make_tokenizer(CHATML)
    samples = SamplePreparer(tokenizer, ALWAYS).prepare(Conversation("id", "f:1", messages))
    assert [sample.id for sample in samples] == ["id#turn-1", "id#turn-2"]
    assert [masked(tokenizer, sample) for sample in samples] == [["b<|im_end|>"], ["d<|im_end|>"]]
    texts = [tokenizer.apply_chat_template(messages[:end], tokenize=False) for end in (3, 5)]
    assert [tokenizer.decode(sample.input_ids) for sample in samples] == texts


@pytest.mark.parametrize("preparation", [None, ALWAYS, NEVER, LAST])
def test_a_conversation_with_one_turn_keeps_its_id(preparation):
    for messages in ([user("a"), assistant("b")], [user("a"), assistant("b"), user("c")]):
        [sample] = prepare("chatml", messages, preparation)
        assert sample.id == "id"


def test_the_last_turn_alone():
    messages = [user("a"), assistant("b"), user("c"), assistant("d"), user("e")]
    [(name, text, trained)] = shown("chatml", prepare("chatml", messages, LAST))
    assert (name, trained) == ("id", ["d<|im_end|>"])
    assert text == style_tokenizer("chatml").apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("style", THINKING_STYLES)
def test_the_last_turn_alone_makes_one_sample_whose_id_is_the_conversations(style):
    preparation = Preparation(THINKING_STYLES[style].kwargs, loss_on=LossOn.LAST)
    [(name, _, [trained])] = shown(style, prepare(style, TALK, preparation))
    assert name == "id"
    assert trained == THINKING_STYLES[style].answer(TALK[-1])


def test_markers_tell_the_last_turn_too():
    assert shown("chatml-marked", prepare("chatml-marked", TALK, LAST))[0][2] == ["d<|im_end|>"]


def test_markers_are_not_followed_where_the_template_drops_reasoning():
    said = "{{- message.content ~ '<|im_end|>\\n' }}\n{%- endfor %}"
    assert said in QWEN3
    template = QWEN3.replace(
        said,
        "{%- if message.role == 'assistant' %}{% generation %}{{ message.content ~ '<|im_end|>' }}{% endgeneration %}"
        "{%- else %}{{ message.content ~ '<|im_end|>' }}{% endif %}{% endfor %}",
    )
    tokenizer = make_tokenizer(template)
    record = Conversation("id", "f:1", TALK)
    samples = SamplePreparer(tokenizer).prepare(record)
    assert [masked(tokenizer, sample) for sample in samples] == [
        ["<think>\nhm\n</think>\n\nb<|im_end|>"],
        ["<think>\nso\n</think>\n\nd<|im_end|>"],
    ]
    [sample] = SamplePreparer(tokenizer, NEVER).prepare(record)
    assert masked(tokenizer, sample) == ["b<|im_end|>", "d<|im_end|>"]


# Like the demo's template: the marker begins before the tag that the prompt opens.
MARKED_THINKING = """\
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ '<think>' ~ (message.reasoning_content or '') ~ '</think>' ~ message.content ~ '<|im_end|>' }}
{%- endgeneration %}
{%- else %}{{ message.content ~ '<|im_end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' ~ ('<think></think>' if thinking is false else '<think>') }}
{%- endif %}"""


def test_what_the_prompt_opens_is_not_trained_on_though_it_is_marked():
    tokenizer = make_tokenizer(MARKED_THINKING)
    record = Conversation("id", "f:1", [user("a"), assistant("b"), user("c"), assistant("d", reasoning_content="so")])
    [sample] = SamplePreparer(tokenizer).prepare(record)
    assert masked(tokenizer, sample) == ["</think>b<|im_end|>", "so</think>d<|im_end|>"]
    [sample] = SamplePreparer(tokenizer, LAST).prepare(record)
    assert masked(tokenizer, sample) == ["so</think>d<|im_end|>"]


def test_markers_are_not_followed_where_the_prompt_closes_the_reasoning_that_they_hold():
    tokenizer = make_tokenizer(MARKED_THINKING)
    record = Conversation("id", "f:1", [user("a"), assistant("b", reasoning_content="hm")])
    [sample] = SamplePreparer(tokenizer, Preparation({"thinking": False})).prepare(record)
    assert tokenizer.decode(sample.input_ids).endswith("<|im_start|>assistant\n<think></think>b<|im_end|>")
    assert masked(tokenizer, sample) == ["b<|im_end|>"]
    record = Conversation("id", "f:1", record.messages, template_kwargs={"thinking": True})
    [sample] = SamplePreparer(tokenizer, Preparation({"thinking": False})).prepare(record)
    assert masked(tokenizer, sample) == ["hm</think>b<|im_end|>"]


TURN_PIECES = {
    "header": "{{- '<|im_start|>assistant\\n' }}",
    "reasoning": "{%- if m.reasoning_content %}{{- '<think>' ~ m.reasoning_content ~ '</think>\\n' }}{% endif %}",
    "content": "{{- m.content }}",
    "calls": "{%- for call in m.tool_calls or [] %}{{- '<tool_call>' ~ call.function.name ~ '</tool_call>' }}"
    "{% endfor %}",
    "end": "{{- ' <|im_end|>' }}",
}


def template_with(marked):
    """A template with these parts of a turn of the assistant marked, and what tools return if they are to be."""
    turn = "".join(
        f"{{% generation %}}{piece}{{% endgeneration %}}" if name in marked else piece
        for name, piece in TURN_PIECES.items()
    )
    said = "{{- m.content }}"
    result = f"{{% generation %}}{said}{{% endgeneration %}}" if "results" in marked else said
    return (
        f"{{%- for m in messages %}}{{%- if m.role == 'assistant' %}}{turn}{{%- else %}}"
        f"{{{{- '<|im_start|>' ~ m.role ~ '\\n' }}}}{{%- if m.role == 'tool' %}}{result}{{%- else %}}{said}"
        "{%- endif %}"
        "{{- '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
    )


@pytest.mark.parametrize("split", [SplitTurns.AUTO, SplitTurns.NEVER])
@pytest.mark.parametrize("count", range(len(TURN_PIECES) + 2))
def test_markers_around_any_parts_of_a_turn_change_nothing_of_what_is_trained_on(count, split):
    messages = [
        user("a"),
        assistant("", tool_calls=[LOOK], reasoning_content="hm"),
        tool("functions.look:0", "4"),
        assistant("b", reasoning_content="so"),
        user("c"),
        assistant("d"),
        user("e"),
    ]
    wanted = [
        "<think>hm</think>\n<tool_call>look</tool_call> <|im_end|>",
        "<think>so</think>\nb <|im_end|>",
        "d <|im_end|>",
    ]
    for marked in combinations([*TURN_PIECES, "results"], count):
        tokenizer = make_tokenizer(template_with(marked), eos="<|im_end|>")
        for loss_on in LossOn:
            preparer = SamplePreparer(tokenizer, Preparation(split_turns=split, loss_on=loss_on))
            [sample] = preparer.prepare(Conversation("id", "f:1", messages))
            assert isinstance(sample, Sample), (marked, str(sample))
            assert masked(tokenizer, sample) == (wanted if loss_on is LossOn.ALL else wanted[-1:]), marked


def test_markers_are_not_followed_where_the_template_drops_what_the_prompt_opens():
    said = "'<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}"
    assert said in DEEPSEEK_R1
    tokenizer = copy.copy(style_tokenizer("deepseek-r1"))
    tokenizer.chat_template = DEEPSEEK_R1.replace(
        said,
        "'<｜Assistant｜>' }}{% generation %}{{ m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}"
        "{% endgeneration %}",
    )
    samples = SamplePreparer(tokenizer).prepare(Conversation("id", "f:1", TALK))
    assert shown("deepseek-r1", samples) == shown("deepseek-r1", prepare("deepseek-r1", TALK))


MARKED_QWEN3 = QWEN3.replace(
    "{{- message.content ~ '<|im_end|>\\n' }}\n{%- endfor %}",
    "{%- if message.role in marked %}{% generation %}{{ message.content ~ '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{ message.content ~ '<|im_end|>' }}{% endif %}{% endfor %}",
)


def test_never_trains_on_the_last_turn_that_is_marked_though_it_was_rewritten():
    tokenizer = make_tokenizer(MARKED_QWEN3)
    preparation = Preparation({"marked": ["assistant"]}, SplitTurns.NEVER, LossOn.LAST)
    messages = [user("a"), assistant("b", reasoning_content="hm" * 20), assistant("d"), user("e")]
    [sample] = SamplePreparer(tokenizer, preparation).prepare(Conversation("id", "f:1", messages))
    assert masked(tokenizer, sample) == ["d<|im_end|>"]


def test_never_does_not_follow_markers_around_more_than_turns():
    tokenizer = make_tokenizer(MARKED_QWEN3)
    messages = [*TALK[:2], tool("x", "result"), *TALK[2:]]
    preparation = Preparation({"marked": ["assistant", "tool"]}, SplitTurns.NEVER)
    [problem] = SamplePreparer(tokenizer, preparation).prepare(Conversation("id", "f:1", messages))
    assert isinstance(problem, InputProblem)
    assert "differently" in problem.reason


def test_a_turn_after_another_that_ends_otherwise_in_history_is_not_doubled():
    template = (
        "{%- for m in messages %}{{- '<|im_start|>' ~ m.role ~ '\\n' }}"
        "{%- if m.reasoning_content %}{{- '<think>' ~ m.reasoning_content ~ '</think>' }}{% endif %}{{- m.content }}"
        "{%- set open = m.role == 'assistant' and not (loop.last and not add_generation_prompt) %}"
        "{{- '<|eot_id|>' if open else '<|im_end|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
        "{{- '<think></think>' if thinking is false else '<think>' }}{% endif %}"
    )
    tokenizer = make_tokenizer(template)
    record = Conversation("id", "f:1", [user("a"), assistant("b", reasoning_content="hm"), assistant("c")])
    asked = "<|im_start|>user\na<|im_end|><|im_start|>assistant\n<think>"
    samples = SamplePreparer(tokenizer).prepare(record)
    assert [tokenizer.decode(sample.input_ids) for sample in samples] == [
        f"{asked}hm</think>b<|im_end|>",
        f"{asked}hm</think>b<|eot_id|><|im_start|>assistant\nc<|im_end|>",
    ]
    assert [masked(tokenizer, sample) for sample in samples] == [["hm</think>b<|im_end|>"], ["c<|im_end|>"]]
    last = [user("a"), assistant("b"), assistant("c", reasoning_content="hm")]
    [sample] = SamplePreparer(tokenizer, LAST).prepare(Conversation("id", "f:1", last))
    assert masked(tokenizer, sample) == ["hm</think>c<|im_end|>"]


def test_space_before_an_answer_is_not_doubled_where_a_template_keeps_a_part_of_it():
    keeping = DEEPSEEK_R1.replace("m.content.split('</think>')[-1]", "m.content.split('</think>')[-1].lstrip('\\n')")
    assert keeping != DEEPSEEK_R1
    tokenizer = copy.copy(style_tokenizer("deepseek-r1"))
    tokenizer.chat_template = keeping
    for answer in ("\n\n    b", "\n\n", "", "  b"):
        record = Conversation("id", "f:1", [user("a"), assistant(f"<think>\nhm\n</think>{answer}")])
        [sample] = SamplePreparer(tokenizer).prepare(record)
        assert masked(tokenizer, sample) == [f"hm\n</think>{answer}{EOS}"]


@pytest.mark.parametrize("thinking", [True, False])
def test_line_breaks_around_reasoning_written_out_are_not_doubled(thinking):
    template = QWEN3.replace(
        "{{ '<|im_start|>assistant\\n' }}",
        "{{ '<|im_start|>assistant\\n' ~ ('<think>\\n\\n</think>\\n\\n' if thinking is false else '') }}",
    )
    assert template != QWEN3
    tokenizer = make_tokenizer(template)
    record = Conversation("id", "f:1", [user("a"), assistant("<think>\nhm\n</think>\n\nb")])
    [sample] = SamplePreparer(tokenizer, Preparation({"thinking": thinking})).prepare(record)
    assert masked(tokenizer, sample) == ["<think>\nhm\n</think>\n\nb<|im_end|>" if thinking else "b<|im_end|>"]


def test_the_ids_of_turns_are_as_long_as_ids_may_be():
    assert [s.id[-7:] for s in prepare("qwen3", TALK, sample_id="x" * 4089)] == ["#turn-1", "#turn-2"]
    [problem] = prepare("qwen3", TALK, sample_id="x" * 4090)
    assert isinstance(problem, InputProblem)
    assert "longer than 4096 characters" in problem.reason


def test_ids_of_turns_that_are_taken_are_problems(tmp_path):
    file = tmp_path / "f.jsonl"
    rows = [
        {"id": "x#turn-1", "input_ids": [1]},
        {"id": "x", "messages": TALK},
        {"id": "y", "messages": TALK},
        {"id": "y#turn-2", "input_ids": [1]},
        {"id": "x", "input_ids": [1]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = list(iter_samples(file, SamplePreparer(style_tokenizer("qwen3")), max_length=None))
    assert [item.id if isinstance(item, Sample) else str(item) for item in found] == [
        "x#turn-1",
        f"{file}:2: an earlier line has the same id, 'x#turn-1'",
        "x#turn-2",
        "y#turn-1",
        "y#turn-2",
        f"{file}:4: an earlier line has the same id, 'y#turn-2'",
        f"{file}:5: an earlier line has the same id, 'x'",
    ]


def test_the_samples_of_a_conversation_are_cut_each_for_itself():
    whole = prepare("qwen3", TALK)
    limit = len(whole[1].input_ids) - 2
    assert len(whole[0].input_ids) <= limit
    first, second = prepare("qwen3", TALK, Preparation(max_length=limit))
    assert (first.id, first.cut) == ("id#turn-1", 0)
    assert (second.id, second.cut) == ("id#turn-2", 2)
    assert second.input_ids.tolist() == whole[1].input_ids[:limit].tolist()
    assert prepare("qwen3", TALK, Preparation(max_length=limit, overflow=Overflow.DROP))[1] == Excluded(
        "f:1", Exclusion.TOO_LONG, "id#turn-2"
    )


def test_the_settings_can_be_sent_to_another_process():
    settings = Preparation({"thinking": True}, SplitTurns.ALWAYS, LossOn.LAST, 4096, Overflow.DROP)
    assert pickle.loads(pickle.dumps(settings)) == settings
