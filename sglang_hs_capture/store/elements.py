"""Stored elements as numbers, with numpy alone."""

import numpy as np
from numpy.typing import NDArray


def _float8_values() -> NDArray[np.float32]:
    """float32 [256]: what each byte stands for in e4m3, the form without infinities, whose exponent has bias 7."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    size[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes & 0x80, -size, size).astype(np.float32)


_FLOAT8 = _float8_values()


def to_float32(data: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """The values of elements as they are stored.

    Args:
        data: uint8 [n * element size], contiguous.
        dtype: ``"bfloat16"``, ``"float16"``, ``"float32"`` or ``"float8_e4m3"``, as in ``dataset.json``.

    Returns:
        float32 [n], exact for each of these dtypes; for float32 a view of ``data``. Of float8 the scales are not in it.
    """
    match dtype:
        case "bfloat16":  # the upper half of a float32
            wide = data.view("<u2").astype(np.uint32)
            wide <<= 16
            return wide.view(np.float32)
        case "float16":
            return data.view("<f2").astype(np.float32)
        case "float32":
            return data.view("<f4")
        case "float8_e4m3":
            return _FLOAT8[data]
    raise ValueError(f"expected bfloat16, float16, float32 or float8_e4m3; got {dtype!r}")
