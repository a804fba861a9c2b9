"""A stand-in for the processor that Kimi-K2.5's checkpoints bring along, with what SGLang calls of it."""

from typing import Any

from transformers.feature_extraction_utils import BatchFeature
from transformers.processing_utils import ProcessorMixin


class KimiK25Processor(ProcessorMixin):
    """A tokenizer and an image processor; ``medias`` are the images in the order of their placeholders."""

    attributes = ("image_processor", "tokenizer")
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **kwargs: Any) -> None:
        super().__init__(image_processor, tokenizer, **kwargs)
        self.media_processor = image_processor

    def __call__(self, text: list[str], medias: list[dict[str, Any]] | None = None, **kwargs: Any) -> BatchFeature:
        """Token ids of the text, in which each image has all its placeholders already, and the images' patches."""
        data = dict(self.tokenizer(text, return_tensors="pt", add_special_tokens=False))
        if medias:
            data |= self.media_processor.preprocess(medias)
        return BatchFeature(data)
