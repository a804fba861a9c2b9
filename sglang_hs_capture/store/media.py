"""Where a sample's images are: the positions that each takes, and the prompt as it was asked for.

A prompt is asked for with one placeholder token for each image. The engine puts as many positions in its place as the
image takes, and at each of them an id made from the image's content, outside the vocabulary. Rows are stored with
these ids, so that the chained hash depends on what was in the image.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_hs_capture.store.hashing import end_hash
from sglang_hs_capture.store.schema import Media, Runs, rle_decode, rle_encode


def prompt_tokens(tokens: NDArray[np.int64], runs: Runs, token: int) -> NDArray[np.int64]:
    """The prompt as it was asked for: int64 ``[P]``, one placeholder ``token`` for each run.

    Args:
        tokens: int64 ``[S]``, the ids stored.
        runs: all within ``[0, S)``, in order.
        token: the placeholder's id.
    """
    kept = tokens.copy()
    keep = np.ones(len(tokens), dtype=bool)
    for start, count in runs:
        kept[start] = token
        keep[start + 1 : start + count] = False
    asked: NDArray[np.int64] = kept[keep]
    return asked


def prompt_hash(tokens: NDArray[np.int64], media: Media) -> int:
    """The chained hash of the prompt as it was asked for, computed from the ids stored, int64 ``[S]``."""
    return end_hash(prompt_tokens(tokens, media.runs, media.token))


def modality_mask(length: int, media: Media | None) -> NDArray[np.int64]:
    """Int64 ``[length]``: 1 at the positions of images."""
    mask = np.zeros(length, dtype=np.int64)
    for start, count in media.runs if media else ():
        mask[start : start + count] = 1
    return mask


def expand_loss_mask(mask: Sequence[int], media: Media) -> tuple[int, ...]:
    """The loss mask of a sample, from that of the prompt as it was asked for; both as run lengths of zeros and ones.

    Positions of images are 0.

    Args:
        mask: of the prompt, covering ``[P]``.
        media: its images.
    """
    # A run begins so far behind its placeholder as the runs before it are longer than one.
    places = np.array([start for start, _ in media.runs])
    longer = np.array([count - 1 for _, count in media.runs])
    places -= np.concatenate(([0], np.cumsum(longer)[:-1]))
    bits = rle_decode(mask)
    bits[places] = 0
    repeats = np.ones(len(bits), dtype=np.int64)
    repeats[places] += longer
    return tuple(rle_encode(np.repeat(bits, repeats)))
