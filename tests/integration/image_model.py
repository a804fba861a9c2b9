"""The tiny Kimi-K2.5 with an image processor, and what ``transformers`` computes for prompts with images."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from sglang_hs_capture.demo.checkpoint import make_kimi_k25
from sglang_hs_capture.layers import Final, make_columns

PROCESSOR = Path(__file__).parents[1] / "media_processor"
MEDIA_CONFIG = {
    "in_patch_limit": 64,
    "patch_size": 14,
    "merge_kernel_size": 2,
    "patch_limit_on_one_side": 512,
    "fixed_output_tokens": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def make_image_model(path: Path) -> Path:
    """A tiny Kimi-K2.5 whose directory has code for images, as the published checkpoints have."""
    model = make_kimi_k25(path)
    for file in PROCESSOR.glob("*.py"):
        shutil.copy(file, model)
    processor = {
        "processor_class": "KimiK25Processor",
        "image_processor_type": "KimiK25VisionProcessor",
        "auto_map": {
            "AutoProcessor": "kimi_k25_processor.KimiK25Processor",
            "AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor",
        },
        "media_proc_cfg": MEDIA_CONFIG,
    }
    (model / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


class ImageReference:
    """Kimi-K2.5 with its vision tower, by ``transformers``, in float32."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoProcessor
        from transformers.models.kimi_k25 import Kimi_K25Config, Kimi_K25ForConditionalGeneration

        raw = json.loads((model / "config.json").read_text())
        vision = raw["vision_config"]
        same = ("patch_size", "num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size")
        config = Kimi_K25Config(
            text_config={**raw["text_config"], "model_type": "deepseek_v3"},
            vision_config={
                **{name: vision[name] for name in (*same, "merge_kernel_size")},
                **{f"pos_emb_{axis}": vision[f"init_pos_emb_{axis}"] for axis in ("height", "width", "time")},
            },
            projection_hidden_size=vision["hidden_size"],
            image_token_id=raw["media_placeholder_token_id"],
            tie_word_embeddings=False,
        )
        self._model, info = Kimi_K25ForConditionalGeneration.from_pretrained(
            model, config=config, dtype=torch.float32, output_loading_info=True
        )
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        self._model.eval()
        self._processor = AutoProcessor.from_pretrained(model, trust_remote_code=True).media_processor

    @torch.no_grad()
    def states(
        self, input_ids: Tensor, images: Sequence[Image.Image], boundaries: Sequence[int], final: Final
    ) -> list[Tensor]:
        """The states of a prompt, each float32 ``[S, H]``, in the order of ``make_columns``.

        Args:
            input_ids: int64 ``[S]``, as many placeholders for each image as it takes positions.
            images: in the order of the prompt.
            boundaries: the boundaries wanted.
            final: the forms of the last layer's output wanted.
        """
        pixels = self._processor.preprocess([{"image": image} for image in images])
        finals: dict[Final, Tensor] = {}

        def keep(_module: torch.nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            finals[Final.PRE_NORM], finals[Final.POST_NORM] = args[0][0].clone(), output[0].clone()

        hook = self._model.model.language_model.norm.register_forward_hook(keep)
        try:
            hidden_states = self._model(
                input_ids=input_ids[None],
                attention_mask=torch.ones_like(input_ids)[None],
                pixel_values=pixels["pixel_values"],
                image_grid_thw=pixels["grid_thws"],
                output_hidden_states=True,
                use_cache=False,
            ).hidden_states
        finally:
            hook.remove()
        columns = make_columns(boundaries, final)
        return [hidden_states[c.boundary][0] if c.final is None else finals[c.final] for c in columns]
