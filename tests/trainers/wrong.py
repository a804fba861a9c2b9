"""Exports with the mistakes that raise no error: states of the layer before, and the wrong side of the final norm."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_hs_capture.export.states import apply_norm
from sglang_hs_capture.layers import Final
from sglang_hs_capture.verify.parity import ReferenceModel

SHIFTED, WRONG_NORM = "shifted", "wrong_norm"


class WrongStates:
    """States as ``transformers`` computes them, for the boundaries of a dataset, in the way of each mistake."""

    def __init__(self, target: Path, boundaries: Sequence[int]) -> None:
        self._reference = ReferenceModel(target)
        self._boundaries = list(boundaries)
        config = json.loads((target / "config.json").read_text())
        self._last_layer, self._eps = config["num_hidden_layers"] - 1, config["rms_norm_eps"]
        self._norm = load_file(target / "model.safetensors")["model.norm.weight"].float()

    def between(self, tokens: Tensor, mistake: str) -> list[Tensor]:
        """float32 ``[S, H]`` for each boundary."""
        earlier = 1 if mistake == SHIFTED else 0
        return self._reference.states(tokens, [b - earlier for b in self._boundaries], Final.PRE_NORM)[:-1]

    def last(self, tokens: Tensor, mistake: str, *, normed: bool) -> Tensor:
        """float32 ``[S, H]``; ``normed`` where the trainer wants the state after the final norm."""
        if mistake == WRONG_NORM:
            return self._reference.states(tokens, [0], Final.PRE_NORM if normed else Final.POST_NORM)[-1]
        layer_before = self._reference.states(tokens, [self._last_layer], Final.PRE_NORM)[0]
        return apply_norm(layer_before, self._norm, self._eps) if normed else layer_before


def rewrite_speculators(file: Path, wrong: WrongStates, mistake: str) -> None:
    """Put wrong states into one file of ``--format speculators``."""
    content = load_file(file)
    tokens, old = content["token_ids"], content["hidden_states"]
    states = [*wrong.between(tokens, mistake), wrong.last(tokens, mistake, normed=False)]
    save_file(content | {"hidden_states": torch.stack(states, 1).to(old.dtype)}, file)


def rewrite_specforge(file: Path, wrong: WrongStates, mistake: str) -> None:
    """Put wrong states into one file of ``--format specforge``."""
    content: dict[str, Any] = torch.load(file)
    tokens, dtype = content["input_ids"], content["hidden_state"].dtype
    content["aux_hidden_state"] = torch.cat(wrong.between(tokens, mistake), -1)[None].to(dtype)
    content["hidden_state"] = wrong.last(tokens, mistake, normed=True)[None].to(dtype)
    torch.save(content, file)


REWRITE: dict[str, tuple[str, Callable[[Path, WrongStates, str], None]]] = {
    "speculators": ("hidden_states/*.safetensors", rewrite_speculators),
    "specforge": ("rows_*/*.ckpt", rewrite_specforge),
}


def make_wrong(export: Path, layout: str, out: Path, wrong: WrongStates, mistake: str) -> Path:
    """A copy of an export with one mistake in it."""
    shutil.copytree(export, out)
    pattern, rewrite = REWRITE[layout]
    files = sorted(out.glob(pattern))
    assert files, f"no {pattern} in {out}"
    for file in files:
        rewrite(file, wrong, mistake)
    return out
