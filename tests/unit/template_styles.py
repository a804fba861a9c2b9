"""Chat templates in the styles of well-known models, and what these models write for each message.

The templates are written for these tests from what is publicly known of the originals. Beside each stands, in plain
Python, the model's raw answer to a prompt: the tests compare masks with that and never with the code that finds them.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import tiktoken
from chat_templates import CHATML, KIMI_K2, MARKED_TURN
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

Message = dict[str, Any]

_TEXTS = ["The assistant said hello to the user.\n\n\n", "    return value\n\n    if value:\n        return 1\n"]


def dumps(value: Any) -> str:
    """JSON as ``tojson`` of chat templates writes it."""
    return json.dumps(value if not isinstance(value, str) else json.loads(value), ensure_ascii=False)


def calls_of(message: Message) -> list[tuple[str, str, str]]:
    """Id, name and arguments, as JSON text, of each call of a message."""
    calls = message.get("tool_calls", [])
    return [(c["id"], c["function"]["name"], dumps(c["function"]["arguments"])) for c in calls]


def thought(message: Message) -> str:
    return str(message.get("reasoning_content", ""))


@dataclass(frozen=True)
class Style:
    """One family of models.

    Attributes:
        template: its chat template.
        controls: its control tokens.
        answer: what the model writes for a message, the end of its turn included.
        after: what the template puts after a finished turn.
        kwargs: settings of the template.
        system: whether there may be a system message.
        tools: whether it shows tool calls.
        in_a_row: whether two turns of the assistant may follow each other.
        reopens: whether the prompt opens an answer after a turn of the assistant as well.
        text_arguments: whether it takes the arguments of tool calls as text only.
        reasoning_key: where it looks for reasoning.
    """

    template: str
    controls: tuple[str, ...]
    answer: Callable[[Message], str]
    after: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)
    system: bool = True
    tools: bool = True
    in_a_row: bool = True
    reopens: bool = True
    text_arguments: bool = False
    reasoning_key: str = "reasoning_content"


LLAMA_31 = """\
{{- '<|begin_of_text|>' }}
{%- if messages[0].role == 'system' %}{% set said = messages[0].content | trim %}{% set rest = messages[1:] %}
{%- else %}{% set said = '' %}{% set rest = messages %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n\\n' }}
{{- said ~ '<|eot_id|>' }}
{%- for message in rest %}
{%- if message.role in ('tool', 'ipython') %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' ~ message.content ~ '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('only single tool calls at once') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- (call.arguments | tojson) ~ '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' ~ (message.content | trim) ~ '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# The header of an answer is part of the user's turn; results of tools are closed by what follows them.
DEEPSEEK_V3 = """\
{%- set ns = namespace(tool=false, user=false, system='') %}
{%- for m in messages if m.role == 'system' %}{% set ns.system = ns.system ~ m.content %}{% endfor %}
{{- '<｜begin▁of▁sentence｜>' ~ ns.system }}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.tool = false %}{% set ns.user = true %}
{{- '<｜User｜>' + m.content + '<｜Assistant｜>' }}
{%- elif m.role == 'assistant' %}
{%- set ns.user = false %}
{%- if ns.tool %}{{ '<｜tool▁outputs▁end｜>' }}{% set ns.tool = false %}{% endif %}
{{- m.content }}
{%- if m.tool_calls %}
{{- '<｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls %}
{{- '' if loop.first else '\\n' }}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
{{- call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' }}
{%- endif %}
{{- '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' %}
{%- if not ns.tool %}{{ '<｜tool▁outputs▁begin｜>' }}{% else %}{{ '\\n' }}{% endif %}{% set ns.tool = true %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if ns.tool %}{{ '<｜tool▁outputs▁end｜>' }}
{%- elif add_generation_prompt and not ns.user %}{{ '<｜Assistant｜>' }}{% endif %}"""

# Finished turns begin with "</think>" whatever the prompt opens with, and never show reasoning.
DEEPSEEK_V31 = """\
{%- set thinking = thinking is defined and thinking %}
{%- set ns = namespace(tool=false, user=false, system='') %}
{%- for m in messages if m.role == 'system' %}{% set ns.system = ns.system ~ m.content %}{% endfor %}
{{- '<｜begin▁of▁sentence｜>' ~ ns.system }}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.tool = false %}{% set ns.user = true %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' %}
{%- if ns.user %}{{ '<｜Assistant｜></think>' }}{% endif %}{% set ns.user = false %}
{%- if m.tool_calls %}
{{- m.content + '<｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif ns.tool %}{{ m.content + '<｜end▁of▁sentence｜>' }}{% set ns.tool = false %}
{%- else %}
{%- set content = m.content.split('</think>', 1)[1] if '</think>' in m.content else m.content %}
{{- content + '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- elif m.role == 'tool' %}{% set ns.user = false %}{% set ns.tool = true %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.user and not ns.tool %}
{{- '<｜Assistant｜>' ~ ('<think>' if thinking else '</think>') }}
{%- endif %}"""

DEEPSEEK_R1 = """\
{{- '<｜begin▁of▁sentence｜>' }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

# What comes before the last answer that is no tool call, and that answer itself, is shown without reasoning.
_KIMI_THINKING = """\
{%- macro head(m) %}{% set name = m.name or m.role %}
{%- if m.role == 'user' %}{{ '<|im_user|>' ~ name ~ '<|im_middle|>' }}
{%- elif m.role == 'assistant' %}{{ '<|im_assistant|>' ~ name ~ '<|im_middle|>' }}
{%- else %}{{ '<|im_system|>' ~ name ~ '<|im_middle|>' }}{% endif %}{% endmacro %}
{%- macro said(m, reasoning) %}
{%- if m.role == 'tool' %}{{ '## Return of ' ~ m.tool_call_id ~ '\\n' }}{% endif %}
{%- if m.role == 'assistant' %}{{ '<think>' ~ reasoning ~ '</think>' }}{% endif %}
{{- m.content }}
{%- if m.tool_calls %}
{{- '<|tool_calls_section_begin|>' }}
{%- for call in m.tool_calls %}
{{- '<|tool_call_begin|>' ~ call.id ~ '<|tool_call_argument_begin|>' }}
{{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) }}
{{- '<|tool_call_end|>' }}
{%- endfor %}
{{- '<|tool_calls_section_end|>' }}
{%- endif %}
{{- '<|im_end|>' }}{% endmacro %}
{%- set ns = namespace(answered=-1) %}
{%- for m in messages %}
{%- if m.role == 'assistant' and not m.tool_calls %}{% set ns.answered = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' ~ (tools | tojson) ~ '<|im_end|>' }}{% endif %}
{%- if messages[0].role != 'system' %}{{ '<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>' }}{% endif %}
{%- for m in messages %}
{{- head(m) }}{{ said(m, '' if loop.index0 <= ns.answered else (m.reasoning_content or '')) }}
{%- endfor %}
"""
KIMI_K2_THINKING = (
    _KIMI_THINKING + "{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)
KIMI_K25 = (
    _KIMI_THINKING
    + """{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}
{{- '<think></think>' if thinking is defined and thinking is false else '<think>' }}{% endif %}"""
)

_QWEN_CALLS = """\
{%- for call in message.tool_calls or [] %}
{{- '\\n' if (loop.first and content) or not loop.first }}
{{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' ~ content ~ '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
"""
_QWEN_TOOLS = "\\n\\n# Tools\\n\\n<tools>\\n' ~ (tools | tojson) ~ '\\n</tools>"
QWEN_25 = (
    "{%- set first = messages[0].content if messages[0].role == 'system' else 'You are Qwen.' %}"
    "{{- '<|im_start|>system\\n' ~ first }}{% if tools %}{{ '"
    + _QWEN_TOOLS
    + """' }}{% endif %}{{ '<|im_end|>\\n' }}
{%- for message in messages %}{% set content = message.content %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' ~ content }}
"""
    + _QWEN_CALLS
    + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN_3 = (
    "{%- set first = messages[0].content if messages[0].role == 'system' else '' %}"
    "{%- if tools or first %}{{- '<|im_start|>system\\n' ~ first }}{% if tools %}{{ '"
    + _QWEN_TOOLS
    + """' }}{% endif %}{{ '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(query=messages | length - 1, found=false) %}
{%- for message in messages[::-1] %}
{%- if message.role == 'user' and not ns.found %}
{%- set ns.query = messages | length - 1 - loop.index0 %}{% set ns.found = true %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}{% set content = message.content %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
{%- if message.reasoning_content is not string and '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.query and (loop.last or reasoning) %}
{{- '<think>\\n' ~ reasoning.strip('\\n') ~ '\\n</think>\\n\\n' ~ content.lstrip('\\n') }}
{%- else %}{{ content }}{% endif %}
"""
    + _QWEN_CALLS
    + """{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false }}{% endif %}"""
)

# System message and tools move to the last user message; there is no header before an answer.
MISTRAL_V3 = """\
{%- if messages[0].role == 'system' %}{% set said = messages[0].content ~ '\\n\\n' %}{% set rest = messages[1:] %}
{%- else %}{% set said = '' %}{% set rest = messages %}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in rest %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- '<s>' }}
{%- for m in rest %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}
{{- '[AVAILABLE_TOOLS] ' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' ~ (said if loop.last else '') ~ m.content ~ '[/INST]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{{- '{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson) }}
{{- ', "id": "' ~ call.id ~ '"}' ~ (']' if loop.last else ', ') }}
{%- endfor %}
{{- '</s>' }}
{%- elif m.role == 'assistant' %}{{ ' ' ~ (m.content | trim) ~ '</s>' }}
{%- else %}{{ '[TOOL_RESULTS] {"content": ' ~ (m.content | tojson) ~ '}[/TOOL_RESULTS]' }}{% endif %}
{%- endfor %}"""

MISTRAL_TEKKEN = """\
{{- '<s>' }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' ~ m.content ~ '[/SYSTEM_PROMPT]' }}
{%- elif m.role == 'user' %}{{ '[INST]' ~ m.content ~ '[/INST]' }}
{%- elif m.role == 'assistant' %}{{ m.content ~ '</s>' }}{% endif %}
{%- endfor %}"""

_GEMMA = """\
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\\n' ~ (said if loop.first else '') }}
{{- (m.content | trim) ~ '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
GEMMA_2 = (
    "{{- '<bos>' }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% set rest = messages %}{% set said = '' %}" + _GEMMA
)
GEMMA_3 = (
    "{{- '<bos>' }}{% if messages[0].role == 'system' %}{% set said = messages[0].content ~ '\\n\\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set said = '' %}{% set rest = messages %}{% endif %}" + _GEMMA
)

PHI_4 = """\
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '<|im_sep|>' ~ m.content ~ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""

# Reasoning of a finished answer is dropped with the next one, that of its tool calls with the answer itself.
HARMONY = """\
{{- '<|start|>system<|message|>You are ChatGPT.<|end|>' }}
{%- set ns = namespace(answered=-1, name='') %}
{%- for m in messages %}
{%- if m.role == 'assistant' and 'tool_calls' not in m %}{% set ns.answered = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role in ('system', 'developer') %}
{{- '<|start|>developer<|message|># Instructions\\n\\n' ~ m.content ~ '<|end|>' }}
{%- elif m.role == 'assistant' and 'tool_calls' in m %}
{%- set call = m.tool_calls[0].function %}{% set ns.name = call.name %}
{%- if m.thinking and loop.index0 > ns.answered %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant to=functions.' ~ call.name ~ '<|channel|>commentary json<|message|>' }}
{{- (call.arguments | tojson) ~ '<|call|>' }}
{%- elif m.role == 'assistant' %}
{%- if loop.last and not add_generation_prompt %}
{%- if 'thinking' in m %}{{ '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ '<|return|>' }}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ '<|end|>' }}{% endif %}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' ~ ns.name ~ ' to=assistant<|channel|>commentary<|message|>' }}
{{- (m.content | tojson) ~ '<|end|>' }}
{%- else %}{{ '<|start|>user<|message|>' ~ m.content ~ '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""


def _chatml(message: Message) -> str:
    calls = [f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for _, n, a in calls_of(message)]
    return message["content"] + "".join(calls) + "<|im_end|>"


def _llama(message: Message) -> str:
    calls = [f'{{"name": "{name}", "parameters": {arguments}}}' for _, name, arguments in calls_of(message)]
    return (calls[0] if calls else message["content"].strip()) + "<|eot_id|>"


def _deepseek_v3(message: Message) -> str:
    calls = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        for _, name, arguments in calls_of(message)
    ]
    called = "<｜tool▁calls▁begin｜>" + "\n".join(calls) + "<｜tool▁calls▁end｜>" if calls else ""
    return message["content"] + called + "<｜end▁of▁sentence｜>"


def _deepseek_v31(message: Message) -> str:
    calls = [f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{a}<｜tool▁call▁end｜>" for _, n, a in calls_of(message)]
    called = f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>" if calls else ""
    return message["content"] + called + "<｜end▁of▁sentence｜>"


def _deepseek_v31_thinking(message: Message) -> str:
    return f"{thought(message)}</think>{_deepseek_v31(message)}"


def _deepseek_r1(message: Message) -> str:
    return f"{thought(message)}\n</think>\n\n{message['content']}<｜end▁of▁sentence｜>"


def _kimi(message: Message) -> str:
    calls = [f"<|tool_call_begin|>{i}<|tool_call_argument_begin|>{a}<|tool_call_end|>" for i, _, a in calls_of(message)]
    called = f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>" if calls else ""
    return message["content"] + called + "<|im_end|>"


def _kimi_thinking(message: Message) -> str:
    return f"<think>{thought(message)}</think>{_kimi(message)}"


def _kimi_k25(message: Message) -> str:
    return f"{thought(message)}</think>{_kimi(message)}"


def _qwen(message: Message) -> str:
    calls = [f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for _, n, a in calls_of(message)]
    return "\n".join([message["content"], *calls] if message["content"] or not calls else calls) + "<|im_end|>"


def _qwen3(message: Message) -> str:
    answer = _qwen({**message, "content": message["content"].lstrip("\n")})
    return f"<think>\n{thought(message)}\n</think>\n\n{answer}"


def _qwen3_instant(message: Message) -> str:
    return _qwen({**message, "content": message["content"].lstrip("\n")})


def _mistral_v3(message: Message) -> str:
    calls = [f'{{"name": "{n}", "arguments": {a}, "id": "{i}"}}' for i, n, a in calls_of(message)]
    return (f"[TOOL_CALLS] [{', '.join(calls)}]" if calls else " " + message["content"].strip()) + "</s>"


def _harmony(message: Message) -> str:
    analysis = f"<|channel|>analysis<|message|>{thought(message)}<|end|><|start|>assistant" if thought(message) else ""
    for _, name, arguments in calls_of(message):
        return f"{analysis} to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>"
    return f"{analysis}<|channel|>final<|message|>{message['content']}<|return|>"


_IM = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<think>",
    "</think>",
)
_KIMI = (
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<think>",
    "</think>",
)
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
_TURNS = ("<bos>", "<start_of_turn>", "<end_of_turn>")
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")

STYLES = {
    "chatml": Style(CHATML, _IM, _chatml, after="\n"),
    "chatml-marked": Style(
        MARKED_TURN + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        _IM,
        _chatml,
        after="\n",
        tools=False,
    ),
    "llama-3.1": Style(LLAMA_31, _LLAMA, _llama),
    "deepseek-v3": Style(DEEPSEEK_V3, _DEEPSEEK, _deepseek_v3, reopens=False, text_arguments=True),
    "deepseek-v3.1": Style(DEEPSEEK_V31, _DEEPSEEK, _deepseek_v31, reopens=False, text_arguments=True),
    "kimi-k2": Style(KIMI_K2, _KIMI, _kimi),
    "qwen2.5": Style(QWEN_25, _IM, _qwen, after="\n"),
    "mistral-v3": Style(MISTRAL_V3, _MISTRAL, _mistral_v3),
    "mistral-tekken": Style(MISTRAL_TEKKEN, _MISTRAL, lambda m: m["content"] + "</s>", tools=False),
    "gemma-2": Style(
        GEMMA_2,
        _TURNS,
        lambda m: m["content"].strip() + "<end_of_turn>",
        "\n",
        system=False,
        tools=False,
        in_a_row=False,
    ),
    "gemma-3": Style(
        GEMMA_3, _TURNS, lambda m: m["content"].strip() + "<end_of_turn>", "\n", tools=False, in_a_row=False
    ),
    "phi-4": Style(PHI_4, (*_IM, "<|im_sep|>"), lambda m: m["content"] + "<|im_end|>", tools=False),
}
# Those that show reasoning at most until the next answer.
THINKING_STYLES = {
    "deepseek-r1": Style(DEEPSEEK_R1, _DEEPSEEK, _deepseek_r1, tools=False),
    "deepseek-v3.1-thinking": Style(
        DEEPSEEK_V31, _DEEPSEEK, _deepseek_v31_thinking, kwargs={"thinking": True}, tools=False
    ),
    "kimi-k2-thinking": Style(KIMI_K2_THINKING, _KIMI, _kimi_thinking),
    "kimi-k2.5": Style(KIMI_K25, _KIMI, _kimi_k25),
    "qwen3": Style(QWEN_3, _IM, _qwen3, after="\n"),
    "kimi-k2.5-instant": Style(KIMI_K25, _KIMI, _kimi, kwargs={"thinking": False}),
    "qwen3-instant": Style(QWEN_3, _IM, _qwen3_instant, after="\n", kwargs={"enable_thinking": False}),
    "gpt-oss": Style(HARMONY, _HARMONY, _harmony, reasoning_key="thinking"),
}


@cache
def _base() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer


@cache
def _unicode_to_byte() -> dict[str, int]:
    """GPT-2's table of the characters that stand for bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


class TikTokenStyle(PreTrainedTokenizer):  # type: ignore[misc]
    """A slow tokenizer over ``tiktoken``, as Kimi's is: it cannot tell where in the text its tokens are."""

    def __init__(self, controls: Sequence[str]) -> None:
        table = _unicode_to_byte()
        self._names = dict(sorted((number, name) for name, number in _base().get_vocab().items()))
        self._numbers = {name: number for number, name in self._names.items()}
        ranks = {bytes(table[char] for char in name): number for number, name in self._names.items()}
        pattern = r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
        self._encoding = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        super().__init__()
        added = [AddedToken(token, normalized=False, special=not token.startswith("</")) for token in controls]
        self.add_tokens(added, special_tokens=False)

    @property
    def vocab_size(self) -> int:
        return len(self._names)

    def get_vocab(self) -> dict[str, int]:
        return {**self._numbers, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [self._names[number] for number in self._encoding.encode_ordinary(text)]

    def _convert_token_to_id(self, token: str) -> int:
        return self._numbers[token]

    def _convert_id_to_token(self, index: int) -> str:
        return self._names[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return b"".join(_bytes_of(token, self.added_tokens_encoder) for token in tokens).decode("utf-8", "replace")


class WithoutOffsets(PreTrainedTokenizerFast):  # type: ignore[misc]
    """A fast tokenizer that says it is a slow one."""

    @property
    def is_fast(self) -> bool:
        return False


def _bytes_of(token: str, added: Any) -> bytes:
    return token.encode("utf-8") if token in added else bytes(_unicode_to_byte()[char] for char in token)


def token_bytes(tokenizer: Any, input_ids: Sequence[int]) -> list[bytes]:
    """The bytes that each token stands for."""
    added = set(tokenizer.added_tokens_encoder)
    return [_bytes_of(token, added) for token in tokenizer.convert_ids_to_tokens(list(input_ids))]


@cache
def style_tokenizer(name: str, kind: str = "fast") -> Any:
    """A style's tokenizer: ``fast``, ``slow`` (the same without offsets) or ``tiktoken`` (a slow one in Python)."""
    style = {**STYLES, **THINKING_STYLES}[name]
    if kind == "tiktoken":
        made: Any = TikTokenStyle(style.controls)
    else:
        tokenizer = Tokenizer.from_str(_base().to_str())
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in style.controls])
        made = (WithoutOffsets if kind == "slow" else PreTrainedTokenizerFast)(tokenizer_object=tokenizer)
    made.chat_template = style.template
    return made
