"""The ids by which prompts are put in order and servers are chosen: what is in an image counts, and how large it is."""

from collections.abc import Sequence

import numpy as np

from sglang_hs_capture.data.images import Image
from sglang_hs_capture.data.records import TokenIds

# So many bytes of images in flight count as much as a token: a GiB of them fills a window of two million tokens.
BYTES_PER_TOKEN = 512


def routing_ids(input_ids: TokenIds, images: Sequence[Image], media_token: int | None) -> TokenIds:
    """A prompt with an id of its own in the place of each image, as often as the image takes positions, about.

    Prompts that begin alike have routing ids that begin alike, as far as the server can share what it computes.

    Args:
        input_ids: int64 ``[S]``, a placeholder for each image.
        images: the images, in order.
        media_token: the placeholder.

    Returns:
        int64 ``[R]``; ``input_ids`` itself without images.
    """
    if not images:
        return input_ids
    places = np.flatnonzero(input_ids == media_token)
    ids, repeats = input_ids.copy(), np.ones(len(input_ids), dtype=np.int64)
    # Negative, as no token is.
    ids[places] = [-(int(image.name[-15:], 16) + 1) for image in images]
    repeats[places] = [image.positions for image in images]
    return np.repeat(ids, repeats)


def load_of(ids: TokenIds, images: Sequence[Image]) -> int:
    """How much a prompt fills the window of what is in flight, in tokens; ``ids`` are its routing ids."""
    return len(ids) + sum(image.nbytes for image in images) // BYTES_PER_TOKEN
