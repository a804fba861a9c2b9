"""``safetensors``: a file for each sample that says itself what it holds, with every column as it was captured."""

import json

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_hs_capture.export.formats.base import TrainerFormat
from sglang_hs_capture.export.layout import FileLayout, safetensors_layout
from sglang_hs_capture.export.options import Format
from sglang_hs_capture.export.states import State, torch_dtype
from sglang_hs_capture.layers import CONVENTION
from sglang_hs_capture.store.index import SampleEntry


class SelfDescribing(TrainerFormat):
    """``sample_{i}.safetensors``."""

    name = Format.SAFETENSORS
    convention = CONVENTION

    def choose_states(self) -> tuple[State, ...]:
        return tuple(State(column) for column in self.info.columns)

    def default_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.info.scaled else torch_dtype(self.info.dtype)

    def file(self, number: int, sample: SampleEntry) -> str:
        return f"sample_{number}.safetensors"

    def layout(self, sample: SampleEntry, input_ids: NDArray[np.int64], loss_mask: NDArray[np.int64]) -> FileLayout:
        metadata = {
            "id": json.dumps(sample.id),
            "columns": json.dumps(self.info.columns),
            "convention": CONVENTION,
            "dataset": json.dumps(self.info.to_json()),
        }
        return safetensors_layout(
            {"input_ids": input_ids, "loss_mask": loss_mask, "hidden_states": self.all_states(sample.length)},
            self.dtype,
            metadata,
        )
