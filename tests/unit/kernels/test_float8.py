"""float8 with a scale a row: kernel against reference bit for bit, and both against a table of the format's values."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_hs_capture.float8 import scales_from_absmax
from sglang_hs_capture.kernels import pack, reference
from sglang_hs_capture.reader.dequantize import dequantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FLOAT8 = torch.float8_e4m3fn
SENTINEL = 77

# The format, written out: 4 bits of exponent with bias 7, 3 of mantissa, no infinities; 0x7f and 0xff are NaN.
POSITIVE = np.array(
    [(code & 7) / 8 * 2.0**-6 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7) for code in range(0x7F)]
)


def nearest(quotients: np.ndarray) -> np.ndarray:
    """Codes of the nearest values, the even one of two, at most 448."""
    magnitude = np.abs(quotients.astype(np.float64))
    above = np.clip(np.searchsorted(POSITIVE, magnitude), 1, 0x7E)
    to_above, to_below = POSITIVE[above] - magnitude, magnitude - POSITIVE[above - 1]
    code = np.where((to_above < to_below) | ((to_above == to_below) & (above % 2 == 0)), above, above - 1)
    return (code | np.where(np.signbit(quotients), 0x80, 0)).astype(np.uint8)


def packed(implementation, state: torch.Tensor, rows: torch.Tensor | None = None, **options):
    """Codes ``[T, H]`` and absmax ``[T]`` of the middle one of three columns; the others are found untouched."""
    n_rows = len(state if rows is None else rows)
    out = torch.full((n_rows, 3, state.shape[1]), SENTINEL, dtype=torch.uint8, device=DEVICE)
    absmax = torch.full((n_rows, 3), float(SENTINEL), device=DEVICE)
    implementation(state.to(DEVICE), rows, out.view(FLOAT8), absmax, 1, **options)
    assert (out[:, [0, 2]] == SENTINEL).all()
    assert (absmax[:, [0, 2]] == SENTINEL).all()
    return out[:, 1].cpu().numpy(), absmax[:, 1].cpu().numpy()


def both(state: torch.Tensor, rows: torch.Tensor | None = None):
    """What kernel and reference agree on."""
    codes, absmax = packed(pack.pack_state, state, rows)
    expected_codes, expected_absmax = packed(reference.pack_state, state, rows)
    np.testing.assert_array_equal(codes, expected_codes)
    np.testing.assert_array_equal(absmax, expected_absmax)
    return codes, absmax


def make_state(n: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hidden)
    values = torch.randn(n, hidden, generator=generator)
    return (values * 10.0 ** torch.randint(-4, 3, (n, hidden), generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_rows", "hidden"), [(1, 1), (7, 100), (5, 2048), (3, 2049), (2, 7168)])
@pytest.mark.parametrize("gather", [False, True])
def test_kernel_equals_reference_and_the_table(dtype, n_rows, hidden, gather):
    state = make_state(n_rows + 3, hidden, dtype)
    rows = torch.randperm(n_rows + 3, generator=torch.Generator().manual_seed(1))[:n_rows].to(DEVICE)
    kept = state[rows.cpu()] if gather else state
    codes, absmax = both(state, rows if gather else None)
    np.testing.assert_array_equal(absmax, kept.float().abs().amax(dim=1).numpy())
    quotients = kept.float().numpy() / scales_from_absmax(absmax)[:, None]
    np.testing.assert_array_equal(codes, nearest(quotients))


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.sampled_from(DTYPES),
)
def test_any_finite_row(values, dtype):
    """From the smallest subnormal to the largest number, in one row."""
    # Always 40 wide, since on a GPU every width is compiled.
    padded = [*values, *[0.0] * (40 - len(values))]
    state = torch.tensor([padded], dtype=torch.float64).to(torch.float32).to(dtype)
    state = torch.where(state.isfinite(), state, 0)
    codes, absmax = both(state)
    scale = scales_from_absmax(absmax)[0]
    if scale == 0:
        assert absmax[0] < 3.2e-43
        assert not codes.any()
    else:
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(codes[0], nearest(state[0].float().numpy() / scale))
    assert not np.isin(codes, [0x7F, 0xFF]).any()


def test_every_code_comes_back():
    """All finite codes, times a power of two, with 448 among them: the scale is that power, and nothing is rounded."""
    values = np.concatenate([POSITIVE, -POSITIVE])
    state = torch.tensor(np.stack([values * 2.0**power for power in (-20, 0, 9)]), dtype=torch.float32)
    codes, absmax = both(state)
    assert scales_from_absmax(absmax).tolist() == [2.0**-20, 1.0, 2.0**9]
    expected = np.concatenate([np.arange(0x7F), np.arange(0x80, 0xFF)])
    np.testing.assert_array_equal(codes, np.broadcast_to(expected, codes.shape))
    back = dequantize(torch.from_numpy(codes).view(FLOAT8), torch.from_numpy(scales_from_absmax(absmax)), torch.float32)
    assert torch.equal(back.view(torch.int32), state.view(torch.int32))


def test_ties_and_their_neighbours():
    """The middle of every two neighbouring values, and the float32 on either side of it."""
    middles = ((POSITIVE[1:] + POSITIVE[:-1]) / 2).astype(np.float32)
    values = np.concatenate([np.nextafter(middles, np.float32(0)), middles, np.nextafter(middles, np.float32(500))])
    state = torch.from_numpy(np.concatenate([values, -values, np.float32([448.0])])[None])
    codes, absmax = both(state)
    assert absmax[0] == 448.0
    np.testing.assert_array_equal(codes[0], nearest(state[0].numpy()))


@pytest.mark.parametrize("absmax", [448.0, 447.9999, 1.0, 3.0e38, 1.5e-40, 9e-43, 6.5e-43])
def test_the_largest_value_is_stored_as_448(absmax):
    """Also where the scale is so small that it is rounded coarsely and the quotient exceeds 464, which would be NaN."""
    codes, _ = both(torch.tensor([[absmax, -absmax]]))
    assert codes.tolist() == [[0x7E, 0xFE]]


@pytest.mark.parametrize("tiny", [0.0, -0.0, 1e-45, 3.1e-43])
def test_a_row_without_a_scale_is_stored_as_zeros(tiny):
    codes, absmax = both(torch.tensor([[tiny, -tiny], [1.0, 2.0]]))
    assert codes[0].tolist() == [0, 0]
    assert absmax[0] == abs(np.float32(tiny))
    assert scales_from_absmax(absmax)[0] == 0.0
    assert codes[1].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_non_finite_row_shows_in_absmax_and_comes_back_as_nan(bad, dtype):
    state = make_state(3, 50, dtype)
    state[1, 49] = bad
    codes, absmax = both(state)
    assert np.isinf(absmax).tolist() == [False, True, False]
    assert not codes[1].any()
    back = dequantize(torch.from_numpy(codes).view(FLOAT8), torch.from_numpy(scales_from_absmax(absmax)), dtype)
    assert back.isnan().all(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_is_within_half_a_step(dtype):
    state = make_state(20, 300, dtype)
    codes, absmax = both(state)
    scales = scales_from_absmax(absmax)
    back = dequantize(torch.from_numpy(codes).view(FLOAT8), torch.from_numpy(scales), torch.float32)
    error = (back - state.float()).abs().numpy()
    # 2^-4 of the value where it is normal, else half of 2^-9 of the scale; a little for rounding in float32.
    bound = np.maximum(state.float().abs().numpy() * 2.0**-4, scales[:, None] * 2.0**-10) * (1 + 1e-6)
    assert (error <= bound).all()
    assert (error > 0).any()


def test_scales_want_float32():
    with pytest.raises(ValueError, match="expected float32"):
        scales_from_absmax(np.ones(3))


def test_dequantize_in_all_shapes_and_dtypes():
    codes = torch.arange(24, dtype=torch.uint8).view(2, 3, 4).view(FLOAT8)
    scales = torch.tensor([[1.0, 2.0, 0.5], [3.0, 0.0, 1e-3]])
    for dtype in DTYPES:
        back = dequantize(codes, scales, dtype)
        assert back.dtype == dtype
        assert torch.equal(back, (codes.double() * scales.double()[..., None]).float().to(dtype))
    assert torch.equal(dequantize(codes[1], scales[1], torch.float32), dequantize(codes, scales, torch.float32)[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_is_exact_for_every_code_and_any_scale(dtype):
    """To the bit what torch's own conversion gives, from the smallest scale to that of the largest float32."""
    largest = float(torch.finfo(torch.float32).max)
    absmax = np.array([1e-45, 5e-43, 1e-38, 2.0**-100, 0.1, 448.0, 1e20, largest, 0.0], np.float32)
    scales = torch.from_numpy(scales_from_absmax(absmax))
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8).expand(9, 254)
    back = dequantize(codes.contiguous().view(FLOAT8), scales, dtype)
    expected = (codes.contiguous().view(FLOAT8).float() * scales[:, None]).to(dtype)
    assert torch.equal(back.view(torch.uint8), expected.view(torch.uint8))
    assert back[5].any()


@pytest.mark.parametrize(
    ("states", "scales", "message"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(2, 3), "expected torch.float8_e4m3fn"),
        (torch.zeros(2, 3, 4, dtype=FLOAT8), torch.zeros(2, 3).double(), "torch.float32, got"),
        (torch.zeros(2, 3, 4, dtype=FLOAT8), torch.zeros(2, 1), "one for each row and state"),
    ],
)
def test_dequantize_refuses_what_does_not_fit(states, scales, message):
    with pytest.raises(ValueError, match=message):
        dequantize(states, scales, torch.float32)
