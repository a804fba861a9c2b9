"""Runs in SpecForge's environment: ``specforge train``, and what the draft model it makes then predicts.

    train_specforge.py JOB OUT

The job is a JSON object: ``config``, of ``specforge train``; and ``right``, a folder with the held-out samples that the
draft model is fed afterwards. Out come the losses of each step, and the predictions.

SpecForge's loss is a Triton kernel, for which a step takes seconds in Triton's interpreter. Here the implementation in
torch stands in for it that SpecForge itself has beside the kernel, as its reference. Nothing else of it is touched.
"""

import json
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import torch
from specforge.algorithms.eagle3 import model as eagle3
from specforge.algorithms.eagle3.data import normalize_offline_sample
from specforge.cli import main as specforge
from specforge.core.loss import _compute_loss
from specforge.export.checkpoint_io import materialize_draft, resolve_training_state
from specforge.runtime.data_plane.feature_store import load_feature_file
from specforge.runtime.data_plane.offline_reader import list_feature_files


def draft_model(config):
    """The trained draft model, in float32, put together by SpecForge's own code for exports."""
    model = config["model"]
    made = materialize_draft(
        resolve_training_state(config["output_dir"]),
        model["draft_model_config"],
        vocab_mapping_path=model["vocab_mapping_path"],
    )
    made.load_embedding(model["target_model_path"])
    return made.float().eval()


@torch.no_grad()
def predictions(model, right):
    """For each held-out sample its tokens, and the first predicted token at each position from the second on."""
    found = []
    for file in list_feature_files(right):
        sample = normalize_offline_sample(load_feature_file(file), 4096)
        tokens = sample["input_ids"][0]
        states = model.project_hidden_states(sample["hidden_state"][:, :-1].float())
        length = states.shape[1]
        embedded = model.embed_input_ids(tokens[None, 1:])
        mask = model.prepare_decoder_attention_mask(torch.ones(1, length), states, 1, length, 0)
        hidden = model.backbone(embedded, states, [[], []], mask, torch.arange(length)[None], None)
        drafted = model.compute_logits(hidden)[0].argmax(-1)
        found.append((tokens, drafted + model.d2t[drafted]))
    return found


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    config = job["config"]
    run = Path("run.json")
    run.write_text(json.dumps(config))
    eagle3.LogSoftmaxLoss = SimpleNamespace(apply=_compute_loss)
    printed = StringIO()
    with redirect_stdout(printed):
        status = specforge(["train", "--config", str(run)])
    if status:
        sys.exit(f"specforge train ended with {status}:\n{printed.getvalue()}")
    losses = re.findall(r"^step \d+: .*'loss': ([0-9.e+-]+)", printed.getvalue(), re.MULTILINE)
    found = predictions(draft_model(config), job["right"])
    torch.save({"losses": [float(loss) for loss in losses], "predictions": found}, sys.argv[2])


main()
