"""The tokens of a prompt that stand for its images, one for each."""

from dataclasses import replace

import numpy as np

from sglang_hs_capture.data.records import BadRow, LossMask, Sample


def check_placeholders(sample: Sample, token: int | None) -> Sample:
    """See that a sample has one placeholder for each of its images; nobody is to learn to predict one.

    Args:
        sample: with or without images.
        token: what stands for an image in the model's prompts; None for a model that takes none, or is not known.

    Returns:
        The sample, with a loss mask of 0 at each placeholder.

    Raises:
        BadRow: it has not, or the model takes no images.
    """
    if not sample.images:
        return sample
    if token is None:
        raise BadRow(
            "it has images, and the model's config.json names no media_placeholder_token_id to stand for one; use a "
            "model that takes images, and name a hub's model by a directory or download it before"
        )
    places = sample.input_ids == token
    if (found := int(places.sum())) != len(sample.images):
        raise BadRow(
            f"it has {len(sample.images)} images, and its prompt {found} placeholders (token {token}) for them; the "
            "chat template must write one for each part of the type image, and no text may hold one"
        )
    mask: LossMask = np.where(places, 0, sample.loss_mask).astype(np.uint8)
    return replace(sample, loss_mask=mask, media_token=token)
