"""Brings together what the check of the known answers needs: the dataset, its answers, and the model's head."""

from pathlib import Path
from typing import TYPE_CHECKING

from sglang_hs_capture.cli import options
from sglang_hs_capture.cli.second_capture import require_same_model
from sglang_hs_capture.errors import ConfigError, InputError
from sglang_hs_capture.model_config import resolve_model_config
from sglang_hs_capture.store.known_answers import load_known_answers
from sglang_hs_capture.store.schema import DatasetInfo

if TYPE_CHECKING:
    from sglang_hs_capture.verify.known_answer import AnswerReport


def check_known_answers(
    directory: Path, model: str | None, info: DatasetInfo, prompts: int, computed_in: options.Dtype | None
) -> "AnswerReport":
    """Compare up to ``prompts`` of the dataset's answers, spread evenly over them, with its final states.

    Args:
        model: where the head is; None for the path in ``dataset.json``.
        computed_in: what the engine computed in; None to take the dtype of the head in the checkpoint.

    Raises:
        InputError: the dataset has no answers.
        ConfigError: the model's weights are not here.
        DatasetMismatchError: the model is another one.
    """
    from sglang_hs_capture.reader.dataset import HiddenStateDataset
    from sglang_hs_capture.verify.known_answer import check_answers, coarser
    from sglang_hs_capture.verify.lm_head import LmHead
    from sglang_hs_capture.verify.recapture import spread

    answers = load_known_answers(directory)
    dataset = HiddenStateDataset(directory)
    places = {(sample.id, sample.length, sample.end_hash): place for place, sample in enumerate(dataset.samples)}
    known = [
        (places[key], answer) for answer in answers if (key := (answer.id, answer.length, answer.end_hash)) in places
    ]
    if not known:
        raise InputError(
            f"{directory}: expected log-probabilities of the engine for a few samples, and there are none; hs-capture "
            "run keeps some unless --known-answers is 0: capture at least one more sample into the dataset; "
            "of a merged dataset, look at those that it was joined from"
        )
    try:
        config = resolve_model_config(model or info.model_path)
    except ConfigError as error:
        raise ConfigError(f"{error}; name a directory with the model's weights by --model") from None
    require_same_model(directory, info, config, "--model" if model else "the model there")
    head = LmHead(config)
    chosen = [known[place] for place in spread(len(known), prompts)]
    return check_answers(dataset, chosen, head, coarser(info.dtype, computed_in.value if computed_in else head.dtype))
