"""Runs in an environment of speculators: what its dataset gives for each sample, and the targets its model derives.

read_speculators.py FORMAT EXPORT TARGET LAYER_IDS OUT
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from speculators.models.eagle3.core import Eagle3DraftModel
from transformers import LlamaConfig

MAX_LENGTH = 4096


def samples(layout, export):
    """Samples as they go into a batch, shifted by speculators' own code."""
    from speculators.train import data

    if layout == "speculators":
        dataset = data.ArrowDataset(MAX_LENGTH, export, on_missing="raise", hidden_states_dtype=torch.float32)
    elif hasattr(data, "SampleFileDataset"):
        dataset = data.SampleFileDataset(MAX_LENGTH, export, hidden_states_dtype=torch.float32)
    else:  # 0.4, which shifts in the dataset
        yield from data.Eagle3SampleFileDataset(MAX_LENGTH, str(export), hidden_states_dtype=torch.float32)
        return
    from speculators.models.eagle3.data import shift_batch

    assert dataset.approx_lengths == [len(dataset[i]["input_ids"]) for i in range(len(dataset))]
    for number in range(len(dataset)):
        yield shift_batch(dataset[number])


def draft_model(export, target, layer_ids):
    """The draft model, whose verifier's weights and vocabulary it loads itself."""
    config = json.loads((target / "config.json").read_text())
    layer = LlamaConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_hidden_layers=1,
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_attention_heads"],
        rms_norm_eps=config["rms_norm_eps"],
    )
    t2d, d2t = (torch.from_numpy(np.load(next(export.glob(f"{name}-*.npy")))) for name in ("t2d", "d2t"))
    return Eagle3DraftModel.from_training_args(
        layer,
        t2d=t2d,
        d2t=d2t,
        draft_vocab_size=len(d2t),
        target_layer_ids=layer_ids,
        norm_before_residual=True,
        ttt_steps=3,
        draft_attn_impl="sdpa",
        verifier_name_or_path=str(target),
    ).float()


@torch.no_grad()
def main():
    layout, export, target, layer_ids, out = sys.argv[1:]
    model = draft_model(Path(export), Path(target), json.loads(layer_ids))
    found = []
    for sample in samples(layout, Path(export)):
        tokens = model.verifier_lm_head(model.verifier_norm(sample["verifier_last_hidden_states"])).argmax(-1)
        found.append({**sample, "targets": tokens + model.d2t[tokens]})
    torch.save(found, out)


main()
