"""Brings samples to the length and the loss that the settings ask for."""

from dataclasses import replace

import numpy as np

from sglang_hs_capture.data.preparation import Overflow, Preparation
from sglang_hs_capture.data.records import Excluded, Exclusion, InputProblem, LossMask, Prepared, Sample


def last_run(mask: LossMask) -> LossMask:
    """The mask with only its last run of ones, uint8 ``[S]``: the last turn of a row that was tokenised before."""
    ones = np.flatnonzero(mask)
    if not len(ones):
        return mask
    gaps = np.flatnonzero(np.diff(ones) > 1)
    start = int(ones[gaps[-1] + 1]) if len(gaps) else int(ones[0])
    kept = np.zeros_like(mask)
    kept[start:] = mask[start:]
    return kept


def fitted(sample: Sample, preparation: Preparation) -> Prepared:
    """The sample, cut where it is too long; or why it is left out."""
    length, limit = len(sample.input_ids), preparation.max_length
    if not preparation.keep_untrained and not sample.loss_mask.any():
        return Excluded(sample.source, Exclusion.NO_LOSS, sample.id)
    if limit is None or length <= limit:
        return sample
    if preparation.overflow is Overflow.DROP:
        return Excluded(sample.source, Exclusion.TOO_LONG, sample.id)
    if preparation.overflow is Overflow.BAD_INPUT:
        reason = f"prompt of {length} tokens is longer than --max-length, {limit}"
        return InputProblem(sample.source, reason, sample.id)
    return _cut(sample, limit, preparation)


def _cut(sample: Sample, limit: int, preparation: Preparation) -> Prepared:
    length = len(sample.input_ids)
    kept = slice(limit) if preparation.overflow is Overflow.TRUNCATE_RIGHT else slice(length - limit, None)
    # What is left of a conversation without an image that it speaks of is another conversation.
    if np.count_nonzero(sample.input_ids[kept] == sample.media_token) < len(sample.images):
        return Excluded(sample.source, Exclusion.IMAGE_CUT_OFF, sample.id)
    if not preparation.keep_untrained and not sample.loss_mask[kept].any():
        return Excluded(sample.source, Exclusion.LOSS_CUT_OFF, sample.id)
    return replace(sample, input_ids=sample.input_ids[kept], loss_mask=sample.loss_mask[kept], cut=length - limit)
