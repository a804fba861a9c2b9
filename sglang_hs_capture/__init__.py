"""Capture hidden states from SGLang at full prefill speed, and read them back for training."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_hs_capture.reader.dataset import HiddenStateDataset

__version__ = "0.1.0"
__all__ = ["HiddenStateDataset", "__version__"]


def __getattr__(name: str) -> Any:
    # Only on demand: the reader imports torch, which most of this package does without.
    if name == "HiddenStateDataset":
        from sglang_hs_capture.reader.dataset import HiddenStateDataset

        return HiddenStateDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
