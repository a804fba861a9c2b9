"""States stored in float8 back to numbers that can be computed with."""

import torch

# By how much the exponents' biases differ: the bits of float8 e4m3, moved to those of float16, are a 256th.
_LIFT = 2.0**8


def dequantize(states: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """States stored in float8, times their scales, in ``dtype``; the product is rounded to float32 first.

    Args:
        states: float8_e4m3fn ``[..., H]``, on any device; commonly one state ``[S, H]``, or rows ``[S, C, H]``. The two
            codes for NaN, which are never stored, would count as 480 and -480.
        scales: float32 ``[...]``, on the same device. Where one is infinite the whole row becomes NaN or infinite.
        dtype: of the result.

    Returns:
        ``[..., H]`` in ``dtype``.

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
    # torch's own conversion takes float8 value by value on a CPU. Here the sign stays where the sign extension has put
    # it, and exponent and mantissa come to lie behind float16's own; subnormal values included, this is exact.
    bits = states.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080)
    return bits.view(torch.float16).float().mul_((scales * _LIFT).unsqueeze(-1)).to(dtype)
