"""The pack kernel: gather the kept rows of one state, cast, and interleave them into ``[T, C, H]``, in one pass.

On a GPU the hardware's own instructions round. Triton's interpreter does not have them, or rounds otherwise; there, and
for float8 on GPUs older than the format, the same rounding is done in integers. Both are held to the reference.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

_FLOAT8 = torch.float8_e4m3fn
_STORED = (torch.bfloat16, torch.float16, torch.float32, _FLOAT8)

_FLOAT8_MAX = tl.constexpr(448.0)
# Scales below the bound are multiplied by a power of two, as their row is: their quotients and remainders stay normal.
_SMALL_SCALE = tl.constexpr(2.0**-70)
_LIFT = tl.constexpr(2.0**80)


@dataclass(frozen=True)
class Launch:
    """How the kernel is launched. Nothing of it changes a result.

    Attributes:
        block: elements of a row that a program holds at once, a power of two. With a scale it must hold a whole row.
        warps: warps of a program.
        rows: rows that a program packs, one after another.
        store_cache: Triton's cache modifier of the stores. The model does not read packed rows, and reads the state
            again at once: with ``.cs`` the former make room for the latter in the cache.
    """

    block: int
    warps: int
    rows: int = 1
    store_cache: str = ".cs"


def default_launch(hidden: int) -> Launch:
    """The launch for rows of ``hidden`` elements: a whole row at once, 32 elements a thread, and at most 16 warps.

    It depends on nothing else, and is not searched for at run time: the kernel runs on the scheduler's thread.
    """
    block = triton.next_power_of_2(hidden)
    return Launch(block=block, warps=min(max(block // 1024, 1), 16))


@triton.jit
def _wide(values, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    if values.dtype == tl.bfloat16 and not NATIVE:
        # In integers, since the interpreter's own conversion makes zeros of subnormal values.
        wide = (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = values.to(tl.float32)
    return wide


@triton.jit
def _magnitude(values, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    # Bits without the sign, which as integers are ordered like absolute values, NaN above infinity.
    return _wide(values, NATIVE).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _largest(magnitudes):  # type: ignore[no-untyped-def]
    # A NaN's bits become infinity's.
    return tl.minimum(tl.max(magnitudes, axis=0), 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _cast(values, DTYPE: tl.constexpr, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    if values.dtype == DTYPE:
        stored = values
    elif DTYPE == tl.bfloat16 and not NATIVE:
        # Round to nearest even in integers: the interpreter's own cast truncates.
        wide = _wide(values, NATIVE)
        pattern = wide.to(tl.uint32, bitcast=True)
        rounded = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
        rounded = tl.where(wide == wide, rounded, 0x7FC0)
        stored = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        stored = _wide(values, NATIVE).to(DTYPE)
    return stored


@triton.jit
def _quotient(values, scale, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """``values / scale`` in float32, rounded as IEEE 754 wants; ``scale`` is finite, positive, and one for all."""
    if NATIVE:
        # The reciprocal is computed once a row, and two exact remainders correct the quotient (Markstein's theorem):
        # six multiplications, plain or fused, in the place of a division, with its checks and branches, an element.
        # The signs are such that a negative zero stays one.
        lift = tl.where(scale < _SMALL_SCALE, _LIFT, 1.0)
        scale *= lift
        negated = values * -lift
        negative_reciprocal = tl.div_rn(tl.full([], -1.0, tl.float32), scale)
        quotient = negated * negative_reciprocal
        for _ in tl.static_range(2):
            quotient = tl.fma(tl.fma(quotient, scale, negated), negative_reciprocal, quotient)
    else:
        # The interpreter's fused operation is not fused, its division is exact.
        quotient = tl.div_rn(values, scale)
    return quotient


@triton.jit
def _float8_bits(values, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Finite float32 to the bits of float8 e4m3, to nearest even; what is larger than 448 becomes 448."""
    if NATIVE:
        stored = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        magnitude = tl.minimum(tl.abs(values), _FLOAT8_MAX)
        pattern = magnitude.to(tl.uint32, bitcast=True)
        # From 23 bits of mantissa to 3, and the exponent's bias from 127 to 7.
        normal = ((pattern + 0x7FFFF + ((pattern >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 all steps are 2^-9 wide, as those of float32 are from 2^14 on: the addition rounds.
        subnormal = (magnitude + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        sign = (values.to(tl.uint32, bitcast=True) >> 24) & 0x80
        stored = (tl.where(magnitude < 0.015625, subnormal, normal) | sign).to(tl.uint8)
    return stored


@triton.jit
def _scaled(values, largest, NATIVE: tl.constexpr, NATIVE_FLOAT8: tl.constexpr):  # type: ignore[no-untyped-def]
    scale = tl.div_rn(largest, tl.full([], _FLOAT8_MAX, tl.float32))
    usable = (scale > 0.0) & (scale < float("inf"))
    quotient = _quotient(values, tl.where(usable, scale, 1.0), NATIVE)
    return _float8_bits(tl.where(usable, quotient, 0.0), NATIVE_FLOAT8)


# Numbers that change from call to call, and the column, must not make Triton compile again.
@triton.jit(do_not_specialize=["n_rows", "absmax_stride", "column"])
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
    SCALED: tl.constexpr,
    NATIVE: tl.constexpr,
    NATIVE_FLOAT8: tl.constexpr,
    BLOCK: tl.constexpr,
    STORE_CACHE: tl.constexpr,
):
    # Row numbers are 64-bit: four 7168-wide states pass 2^31 elements at 75,000 rows.
    first = tl.program_id(0).to(tl.int64)
    for row in range(first, n_rows, tl.num_programs(0)):
        source = tl.load(rows_ptr + row) if GATHER else row
        source_ptr = state_ptr + source * state_stride
        target_ptr = out_ptr + row * out_stride + column * HIDDEN
        if SCALED:
            offsets = tl.arange(0, BLOCK)
            mask = offsets < HIDDEN
            values = _wide(tl.load(source_ptr + offsets, mask=mask, other=0.0), NATIVE)
            largest = _largest(_magnitude(values, NATIVE))
            stored = _scaled(values, largest, NATIVE, NATIVE_FLOAT8)
            tl.store(target_ptr + offsets, stored, mask=mask, cache_modifier=STORE_CACHE)
        else:
            magnitudes = tl.zeros([BLOCK], dtype=tl.int32)
            for start in tl.static_range(0, HIDDEN, BLOCK):
                offsets = start + tl.arange(0, BLOCK)
                mask = offsets < HIDDEN
                values = tl.load(source_ptr + offsets, mask=mask, other=0.0)
                stored = _cast(values, out_ptr.dtype.element_ty, NATIVE)
                tl.store(target_ptr + offsets, stored, mask=mask, cache_modifier=STORE_CACHE)
                magnitudes = tl.maximum(magnitudes, _magnitude(stored, NATIVE))
            largest = _largest(magnitudes)
        tl.store(absmax_ptr + row * absmax_stride + column, largest)


_COMPILED = isinstance(_pack_kernel, triton.JITFunction)


@lru_cache
def _has_float8(device: torch.device) -> bool:
    return _COMPILED and torch.cuda.get_device_capability(device) >= (8, 9)


def pack_state(
    state: torch.Tensor,
    rows: torch.Tensor | None,
    out: torch.Tensor,
    absmax: torch.Tensor,
    column: int,
    *,
    programs: int | None = None,
    launch: Launch | None = None,
) -> None:
    """Triton form of :func:`sglang_hs_capture.kernels.reference.pack_state`; the same contract, on the current stream.

    ``out`` may be pinned host memory: the kernel then stores over PCIe. ``programs`` bounds the grid, so that such a
    launch leaves multiprocessors to the model; by default there is one program for each ``launch.rows`` rows.
    ``launch`` is for benchmarks; by default it is :func:`default_launch`.

    Raises:
        ValueError: shapes, strides or dtypes do not fit the contract, or ``launch`` cannot hold a row.
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
    if out.dtype not in _STORED:
        raise ValueError(f"out: expected one of {', '.join(map(str, _STORED))}, got {out.dtype}")
    if rows is None and state.shape[0] < n_rows:
        raise ValueError(f"state: expected at least {n_rows} rows, got {state.shape[0]}")
    if rows is not None and (rows.shape != (n_rows,) or rows.dtype != torch.int64):
        raise ValueError(f"rows: expected int64 [{n_rows}], got {rows.dtype} {tuple(rows.shape)}")
    scaled = out.dtype == _FLOAT8
    launch = launch or default_launch(hidden)
    if scaled and launch.block < hidden:
        raise ValueError(f"launch: expected a block of at least {hidden} elements for float8, got {launch.block}")
    if n_rows == 0:
        return
    grid = (min(programs or n_rows, triton.cdiv(n_rows, launch.rows)),)
    _pack_kernel[grid](
        state,
        state if rows is None else rows,
        out.view(torch.uint8) if scaled else out,
        absmax,
        n_rows,
        state.stride(0),
        out.stride(0),
        absmax.stride(0),
        column,
        HIDDEN=hidden,
        GATHER=rows is not None,
        SCALED=scaled,
        NATIVE=_COMPILED,
        NATIVE_FLOAT8=scaled and _has_float8(state.device),
        BLOCK=launch.block,
        STORE_CACHE=launch.store_cache,
        num_warps=launch.warps,
    )
