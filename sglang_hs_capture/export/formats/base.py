"""What a trainer's layout has to say of itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_hs_capture.errors import ConfigError
from sglang_hs_capture.export.files import write_bytes
from sglang_hs_capture.export.layout import FileLayout, StatesOf
from sglang_hs_capture.export.options import Format
from sglang_hs_capture.export.states import State
from sglang_hs_capture.export.vocabulary import DraftVocabulary, Row, TokenCounts, npy_bytes
from sglang_hs_capture.layers import Column, Final, draft_ids, layer_ids_of
from sglang_hs_capture.store.index import SampleEntry
from sglang_hs_capture.store.schema import DatasetInfo

PRE_NORM, POST_NORM = Column(final=Final.PRE_NORM).name, Column(final=Final.POST_NORM).name
_FINAL = (PRE_NORM, POST_NORM)


@dataclass(frozen=True)
class Written:
    """All sample files are written: what remains to be derived from them.

    Attributes:
        path: the export's directory.
        unfinished: a folder on the same file system whose content does not count, removed at the end.
        samples: in the order of their numbers.
        rows: gives the input ids [S] and the loss mask [S] of each of them, in this order, read anew.
        model: the target model's name or path.
        vocabulary: None where the draft model has its target's.
    """

    path: Path
    unfinished: Path
    samples: Sequence[SampleEntry]
    rows: Callable[[], Iterator[Row]]
    model: str
    vocabulary: DraftVocabulary | None

    def put(self, name: str, data: bytes) -> None:
        """Write a small file, in one step.

        Raises:
            DiskFullError, StoreError: the disk refuses.
        """
        write_bytes(self.unfinished, self.path / name, data)


class TrainerFormat(ABC):
    """One layout, for one dataset.

    Attributes:
        name: by which the user asks for it.
        convention: what its trainer's layer ids mean: a key of ``layers.draft_ids``.
        has_vocabulary: whether a draft model's vocabulary has a place in it.
        states: those of each row, those between layers first.
        dtype: of the states written.
        layer_ids: of these states, in the trainer's convention and in others.
    """

    name: ClassVar[Format]
    convention: ClassVar[str]
    has_vocabulary: ClassVar[bool] = False

    def __init__(self, info: DatasetInfo, dtype: torch.dtype | None) -> None:
        """Choose the states.

        Args:
            dtype: of the states written; None for the format's own.

        Raises:
            ConfigError: the layout cannot express what the dataset holds, or the dataset lacks what it needs.
        """
        self.info = info
        self.dtype = dtype or self.default_dtype()
        self.states = self.choose_states()
        self.layer_ids = self._layer_ids()

    def _layer_ids(self) -> dict[str, Any]:
        """The ids for the trainer's config, as ``export.json`` has them."""
        try:
            aux = layer_ids_of(self.convention, self.info.boundaries)
        except ConfigError as error:
            raise ConfigError(f"--format {self.name}: {error}") from None
        return {
            "convention": self.convention,
            "aux": aux,
            "final": layer_ids_of(self.convention, [self.info.num_layers])[0],
            "final_form": self.final_form,
            "by_convention": draft_ids(self.info.boundaries),
        }

    def choose_states(self) -> tuple[State, ...]:
        """The states of each row, in order: commonly those of all boundaries, and the last layer's.

        Raises:
            ConfigError: the layout cannot express them, or the dataset lacks one.
        """
        return (*(State(Column(boundary=b).name) for b in self.info.boundaries), self.final_state())

    @property
    def final_form(self) -> str:
        """Whether the last state is the one before the final norm, or after it; or that both are there."""
        after = [state.normed or state.column == POST_NORM for state in self.states if state.column in _FINAL]
        return "both" if len(after) > 1 else "post_norm" if after[0] else "pre_norm"

    def default_dtype(self) -> torch.dtype:
        """The dtype that the trainer's own files have."""
        return torch.bfloat16

    def final_state(self) -> State:
        """The last state, as it is before the final norm.

        Raises:
            ConfigError: the dataset has the state after the norm only, which cannot be undone.
        """
        if PRE_NORM not in self.info.columns:
            raise ConfigError(
                f"--format {self.name}: its trainer applies the final norm itself and wants {PRE_NORM}; the dataset "
                f"has {', '.join(self.info.columns)}; capture with --final pre_norm or both"
            )
        return State(PRE_NORM)

    def all_states(self, length: int) -> StatesOf:
        """A tensor [S, K, H] of all states."""
        return StatesOf(0, len(self.states), (length, len(self.states), self.info.hidden_size))

    def one_state(self, number: int, length: int) -> StatesOf:
        """A tensor [S, H] of one state."""
        return StatesOf(number, number + 1, (length, self.info.hidden_size))

    def last_state(self, length: int) -> StatesOf:
        """A tensor [S, H] of the last layer's state."""
        return self.one_state(len(self.states) - 1, length)

    def joined_states(self, length: int) -> StatesOf:
        """A tensor [S, (K - 1) H] of the states between layers, side by side."""
        between = len(self.states) - 1
        return StatesOf(0, between, (length, between * self.info.hidden_size))

    @abstractmethod
    def file(self, number: int, sample: SampleEntry) -> str:
        """A sample's file, relative to the export's directory; nothing of the user's goes into it unchecked."""

    @abstractmethod
    def layout(self, sample: SampleEntry, input_ids: NDArray[np.int64], loss_mask: NDArray[np.int64]) -> FileLayout:
        """The file of one sample, with its input ids [S] and loss mask [S]."""

    def finish(self, written: Written) -> None:
        """Write what goes with the sample files.

        Raises:
            ConfigError: the vocabulary asked for does not fit the dataset.
            DiskFullError, StoreError: the disk refuses.
        """
        if written.vocabulary is not None:
            counts = TokenCounts()
            for _ in counts.watch(written.rows()):
                pass
            self.write_vocabulary(written, written.vocabulary, counts)

    def write_vocabulary(self, written: Written, vocabulary: DraftVocabulary, counts: TokenCounts) -> None:
        """Write ``d2t-{V}.npy`` and ``t2d-{V}.npy`` for a draft model's vocabulary of V tokens."""
        d2t, t2d = vocabulary.mappings(counts.as_dict())
        written.put(f"d2t-{vocabulary.size}.npy", npy_bytes(d2t))
        written.put(f"t2d-{vocabulary.size}.npy", npy_bytes(t2d))
