"""An export from beginning to end: what is to be written, several threads that write it, and what goes with it."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_hs_capture.errors import ConfigError, DatasetMismatchError, DiskFullError, StoreError
from sglang_hs_capture.export.files import Batch
from sglang_hs_capture.export.formats import FORMATS
from sglang_hs_capture.export.formats.base import TrainerFormat, Written
from sglang_hs_capture.export.manifest import REMEDY, Output
from sglang_hs_capture.export.options import ExportOptions, ExportResult, ExportView
from sglang_hs_capture.export.states import StateSource, torch_dtype
from sglang_hs_capture.export.vocabulary import DraftVocabulary, Row
from sglang_hs_capture.model_config import ModelConfig, load_model_config
from sglang_hs_capture.reader.dataset import HiddenStateDataset
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.index import SampleEntry
from sglang_hs_capture.store.schema import DatasetInfo

_BATCH_BYTES, _BATCH_FILES = 64 << 20, 16


@dataclass(frozen=True)
class _Job:
    """A sample to be written, and its file."""

    sample: SampleEntry
    path: Path


def export_dataset(directory: Path, out: Path, options: ExportOptions, view: ExportView) -> ExportResult:
    """Write a dataset as a trainer reads it, or go on with that, or add what the dataset has got since.

    Raises:
        ConfigError: an option is wrong, or does not fit the dataset or the format.
        DatasetMismatchError: ``out`` holds another export, or the model is another one.
        DatasetLockedError: another process is writing there.
        CorruptionError: the dataset is damaged.
        DiskFullError, StoreError: there is no dataset, or a disk refuses.
    """
    begun = time.monotonic()
    if out.absolute().resolve().is_relative_to(directory.absolute().resolve()):
        raise ConfigError(f"{out}: expected a directory outside of the dataset {directory}; choose another one")
    dataset = HiddenStateDataset(directory)
    kind = FORMATS[options.format](dataset.info, torch_dtype(options.dtype) if options.dtype else None)
    model = _verifier(options, dataset.info)
    vocabulary = _vocabulary(options, kind, dataset.info, model)
    source = StateSource(dataset, kind.states, kind.dtype)
    with Output(out, _identity(dataset.info, kind, options)) as output:
        samples, left_out = _choose(dataset, output, options)
        files = {sample.id: out / kind.file(number, sample) for number, sample in enumerate(samples)}
        output.number(samples, files)
        jobs = [_Job(sample, files[sample.id]) for sample in samples if not files[sample.id].is_file()]
        size = _write(source, kind, output, jobs, options.workers, view)
        state = {"samples": len(samples), "draft_vocab_size": options.draft_vocab_size}
        if jobs or output.finished != state:
            name = str(model.path) if model else dataset.info.model_path
            rows = _Rows(dataset, samples, view)
            kind.finish(Written(out, output.unfinished, samples, rows.read, name, vocabulary))
            output.finish(state)
    tokens = sum(sample.length for sample in samples)
    return ExportResult(len(samples), tokens, len(jobs), size, time.monotonic() - begun, left_out, kind.layer_ids)


def _identity(info: DatasetInfo, kind: TrainerFormat, options: ExportOptions) -> dict[str, Any]:
    """What must not change between the runs of one export, ready for JSON."""
    known = info.to_json()
    names = ("created_at", "config_hash", "columns", "num_layers", "hidden_size", "dtype")
    return {
        "format": kind.name.value,
        "dtype": str(kind.dtype).removeprefix("torch."),
        "min_loss_tokens": options.min_loss_tokens,
        "dataset": {name: list(known[name]) if name == "columns" else known[name] for name in names},
        "layer_ids": kind.layer_ids,
    }


def _verifier(options: ExportOptions, info: DatasetInfo) -> ModelConfig | None:
    """The target model, if the user has named it.

    Raises:
        ConfigError: there is no such model.
        DatasetMismatchError: the dataset was captured from another one.
    """
    if options.verifier is None:
        return None
    model = load_model_config(options.verifier)
    if model.config_hash != info.config_hash:
        raise DatasetMismatchError(
            f"--verifier: the dataset was captured from a model with the config {info.config_hash}, and that of "
            f"{options.verifier} is {model.config_hash}; name the model it was captured from, {info.model_path}"
        )
    return model


def _vocabulary(
    options: ExportOptions, kind: TrainerFormat, info: DatasetInfo, model: ModelConfig | None
) -> DraftVocabulary | None:
    if options.draft_vocab_size is None:
        return None
    if not kind.has_vocabulary:
        raise ConfigError(f"--draft-vocab-size: the format {kind.name} has no place for a vocabulary; leave it out")
    if model is None:
        raise ConfigError(
            "--draft-vocab-size: the size of the target's vocabulary is needed; name the model's directory with "
            f"--verifier; the dataset was captured from {info.model_path}"
        )
    return DraftVocabulary(options.draft_vocab_size, model.vocab_size)


def _choose(dataset: HiddenStateDataset, output: Output, options: ExportOptions) -> tuple[list[SampleEntry], int]:
    """The samples by number, those that have one already first; and how many are left out.

    Raises:
        StoreError: there is none, or the dataset no longer has one that was exported.
    """
    by_id = {sample.id: sample for sample in dataset.samples}
    gone = [numbered.id for numbered in output.samples if numbered.id not in by_id]
    if gone:
        raise StoreError(
            f"{output.path}: the export holds {gone[0]!r}, and the dataset no longer has it; of such samples there "
            f"are {len(gone)}; {REMEDY}"
        )
    chosen = {numbered.id: by_id[numbered.id] for numbered in output.samples}
    more = (sample for sample in dataset.samples if sample.loss_tokens >= options.min_loss_tokens)
    chosen |= {sample.id: sample for sample in more}
    if not chosen:
        raise StoreError(
            f"{dataset.path}: there is nothing to export: of {len(dataset)} samples none has "
            f"{options.min_loss_tokens} tokens that the loss is on; see hs-capture inspect"
        )
    return list(chosen.values()), len(by_id) - len(chosen)


def _write(
    source: StateSource, kind: TrainerFormat, output: Output, jobs: Sequence[_Job], workers: int, view: ExportView
) -> int:
    """Write the files of ``jobs``; returns the bytes of their states.

    Raises:
        CorruptionError, DiskFullError, StoreError: of the first file that cannot be written; the others are stopped.
    """
    token_bytes = len(kind.states) * source.dataset.info.hidden_size * kind.dtype.itemsize
    total = sum(job.sample.length for job in jobs) * token_bytes
    if not jobs:
        return 0
    with fs.io_errors(output.path, "make folders in"):
        for folder in {job.path.parent for job in jobs}:
            fs.make_dir(folder)
    _require_room(output.path, total)
    view.begin("Export", total, "bytes")
    stop = threading.Event()

    def write(batch: Sequence[_Job]) -> None:
        with Batch(output.unfinished) as files:
            for job in batch:
                if stop.is_set():
                    return
                ids = source.dataset.read_input_ids(job.sample)
                layout = kind.layout(job.sample, ids, job.sample.loss_mask())
                files.write(job.path, layout, source.blocks(job.sample), view.advance)
            files.commit()

    pool = ThreadPoolExecutor(workers, "hs-export")
    try:
        with _one_thread_each():
            for done in as_completed([pool.submit(write, batch) for batch in _batches(jobs, token_bytes)]):
                done.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
    return total


def _require_room(path: Path, size: int) -> None:
    """Say at once what would otherwise be noticed after hours.

    Raises:
        DiskFullError: there is less room than the states take.
    """
    free = fs.free_bytes(path)
    if free < size:
        raise DiskFullError(
            f"{path}: the states that are to be written take {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; "
            "free some space or choose another directory"
        )


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Keep torch from starting threads of its own beside the workers: they would wait for each other, spinning."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _batches(jobs: Sequence[_Job], token_bytes: int) -> Iterator[list[_Job]]:
    """Files that become durable together: as many as are written in a moment."""
    batch: list[_Job] = []
    size = 0
    for job in jobs:
        batch.append(job)
        size += job.sample.length * token_bytes
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_FILES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@dataclass(frozen=True)
class _Rows:
    """The token ids and loss masks of all samples, for what goes with the files."""

    dataset: HiddenStateDataset
    samples: Sequence[SampleEntry]
    view: ExportView

    def read(self) -> Iterator[Row]:
        """Input ids [S] and loss mask [S] of each sample, read anew."""
        self.view.begin("Tokens", len(self.samples), "samples")
        for sample in self.samples:
            yield self.dataset.read_input_ids(sample), sample.loss_mask()
            self.view.advance(1)
