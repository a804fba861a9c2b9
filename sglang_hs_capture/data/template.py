"""A model's own tokenizer and chat template: conversations to text, and text to token ids."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from sglang_hs_capture.data.message_form import REASONING_KEYS, MessageForm
from sglang_hs_capture.data.reasoning import CLOSE, OPEN
from sglang_hs_capture.data.records import BadRow, Conversation, Message, TokenIds
from sglang_hs_capture.errors import InputError
from sglang_hs_capture.text import one_line

Span = tuple[int, int]
Offsets = npt.NDArray[np.int64]
_Rendered = TypeVar("_Rendered")

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PROBE = "probe0of0the0end0of0a0turn"
_EXCHANGE = Conversation("", "", [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}])
_CALL = {"id": "probe0id", "type": "function", "function": {"name": "probe0name", "arguments": {}}}
_HOW_ELSE = "pass rows tokenised before (input_ids and loss_mask), or --chat-template FILE"


def load_tokenizer(model_path: str, *, trust_remote_code: bool = False, chat_template: Path | None = None) -> Any:
    """Load a model's tokenizer, and replace its chat template where a file with another one is given.

    Raises:
        InputError: the tokenizer or the file cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except Exception as error:  # what remote code and half-downloaded models raise cannot be listed
        raise InputError(
            f"{model_path}: the tokenizer cannot be loaded: {type(error).__name__}: {one_line(str(error))}; a model "
            "with code of its own needs --trust-remote-code"
        ) from error
    if chat_template is not None:
        try:
            tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--chat-template: {chat_template} cannot be read: {error}") from error
    return tokenizer


def read_stop_ids(model_path: str) -> frozenset[int]:
    """The token ids that end a turn according to a local model's ``generation_config.json``; empty if it names none."""
    try:
        config = json.loads((Path(model_path) / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return frozenset()
    eos = config.get("eos_token_id") if isinstance(config, dict) else None
    ids = eos if isinstance(eos, list) else [eos]
    return frozenset(token for token in ids if type(token) is int)


class ChatTemplate:
    """Renders conversations with a tokenizer's chat template.

    Some things are put into one form before the template sees them. The role ``developer`` becomes ``system`` unless
    the template's source mentions it, since many templates silently drop roles that they do not know. The arguments of
    tool calls are given as objects, as SGLang's own chat endpoint does; a template that cannot take them, such as
    DeepSeek-V3's, gets their JSON text. A template that shows the id of a tool call but not its name, as Kimi's do,
    gets ids that hold the name. Reasoning is given under the key that the template looks for, also when it is written
    out in the content and the template does not take it from there itself. Settings of the run are overridden by the
    row's own ``chat_template_kwargs``.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            InputError: the tokenizer has no chat template, or one whose result cannot be written as text.
        """
        from transformers import PreTrainedTokenizerBase

        self.tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        self._frames: dict[str, tuple[str, str]] = {}
        self._plain = type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
        source = getattr(tokenizer, "chat_template", None)
        if not source and self._plain:
            raise InputError(f"the model's tokenizer has no chat template: {_HOW_ELSE}")
        self._source = "".join(source.values()) if isinstance(source, dict) else str(source or "")
        self._check_text_form()
        self._form = MessageForm(keep_developer="developer" in self._source)
        self._form = replace(self._form, names_in_ids=self._shows_ids_without_names())
        self._form = self._with_reasoning()
        self._marked = self._has_good_markers()
        self.stop_ids = self._find_stop_ids()

    def render(
        self, conversation: Conversation, messages: Sequence[Message] | None = None, *, generation_prompt: bool = False
    ) -> str:
        """The text of a conversation, or of other messages with its tools and settings.

        Raises:
            BadRow: the template rejects them.
        """
        kwargs = self._settings(conversation)

        def apply(chosen: list[Message]) -> str:
            text = self.tokenizer.apply_chat_template(
                chosen, tools=conversation.tools, add_generation_prompt=generation_prompt, tokenize=False, **kwargs
            )
            return str(text)

        return self._try(apply, conversation.messages if messages is None else messages)

    def answer_frame(self, conversation: Conversation) -> tuple[str, str]:
        """What a server puts after a question to ask for the answer, and the template after the answer's last word.

        Both with a conversation's settings, and empty if there is no such thing or the template rejects the question.
        """
        settings = json.dumps(self._settings(conversation), sort_keys=True, default=repr)
        if settings not in self._frames:
            exchange = replace(conversation, messages=_EXCHANGE.messages, tools=None)
            try:
                question = self.render(exchange, _EXCHANGE.messages[:1])
                prompt = self.render(exchange, _EXCHANGE.messages[:1], generation_prompt=True)
                closing = self.render(exchange).rpartition(_PROBE)[2]
            except BadRow:
                question = prompt = closing = ""
            self._frames[settings] = (prompt[len(question) :] if prompt.startswith(question) else "", closing)
        return self._frames[settings]

    def render_marked(self, conversation: Conversation) -> tuple[str, list[Span]] | None:
        """The text of a conversation, and what the template marks as said by the assistant, in characters.

        ``apply_chat_template(return_assistant_tokens_mask=True)`` starts from the same spans but carries them over to
        tokens wrongly when one ends with a character of several tokens, at token 0 or in dropped whitespace.

        Returns:
            None if the template marks nothing or in a way that cannot be followed, or if the tokenizer renders with
            code of its own.

        Raises:
            BadRow: the template rejects the conversation.
        """
        return self._render_marked(conversation) if self._marked else None

    def _render_marked(self, conversation: Conversation) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        tools = conversation.tools
        template = self.tokenizer.get_chat_template(None, tools)
        kwargs = {**self.tokenizer.special_tokens_map, **self._settings(conversation)}

        def apply(chosen: list[Message]) -> tuple[str, list[Span]]:
            texts, spans = render_jinja_template(
                [chosen], tools=tools, chat_template=template, return_assistant_tokens_mask=True, **kwargs
            )
            return str(texts[0]), [(int(start), int(end)) for start, end in spans[0]]

        return self._try(apply, conversation.messages)

    def encode(self, text: str) -> TokenIds:
        """Token ids of rendered text, int64 ``[S]``.

        Raises:
            BadRow: the text cannot be encoded.
        """
        return np.asarray(self._encoded(text)["input_ids"], dtype=np.int64)

    def encode_with_offsets(self, text: str) -> tuple[TokenIds, Offsets | None]:
        """Token ids ``[S]`` and where each token begins and ends in the text, in characters, ``[S, 2]``.

        Each of the several tokens of one character has that character as its place. Whitespace that the tokenizer
        leaves out of a token's place is counted to it again. The places are None if the tokenizer, a slow one, cannot
        tell.

        Raises:
            BadRow: the text cannot be encoded.
        """
        if not getattr(self.tokenizer, "is_fast", False):
            return self.encode(text), None
        encoded = self._encoded(text, return_offsets_mapping=True)
        offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        ends = np.maximum.accumulate(offsets[:, 1])
        starts = np.minimum(offsets[:, 0], np.concatenate(([0], ends[:-1])))
        return np.asarray(encoded["input_ids"], dtype=np.int64), np.stack((starts, ends), axis=1)

    def is_blank(self, token: int) -> bool:
        """Whether a token is nothing but whitespace."""
        text = self.decode([token])
        return bool(text) and not text.strip()

    def decode(self, input_ids: Sequence[int] | TokenIds) -> str:
        """The text of some tokens, control tokens included."""
        return str(self.tokenizer.decode(input_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _settings(self, conversation: Conversation) -> dict[str, Any]:
        return {**self._kwargs, **conversation.template_kwargs}

    def _try(self, apply: Callable[[list[Message]], _Rendered], messages: Sequence[Message]) -> _Rendered:
        try:
            try:
                return apply(self._form.apply(messages, arguments_as_text=False))
            except TypeError:
                return apply(self._form.apply(messages, arguments_as_text=True))
        except ImportError:
            raise
        except Exception as error:  # a template is foreign code: what it raises cannot be listed
            raise BadRow(
                f"the chat template cannot render the conversation: {type(error).__name__}: {one_line(str(error))}"
            ) from error

    def _encoded(self, text: str, **kwargs: Any) -> Any:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRow(
                f"the text holds half of a surrogate pair, {text[error.start]!r}, which no token stands for"
            ) from None
        return self.tokenizer(text, add_special_tokens=False, **kwargs)

    def _check_text_form(self) -> None:
        """Refuse tokenizers of mistral_common, whose control tokens have no text form."""
        probe = [{"role": "user", "content": "x"}]
        try:
            text = self.tokenizer.apply_chat_template(probe, tokenize=False, **self._kwargs)
            direct = self.tokenizer.apply_chat_template(probe, tokenize=True, return_dict=False, **self._kwargs)
        except Exception:  # a template that rejects the probe: each conversation will say why
            return
        if list(direct) != list(self._encoded(str(text))["input_ids"]):
            raise InputError(
                f"the model's tokenizer ({type(self.tokenizer).__name__}) writes chats with tokens that have no text "
                "form, so no loss mask can be found: pass rows tokenised before (input_ids and loss_mask)"
            )

    def _shows_ids_without_names(self) -> bool:
        text = self._shown({"role": "assistant", "content": "", "tool_calls": [_CALL]})
        return "probe0id" in text and "probe0name" not in text

    def _with_reasoning(self) -> MessageForm:
        """The form with the place of reasoning; where the template shows none it does not matter."""
        written = f"{OPEN}{_PROBE}{CLOSE}x"
        for key in REASONING_KEYS:
            calling = self._shown({"role": "assistant", "content": "", key: _PROBE, "tool_calls": [_CALL]})
            answering = self._shown({"role": "assistant", "content": "x", key: _PROBE})
            if _PROBE in calling + answering:
                lift = written in self._shown({"role": "assistant", "content": written})
                breaks = f"{OPEN}\n{_PROBE}\n{CLOSE}" in calling + answering
                return replace(self._form, reasoning_key=key, lift_reasoning=lift, breaks_lines=breaks)
        return self._form

    def _shown(self, message: Message) -> str:
        """How a turn after a question is rendered; empty if the template rejects it."""
        try:
            return self.render(Conversation("", "", [{"role": "user", "content": "x"}, message]))
        except BadRow:  # each conversation will say why
            return ""

    def _has_good_markers(self) -> bool:
        """Whether the template marks what the assistant says, and where: inside a macro jinja's positions are wrong."""
        if not self._plain or not _MARKER.search(self._source):
            return False
        try:
            text, spans = self._render_marked(_EXCHANGE)
        except BadRow:  # each conversation will say why
            return True
        return any(_PROBE in text[start:end] for start, end in spans)

    def _find_stop_ids(self) -> frozenset[int]:
        """The tokenizer's end-of-text token, and the control token that the template puts after an answer."""
        eos = getattr(self.tokenizer, "eos_token_id", None)
        found = {eos} if isinstance(eos, int) else set()
        try:
            text = self.render(_EXCHANGE)
        except BadRow:  # each conversation will say why
            return frozenset(found)
        control = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        _, present, after = text.rpartition(_PROBE)
        if not present:
            return frozenset(found)
        return frozenset(found.union(control.intersection(self.encode(after.lstrip())[:1].tolist())))
