"""Runs in SpecForge's environment: what its offline reader gives for each sample, and the targets it derives.

read_specforge.py EXPORT TARGET OUT
"""

import sys

import torch
from specforge.algorithms.eagle3.data import build_offline_reader, normalize_offline_sample
from specforge.modeling.target.target_head import TargetHead
from specforge.runtime.data_plane.feature_store import load_feature_file
from specforge.runtime.data_plane.offline_reader import list_feature_files

MAX_LENGTH = 4096


@torch.no_grad()
def main():
    export, target, out = sys.argv[1:]
    head = TargetHead.from_pretrained(target)
    files = list_feature_files(export)
    refs = list(build_offline_reader(export, run_id="test", ttt_length=3, max_len=MAX_LENGTH))
    assert len(refs) == len(files)
    found = []
    for file in files:
        raw = load_feature_file(file)
        sample = normalize_offline_sample(raw, MAX_LENGTH)
        input_ids, target_states, loss_mask = head.preprocess(
            sample["input_ids"], sample["target"], sample["loss_mask"]
        )
        batch = {"hidden_states": sample["hidden_state"], "input_ids": input_ids, "loss_mask": loss_mask}
        found.append({"file": file, "raw": raw, **batch, "targets": head(target_states).argmax(-1)})
    torch.save(found, out)


main()
