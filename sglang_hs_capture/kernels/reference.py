"""The pack operation in plain torch: the contract the Triton kernel is tested against, and what runs on a CPU."""

import torch


def pack_state(
    state: torch.Tensor, rows: torch.Tensor | None, out: torch.Tensor, absmax: torch.Tensor, column: int
) -> None:
    """Gather rows of one captured state, cast them, and write them as one column of the packed rows.

    Args:
        state: ``[N, H]`` floating point, the state of every row of the forward; rows may be strided.
        rows: int64 ``[T]``, which rows to keep, in order; None keeps the first ``T``.
        out: ``[T, C, H]`` in the store's dtype; ``out[:, column]`` is written, nothing else is touched.
        absmax: float32 ``[T, C]``; ``absmax[:, column]`` becomes each row's largest absolute value *as stored*,
            infinity where a value is NaN or infinite. It is how a row that must not be trained on is noticed without
            reading the rows again.
        column: which of the ``C`` columns.

    Raises:
        IndexError: a row index lies outside the state.
    """
    kept = state[: out.shape[0]] if rows is None else state[rows]
    stored = kept.to(out.dtype)
    out[:, column].copy_(stored)
    magnitude = stored.float().abs()
    absmax[:, column].copy_(torch.where(magnitude.isnan(), torch.inf, magnitude).amax(dim=1))
