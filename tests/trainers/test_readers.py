"""Each trainer's own reader on an export: shapes, values, and the targets that its own code derives from the states."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.verify.parity import load_reference
from tests.trainers.conftest import DTYPES, SAMPLES, Drive, Exported

pytestmark = pytest.mark.engine

# At so many positions a target derived by the trainer is the target model's own most likely token.
AGREEMENT = {"float32": 0.99, "bfloat16": 0.97}
BOUNDARIES = [3, 5, 6]  # what --layers eagle3 means for 8 layers
READERS = [
    ("speculators-0.9.0", "speculators"),
    ("speculators-0.7.0", "speculators"),
    ("speculators-0.7.0", "eagle-pt"),
    ("speculators-0.4.0", "eagle-pt"),
]

Datasets = Callable[[str], Path]


def by_tokens(dataset: Path, first: int = 0) -> dict[tuple[int, ...], dict[str, Any]]:
    """The captured samples, found by their tokens from the ``first`` on; a few samples are the same."""
    samples = HiddenStateDataset(dataset)
    assert samples.columns == (*(f"boundary:{b}" for b in BOUNDARIES), "final:pre_norm")
    assert len(samples) == SAMPLES
    return {tuple(sample["input_ids"][first:].tolist()): sample for sample in (samples[i] for i in range(SAMPLES))}


@cache
def likeliest(target: Path, tokens: tuple[int, ...]) -> Tensor:
    """``[S]``: what the target model predicts after each token, by ``transformers`` in float32."""
    return load_reference(target).logits(tokens).argmax(-1)


def agreement(found: list[tuple[Tensor, Tensor]], target: Path) -> float:
    """The share of positions at which predictions, given with the sample's tokens, are the target model's own.

    Predictions stand for the positions from the second on.
    """
    same = [predicted == likeliest(target, tuple(tokens.tolist()))[1:] for tokens, predicted in found]
    return float(torch.cat(same).float().mean())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("trainer", "layout"), READERS)
def test_speculators(
    trainer: str,
    layout: str,
    dtype: str,
    drive: Drive,
    exported: Exported,
    datasets: Datasets,
    targets: dict[str, Path],
) -> None:
    ids = BOUNDARIES if layout == "speculators" else [b - 1 for b in BOUNDARIES]
    read = drive(trainer, "read_speculators", layout, exported(dtype, layout), targets[dtype], str(ids))
    captured = by_tokens(datasets(dtype), first=1)
    assert {tuple(sample["input_ids"].tolist()) for sample in read} == set(captured)
    found = []
    for sample in read:
        # Shifted by one by the trainer: the token at a position, with the states of the one before.
        original = captured[tuple(sample["input_ids"].tolist())]
        states = original["hidden_states"]
        length = len(original["input_ids"]) - 1
        assert sample["hidden_states"].shape == (length, 3 * 128)
        assert sample["lengths"].tolist() == [length]
        assert torch.equal(sample["hidden_states"].bfloat16(), torch.cat(states[:3], -1)[:-1].bfloat16())
        assert torch.equal(sample["verifier_last_hidden_states"].bfloat16(), states[3][1:].bfloat16())
        assert sample["input_ids"].dtype == torch.int64
        assert torch.equal(sample["loss_mask"].long(), original["loss_mask"][1:])
        found.append((original["input_ids"], sample["targets"]))
    assert agreement(found, targets[dtype]) >= AGREEMENT[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_specforge(dtype: str, drive: Drive, exported: Exported, datasets: Datasets, targets: dict[str, Path]) -> None:
    read = drive("specforge-0.2.0", "read_specforge", exported(dtype, "specforge"), targets[dtype])
    captured = by_tokens(datasets(dtype))
    assert {tuple(sample["raw"]["input_ids"].tolist()) for sample in read} == set(captured)
    found = []
    for sample in read:
        raw = sample["raw"]
        original = captured[tuple(raw["input_ids"].tolist())]
        length = len(raw["input_ids"])
        assert raw["aux_hidden_state"].shape == (1, length, 3 * 128)
        assert raw["hidden_state"].shape == (1, length, 128)
        assert raw["hidden_state"].dtype == raw["aux_hidden_state"].dtype == torch.bfloat16
        assert raw["loss_mask"].dtype == torch.int64
        assert torch.equal(raw["loss_mask"], original["loss_mask"])
        between = torch.cat(original["hidden_states"][:3], -1).bfloat16()
        # The trainer leaves the states and shifts tokens and targets to the left.
        assert torch.equal(sample["hidden_states"], between[None])
        assert torch.equal(sample["input_ids"][0, :-1], original["input_ids"][1:])
        found.append((original["input_ids"], sample["targets"][0, :-1]))
    assert agreement(found, targets[dtype]) >= AGREEMENT[dtype]
