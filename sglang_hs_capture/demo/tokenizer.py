"""A small byte-level BPE tokenizer in the style of Kimi-K2's, trained on the demo's own text."""

import json
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "[BOS]", "<|im_end|>", "[PAD]"
MEDIA_PLACEHOLDER = "<|media_pad|>"
CONTROL_TOKENS = (
    PAD,
    BOS,
    EOS,
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    MEDIA_PLACEHOLDER,
)
# Markers that stay in the decoded text: reasoning parsers look for them there.
VISIBLE_TOKENS = ("<think>", "</think>")


def demo_texts() -> list[str]:
    """Every string of the shipped conversations, in file order."""
    lines = resources.files("sglang_hs_capture.demo").joinpath("conversations.jsonl").read_text(encoding="utf-8")
    return [text for line in lines.splitlines() for text in _strings(json.loads(line))]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 2048) -> PreTrainedTokenizerFast:
    """Train a tokenizer; the same texts always give the same one.

    Args:
        texts: what to learn merges from. All 256 bytes are in the vocabulary, so any text can be encoded.
        vocab_size: the most entries it may have, control tokens included; it has fewer if the texts are short.

    Returns:
        a tokenizer with Kimi-K2's control tokens and a chat template that marks what the assistant said.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(VISIBLE_TOKENS),
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in VISIBLE_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    fast.chat_template = (
        Path(str(resources.files("sglang_hs_capture.demo"))).joinpath("chat_template.jinja").read_text()
    )
    return fast
