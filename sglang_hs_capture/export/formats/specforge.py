"""``specforge``: the offline features of SpecForge 0.2, whose trainer applies the target's lm_head only.

So the last state is the one after the final norm. Its reader takes any file whose name ends in ``.ckpt``.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_hs_capture.errors import ConfigError
from sglang_hs_capture.export.formats.base import POST_NORM, PRE_NORM, TrainerFormat, Written
from sglang_hs_capture.export.layout import FileLayout, StatesOf
from sglang_hs_capture.export.options import Format
from sglang_hs_capture.export.states import State
from sglang_hs_capture.export.torch_layout import torch_layout
from sglang_hs_capture.export.vocabulary import DraftVocabulary, TokenCounts, torch_bytes
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.index import SampleEntry

FILES_PER_FOLDER = 2000
BOUNDARIES = 3


class SpecForge(TrainerFormat):
    """``rows_{a}-{b}/data_{i}.ckpt``, and ``vocab_mapping/vocab_mapping.pt``."""

    name = Format.SPECFORGE
    convention = "output_of_layer"
    has_vocabulary = True

    def final_state(self) -> State:
        if len(self.info.boundaries) != BOUNDARIES:
            raise ConfigError(
                f"--format {self.name}: SpecForge trains on the states of {BOUNDARIES} layers; the dataset has "
                f"{len(self.info.boundaries)} of them: {', '.join(self.info.columns)}"
            )
        return State(POST_NORM) if POST_NORM in self.info.columns else State(PRE_NORM, normed=True)

    def file(self, number: int, sample: SampleEntry) -> str:
        start = number // FILES_PER_FOLDER * FILES_PER_FOLDER
        return f"rows_{start}-{start + FILES_PER_FOLDER}/data_{number}.ckpt"

    def layout(self, sample: SampleEntry, input_ids: NDArray[np.int64], loss_mask: NDArray[np.int64]) -> FileLayout:
        content = {
            "input_ids": input_ids,
            "loss_mask": loss_mask,
            "hidden_state": _batch_of_one(self.last_state(sample.length)),
            "aux_hidden_state": _batch_of_one(self.joined_states(sample.length)),
        }
        return torch_layout(content, self.dtype)

    def write_vocabulary(self, written: Written, vocabulary: DraftVocabulary, counts: TokenCounts) -> None:
        d2t, t2d = (torch.from_numpy(array) for array in vocabulary.mappings(counts.as_dict()))
        folder = written.path / "vocab_mapping"
        with fs.io_errors(folder, "create"):
            fs.make_dir(folder)
        written.put("vocab_mapping/vocab_mapping.pt", torch_bytes({"d2t": d2t, "t2d": t2d}))


def _batch_of_one(states: StatesOf) -> StatesOf:
    return StatesOf(states.first, states.last, (1, *states.shape))
