"""The pack operation in plain torch: the contract the Triton kernel is tested against, and what runs on a CPU."""

import torch

from sglang_hs_capture.float8 import FLOAT8_MAX


def pack_state(
    state: torch.Tensor, rows: torch.Tensor | None, out: torch.Tensor, absmax: torch.Tensor, column: int
) -> None:
    """Gather rows of one captured state, cast them, and write them as one column of the packed rows.

    With ``out`` in float8 e4m3 each row is divided by a scale of its own, its largest absolute value divided by 448,
    and the quotient is rounded to nearest even; divisions are those of IEEE float32. ``scales_from_absmax`` gives the
    same scales from ``absmax``. A row is stored as zeros if its scale is 0 (its largest value is 0, or below 3.2e-43)
    or infinite.

    Args:
        state: ``[N, H]`` floating point, the state of every row of the forward; rows may be strided.
        rows: int64 ``[T]``, which rows to keep, in order; None keeps the first ``T``.
        out: ``[T, C, H]`` in the store's dtype; ``out[:, column]`` is written, nothing else is touched.
        absmax: float32 ``[T, C]``; ``absmax[:, column]`` becomes each row's largest absolute value *as stored*, with
            float8 as it was *before* division and cast; infinity where a value is NaN or infinite. It is how a row
            that must not be trained on is noticed without reading the rows again.
        column: which of the ``C`` columns.

    Raises:
        IndexError: a row index lies outside the state.
    """
    kept = state[: out.shape[0]] if rows is None else state[rows]
    if out.dtype == torch.float8_e4m3fn:
        values = kept.float()
        largest = _largest(values)
        stored = _scaled(values, largest).to(out.dtype)
    else:
        stored = kept.to(out.dtype)
        largest = _largest(stored.float())
    out[:, column].copy_(stored)
    absmax[:, column].copy_(largest)


def _largest(values: torch.Tensor) -> torch.Tensor:
    magnitude = values.abs()
    return torch.where(magnitude.isnan(), torch.inf, magnitude).amax(dim=1)


def _scaled(values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    # A tensor as the divisor: on a GPU torch multiplies by the reciprocal of a number.
    scale = (largest / torch.full_like(largest, FLOAT8_MAX)).unsqueeze(1)
    usable = (scale > 0) & scale.isfinite()
    # Quotients above 448 come of scales so small that they are rounded coarsely; torch would cast them to NaN.
    quotient = (values / torch.where(usable, scale, 1)).clamp(-FLOAT8_MAX, FLOAT8_MAX)
    return torch.where(usable, quotient, 0)
