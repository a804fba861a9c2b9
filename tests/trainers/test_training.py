"""Draft models trained by the trainers themselves, on right states and on wrong ones, and what they are worth.

A draft model is trained on the states of an export and then fed the states that a serving engine would give it: the
right ones. So a mistake in the export shows as it would in serving, by tokens that the target model does not accept.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.conftest import DRAFT_VOCABULARY, SAMPLES, Drive, Exported
from tests.trainers.test_readers import BOUNDARIES, agreement
from tests.trainers.wrong import SHIFTED, WRONG_NORM, WrongStates, make_wrong

pytestmark = pytest.mark.engine

STEPS = 50
HELD_OUT = SAMPLES // 10
RIGHT = "right"
# How many more of the target's tokens a draft model has to predict if it was trained on the right states.
CLEARLY = 0.1

Train = Callable[[str, str], dict[str, Any]]


def speculators_job(export: Path, right: Path, target: Path, work: Path) -> dict[str, Any]:
    """``speculators train`` on the first nine tenths of an export, at rates that fit 50 steps."""
    options: dict[str, Any] = {
        "speculator-type": "eagle3",
        "verifier-name-or-path": target,
        "data-path": export,
        "draft-vocab-size": DRAFT_VOCABULARY,
        "on-missing": "raise",
        "hidden-states-dtype": "float32",
        "draft-attn-impl": "sdpa",
        "loss-implementation": "eager",
        "num-workers": 0,
        "total-seq-len": 1024,
        "epochs": 3,
        "max-steps": STEPS,
        "lr": 0.02,
        "muon-lr": 0.02,
        "scheduler-type": "none",
        "save-path": work / "checkpoints",
        "log-dir": work / "logs",
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    arguments += ["--target-layer-ids", *map(str, BOUNDARIES)]
    return {"arguments": arguments, "right": str(right), "target": str(target)}


def specforge_job(export: Path, right: Path, target: Path, work: Path) -> dict[str, Any]:
    """``specforge train`` on a folder with the first nine tenths of an export, at rates that fit 50 steps."""
    config = json.loads((target / "config.json").read_text())
    taken = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    draft = {name: config[name] for name in (*taken, "max_position_embeddings", "rms_norm_eps", "pad_token_id")}
    draft |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu"}
    draft |= {"num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCABULARY, "torch_dtype": "bfloat16"}
    (work / "draft.json").write_text(json.dumps(draft))
    train, held_out = (
        split_specforge(export, work / "train", first=True),
        split_specforge(right, work / "held", first=False),
    )
    return {
        "right": str(held_out),
        "config": {
            "model": {
                "target_model_path": str(target),
                "draft_model_config": str(work / "draft.json"),
                "vocab_mapping_path": str(export / "vocab_mapping" / "vocab_mapping.pt"),
            },
            "data": {"hidden_states_path": str(train), "max_length": 512, "dataloader_num_workers": 0},
            "training": {
                "strategy": "eagle3",
                "attention_backend": "sdpa",
                "fsdp_sharding": "NO_SHARD",
                "ttt_length": 3,
                "batch_size": 8,
                "max_steps": STEPS,
                "num_epochs": 10,
                "learning_rate": 0.01,
                "lr_scheduler": "constant",
                "log_interval": 1,
            },
            "output_dir": str(work / "checkpoints"),
        },
    }


def split_specforge(export: Path, out: Path, *, first: bool) -> Path:
    """A folder with links to an export's samples but the last tenth, or to these."""
    files = sorted(export.glob("rows_*/data_*.ckpt"), key=lambda file: int(file.stem.removeprefix("data_")))
    assert len(files) == SAMPLES
    out.mkdir()
    for file in files[:-HELD_OUT] if first else files[-HELD_OUT:]:
        (out / file.name).symlink_to(file)
    return out


JOBS = {"speculators-0.9.0": ("speculators", speculators_job), "specforge-0.2.0": ("specforge", specforge_job)}


@pytest.fixture(scope="module")
def trained(
    drive: Drive, exported: Exported, targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Train:
    """A function ``(trainer, states) -> losses of the steps, and agreement on the held-out samples``."""
    target = targets["float32"]

    @cache
    def train(trainer: str, states: str) -> dict[str, Any]:
        layout, make_job = JOBS[trainer]
        work = tmp_path_factory.mktemp(f"{layout}-{states}")
        right = export = exported("float32", layout)
        if states != RIGHT:
            export = make_wrong(right, layout, work / "export", WrongStates(target, BOUNDARIES), states)
        job = work / "job.json"
        job.write_text(json.dumps(make_job(export, right, target, work)))
        made = drive(trainer, f"train_{layout}", job)
        assert len(made["predictions"]) == HELD_OUT
        return {"losses": made["losses"], "agreement": agreement(made["predictions"], target)}

    return train


@pytest.mark.parametrize("trainer", JOBS)
def test_the_loss_falls_by_half(trainer: str, trained: Train, figures: list[str]) -> None:
    losses = trained(trainer, RIGHT)["losses"]
    assert len(losses) == STEPS
    last = sum(losses[-5:]) / 5
    figures.append(f"{trainer}: loss of step 1 {losses[0]:.2f}, mean of steps 46 to 50 {last:.2f}")
    assert last < losses[0] / 2


@pytest.mark.parametrize("states", [SHIFTED, WRONG_NORM])
@pytest.mark.parametrize("trainer", JOBS)
def test_right_states_make_a_better_draft_model(trainer: str, states: str, trained: Train, figures: list[str]) -> None:
    right, wrong = trained(trainer, RIGHT)["agreement"], trained(trainer, states)["agreement"]
    figures.append(f"{trainer}: top-1 agreement with the target {right:.3f}, trained on {states} states {wrong:.3f}")
    assert right > wrong + CLEARLY
