"""Scales of states stored in float8: the host's side of what the pack kernel does."""

import numpy as np
import numpy.typing as npt

FLOAT8_MAX = 448.0
"""The largest value of float8 e4m3 (``torch.float8_e4m3fn``): the largest value of a row is stored as this."""


def scales_from_absmax(absmax: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The scale of each row and state, from what the pack operation gave as its largest absolute value.

    These are, to the bit, the scales by which the kernel divided. A row whose scale is 0 was stored as zeros. An
    infinite one marks a row with a NaN or an infinite value.

    Args:
        absmax: float32, any shape; commonly ``[T, C]``.

    Returns:
        float32 of the same shape.

    Raises:
        ValueError: ``absmax`` is not float32; from other values the scales would not be those of the kernel.
    """
    if absmax.dtype != np.float32:
        raise ValueError(f"absmax: expected float32, as the pack operation gives it, got {absmax.dtype}")
    return absmax / np.float32(FLOAT8_MAX)
