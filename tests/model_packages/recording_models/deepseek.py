"""``DeepseekV3ForCausalLM`` that captures and records."""

import os
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from sglang_hs_capture.models import deepseek as capturing


class DeepseekV3ForCausalLM(capturing.DeepseekV3ForCausalLM):
    """Saves, for each prefill forward, every boundary's state and both final states as the engine's dtype."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.recorded: dict[str, torch.Tensor] = {}
        self.forwards = 0
        self.recording = False
        for number, layer in enumerate(self.model.layers):
            layer.input_layernorm.register_forward_hook(self._recorder(f"boundary:{number}"))
        self.model.norm.register_forward_hook(self._recorder("final:pre_norm", "final:post_norm"))

    def _recorder(self, before: str, after: str | None = None) -> Any:
        def record(_norm: Any, args: tuple[torch.Tensor, ...], output: Any) -> None:
            if not self.recording:
                return
            normed, summed = output if isinstance(output, tuple) else (output, args[0])
            self.recorded[before] = summed.clone()
            if after is not None:
                self.recorded[after] = normed.clone()

        return record

    @wraps(capturing.DeepseekV3ForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
        self.recorded = {}
        self.recording = batch.forward_mode.name == "EXTEND" and bool(batch.rids)
        result = super().forward(*args, **kwargs)
        if self.recording:
            content = {
                "rids": list(batch.rids),
                "prefix_lens": list(batch.extend_prefix_lens_cpu),
                "seq_lens": list(batch.extend_seq_lens_cpu),
                "states": {name: state.cpu() for name, state in self.recorded.items()},
            }
            self.forwards += 1
            torch.save(content, Path(os.environ["HS_RECORD_DIR"]) / f"{self.forwards:06d}.pt")
        return result


EntryClass = [DeepseekV3ForCausalLM]
