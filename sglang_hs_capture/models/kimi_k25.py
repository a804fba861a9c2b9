"""Kimi-K2.5: the vision wrapper whose language model is a DeepSeek-V3, with capture in its own forward."""

from functools import wraps
from typing import Any

from sglang.srt.models import kimi_k25 as upstream

from sglang_hs_capture.capture.mixin import CapturingMixin


class KimiK25ForConditionalGeneration(CapturingMixin, upstream.KimiK25ForConditionalGeneration):
    """SGLang's ``KimiK25ForConditionalGeneration`` that captures."""

    @wraps(upstream.KimiK25ForConditionalGeneration.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._captured(super().forward, *args, **kwargs)


class KimiK25Capture(KimiK25ForConditionalGeneration):
    """The same under a name of its own, for an edited config.json."""


EntryClass = [KimiK25ForConditionalGeneration, KimiK25Capture]
