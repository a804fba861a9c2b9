"""``eagle-pt``: a pickle for each sample, as speculators 0.3 and 0.4 read them, and to 0.7 with ``--legacy-data``.

Its reader takes any file whose name ends in ``pt``, in any folder: nothing else may be named so.
"""

import json
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from sglang_hs_capture import __version__
from sglang_hs_capture.export.formats.base import TrainerFormat, Written
from sglang_hs_capture.export.layout import FileLayout
from sglang_hs_capture.export.options import Format
from sglang_hs_capture.export.torch_layout import torch_layout
from sglang_hs_capture.store.index import SampleEntry


class EaglePt(TrainerFormat):
    """``data_{i}.pt``, ``sample_lengths.json``, ``data_config.json``."""

    name = Format.EAGLE_PT
    convention = "output_of_layer"
    has_vocabulary = True

    def file(self, number: int, sample: SampleEntry) -> str:
        return f"data_{number}.pt"

    def layout(self, sample: SampleEntry, input_ids: NDArray[np.int64], loss_mask: NDArray[np.int64]) -> FileLayout:
        states = [self.one_state(number, sample.length) for number in range(len(self.states))]
        return torch_layout({"input_ids": input_ids, "hidden_states": states, "loss_mask": loss_mask}, self.dtype)

    def finish(self, written: Written) -> None:
        lengths = {str(number): sample.length for number, sample in enumerate(written.samples)}
        written.put("sample_lengths.json", json.dumps(lengths).encode())
        written.put("data_config.json", self._config(written))
        super().finish(written)

    def _config(self, written: Written) -> bytes:
        """The fields that speculators' own generator writes, as far as they have a meaning here."""
        ids = [*self.layer_ids["aux"], self.layer_ids["final"]]
        config = {
            "version": "2.0",
            "generated_at": datetime.now(UTC).isoformat(),
            "generator": f"sglang-hs-capture {__version__}",
            "model": {"target_model_path": written.model, "hidden_size": self.info.hidden_size},
            "data": {"num_samples": len(written.samples)},
            "hidden_states": {"layer_ids": ids, "description": "outputs of these layers, the last before the norm"},
            "format": {"file_pattern": "data_{idx}.pt", "dtype": str(self.dtype), "num_tensors": len(ids)},
        }
        return (json.dumps(config, indent=2) + "\n").encode()
