"""The Triton pack kernel against its reference, bit for bit; under TRITON_INTERPRET=1 where there is no GPU."""

import pytest
import torch

from sglang_hs_capture.kernels import pack, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SENTINEL = 77.0


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, so that NaNs and signed zeros compare by representation."""
    return tensor.contiguous().view(torch.uint8)


def make_state(n: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values over many magnitudes, with halfway cases of bf16 rounding, zeros of both signs and subnormals."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, hidden, generator=generator) * 10.0 ** torch.randint(
        -6, 4, (n, hidden), generator=generator
    )
    flat = values.view(-1)
    special = torch.tensor([0.0, -0.0, 1.00390625, 1.01171875, -1.00390625, 6.0e-8, 1e-30, 1e-40, 65504.0, -3.0])
    flat[: min(len(special), flat.numel())] = special[: flat.numel()]
    return values.to(dtype).to(DEVICE)


def run_both(
    state: torch.Tensor, rows: torch.Tensor | None, n_rows: int, dtype: torch.dtype, column: int, columns: int
):
    outs, maxima = [], []
    for implementation in (pack.pack_state, reference.pack_state):
        out = torch.full((n_rows, columns, state.shape[1]), SENTINEL, dtype=dtype, device=DEVICE)
        absmax = torch.full((n_rows, columns), SENTINEL, device=DEVICE)
        implementation(state, rows, out, absmax, column)
        outs.append(out)
        maxima.append(absmax)
    return outs, maxima


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize(("n_rows", "hidden"), [(1, 1), (7, 96), (5, 2048), (3, 2049), (2, 7168)])
def test_kernel_equals_reference_in_all_dtypes(source, stored, n_rows, hidden):
    state = make_state(n_rows + 3, hidden, source)
    rows = torch.randperm(n_rows + 3, generator=torch.Generator().manual_seed(1))[:n_rows].to(DEVICE)
    outs, maxima = run_both(state, rows, n_rows, stored, column=1, columns=3)
    assert torch.equal(bits(outs[0]), bits(outs[1]))
    assert torch.equal(maxima[0], maxima[1])
    assert torch.equal(bits(outs[0][:, 1]), bits(state[rows].to(stored)))


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_subnormal_values_are_kept(source, stored):
    state = torch.tensor([[1e-40, -3e-39, 2e-45], [0.0, 0.0, 2e-40]]).to(source).to(DEVICE)
    outs, maxima = run_both(state, None, 2, stored, column=0, columns=1)
    assert torch.equal(bits(outs[0]), bits(outs[1]))
    assert torch.equal(maxima[0], maxima[1])
    assert (maxima[0] > 0).all()


def test_only_its_column_is_written():
    state = make_state(4, 64, torch.bfloat16)
    outs, maxima = run_both(state, None, 4, torch.bfloat16, column=2, columns=4)
    for out, absmax in zip(outs, maxima, strict=True):
        untouched = [0, 1, 3]
        assert (out[:, untouched] == SENTINEL).all()
        assert (absmax[:, untouched] == SENTINEL).all()
        assert not (absmax[:, 2] == SENTINEL).any()


def test_strided_state_and_no_row_index_keep_the_first_rows():
    wide = make_state(6, 256, torch.float32)
    state = wide[:, :100]
    outs, maxima = run_both(state, None, 4, torch.bfloat16, column=0, columns=2)
    assert torch.equal(bits(outs[0]), bits(outs[1]))
    assert torch.equal(maxima[0], maxima[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_rows_show_in_absmax_and_bits_are_kept(bad):
    state = make_state(3, 50, torch.float32)
    state[1, 49] = bad
    outs, maxima = run_both(state, None, 3, torch.bfloat16, column=0, columns=1)
    for absmax in maxima:
        assert absmax[1, 0] == float("inf")
        assert torch.isfinite(absmax[[0, 2], 0]).all()
    assert torch.equal(outs[0].isnan(), outs[1].isnan())
    finite = ~outs[0].isnan()
    assert torch.equal(outs[0][finite], outs[1][finite])


def test_overflow_of_the_store_dtype_is_non_finite():
    state = torch.full((2, 8), 1e6, device=DEVICE)
    state[1] = 1.0
    _, maxima = run_both(state, None, 2, torch.float16, column=0, columns=1)
    for absmax in maxima:
        assert absmax[0, 0] == float("inf")
        assert absmax[1, 0] == 1.0


def test_a_zero_row_has_absmax_zero():
    state = torch.zeros(2, 8, device=DEVICE)
    state[1, 3] = -2.0
    _, maxima = run_both(state, None, 2, torch.bfloat16, column=0, columns=1)
    for absmax in maxima:
        assert absmax[:, 0].tolist() == [0.0, 2.0]


@pytest.mark.parametrize("programs", [1, 3, 64])
def test_a_bounded_grid_writes_every_row(programs):
    state = make_state(10, 70, torch.bfloat16)
    rows = torch.tensor([9, 0, 5, 5, 2], device=DEVICE)
    out = torch.full((5, 1, 70), SENTINEL, dtype=torch.bfloat16, device=DEVICE)
    absmax = torch.full((5, 1), SENTINEL, device=DEVICE)
    pack.pack_state(state, rows, out, absmax, 0, programs=programs)
    assert torch.equal(bits(out[:, 0]), bits(state[rows]))


@pytest.mark.parametrize("stored", [*DTYPES, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "launch",
    [
        pack.Launch(block=512, warps=4, rows=3),
        pack.Launch(block=256, warps=1, store_cache=""),
        pack.Launch(block=64, warps=1),
        pack.Launch(block=32, warps=2, rows=2),
    ],
)
def test_no_launch_changes_a_result(stored, launch):
    state = make_state(8, 130, torch.float32)
    rows = torch.tensor([7, 0, 5, 5, 2, 1, 3], device=DEVICE)
    results = []
    for options in ({"launch": launch, "programs": None}, {"launch": launch, "programs": 2}, {}):
        if stored == torch.float8_e4m3fn and launch.block < 130 and options:
            continue
        out = torch.zeros((7, 2, 130), dtype=stored, device=DEVICE)
        absmax = torch.zeros((7, 2), device=DEVICE)
        pack.pack_state(state, rows, out, absmax, 1, **options)
        results.append((out, absmax))
    expected, largest = torch.zeros_like(results[-1][0]), torch.zeros((7, 2), device=DEVICE)
    reference.pack_state(state, rows, expected, largest, 1)
    for out, absmax in results:
        assert torch.equal(bits(out), bits(expected))
        assert torch.equal(absmax, largest)


@pytest.mark.parametrize(
    ("hidden", "block", "warps"), [(1, 1, 1), (100, 128, 1), (2048, 2048, 2), (7168, 8192, 8), (40000, 65536, 16)]
)
def test_default_launch_holds_a_row(hidden, block, warps):
    assert pack.default_launch(hidden) == pack.Launch(block=block, warps=warps)


def test_float8_needs_a_block_that_holds_a_row():
    with pytest.raises(ValueError, match="at least 130 elements for float8, got 128"):
        pack.pack_state(
            torch.zeros(2, 130),
            None,
            torch.zeros(2, 1, 130, dtype=torch.float8_e4m3fn),
            torch.zeros(2, 1),
            0,
            launch=pack.Launch(block=128, warps=1),
        )


def test_zero_rows_are_no_work():
    out = torch.empty(0, 2, 8)
    pack.pack_state(torch.zeros(3, 8), None, out, torch.empty(0, 2), 0)


@pytest.mark.parametrize(
    ("state", "rows", "out", "column", "message"),
    [
        (torch.zeros(2, 9), None, torch.zeros(2, 1, 8), 0, "state: expected"),
        (torch.zeros(8, 2).T, None, torch.zeros(2, 1, 8), 0, "state: expected"),
        (torch.zeros(1, 8), None, torch.zeros(2, 1, 8), 0, "at least 2 rows"),
        (torch.zeros(2, 8), None, torch.zeros(2, 1, 8), 1, "column in"),
        (torch.zeros(2, 8), None, torch.zeros(2, 1, 8, dtype=torch.float8_e5m2), 0, "out: expected one of"),
        (torch.zeros(2, 8), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1, 8), 0, "rows: expected int64"),
    ],
)
def test_what_does_not_fit_is_refused(state, rows, out, column, message):
    with pytest.raises(ValueError, match=message):
        pack.pack_state(state, rows, out, torch.zeros(out.shape[:2]), column)
