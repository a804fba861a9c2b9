"""``speculators``: token ids as an Arrow dataset, and a safetensors file of states for each row of it.

As speculators 0.9 reads it through hs-connectors, and 0.7 without ``--legacy-data``.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sglang_hs_capture.export.files import move_into
from sglang_hs_capture.export.formats.base import TrainerFormat, Written
from sglang_hs_capture.export.layout import FileLayout, safetensors_layout
from sglang_hs_capture.export.options import Format
from sglang_hs_capture.export.vocabulary import Row, TokenCounts, torch_bytes
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.index import SampleEntry

STATE_FILE, INFO_FILE = "state.json", "dataset_info.json"
# Of rows held in memory while the Arrow file is written; a row may be a hundred thousand tokens.
_BATCH_ROWS = 64


class Speculators(TrainerFormat):
    """The Arrow dataset, ``hidden_states/hs_{row}.safetensors``, ``token_freq.pt``."""

    name = Format.SPECULATORS
    convention = "boundary"
    has_vocabulary = True

    def file(self, number: int, sample: SampleEntry) -> str:
        return f"hidden_states/hs_{number}.safetensors"

    def layout(self, sample: SampleEntry, input_ids: NDArray[np.int64], loss_mask: NDArray[np.int64]) -> FileLayout:
        return safetensors_layout({"token_ids": input_ids, "hidden_states": self.all_states(sample.length)}, self.dtype)

    def finish(self, written: Written) -> None:
        counts = TokenCounts()
        folder = written.unfinished / "arrow"
        write_arrow(folder, counts.watch(written.rows()))
        state = written.path / STATE_FILE
        # Without it the folder is no dataset; with it the one before, whose rows are the first of this one.
        with fs.io_errors(state, "replace"):
            fs.remove(state)
            fs.fsync_dir(written.path)
            names = {file.name for file in folder.iterdir()}
            for old in written.path.glob("data-*.arrow"):
                if old.name not in names:
                    fs.remove(old)
        move_into(written.path, [folder / name for name in sorted(names, key=lambda n: n == STATE_FILE)])
        written.put("token_freq.pt", torch_bytes(counts.as_dict()))
        if written.vocabulary is not None:
            self.write_vocabulary(written, written.vocabulary, counts)


def write_arrow(folder: Path, rows: Iterable[Row]) -> None:
    """Write token ids and loss masks as ``datasets.load_from_disk`` reads them, as tensors.

    Raises:
        DiskFullError, StoreError: the disk refuses.
    """
    import datasets
    from datasets.arrow_writer import ArrowWriter

    ids = datasets.List(datasets.Value("int64"))
    features = datasets.Features({"input_ids": ids, "loss_mask": ids, "seq_len": datasets.Value("int64")})
    stream = folder.with_suffix(".stream")
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with fs.io_errors(folder, "write the Arrow dataset"):
            writer = ArrowWriter(path=str(stream), features=features, writer_batch_size=_BATCH_ROWS)
            for input_ids, loss_mask in rows:
                writer.write({"input_ids": input_ids, "loss_mask": loss_mask, "seq_len": len(input_ids)})
            writer.finalize()
            writer.close()
            datasets.Dataset.from_file(str(stream)).with_format("torch").save_to_disk(str(folder))
    finally:
        if shown:
            datasets.enable_progress_bars()
