"""A stand-in for the image processor that Kimi-K2.5's checkpoints bring along: the same interface and numbers."""

import math
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature


class KimiK25VisionProcessor(BaseImageProcessor):
    """Images to normalised patches; ``media_proc_cfg`` holds the sizes, as in the published checkpoints."""

    model_input_names = ("pixel_values", "grid_thws")

    def __init__(self, media_proc_cfg: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.media_proc_cfg = media_proc_cfg

    def _sizes(self, image: Image.Image) -> tuple[int, int, int, int]:
        """Width and height after resizing, and after padding to whole merged patches."""
        cfg = self.media_proc_cfg
        patch, side = cfg["patch_size"], cfg["patch_limit_on_one_side"] * cfg["patch_size"]
        width, height = image.size
        patches = max(1.0, width // patch) * max(1.0, height // patch)
        scale = min(1.0, math.sqrt(cfg["in_patch_limit"] / patches), side / width, side / height)
        resized = [min(max(1, int(size * scale)), side) for size in (width, height)]
        factor = patch * cfg["merge_kernel_size"]
        padded = [math.ceil(size / factor) * factor for size in resized]
        return resized[0], resized[1], padded[0], padded[1]

    def media_tokens_calculator(self, media: dict[str, Any]) -> int:
        """How many positions of the prompt an image takes."""
        *_, width, height = self._sizes(media["image"])
        factor = self.media_proc_cfg["patch_size"] * self.media_proc_cfg["merge_kernel_size"]
        return (width // factor) * (height // factor)

    def preprocess(self, medias: list[dict[str, Any]], return_tensors: str | None = None) -> BatchFeature:
        """Patches float32 ``[N, 3, patch, patch]`` of all images, and each one's grid ``[n, 3]``."""
        cfg = self.media_proc_cfg
        patch = cfg["patch_size"]
        patches, grids = [], []
        for media in medias:
            image = media["image"].convert("RGB")
            width, height, padded_width, padded_height = self._sizes(image)
            pixels = np.zeros((padded_height, padded_width, 3), dtype=np.uint8)
            pixels[:height, :width] = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
            values = (pixels / np.float32(255) - np.float32(cfg["image_mean"])) / np.float32(cfg["image_std"])
            rows, columns = padded_height // patch, padded_width // patch
            cut = values.astype(np.float32).reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
            patches.append(torch.from_numpy(cut.reshape(rows * columns, 3, patch, patch).copy()))
            grids.append([1, rows, columns])
        return BatchFeature({"pixel_values": torch.cat(patches), "grid_thws": torch.tensor(grids)})
