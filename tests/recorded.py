"""Reads what the model package ``recording_models`` wrote beside a capture."""

from pathlib import Path

import torch


def recorded_states(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """The states ``[S, H]`` of each request and column, by request id and the column's name.

    A file holds one forward, with its requests' rows one after another; a prompt's chunks lie in several.
    """
    parts: dict[tuple[str, str], list[torch.Tensor]] = {}
    for file in sorted(folder.glob("*.pt")):
        content, start = torch.load(file), 0
        for rid, length in zip(content["rids"], content["seq_lens"], strict=True):
            for name, state in content["states"].items():
                parts.setdefault((rid, name), []).append(state[start : start + length])
            start += length
    return {key: torch.cat(value) for key, value in parts.items()}
