"""``modelopt``: a pickle for each conversation, as ModelOpt's ``OfflineSupervisedDataset`` reads them.

Its trainer takes any file whose name ends in ``.pt``, in any folder.
"""

import re

import numpy as np
from numpy.typing import NDArray

from sglang_hs_capture.export.formats.base import POST_NORM, PRE_NORM, TrainerFormat
from sglang_hs_capture.export.layout import FileLayout
from sglang_hs_capture.export.options import Format
from sglang_hs_capture.export.states import State
from sglang_hs_capture.export.torch_layout import torch_layout
from sglang_hs_capture.store.index import SampleEntry
from sglang_hs_capture.store.schema import sample_key

# An id of this form becomes a file's name as it is. It is lower case, for file systems that do not tell case.
_HARMLESS = re.compile(r"[a-z0-9][a-z0-9_-]{0,99}", re.ASCII)
_HASHED = "sample."


class ModelOpt(TrainerFormat):
    """``{conversation_id}.pt``, with a flag that says whether the last state is the one before the final norm."""

    name = Format.MODELOPT
    convention = "output_of_layer"

    def final_state(self) -> State:
        return State(PRE_NORM if PRE_NORM in self.info.columns else POST_NORM)

    def file(self, number: int, sample: SampleEntry) -> str:
        return f"{file_stem(sample.id)}.pt"

    def layout(self, sample: SampleEntry, input_ids: NDArray[np.int64], loss_mask: NDArray[np.int64]) -> FileLayout:
        content = {
            "input_ids": input_ids,
            "hidden_states": self.last_state(sample.length),
            "aux_hidden_states": self.joined_states(sample.length),
            "loss_mask": loss_mask,
            "conversation_id": sample.id,
            "hidden_states_prenorm": self.final_form == "pre_norm",
        }
        return torch_layout(content, self.dtype)


def file_stem(sample_id: str) -> str:
    """The name of a sample's file: its id where that is harmless, else one made of the id's hash.

    Two ids never have the same name: a harmless id has no dot, and one that is hashed does.
    """
    return sample_id if _HARMLESS.fullmatch(sample_id) else _HASHED + sample_key(sample_id)
