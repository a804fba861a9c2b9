"""Scales of states stored in float8: the host's side of what the pack kernel does."""

import numpy as np
import numpy.typing as npt
import torch

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


def dequantize(states: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """States stored in float8, times their scales, in ``dtype``; the product is rounded to float32 first.

    Args:
        states: float8_e4m3fn ``[..., C, H]``.
        scales: float32 ``[..., C]``, on the same device. Where one is infinite the whole row becomes NaN.
        dtype: of the result.

    Returns:
        ``[..., C, H]`` in ``dtype``.

    Raises:
        ValueError: dtypes or shapes do not fit.
    """
    if states.dtype != torch.float8_e4m3fn or scales.dtype != torch.float32:
        raise ValueError(
            f"states, scales: expected torch.float8_e4m3fn, torch.float32, got {states.dtype}, {scales.dtype}"
        )
    if scales.shape != states.shape[:-1]:
        raise ValueError(
            f"scales: expected one for each row and state, {tuple(states.shape[:-1])}, got {tuple(scales.shape)}"
        )
    return (states.float() * scales.unsqueeze(-1)).to(dtype)
