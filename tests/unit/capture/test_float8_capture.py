"""Capture in float8 through a real writing process."""

import torch

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.store.session import read_sessions
from tests.unit import toy_model
from tests.unit.toy_model import ToyModel


def test_states_in_float8_come_with_their_scales(tmp_path):
    model = ToyModel(tmp_path, dtype="float8_e4m3")
    prompts = {"hs-long": list(range(500)), "hs-short": [7, 8]}
    model.forward(("hs-long", prompts["hs-long"], 0, 300), ("other", [5] * 9, 0, 9))
    model.forward(("hs-long", prompts["hs-long"], 300, 500), ("hs-short", prompts["hs-short"], 0, 2))
    model.close()
    (record,) = read_sessions(tmp_path)
    assert (record.state, record.counters.bytes) == ("closed", 502 * 2 * toy_model.HIDDEN)
    dataset = HiddenStateDataset(tmp_path, raw=True)
    assert {sample.id for sample in dataset.samples} == set(prompts)
    for item in dataset:
        expected = ToyModel.states(prompts[item["id"]])
        for column, (codes, scales) in enumerate(zip(item["hidden_states"], item["scales"], strict=True)):
            state = expected[:, column]
            assert torch.equal(scales, state.abs().amax(dim=1) / torch.tensor(448.0))
            error = (codes.float() * scales[:, None] - state).abs()
            bound = torch.maximum(state.abs() * 2.0**-4, scales[:, None] * 2.0**-10) * (1 + 1e-6)
            assert (error <= bound).all()
            assert error.any()
