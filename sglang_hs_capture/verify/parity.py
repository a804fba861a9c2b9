"""Captured states against ``transformers``: the same tokens through an independent implementation, in float32.

For models small enough to be run in float32 on the CPU. What is compared is the whole path from the tokens in the
dataset to the rows on disk, so the error found is the engine's arithmetic plus the stored dtype's rounding.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sglang_hs_capture.errors import ConfigError, InputError
from sglang_hs_capture.layers import Final, make_columns
from sglang_hs_capture.model_config import load_model_config

# Names under which published checkpoints carry an architecture that transformers has under another.
MODEL_TYPES = {"kimi_k2": "deepseek_v3"}
WRAPPER_PREFIX = "language_model."
# How far the engine's arithmetic may lie from the reference's, as a share of a row's norm.
ARITHMETIC = 1e-5
# What rounding to a dtype may cost: as a share of the value, and at least this much.
_ROUNDING = {"float32": (2.0**-24, 0.0), "bfloat16": (2.0**-8, 0.0), "float16": (2.0**-11, 2.0**-25)}


class CapturedSamples(Protocol):
    """What ``compare`` needs of a dataset; ``HiddenStateDataset`` has it."""

    @property
    def columns(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ColumnError:
    """How far one column of a dataset lies from the reference.

    Attributes:
        column: the column's name.
        relative: the largest ``||captured - reference|| / ||reference||`` of any row.
        absolute: the largest difference of any element, as a share of the reference's largest element.
        excess: the largest difference of any element, as a share of its ``allowance``; above 1 it is too large.
    """

    column: str
    relative: float
    absolute: float
    excess: float


@dataclass(frozen=True)
class ParityReport:
    """Outcome of ``compare``: one ``ColumnError`` a column, over ``samples`` samples with ``tokens`` tokens in all."""

    samples: int
    tokens: int
    columns: tuple[ColumnError, ...]

    @property
    def worst(self) -> float:
        """The largest relative error of any column; NaN if any captured value is NaN."""
        return float(torch.tensor([column.relative for column in self.columns]).max())

    @property
    def excess(self) -> float:
        """The largest excess of any column; NaN if any captured value is NaN."""
        return float(torch.tensor([column.excess for column in self.columns]).max())


class ReferenceModel:
    """The language model of a DeepSeek-V3 or Kimi-K2.5 checkpoint, held by ``transformers`` in float32 on the CPU.

    Raises:
        ConfigError: the checkpoint is quantised, of a kind ``transformers`` does not know, or lacks weights.
    """

    def __init__(self, model_path: str | Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        text = _text_config(model_path)
        if text["model_type"] not in CONFIG_MAPPING:
            raise ConfigError(f"parity: transformers has no model of the type {text['model_type']!r} of {model_path}")
        with _quiet_loading():
            self._model, info = AutoModelForCausalLM.from_pretrained(
                model_path,
                config=CONFIG_MAPPING[text["model_type"]].from_dict(text),
                dtype=torch.float32,
                key_mapping={f"^{WRAPPER_PREFIX}": ""},
                output_loading_info=True,
            )
        if info["missing_keys"]:
            raise ConfigError(
                f"parity: {model_path} lacks {len(info['missing_keys'])} weights of a {text['model_type']} model, "
                f"such as {min(info['missing_keys'])}"
            )
        self._model.eval()

    @torch.no_grad()
    def states(self, input_ids: Tensor | Sequence[int], boundaries: Sequence[int], final: Final) -> list[Tensor]:
        """Run a prompt and return its states in the order of ``make_columns``.

        Args:
            input_ids: ``[S]`` token ids.
            boundaries: the boundaries wanted, each below the number of layers.
            final: the forms of the last layer's output wanted.

        Returns:
            float32 tensors ``[S, H]``.
        """
        finals: dict[Final, Tensor] = {}

        def keep(_module: torch.nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            finals[Final.PRE_NORM], finals[Final.POST_NORM] = args[0][0].clone(), output[0].clone()

        hook = self._model.model.norm.register_forward_hook(keep)
        try:
            tokens = torch.as_tensor(input_ids, dtype=torch.int64)
            hidden_states = self._model.model(tokens[None], output_hidden_states=True, use_cache=False).hidden_states
        finally:
            hook.remove()
        return [
            hidden_states[column.boundary][0] if column.final is None else finals[column.final]
            for column in make_columns(boundaries, final)
        ]

    @torch.no_grad()
    def logits(self, input_ids: Tensor | Sequence[int]) -> Tensor:
        """``[S, vocab]`` in float32: what the model predicts after each token of the prompt."""
        tokens = torch.as_tensor(input_ids, dtype=torch.int64)
        logits: Tensor = self._model(tokens[None], use_cache=False).logits[0]
        return logits


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Keep ``transformers`` from listing the vision tower's weights as unexpected."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _text_config(model_path: str | Path) -> dict[str, Any]:
    raw = dict(load_model_config(model_path).raw)
    text = dict(raw.get("text_config") or raw)
    if raw.get("quantization_config") or text.get("quantization_config"):
        raise ConfigError(
            f"parity: {model_path} is quantised, and transformers would compute with other weights than the engine; "
            "compare a checkpoint that is not quantised"
        )
    text["model_type"] = MODEL_TYPES.get(text["model_type"], text["model_type"])
    return text


@lru_cache(maxsize=1)
def load_reference(model_path: str | Path) -> ReferenceModel:
    """The ``ReferenceModel`` of a checkpoint; the one used last stays loaded."""
    return ReferenceModel(model_path)


def reference_states(
    model_path: str | Path, input_ids: Tensor | Sequence[int], boundaries: Sequence[int], final: Final
) -> list[Tensor]:
    """``ReferenceModel.states`` of the checkpoint at ``model_path``, which stays loaded for the next call."""
    return load_reference(model_path).states(input_ids, boundaries, final)


def allowance(expected: Tensor, dtype: str) -> Tensor:
    """How far each element of a captured state may lie from the reference.

    That is what rounding to the stored dtype costs at most, and ``ARITHMETIC`` of the row's norm. Float8 costs 2^-4 of
    a value, or half a subnormal step, 2^-10 of the row's scale; ``HiddenStateDataset`` rounds it to bfloat16 again.

    Args:
        expected: float32 ``[S, H]``, the reference.
        dtype: what the states were stored in, by its name in ``dataset.json``.

    Returns:
        float32 ``[S, H]``.
    """
    size = expected.abs()
    # A value that lies beside the reference already is rounded by a little more or less than the reference would be.
    beside: Tensor = ARITHMETIC * 1.125 * expected.norm(dim=-1, keepdim=True)
    if dtype != "float8_e4m3":
        share, least = _ROUNDING[dtype]
        return beside + (size * share).clamp(min=least)
    scale = size.amax(dim=-1, keepdim=True) / 448
    rounding = torch.maximum(size * 2.0**-4, scale * 2.0**-10)
    return beside + rounding + (size + rounding) * _ROUNDING["bfloat16"][0]


class ReferenceSamples:
    """The samples of a dataset as the reference computes them: the same tokens, and states in float32."""

    def __init__(self, dataset: CapturedSamples, model_path: str | Path) -> None:
        """Load the reference.

        Raises:
            ConfigError: see ``ReferenceModel``.
        """
        self._dataset = dataset
        self._reference = load_reference(model_path)
        self._boundaries, self._final = _wanted(dataset.columns)

    @property
    def columns(self) -> Sequence[str]:
        """Those of the dataset."""
        return self._dataset.columns

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``input_ids`` and ``hidden_states`` of one sample, as ``HiddenStateDataset`` gives them."""
        tokens = self._dataset[index]["input_ids"]
        return {"input_ids": tokens, "hidden_states": self._reference.states(tokens, self._boundaries, self._final)}


def compare(
    dataset: CapturedSamples, model_path: str | Path, limit: int | None = None, *, dtype: str = "float32"
) -> ParityReport:
    """Compare a dataset's samples with the reference.

    Args:
        dataset: captured samples.
        model_path: the checkpoint they were captured from.
        limit: compare only this many samples, spread evenly over the dataset; all if None.
        dtype: what the samples' states were stored in, for ``excess``.

    Raises:
        ConfigError: see ``ReferenceModel``.
        InputError: the dataset has no sample.
    """
    if len(dataset) == 0:
        raise InputError("parity: the dataset has no sample to compare")
    reference = load_reference(model_path)
    boundaries, final = _wanted(dataset.columns)
    errors = torch.zeros(len(dataset.columns), 3)
    samples = tokens = 0
    for sample in _spread(dataset, limit):
        expected = reference.states(sample["input_ids"], boundaries, final)
        pairs = zip(sample["hidden_states"], expected, strict=True)
        found = torch.stack([_errors(captured.float(), state, dtype) for captured, state in pairs])
        errors = torch.maximum(errors, found)
        samples += 1
        tokens += len(sample["input_ids"])
    columns = zip(dataset.columns, errors.tolist(), strict=True)
    return ParityReport(samples, tokens, tuple(ColumnError(name, *values) for name, values in columns))


def _wanted(columns: Sequence[str]) -> tuple[list[int], Final]:
    """Boundaries and final form from column names such as ``boundary:3`` and ``final:pre_norm``."""
    kinds = [name.split(":") for name in columns]
    boundaries = [int(value) for kind, value in kinds if kind == "boundary"]
    finals = [Final(value) for kind, value in kinds if kind == "final"]
    return boundaries, finals[0] if len(finals) == 1 else Final.BOTH


def _spread(dataset: CapturedSamples, limit: int | None) -> Iterator[dict[str, Any]]:
    count = len(dataset) if limit is None else min(limit, len(dataset))
    for index in range(count):
        yield dataset[index * len(dataset) // count]


def _errors(captured: Tensor, expected: Tensor, dtype: str) -> Tensor:
    """``[3]``: the largest relative error of a row; of an element, as a share of the largest, and of its allowance."""
    difference = captured - expected
    relative = (difference.norm(dim=-1) / expected.norm(dim=-1)).max()
    size = difference.abs()
    return torch.stack([relative, size.max() / expected.abs().max(), (size / allowance(expected, dtype)).max()])
