"""The demo's tokenizer and chat template."""

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sglang_hs_capture.demo.tokenizer import CONTROL_TOKENS, demo_texts, train_tokenizer

CALL = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "First?"},
    {"role": "assistant", "content": "One.", "reasoning_content": "old thoughts"},
    {
        "role": "user",
        "content": [{"type": "text", "text": "What is "}, {"type": "image"}, {"type": "text", "text": "?"}],
    },
    {"role": "assistant", "content": None, "reasoning_content": "I must add.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "functions.add:0", "content": "2"},
    {"role": "assistant", "content": "Two."},
]
FIRST = "<think></think>One.<|im_end|>"
CALLING = (
    "<think>I must add.</think><|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
)
LAST = "<think></think>Two.<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(demo_texts())


def test_training_gives_the_same_tokenizer_each_time(tokenizer: PreTrainedTokenizerFast) -> None:
    assert train_tokenizer(demo_texts()).backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_any_text_survives(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "naïve \t\n 数学 🚀 \x00 \x7f end"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_tokens_are_single_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    for token in (*CONTROL_TOKENS, "<think>", "</think>"):
        assert len(tokenizer.encode(token)) == 1


def test_template_lays_out_a_conversation(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.apply_chat_template(CONVERSATION, tokenize=False, tools=[{"name": "add"}]) == (
        '<|im_system|>tool_declare<|im_middle|>[{"name": "add"}]<|im_end|>'
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|>"
        "<|im_user|>user<|im_middle|>First?<|im_end|>"
        f"<|im_assistant|>assistant<|im_middle|>{FIRST}"
        "<|im_user|>user<|im_middle|>What is <|media_begin|>image<|media_content|><|media_pad|><|media_end|>?<|im_end|>"
        f"<|im_assistant|>assistant<|im_middle|>{CALLING}"
        "<|im_system|>tool<|im_middle|>## Return of functions.add:0\n2<|im_end|>"
        f"<|im_assistant|>assistant<|im_middle|>{LAST}"
    )


def test_reasoning_of_earlier_turns_is_kept_on_demand(tokenizer: PreTrainedTokenizerFast) -> None:
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, preserve_thinking=True)
    assert "<think>old thoughts</think>One." in text


@pytest.mark.parametrize(("options", "end"), [({}, "<think>"), ({"thinking": False}, "<think></think>")])
def test_generation_prompt_opens_the_reasoning(
    tokenizer: PreTrainedTokenizerFast, options: dict[str, bool], end: str
) -> None:
    text = tokenizer.apply_chat_template(CONVERSATION[:2], tokenize=False, add_generation_prompt=True, **options)
    assert text.endswith(f"First?<|im_end|><|im_assistant|>assistant<|im_middle|>{end}")


def test_assistant_mask_covers_exactly_what_the_assistant_said(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded = tokenizer.apply_chat_template(CONVERSATION, return_dict=True, return_assistant_tokens_mask=True)
    said = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(said) == FIRST + CALLING + LAST


def test_an_unknown_role_is_an_error(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(Exception, match="unknown role narrator"):
        tokenizer.apply_chat_template([{"role": "narrator", "content": "x"}], tokenize=False)


def test_a_saved_tokenizer_loads_with_its_template(tokenizer: PreTrainedTokenizerFast, tmp_path: object) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.eos_token == "<|im_end|>"
    assert loaded.apply_chat_template(CONVERSATION) == tokenizer.apply_chat_template(CONVERSATION)
