"""Answers of the real engine, captured with their prompts."""

import json
import os
import random
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.layers import Final
from sglang_hs_capture.verify.parity import reference_states

pytestmark = [pytest.mark.engine, pytest.mark.slow]

COMMAND = [sys.executable, "-m", "sglang_hs_capture.cli.main", "run"]
NEW = 12


def greedy(model, ids: list[int]) -> list[int]:
    """What ``transformers`` would say, the likeliest token each time."""
    tokens = list(ids)
    for _ in range(NEW):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(ids) :]


def test_the_model_answers_and_prompt_and_answer_are_captured(deepseek_checkpoint, tmp_path):
    choose = random.Random(5)
    stem = [choose.randrange(5, 2000) for _ in range(80)]
    prompts = {f"p{n}": [*stem, *(choose.randrange(5, 2000) for _ in range(n))] for n in (1, 5, 60, 130)}
    data, output = tmp_path / "data.jsonl", tmp_path / "dataset"
    rows = [
        {"id": name, "input_ids": [*ids, 7, 7], "loss_mask": [0] * len(ids) + [1, 1]} for name, ids in prompts.items()
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "--model",
        deepseek_checkpoint,
        "--data",
        data,
        "--output",
        output,
        "--dtype",
        "float32",
        "--layers",
        "0,4,7",
    ]
    words += ["--min-free-gb", "0", "--regenerate", "--temperature", "0", "--max-new-tokens", NEW]
    words += ["--json-summary", tmp_path / "summary.json", "--", "--chunked-prefill-size", "64"]
    environment = {"OMP_NUM_THREADS": "2", **os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*COMMAND, *map(str, words)], env=environment, capture_output=True, text=True, timeout=420, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["answered"], summary["captured"], summary["resent"]) == (4, 4, 0)
    items = {item["id"]: item for item in HiddenStateDataset(output)}  # type: ignore[attr-defined]
    assert set(items) == set(prompts)
    model = AutoModelForCausalLM.from_pretrained(deepseek_checkpoint, dtype=torch.float32).eval()
    for name, ids in prompts.items():
        said = greedy(model, ids)
        assert items[name]["input_ids"].tolist() == [*ids, *said]
        assert items[name]["loss_mask"].tolist() == [0] * len(ids) + [1] * NEW
        expected = reference_states(deepseek_checkpoint, [*ids, *said], (0, 4, 7), Final.PRE_NORM)
        for got, reference in zip(items[name]["hidden_states"], expected, strict=True):
            assert ((got - reference).norm(dim=1) / reference.norm(dim=1)).max() <= 1e-5
