"""What a model is to answer anew: the part of a sample or of a conversation that comes before each answer."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from sglang_hs_capture.data.media import references
from sglang_hs_capture.data.records import BadRow, Conversation, InputProblem, Record, Sample, TokenIds
from sglang_hs_capture.data.samples import SeenIds, problem_of, repeated
from sglang_hs_capture.data.template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens that an answer is to follow.

    Attributes:
        id: the id of the sample that prompt and answer will be.
        source: ``file:line``.
        input_ids: int64 ``[P]``, P at least 1.
        stop_ids: token ids that end an answer, besides those that the model's own config names.
    """

    id: str
    source: str
    input_ids: TokenIds
    stop_ids: frozenset[int] = frozenset()


def iter_prompts(
    records: Iterable[Record | InputProblem],
    template_for: Callable[[str], ChatTemplate],
    *,
    last_only: bool,
    vocab_size: int | None,
) -> Iterator[Prompt | InputProblem]:
    """The prompts of conversations and of rows tokenised before, in order, each row's id at most once.

    Memory grows by about a hundred bytes for each row, for the ids seen.

    Args:
        records: from ``conversations.iter_records``.
        template_for: gives the chat template, for a conversation at ``file:line``.
        last_only: only the last answer of each is wanted.
        vocab_size: token ids must be below it; None for no limit.

    Raises:
        InputError: a file cannot be read on, or no conversation can be rendered.
    """
    seen = SeenIds()
    for record in records:
        if isinstance(record, InputProblem):
            yield record
            continue
        if seen.has(record.id):
            yield InputProblem(record.source, repeated(record.id), record.id)
            continue
        try:
            if record.images if isinstance(record, Sample) else references(record.messages):
                raise BadRow("it has images, and prompts are answered anew only from text; capture it as it is")
            if isinstance(record, Sample):
                prompts = prompts_of_sample(record, last_only=last_only)
            else:
                prompts = prompts_of_conversation(record, template_for(record.source), last_only=last_only)
        except BadRow as problem:
            yield InputProblem(record.source, str(problem), record.id)
            continue
        for prompt in prompts:
            reason = problem_of(prompt.input_ids, None, vocab_size)
            yield InputProblem(prompt.source, reason, prompt.id) if reason else prompt


def prompts_of_sample(sample: Sample, *, last_only: bool) -> list[Prompt]:
    """The tokens before each run of trained tokens; all tokens of a row of which every token or none is trained.

    Raises:
        BadRow: an answer begins at the first token, so there is nothing to answer.
    """
    mask = sample.loss_mask.astype(bool)
    starts = np.flatnonzero(mask & ~np.concatenate(([False], mask[:-1])))
    if mask.all() or not len(starts):
        return [Prompt(sample.id, sample.source, sample.input_ids)]
    if starts[0] == 0:
        raise BadRow("the first token is trained on, so no prompt stands before it that could be answered")
    wanted = starts[-1:] if last_only else starts
    return _named(sample.id, sample.source, [sample.input_ids[:start] for start in wanted])


def prompts_of_conversation(conversation: Conversation, template: ChatTemplate, *, last_only: bool) -> list[Prompt]:
    """The conversation up to each turn of the assistant, and up to its end if somebody else speaks last.

    Each is rendered as a server would render it to answer: without what the template takes out of past turns, and with
    the beginning of the assistant's turn. Several messages of the assistant in a row are one turn.

    Raises:
        BadRow: nobody speaks before the assistant, or the template rejects the messages.
    """
    ends = list(_turns(conversation))
    if not ends:
        raise BadRow("nobody speaks before the assistant, so there is nothing to answer")
    wanted = ends[-1:] if last_only else ends
    heads = [template.render(conversation, conversation.messages[:end], generation_prompt=True) for end in wanted]
    prompts = _named(conversation.id, conversation.source, [template.encode(head) for head in heads], template.stop_ids)
    if any(not len(prompt.input_ids) for prompt in prompts):
        raise BadRow("the chat template renders a prompt without tokens")
    return prompts


def _turns(conversation: Conversation) -> Iterator[int]:
    """How many messages come before each turn of the assistant."""
    roles = [message["role"] for message in conversation.messages]
    for index, role in enumerate([*roles, "assistant"]):
        if role == "assistant" and index and roles[index - 1] != "assistant":
            yield index


def _named(sample_id: str, source: str, heads: list[TokenIds], stop_ids: frozenset[int] = frozenset()) -> list[Prompt]:
    if len(heads) == 1:
        return [Prompt(sample_id, source, heads[0], stop_ids)]
    return [Prompt(f"{sample_id}#turn-{number}", source, head, stop_ids) for number, head in enumerate(heads, start=1)]
