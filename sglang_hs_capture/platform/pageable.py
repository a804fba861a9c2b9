"""Pinned memory where there is none."""

from typing import Any

from torch.overrides import TorchFunctionMode


class PageableMemory(TorchFunctionMode):
    """Gives ordinary memory to who asks for pinned memory, of which there is none without a GPU.

    SGLang asks its platform before it pins memory, but not where it pads a batch for DP attention.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)
