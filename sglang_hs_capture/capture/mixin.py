"""What a capturing model class adds to SGLang's: capture set up after construction, and wrapped around each forward."""

from collections.abc import Callable
from typing import Any

from sglang_hs_capture.capture.attach import attach
from sglang_hs_capture.capture.session import Capture

_FORWARD_BATCH = 2


class CapturingMixin:
    """Goes before an SGLang model class among the bases; the class names its decoder and wraps ``forward``."""

    hs_capture: Capture | None

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        self.hs_capture = attach(self, self._decoder(), config)

    def _decoder(self) -> Any:
        """The ``DeepseekV2Model`` whose layers are tapped; a vision wrapper keeps it one level further in."""
        inner: Any = getattr(self, "language_model", self)
        return inner.model

    def _captured(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run upstream's ``forward(input_ids, positions, forward_batch, ...)``, capturing what the batch asks for."""
        if self.hs_capture is None:
            return forward(*args, **kwargs)
        batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[_FORWARD_BATCH]
        with self.hs_capture.forward(batch):
            return forward(*args, **kwargs)
