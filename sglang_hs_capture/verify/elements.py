"""Stored elements as numbers, with numpy alone."""

import numpy as np
from numpy.typing import NDArray


def to_float32(data: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """The values of elements as they are stored.

    Args:
        data: uint8 [n * element size], contiguous.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``, as in ``dataset.json``.

    Returns:
        float32 [n], exact for each of these dtypes; for float32 a view of ``data``.
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
    # A dtype whose elements have a scale beside them belongs here and needs more than its bytes.
    raise ValueError(f"expected bfloat16, float16 or float32; got {dtype!r}")
