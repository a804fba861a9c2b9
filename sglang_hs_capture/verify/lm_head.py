"""The language model's head, read from a checkpoint piece by piece: no other weight of the model is loaded."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sglang_hs_capture.errors import ConfigError
from sglang_hs_capture.model_config import ModelConfig

INDEX_FILE = "model.safetensors.index.json"
# A multimodal wrapper's language model has its weights under a name of its own.
PREFIXES = ("", "language_model.")
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PIECE_BYTES = 256 << 20


class LmHead:
    """The head's weight [V, H], which stays on disk.

    Attributes:
        name: the tensor's name.
        dtype: what the checkpoint has it in: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
    """

    def __init__(self, model: ModelConfig) -> None:
        """Find the tensor in a model's directory; with tied embeddings it is theirs.

        Raises:
            ConfigError: there is none, it is quantised, or it is of another shape than the config says.
        """
        text = model.raw.get("text_config") or model.raw
        tied = bool(text.get("tie_word_embeddings", False))
        wanted = [f"{prefix}{EMBEDDINGS if tied else HEAD}" for prefix in PREFIXES]
        path, self.name = _find(model.path, wanted)
        self.rows, self.width = model.vocab_size, model.hidden_size
        self._file = safe_open(path, framework="pt")
        self._weight = self._file.get_slice(self.name)
        shape, dtype = list(self._weight.get_shape()), self._weight.get_dtype()
        if dtype not in DTYPES:
            raise ConfigError(f"{path}: {self.name} is {dtype}; expected one of {', '.join(DTYPES)}: it is quantised")
        if shape != [self.rows, self.width]:
            raise ConfigError(f"{path}: {self.name} has the shape {shape}; the config says {[self.rows, self.width]}")
        self.dtype = DTYPES[dtype]

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """All of it, in order: the first token of each piece, and float32 ``[n, H]``."""
        step = max(1, PIECE_BYTES // (4 * self.width))
        for first in range(0, self.rows, step):
            yield first, self._weight[first : min(first + step, self.rows)].float()

    def rows_of(self, tokens: Tensor) -> Tensor:
        """The rows of some tokens.

        Args:
            tokens: int64 ``[n]``.

        Returns:
            float32 ``[n, H]``.
        """
        distinct, places = torch.unique(tokens, return_inverse=True)
        rows = torch.cat([self._weight[token : token + 1] for token in distinct.tolist()])
        return rows.float()[places]


def _find(directory: Path, names: Sequence[str]) -> tuple[Path, str]:
    """The file that holds one of these tensors, and which of them."""
    index = directory / INDEX_FILE
    if index.exists():
        return _find_in_index(index, names)
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                there = set(file.keys())
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: not a file of safetensors ({error})") from None
        for name in names:
            if name in there:
                return path, name
    raise ConfigError(
        f"{directory}: expected {' or '.join(names)} in a safetensors file; name a directory with the model's weights"
    )


def _find_in_index(index: Path, names: Sequence[str]) -> tuple[Path, str]:
    try:
        places: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        name = next((name for name in names if name in places), None)
        path = index.parent / str(places[name]) if name else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{index}: cannot be read ({error!r})") from None
    if name is None or path is None:
        raise ConfigError(f"{index}: expected {' or '.join(names)} among the weights")
    if not path.exists():
        raise ConfigError(f"{path}: {name} should be in this file, and it is not there; download it")
    return path, name
