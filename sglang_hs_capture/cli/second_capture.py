"""Captures some of a dataset's prompts a second time, into a folder that is removed afterwards, and compares them."""

import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from sglang_hs_capture.cli import options
from sglang_hs_capture.cli.tell import tell
from sglang_hs_capture.driver.launch import flag_value
from sglang_hs_capture.driver.progress import make_view
from sglang_hs_capture.driver.run import RunSettings
from sglang_hs_capture.driver.source import Source
from sglang_hs_capture.driver.start import run_on_own_server
from sglang_hs_capture.errors import DatasetMismatchError, InputError
from sglang_hs_capture.layers import Final
from sglang_hs_capture.model_config import ModelConfig
from sglang_hs_capture.store.schema import DatasetInfo

if TYPE_CHECKING:
    from sglang_hs_capture.verify.recapture import Comparison

MIN_FREE_GB = 0.25


def require_same_model(directory: Path, info: DatasetInfo, model: ModelConfig, option: str) -> None:
    """See that a dataset was captured from this model, which ``option`` names.

    Raises:
        DatasetMismatchError: its config is another one.
    """
    if info.config_hash != model.config_hash:
        raise DatasetMismatchError(
            f"{directory}: the dataset was captured from a model with the config {info.config_hash}, and that of "
            f"{option} is {model.config_hash}; name the model it was captured from, {info.model_path}"
        )


@dataclass(frozen=True)
class SecondCapture:
    """How prompts are captured again.

    Attributes:
        model: a directory or a hub id.
        config: its config, if it is here.
        sglang_args: flags for SGLang.
        cpu: run on the CPU platform.
        start_timeout_s: how long the server may take to start.
        computed_in: the dtype that the model computes in; None to take the flags' or the model's.
    """

    model: str
    config: ModelConfig | None
    sglang_args: Sequence[str]
    cpu: bool
    start_timeout_s: float
    computed_in: options.Dtype | None

    def compare(self, dataset: Path, prompts: int, seed: int) -> "Comparison":
        """Capture a random choice of the dataset's prompts again, and compare every state.

        Raises:
            InputError: the dataset has no sample.
            HsCaptureError: nothing could be captured.
            typer.Exit: the capture ended early; its account has been printed.
        """
        from sglang_hs_capture.reader.dataset import HiddenStateDataset
        from sglang_hs_capture.verify.recapture import bound_of, compare

        first = HiddenStateDataset(dataset)
        # A dataset does not hold the images themselves.
        candidates = [index for index, sample in enumerate(first.samples) if sample.media is None]
        if not candidates:
            raise InputError(f"{dataset}: the dataset has no sample without images to capture again")
        chosen = sorted(random.Random(seed).sample(candidates, min(prompts, len(candidates))))
        with tempfile.TemporaryDirectory(prefix="hs-capture-verify-") as folder:
            rows = Path(folder) / "prompts.jsonl"
            with rows.open("w", encoding="utf-8") as file:
                for index in chosen:
                    file.write(json.dumps({"id": str(index), "input_ids": first[index]["input_ids"].tolist()}) + "\n")
            self._capture(rows, Path(folder) / "dataset", first.info, len(chosen))
            second = HiddenStateDataset(Path(folder) / "dataset")
            places = {sample.id: place for place, sample in enumerate(second.samples)}
            pairs = [(index, places[str(index)]) for index in chosen]
            return compare(first, second, pairs, bound_of(first.info.dtype, self._computed_in()))

    def _capture(self, rows: Path, output: Path, info: DatasetInfo, prompts: int) -> None:
        finals = [name.removeprefix("final:") for name in info.columns if name.startswith("final:")]
        capture = options.CaptureOptions(
            layers=",".join(map(str, info.boundaries)),
            final=Final(finals[0]) if len(finals) == 1 else Final.BOTH,
            dtype=options.Dtype(info.dtype),
            min_free_gb=MIN_FREE_GB,
        )
        with make_view(prompts) as view:
            summary = run_on_own_server(
                self.model,
                Source([rows], tokenizer=self.model),
                capture.config(output, cpu=self.cpu),
                RunSettings(output=output.resolve(), known_answers=0),
                view,
                sglang_args=self.sglang_args,
                cpu=self.cpu,
                start_timeout_s=self.start_timeout_s,
            )
        if summary.exit_code:
            tell(f"error: the prompts could not be captured again: {summary.ended}", err=True)
            raise typer.Exit(summary.exit_code)

    def _computed_in(self) -> str:
        """The dtype of the second capture's arithmetic; that of the first is taken to be the same."""
        if self.computed_in is not None:
            return self.computed_in.value
        raw = dict(self.config.raw) if self.config else {}
        text = raw.get("text_config") or {}
        of_model = next((str(c[n]) for c in (text, raw) for n in ("dtype", "torch_dtype") if c.get(n)), "")
        known = {dtype.value for dtype in options.Dtype}
        given = flag_value(self.sglang_args, "--dtype") or ("float32" if self.cpu else of_model)
        return given if given in known else options.Dtype.BFLOAT16.value
