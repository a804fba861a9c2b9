"""DeepSeek-V2, V3 and V3.2, and all that share their classes (Kimi-K2), with capture in their own forward."""

from functools import wraps
from typing import Any

from sglang.srt.models import deepseek_v2 as upstream

from sglang_hs_capture.capture.mixin import CapturingMixin


class DeepseekV2ForCausalLM(CapturingMixin, upstream.DeepseekV2ForCausalLM):
    """SGLang's ``DeepseekV2ForCausalLM`` that captures."""

    @wraps(upstream.DeepseekV2ForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._captured(super().forward, *args, **kwargs)


class DeepseekV3ForCausalLM(CapturingMixin, upstream.DeepseekV3ForCausalLM):
    """SGLang's ``DeepseekV3ForCausalLM`` that captures."""

    @wraps(upstream.DeepseekV3ForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._captured(super().forward, *args, **kwargs)


class DeepseekV32ForCausalLM(CapturingMixin, upstream.DeepseekV32ForCausalLM):
    """SGLang's ``DeepseekV32ForCausalLM`` that captures."""

    @wraps(upstream.DeepseekV32ForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._captured(super().forward, *args, **kwargs)


class DeepseekV2Capture(DeepseekV2ForCausalLM):
    """The same under a name of its own, for an edited config.json."""


class DeepseekV3Capture(DeepseekV3ForCausalLM):
    """The same under a name of its own, for an edited config.json."""


class DeepseekV32Capture(DeepseekV32ForCausalLM):
    """The same under a name of its own, for an edited config.json."""


EntryClass = [
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    DeepseekV32ForCausalLM,
    DeepseekV2Capture,
    DeepseekV3Capture,
    DeepseekV32Capture,
]
