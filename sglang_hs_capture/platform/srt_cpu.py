"""The platform class itself, imported by SGLang only after ``activate`` has named it."""

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

ATTENTION_BACKEND = "torch_native"
MAX_TOTAL_TOKENS = 65536
MAX_RUNNING_REQUESTS = 64


class CaptureCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU with PyTorch's own operators only: no compiled SGLang kernel is needed."""

    _enum = PlatformEnum.OOT

    def get_device(self, device_id: int | None = 0) -> str:
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill in what was not given on the command line.

        ``dtype``: SGLang's own choice for a float32 checkpoint is float16. ``max_total_tokens`` and
        ``max_running_requests``: its own choice fills the machine's memory with the KV cache.
        """
        server_args.attention_backend = ATTENTION_BACKEND
        if server_args.dtype == "auto":
            server_args.dtype = "float32"
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = MAX_TOTAL_TOKENS
        if server_args.max_running_requests is None:
            server_args.max_running_requests = MAX_RUNNING_REQUESTS
        if server_args.enable_multimodal is None:
            server_args.enable_multimodal = False

    def init_backend(self) -> None:
        """Run everything eagerly, and every attention of a DeepSeek-style layer through the absorbed form of MLA.

        The method that SGLang falls back to for ``torch_native`` expands the latent cache for prompts without a prefix,
        and gives wrong values with this backend.
        """
        from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
        from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

        def absorbed(attn: Any, forward_batch: Any) -> Any:
            return AttnForwardMethod.MLA

        AttentionBackendRegistry.register(ATTENTION_BACKEND, absorbed)
        torch.compiler.set_stance("force_eager")
