"""Tokenizers and chat templates of several families, built by hand for the tests of this folder."""

from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CONTROL = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|im_system|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_middle|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
VISIBLE = ("<think>", "</think>", "<tool_call>", "</tool_call>")

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' ~ (tools | tojson) ~ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content }}
{%- for call in message.tool_calls or [] %}
{%- set function = {'name': call.function.name, 'arguments': call.function.arguments} %}
{{- '<tool_call>\\n' ~ (function | tojson) ~ '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

CHATML_WITHOUT_PROMPT = """\
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}"""

LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' ~ (message.content | trim) ~ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

KIMI_K2 = """\
{%- if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' ~ (tools | tojson) ~ '<|im_end|>' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|im_user|>user<|im_middle|>' }}
{%- elif message.role == 'assistant' %}{{ '<|im_assistant|>assistant<|im_middle|>' }}
{%- else %}{{ '<|im_system|>' ~ message.role ~ '<|im_middle|>' }}{% endif %}
{%- if message.role == 'tool' %}{{ '## Return of ' ~ message.tool_call_id ~ '\\n' }}{% endif %}
{{- message.content }}
{%- if message.tool_calls %}
{{- '<|tool_calls_section_begin|>' }}
{%- for call in message.tool_calls %}
{{- '<|tool_call_begin|>' ~ call.id ~ '<|tool_call_argument_begin|>' }}
{%- if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}{% endif %}
{{- '<|tool_call_end|>' }}
{%- endfor %}
{{- '<|tool_calls_section_end|>' }}
{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"""

QWEN3 = """\
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.role == 'assistant' and loop.index0 > ns.last_user %}
{{- '<think>\\n' ~ (message.reasoning_content or '') ~ '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

MISTRAL = """\
{{- '<s>' }}
{%- for message in messages %}
{%- if message.role == 'user' and loop.index0 % 2 == 0 %}{{ '[INST] ' ~ message.content ~ ' [/INST]' }}
{%- elif message.role == 'assistant' and loop.index0 % 2 == 1 %}{{ ' ' ~ message.content ~ '</s>' }}
{%- else %}{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- endfor %}"""

# The header opens a reasoning block; a finished turn is shown without it.
DEEPSEEK_R1 = """\
{{- '<s>' }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_assistant|>' ~ message.content.split('</think>')[-1] }}
{%- for call in message.tool_calls or [] %}
{{- '<|tool_call_begin|>' + call.function.name + '\\n' + call.function.arguments + '<|tool_call_end|>' }}
{%- endfor %}
{{- '</s>' }}
{%- else %}{{ '<|im_user|>' ~ message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|><think>\\n' }}{% endif %}"""

# Generation markers around the content alone, around the whole turn with the newline, and inside a macro.
MARKED_CONTENT = """\
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}"""

MARKED_TURN = """\
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content ~ '<|im_end|>\\n' }}{% endgeneration %}
{%- else %}{{ message.content ~ '<|im_end|>\\n' }}{% endif %}
{%- endfor %}"""

MARKED_IN_MACRO = """\
{%- macro turn(message) %}
{{- '<|im_start|>' ~ message.role ~ '\\n' }}
{%- generation %}{{ message.content }}{% endgeneration %}
{{- '<|im_end|>\\n' }}
{%- endmacro %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ turn(message) }}
{%- else %}{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_TEXTS = [
    "The assistant said hello to the user, and the user said hello to the assistant.\n\nAssistant and user:\n\n\n",
    "    return value\n\n    if value:\n        return 1\n",
]


class SlowTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]
    """The same tokens from a tokenizer that cannot tell where in the text they are."""

    @property
    def is_fast(self) -> bool:
        return False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert not kwargs.get("return_offsets_mapping")
        return super().__call__(*args, **kwargs)


def make_tokenizer(template: str | None, *, eos: str | None = None, slow: bool = False, trim: bool = False) -> Any:
    """A byte-level BPE tokenizer whose vocabulary has all the control tokens; ``trim`` cuts spaces off its offsets."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(CONTROL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in VISIBLE])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    kind = SlowTokenizer if slow else PreTrainedTokenizerFast
    made = kind(tokenizer_object=tokenizer, eos_token=eos, clean_up_tokenization_spaces=False)
    made.chat_template = template
    return made


def masked(tokenizer: Any, sample: Any) -> list[str]:
    """The text of each run of tokens that the mask keeps."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], sample.loss_mask, [0]))))
    return [tokenizer.decode(sample.input_ids[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def tool(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
