"""Runs in speculators' environment: ``speculators train``, and what the draft model it makes then predicts.

    train_speculators.py JOB OUT

The job is a JSON object: ``arguments`` of ``speculators train``; ``right``, an export whose held-out samples the draft
model is fed afterwards; and ``target``. Out come the losses of each step, and the predictions.

The trainer moves everything to its accelerator, by the number of it, and waits for it; without one it ends in an
error. Here both are the CPU's. Nothing else of it is touched.
"""

import json
import logging
import sys
from pathlib import Path

import torch
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train import trainer
from speculators.train.cli import main as train
from speculators.train.config import TrainConfig
from speculators.train.data import ArrowDataset, CollateFn

TRAIN_RATIO = 0.9


def on_cpu():
    trainer.get_local_rank = lambda: torch.device("cpu")
    torch.accelerator.synchronize = lambda *_: None


def losses_of_steps():
    """A list that fills with the loss of each step, as the trainer logs it."""
    losses = []
    make = logging.getLogRecordFactory()

    def record(*args, **kwargs):
        made = make(*args, **kwargs)
        if made.name == "speculators.metrics" and isinstance(made.msg, dict) and "train" in made.msg:
            losses.append(made.msg["train"]["loss"])
        return made

    logging.setLogRecordFactory(record)
    return losses


@torch.no_grad()
def predictions(checkpoint, job):
    """For each held-out sample its tokens, and the first predicted token at each position from the second on."""
    config = Eagle3DraftModel.config_class.from_pretrained(checkpoint)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = Eagle3DraftModel.from_pretrained(checkpoint, config=config, verifier=job["target"]).float().eval()
    held_out = ArrowDataset(4096, job["right"], on_missing="raise", train_ratio=TRAIN_RATIO, split="val")
    found = []
    for sample in (held_out[number] for number in range(len(held_out))):
        tokens = sample["input_ids"]
        collate = CollateFn(len(tokens) - 1, model.hidden_size, dtype=torch.float32, preprocess=shift_batch)
        batch = collate([dict(sample)])
        fed = {name: batch[name] for name in ("hidden_states", "input_ids", "document_ids", "position_ids")}
        drafted = model(**fed, ttt_steps=1)[0][0]
        found.append((tokens, drafted + model.d2t[drafted]))
    return found


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    on_cpu()
    losses = losses_of_steps()
    config = TrainConfig.resolve([*job["arguments"], "--train-data-ratio", str(TRAIN_RATIO)])
    train(config)
    checkpoints = [path for path in Path(config.trainer.save_path).iterdir() if path.name.isdigit()]
    last = max(checkpoints, key=lambda path: int(path.name))
    torch.save({"losses": losses, "predictions": predictions(last, job)}, sys.argv[2])


main()
