"""Shows that a prompt's rows were computed from the images that the engine has for it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_hs_capture.store.hashing import end_hash
from sglang_hs_capture.store.media import prompt_tokens
from sglang_hs_capture.store.schema import Media
from sglang_hs_capture.writing.plan import ImageSpan


def prove_images(tokens: NDArray[np.int64], images: Sequence[ImageSpan], token: int | None) -> Media | str | None:
    """Compare the ids at the images' positions with those that the engine has made from the images' content.

    Rows of a prefix may have been computed for another request. The hash in a request's id covers the text, not what
    is in an image, so that a prefix with the same text and another image would pass without this.

    Args:
        tokens: int64 ``[S]``, the ids of the rows found for the whole prompt.
        images: those of the prompt, in order, as the engine tells them.
        token: the placeholder that stood for each image when the prompt was sent.

    Returns:
        Where the images are; None without any; or why the rows are not those of these images.
    """
    if not images:
        return None
    if token is None:
        return "the engine has images for the prompt, and the model's config names no placeholder for them"
    for span in images:
        ids = tokens[span.start : span.start + span.count]
        if len(ids) < span.count:
            return f"an image takes positions {span.start} on, and the prompt ends after {len(tokens)} tokens"
        if not np.array_equal(ids, np.resize(np.array(span.ids, dtype=np.int64), span.count)):
            return f"the rows at positions {span.start} on were computed from another image"
    runs = tuple((span.start, span.count) for span in images)
    return Media(runs, token, end_hash(prompt_tokens(tokens, runs, token)))
