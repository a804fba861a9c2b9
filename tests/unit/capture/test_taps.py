"""Taps on a toy decoder that treats its layers and its norm as SGLang does, in its newer and its older form."""

import pytest
import torch
from torch import nn

from sglang_hs_capture.capture.taps import Taps
from sglang_hs_capture.errors import GuardError
from sglang_hs_capture.layers import Final, make_columns


class Layer(nn.Module):
    """Hands its input to the collector, then changes it in place, as fused kernels do."""

    def __init__(self, index: int, old: bool) -> None:
        super().__init__()
        self.index, self.old = index, old

    def forward(self, hidden, captured_last_layer_outputs=None):
        collector = captured_last_layer_outputs
        if collector is not None:
            if self.old:
                assert collector.copies_on_append
                collector.append(hidden)
            else:
                collector.capture(hidden, owned=False)
        hidden += 10.0**self.index
        return hidden


class Norm(nn.Module):
    def forward(self, hidden, residual=None):
        if residual is None:
            return hidden * 2
        total = hidden + residual
        return total * 2, total


class Decoder(nn.Module):
    def __init__(self, old: bool, fused: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i, old) for i in range(5))
        self.norm, self.fused = Norm(), fused

    def forward(self, hidden, captured=None):
        hidden = hidden.clone()
        for layer in self.layers:
            hidden = layer(hidden, captured_last_layer_outputs=captured)
        if self.fused:
            return self.norm(hidden / 2, hidden / 2)[0]
        return self.norm(hidden)


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_each_column_gets_its_boundary_and_the_final_states(old, fused):
    decoder = Decoder(old, fused)
    taps = Taps(decoder, make_columns((0, 2, 4), Final.BOTH))
    start = torch.zeros(3, 1)
    decoder(start)
    got: dict[int, torch.Tensor] = {}
    taps.arm(lambda column, state: got.__setitem__(column, state.clone()))
    out = decoder(start)
    taps.disarm()
    decoder(start + 1)
    assert sorted(got) == [0, 1, 2, 3, 4]
    assert [got[c][0].item() for c in range(5)] == [0.0, 11.0, 1111.0, 11111.0, 22222.0]
    assert torch.equal(out, got[4])


def test_a_layer_that_already_captures_is_refused():
    decoder = Decoder(old=False, fused=False)
    taps = Taps(decoder, make_columns((0,), Final.PRE_NORM))
    taps.arm(lambda column, state: None)
    with pytest.raises(GuardError, match="layer 0 already captures"):
        decoder(torch.zeros(1, 1), captured=[])


def test_unarmed_taps_leave_a_foreign_collector_alone():
    decoder = Decoder(old=True, fused=False)
    Taps(decoder, make_columns((1,), Final.PRE_NORM))

    class Theirs(list):
        copies_on_append = True

    theirs = Theirs()
    decoder(torch.zeros(1, 1), captured=theirs)
    assert len(theirs) == 5
