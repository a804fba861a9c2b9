"""The compiled pack kernel against the reference on the CPU, bit for bit; past 2^31 elements; into pinned memory."""

import mmap
from collections.abc import Callable, Iterator

import pytest
import torch

from sglang_hs_capture.kernels import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from sglang_hs_capture.kernels import pack  # noqa: E402
from sglang_hs_capture.kernels.pack import pack_state  # noqa: E402

HIDDEN, COLUMNS = 7168, 4
FLOAT8 = torch.float8_e4m3fn
SOURCES = [torch.bfloat16, torch.float16, torch.float32]
STORED = [*SOURCES, FLOAT8]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def make_state(n_rows: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of all magnitudes, many in each; zeros of both signs, a zero row, subnormals, halfway cases."""
    generator = torch.Generator().manual_seed(hidden)
    values = torch.randn(n_rows, hidden, generator=generator, dtype=torch.float64)
    values *= 2.0 ** torch.randint(-16, 1, (n_rows, hidden), generator=generator)
    values *= 2.0 ** torch.linspace(-140, 120, n_rows, dtype=torch.float64).unsqueeze(1)
    values[n_rows // 2] = torch.randn(hidden, generator=generator)
    special = torch.tensor([1.0, 0.0, -0.0, 1.00390625, 1.01171875, -1.00390625, 6.0e-8, 1e-40, 0.53125, -0.59375])
    values[n_rows // 2, : len(special)] = special[:hidden]
    values[n_rows // 3] = 0.0
    return values.to(torch.float32).to(dtype)


def expected(
    state: torch.Tensor, rows: torch.Tensor | None, n_rows: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    out, absmax = torch.empty(n_rows, 1, state.shape[1], dtype=dtype), torch.empty(n_rows, 1)
    reference.pack_state(state.cpu(), None if rows is None else rows.cpu(), out, absmax, 0)
    return out[:, 0], absmax[:, 0]


@pytest.mark.parametrize("hidden", [HIDDEN, 100, 2049, 1])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("source", SOURCES)
def test_every_pair_of_dtypes(source, stored, hidden):
    n_rows = 300
    state = make_state(n_rows + 20, hidden, source).cuda()
    gathered = torch.randperm(n_rows + 20, generator=torch.Generator().manual_seed(1))[:n_rows].cuda()
    for rows in (gathered, None):
        for column in range(2):
            out = torch.full((n_rows, 2, hidden), 7.0, device="cuda").to(stored)
            absmax = torch.full((n_rows, 2), 7.0, device="cuda")
            pack_state(state, rows, out, absmax, column)
            values, largest = expected(state, rows, n_rows, stored)
            assert torch.equal(bits(out[:, column].cpu()), bits(values))
            assert torch.equal(absmax[:, column].cpu(), largest)
            assert (out[:, 1 - column].float() == 7.0).all()
            assert (absmax[:, 1 - column] == 7.0).all()


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
def test_thirty_million_quotients(source):
    """The kernel divides by multiplying: every code is that of the exact division, on rows of all magnitudes."""
    state = make_state(4096, HIDDEN, source)
    out, absmax = torch.empty(4096, 1, HIDDEN, dtype=FLOAT8, device="cuda"), torch.empty(4096, 1, device="cuda")
    pack_state(state.cuda(), None, out, absmax, 0)
    values, largest = expected(state, None, 4096, FLOAT8)
    assert torch.equal(bits(out[:, 0].cpu()), bits(values))
    assert torch.equal(absmax[:, 0].cpu(), largest)
    # Most codes are in use, and none of the two that are NaN.
    assert len(bits(values).unique()) > 240
    assert not values.float().isnan().any()


@pytest.mark.parametrize("source", SOURCES)
def test_the_reference_on_the_gpu_is_the_one_on_the_cpu(source):
    state = make_state(300, HIDDEN, source)
    values, largest = expected(state, None, 300, FLOAT8)
    out, absmax = torch.empty(300, 1, HIDDEN, dtype=FLOAT8, device="cuda"), torch.empty(300, 1, device="cuda")
    reference.pack_state(state.cuda(), None, out, absmax, 0)
    assert torch.equal(bits(out[:, 0].cpu()), bits(values))
    assert torch.equal(absmax[:, 0].cpu(), largest)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_rows_show_in_absmax(stored, bad):
    state = torch.randn(3, HIDDEN, device="cuda")
    state[1, HIDDEN - 1] = bad
    out, absmax = torch.empty(3, 1, HIDDEN, device="cuda").to(stored), torch.empty(3, 1, device="cuda")
    pack_state(state, None, out, absmax, 0)
    assert absmax[:, 0].isinf().tolist() == [False, True, False]
    values, largest = expected(state, None, 3, stored)
    assert torch.equal(bits(out[[0, 2], 0].cpu()), bits(values[[0, 2]]))
    assert torch.equal(out[1, 0].float().isnan().cpu(), values[1].float().isnan())
    assert torch.equal(absmax[:, 0].cpu(), largest)


@pytest.mark.parametrize("stored", [torch.bfloat16, FLOAT8])
def test_rows_past_two_to_the_31_elements(stored):
    n_rows = 2**31 // (COLUMNS * HIDDEN) + 50
    state = torch.randn(64, HIDDEN, device="cuda", dtype=torch.bfloat16)
    rows = torch.arange(n_rows, device="cuda") % 64
    out = torch.full((n_rows, COLUMNS, HIDDEN), 7, device="cuda", dtype=torch.uint8)
    if stored == torch.bfloat16:
        out = torch.full((n_rows, COLUMNS, HIDDEN), 7.0, device="cuda", dtype=stored)
    absmax = torch.zeros(n_rows, COLUMNS, device="cuda")
    pack_state(state, rows, out.view(stored), absmax, COLUMNS - 1)
    assert out.numel() > 2**31
    values, largest = expected(state, rows[-100:], 100, stored)
    assert torch.equal(bits(out[-100:, COLUMNS - 1].cpu()), bits(values))
    assert torch.equal(absmax[-100:, COLUMNS - 1].cpu(), largest)
    assert (out[-100:, : COLUMNS - 1] == 7).all()


@pytest.mark.parametrize("source", SOURCES)
def test_a_state_past_two_to_the_31_elements(source):
    """The rows that are read lie beyond what 32 bits can count."""
    n_rows = 2**31 // HIDDEN + 50
    state = torch.empty(n_rows, HIDDEN, device="cuda", dtype=source)
    state[-60:] = torch.randn(60, HIDDEN, device="cuda")
    rows = torch.arange(n_rows - 1, n_rows - 51, -1, device="cuda")
    out, absmax = torch.empty(50, 1, HIDDEN, dtype=source, device="cuda"), torch.empty(50, 1, device="cuda")
    pack_state(state, rows, out, absmax, 0)
    assert torch.equal(bits(out[:, 0]), bits(state[rows]))


def test_a_strided_state():
    wide = torch.randn(40, 2 * HIDDEN, device="cuda", dtype=torch.bfloat16)
    state = wide[:, 3 : 3 + HIDDEN]
    out, absmax = torch.empty(40, 1, HIDDEN, device="cuda", dtype=torch.bfloat16), torch.empty(40, 1, device="cuda")
    pack_state(state, None, out, absmax, 0)
    assert torch.equal(bits(out[:, 0]), bits(state))


@pytest.fixture
def registered() -> Iterator[Callable[[int], torch.Tensor]]:
    """Host memory as the ring has it: an anonymous mapping that is registered with the driver."""
    arenas = []

    def allocate(nbytes: int) -> torch.Tensor:
        arena = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        assert int(torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), nbytes, 0)) == 0
        arenas.append(arena)
        return arena

    yield allocate
    for arena in arenas:
        torch.cuda.cudart().cudaHostUnregister(arena.data_ptr())


@pytest.mark.parametrize("stored", [torch.bfloat16, FLOAT8])
@pytest.mark.parametrize("programs", [None, 8])
def test_direct_store_into_pinned_memory(registered, programs, stored):
    n_rows = 500
    arena = registered(n_rows * COLUMNS * HIDDEN * stored.itemsize)
    arena.fill_(7)
    target = arena.view(stored).view(n_rows, COLUMNS, HIDDEN)
    state = torch.randn(n_rows + 5, HIDDEN, device="cuda")
    rows = torch.randperm(n_rows + 5, device="cuda")[:n_rows]
    absmax = torch.zeros(n_rows, COLUMNS, device="cuda")
    pack_state(state, rows, target, absmax, 2, programs=programs)
    torch.cuda.synchronize()
    values, largest = expected(state, rows, n_rows, stored)
    assert torch.equal(bits(target[:, 2]), bits(values))
    assert torch.equal(absmax[:, 2].cpu(), largest)
    assert (bits(target[:, [0, 1, 3]]) == 7).all()


def test_no_launch_compiles_again_for_another_column_or_number_of_rows():
    """The first prefill compiles; no later one may, whatever its number of rows."""

    def compiled() -> int:
        return sum(len(cache[0]) for cache in pack._pack_kernel.device_caches.values())

    state = torch.randn(64, HIDDEN, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(64, COLUMNS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    absmax = torch.empty(64, COLUMNS, device="cuda")
    pack_state(state, None, out, absmax, 0)
    before = compiled()
    assert before > 0
    for n_rows in (1, 2, 16, 33, 64):
        for column in range(COLUMNS):
            pack_state(state, None, out[:n_rows], absmax[:n_rows], column)
    assert compiled() == before
