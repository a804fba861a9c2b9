"""Tiny checkpoints: reproducible, of the published form, and fit to test hidden states with."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sglang_hs_capture.demo.checkpoint import make_deepseek_v3, make_kimi_k25
from sglang_hs_capture.errors import ConfigError
from sglang_hs_capture.layers import Final
from sglang_hs_capture.verify.parity import ReferenceModel

BOUNDARIES = list(range(8))


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kimi_k25(tmp_path_factory.mktemp("kimi"))


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return torch.randint(0, 2000, (700,), generator=torch.Generator().manual_seed(0))


def smallest_routing_lead(model: ReferenceModel, prompt: torch.Tensor) -> float:
    """By how much, over all layers and tokens, the last expert chosen is ahead of the first one not chosen."""
    leads = []

    def record(gate: Any, args: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
        ranked = (output[0].sigmoid() + gate.e_score_correction_bias).sort(dim=-1, descending=True).values
        leads.append(ranked[:, gate.top_k - 1] - ranked[:, gate.top_k])

    layers = model._model.model.layers
    hooks = [layer.mlp.gate.register_forward_hook(record) for layer in layers if hasattr(layer.mlp, "gate")]
    model.states(prompt, BOUNDARIES, Final.BOTH)
    for hook in hooks:
        hook.remove()
    return float(torch.stack(leads).min())


def test_the_same_seed_gives_the_same_files(kimi: Path, tmp_path: Path) -> None:
    again = make_kimi_k25(tmp_path)
    names = sorted(file.name for file in kimi.iterdir())
    assert names == sorted(file.name for file in again.iterdir())
    assert all((kimi / name).read_bytes() == (again / name).read_bytes() for name in names)


def test_another_seed_gives_other_weights(kimi: Path, tmp_path: Path) -> None:
    other = load_file(make_kimi_k25(tmp_path, seed=1) / "model.safetensors")
    name = "language_model.model.layers.3.self_attn.o_proj.weight"
    assert not torch.equal(other[name], load_file(kimi / "model.safetensors")[name])


def test_kimi_has_the_names_of_the_published_checkpoint(kimi: Path) -> None:
    config = json.loads((kimi / "config.json").read_text())
    assert config["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert config["text_config"]["rope_scaling"]["type"] == "yarn"
    assert config["vision_config"]["vt_hidden_size"] == config["vision_config"]["hidden_size"]
    with safe_open(kimi / "model.safetensors", "pt") as weights:
        roots = {name.split(".")[0] for name in weights.keys()}  # noqa: SIM118
    assert roots == {"language_model", "vision_tower", "mm_projector"}


def test_both_architectures_hold_the_same_language_model(kimi: Path, tmp_path: Path, prompt: torch.Tensor) -> None:
    plain = ReferenceModel(make_deepseek_v3(tmp_path)).states(prompt[:50], BOUNDARIES, Final.BOTH)
    wrapped = ReferenceModel(kimi).states(prompt[:50], BOUNDARIES, Final.BOTH)
    assert all(torch.equal(a, b) for a, b in zip(plain, wrapped, strict=True))


def test_neighbouring_boundaries_differ_by_a_large_part_of_their_norm(kimi: Path, prompt: torch.Tensor) -> None:
    states = ReferenceModel(kimi).states(prompt, BOUNDARIES, Final.BOTH)
    for before, after in pairwise(states):
        assert ((after - before).norm(dim=-1) / before.norm(dim=-1)).min() > 0.1


@pytest.mark.parametrize("sizes", [{}, {"n_routed_experts": 32, "num_experts_per_tok": 6}])
def test_no_token_is_near_a_routing_tie(tmp_path: Path, prompt: torch.Tensor, sizes: dict[str, int]) -> None:
    model = ReferenceModel(make_deepseek_v3(tmp_path, **sizes))
    assert smallest_routing_lead(model, prompt) > 1e-3


def test_bfloat16_halves_the_file_and_keeps_the_routers_bias_in_float32(kimi: Path, tmp_path: Path) -> None:
    half = make_kimi_k25(tmp_path, dtype="bfloat16")
    weights, full = load_file(half / "model.safetensors"), load_file(kimi / "model.safetensors")
    for name, weight in weights.items():
        expected = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert weight.dtype == expected
        assert torch.equal(weight, full[name].to(expected))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dtype": "float64"}, "dtype"),
        ({"layers": 3}, "the sizes are num_hidden_layers"),
        ({"hidden_size": 16}, "over twice n_routed_experts"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_deepseek_v3(tmp_path, **sizes)
