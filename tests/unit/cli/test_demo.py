"""What the demo makes of a dataset: the comparison of its states, in whatever dtype they are stored."""

from pathlib import Path

import numpy as np
import pytest
import torch
from toy_store import make_info, open_store

from sglang_hs_capture.cli import demo, inspect
from sglang_hs_capture.demo.checkpoint import make_kimi_k25
from sglang_hs_capture.errors import CorruptionError
from sglang_hs_capture.float8 import scales_from_absmax
from sglang_hs_capture.kernels import reference
from sglang_hs_capture.layers import Final
from sglang_hs_capture.store.hashing import prefix_hashes
from sglang_hs_capture.store.index import load_index
from sglang_hs_capture.verify.parity import reference_states

TORCH_DTYPES = {"float32": torch.float32, "float8_e4m3": torch.float8_e4m3fn}
TOKENS = [5, 900, 17, 5, 33]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kimi_k25(tmp_path_factory.mktemp("kimi"), num_hidden_layers=2)


def store_reference(directory: Path, model: Path, dtype: str, factor: float = 1.0) -> None:
    """A dataset of what the reference computes for one prompt, one of its values off by a factor."""
    states = reference_states(model, TOKENS, [1], Final.PRE_NORM)
    states[0][2, int(states[0][2].abs().argmax())] *= factor
    hidden = states[0].shape[1]
    packed, absmax = torch.empty(len(TOKENS), 2, hidden, dtype=TORCH_DTYPES[dtype]), torch.empty(len(TOKENS), 2)
    for column, state in enumerate(states):
        reference.pack_state(state, None, packed, absmax, column)
    store = open_store(directory, info=make_info(dtype=dtype, hidden_size=hidden))
    ids = np.array(TOKENS)
    hashes = prefix_hashes(ids, 0, 0)
    data = packed.view(torch.uint8).numpy().reshape(-1)
    scales = scales_from_absmax(absmax.numpy()) if dtype == "float8_e4m3" else None
    extents = store.append(data, ids, np.arange(len(ids)), hashes, None, scales)
    store.add_sample("a", len(ids), extents, int(hashes[-1]))
    store.close()


@pytest.mark.parametrize(
    ("dtype", "said", "factor"),
    [
        ("float32", "agree with transformers to 1e-05.", 1.001),
        ("float8_e4m3", "agree with transformers to what rounding to float8_e4m3 costs at most.", 1.2),
    ],
)
def test_states_are_held_to_what_their_dtype_can_tell_apart(tmp_path, capsys, model, dtype, said, factor):
    store_reference(tmp_path / "right", model, dtype)
    demo.verify(tmp_path / "right", model)
    assert said in capsys.readouterr().out
    store_reference(tmp_path / "wrong", model, dtype, factor)
    with pytest.raises(CorruptionError, match="a captured state differs from transformers' by"):
        demo.verify(tmp_path / "wrong", model)


def test_inspect_tells_of_scales(tmp_path, model):
    store_reference(tmp_path, model, "float8_e4m3")
    account = inspect.describe(tmp_path, load_index(tmp_path))
    hidden = account["model"]["hidden_size"]
    assert (account["dtype"], account["bytes"], account["scale_bytes"]) == ("float8_e4m3", 5 * 2 * hidden, 5 * 2 * 4)
    (line,) = [line for line in inspect.lines(account) if line.startswith("States")]
    assert line.endswith("final:pre_norm, float8_e4m3 with a scale for each row and state")
