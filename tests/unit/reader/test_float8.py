"""States through float8: packed, stored with their scales and read again, whatever their values are."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_store import make_info, open_store

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.float8 import scales_from_absmax
from sglang_hs_capture.kernels import reference
from sglang_hs_capture.store.hashing import prefix_hashes

HIDDEN = 7
# Not so small that the scale itself is rounded coarsely, nor so large that bfloat16 has no such value.
VALUES = st.floats(-(2.0**127), 2.0**127, width=32).map(lambda x: x if abs(x) > 1e-30 else 0.0)
ROWS = st.lists(st.lists(VALUES, min_size=2 * HIDDEN, max_size=2 * HIDDEN), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, cut=st.integers(0, 12), finished=st.booleans())
def test_states_come_back_within_the_bound(rows: list[list[float]], cut: int, finished: bool) -> None:
    states = torch.tensor(rows, dtype=torch.float32).view(len(rows), 2, HIDDEN)
    codes, absmax = torch.empty(states.shape, dtype=torch.float8_e4m3fn), torch.empty(len(rows), 2)
    for column in range(2):
        reference.pack_state(states[:, column], None, codes, absmax, column)
    scales = scales_from_absmax(absmax.numpy())
    ids = np.arange(len(rows))
    hashes = prefix_hashes(ids, 0, 0)
    with tempfile.TemporaryDirectory() as name:
        store = open_store(Path(name), info=make_info(dtype="float8_e4m3", hidden_size=HIDDEN))
        extents = []
        for part in (slice(0, cut), slice(cut, len(rows))):
            data = codes[part].view(torch.uint8).numpy().reshape(-1)
            extents += store.append(data, ids[part], ids[part], hashes[part], None, scales[part])
        store.add_sample("a", len(rows), extents, int(hashes[-1]))
        store.commit()
        if finished:
            store.close()
        raw, plain = HiddenStateDataset(name, raw=True)[0], HiddenStateDataset(name)[0]
        store.close()
    for column, (stored, scale, values) in enumerate(
        zip(raw["hidden_states"], raw["scales"], plain["hidden_states"], strict=True)
    ):
        state = states[:, column]
        assert torch.equal(stored.view(torch.uint8), codes[:, column].view(torch.uint8))
        assert torch.equal(scale, torch.from_numpy(scales[:, column].copy()))
        bound = torch.maximum(state.abs() * 2.0**-4, scale[:, None] * 2.0**-10)
        # 2^-8 more for bfloat16.
        exact = stored.double() * scale.double()[:, None]
        assert ((exact - state).abs() <= bound * (1 + 1e-6)).all()
        assert ((values.double() - state).abs() <= (bound + exact.abs() * 2.0**-8) * (1 + 1e-6)).all()
