"""The pack kernel: gather the kept rows of one state, cast, and interleave them into ``[T, C, H]``, in one pass."""

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit
def _cast(values, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    if DTYPE == tl.bfloat16 and values.dtype != tl.bfloat16:
        # Round to nearest even in integers: the interpreter's own cast truncates, and so both give the same bits.
        wide = values.to(tl.float32)
        pattern = wide.to(tl.uint32, bitcast=True)
        rounded = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
        rounded = tl.where(wide == wide, rounded, 0x7FC0)
        stored = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        stored = values.to(DTYPE)
    return stored


@triton.jit
def _pack_kernel(  # type: ignore[no-untyped-def]
    state_ptr,
    rows_ptr,
    out_ptr,
    absmax_ptr,
    n_rows,
    state_stride,
    out_stride,
    absmax_stride,
    column,
    HIDDEN: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Row numbers are 64-bit: four 7168-wide states pass 2^31 elements at 75,000 rows.
    first = tl.program_id(0).to(tl.int64)
    for row in range(first, n_rows, tl.num_programs(0)):
        source = tl.load(rows_ptr + row) if GATHER else row
        source_ptr = state_ptr + source * state_stride
        target_ptr = out_ptr + row * out_stride + column * HIDDEN
        largest = tl.zeros([BLOCK], dtype=tl.float32)
        for start in tl.static_range(0, HIDDEN, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = offsets < HIDDEN
            stored = _cast(tl.load(source_ptr + offsets, mask=mask, other=0.0), out_ptr.dtype.element_ty)
            tl.store(target_ptr + offsets, stored, mask=mask)
            magnitude = tl.abs(stored.to(tl.float32))
            largest = tl.maximum(largest, tl.where(magnitude == magnitude, magnitude, float("inf")))
        tl.store(absmax_ptr + row * absmax_stride + column, tl.max(largest, axis=0))


def pack_state(
    state: torch.Tensor,
    rows: torch.Tensor | None,
    out: torch.Tensor,
    absmax: torch.Tensor,
    column: int,
    *,
    programs: int | None = None,
) -> None:
    """Triton form of :func:`sglang_hs_capture.kernels.reference.pack_state`; the same contract, on the current stream.

    ``out`` may be pinned host memory: the kernel then stores over PCIe. ``programs`` bounds the grid, so that such a
    launch leaves multiprocessors to the model; by default there is one program a row.

    Raises:
        ValueError: shapes, strides or dtypes do not fit the contract.
    """
    n_rows, n_columns, hidden = out.shape
    if state.ndim != 2 or state.shape[1] != hidden or state.stride(1) != 1:
        raise ValueError(
            f"state: expected [N, {hidden}] with contiguous rows, got {tuple(state.shape)} strides {state.stride()}"
        )
    if not out[0:1].is_contiguous() or not 0 <= column < n_columns:
        raise ValueError(
            f"out: expected rows [C, H] contiguous and column in [0, {n_columns}), got {out.stride()}, {column}"
        )
    if rows is None and state.shape[0] < n_rows:
        raise ValueError(f"state: expected at least {n_rows} rows, got {state.shape[0]}")
    if rows is not None and (rows.shape != (n_rows,) or rows.dtype != torch.int64):
        raise ValueError(f"rows: expected int64 [{n_rows}], got {rows.dtype} {tuple(rows.shape)}")
    if n_rows == 0:
        return
    grid = (n_rows if programs is None else min(programs, n_rows),)
    _pack_kernel[grid](
        state,
        state if rows is None else rows,
        out,
        absmax,
        n_rows,
        state.stride(0),
        out.stride(0),
        absmax.stride(0),
        column,
        HIDDEN=hidden,
        GATHER=rows is not None,
        BLOCK=min(_BLOCK, triton.next_power_of_2(hidden)),
        num_warps=8,
    )
