"""The platform class itself, imported by SGLang only after ``activate`` has named it."""

import os
from typing import Any

import sglang
import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

from sglang_hs_capture.errors import EngineError

ATTENTION_BACKEND = "torch_native"
MAX_TOTAL_TOKENS = 65536
MAX_RUNNING_REQUESTS = 64

# From some version after 0.5.20 on, a platform may leave the choice of KV pool and allocator to SGLang.
CHOOSES_POOLS = not hasattr(SRTPlatform, "get_kv_pool_cls")


class CaptureCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU with PyTorch's own operators only: no compiled kernel is needed."""

    _enum = PlatformEnum.OOT

    def get_device(self, device_id: int | None = 0) -> str:
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_kv_pool_cls(self, *, kind: str) -> None:
        return None

    def get_mla_kv_pool_cls(self) -> Any:
        return _mla_kv_pool

    def get_paged_allocator_cls(self) -> Any:
        return _token_allocator if CHOOSES_POOLS else None

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill in what was not given on the command line, and refuse what SGLang cannot do without a GPU.

        ``dtype``: SGLang's own choice for a float32 checkpoint is float16. ``max_total_tokens`` and
        ``max_running_requests``: its own choice fills the machine's memory with the KV cache. ``enable_multimodal``:
        when on, it needs the checkpoint's own image processor. ``mm_attention_backend``: the others need a GPU or AMX.
        ``sleep_on_idle``: the scheduler would otherwise keep a core busy while it waits.

        Raises:
            EngineError: a GPU is visible, or this SGLang would use NCCL between several ranks.
        """
        if torch.cuda.is_available():
            raise EngineError(
                "SGLANG_PLATFORM=hs_capture_cpu on a machine with a GPU: SGLang would use both; hide the GPU with "
                'CUDA_VISIBLE_DEVICES="", or unset SGLANG_PLATFORM to serve on it'
            )
        if server_args.enable_dp_attention or getattr(server_args, "attn_dp_size", 1) > 1:
            # Rows of all ranks are put together by a Triton kernel, which only its interpreter runs here. It is read
            # from the environment when Triton is imported, by the ranks' processes.
            os.environ["TRITON_INTERPRET"] = "1"
        defaults = {
            "max_total_tokens": MAX_TOTAL_TOKENS,
            "max_running_requests": MAX_RUNNING_REQUESTS,
            "enable_multimodal": False,
            "mm_attention_backend": "sdpa",
        }
        for name, value in defaults.items():
            if getattr(server_args, name) is None:
                setattr(server_args, name, value)
        if server_args.dtype == "auto":
            server_args.dtype = "float32"
        server_args.attention_backend = ATTENTION_BACKEND
        server_args.sleep_on_idle = True
        _prepare_for_ranks(server_args.tp_size * server_args.pp_size)

    def init_backend(self) -> None:
        """Run every attention of a DeepSeek-style layer through the absorbed form of MLA, and everything eagerly.

        The backend is SGLang's own with what it lacks for DP attention.

        The method that SGLang falls back to for ``torch_native`` expands the latent cache for prompts without a prefix,
        and gives wrong values with this backend.
        """
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
        from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

        def absorbed(attn: Any, forward_batch: Any) -> Any:
            return AttnForwardMethod.MLA

        def padded(model_runner: Any) -> Any:
            from sglang_hs_capture.platform.padded import PaddedAttentionBackend

            return PaddedAttentionBackend(model_runner)

        AttentionBackendRegistry.register(ATTENTION_BACKEND, absorbed)
        register_attention_backend(ATTENTION_BACKEND)(padded)
        torch.compiler.set_stance("force_eager")


def _prepare_for_ranks(ranks: int) -> None:
    """Name a core for each rank, which SGLang asks for when there are more ranks than NUMA nodes.

    Only its AMX backend, which this platform does not use, would bind threads to them. Called before the ranks'
    processes start, so that they inherit the setting.

    Raises:
        EngineError: this SGLang would set up NCCL between the ranks.
    """
    if ranks == 1:
        return
    if CHOOSES_POOLS:
        raise EngineError(
            f"SGLang {sglang.__version__} sets up NCCL between ranks on any platform, so that the CPU platform can run "
            "only one: leave out --tp-size and --pp-size, or install 0.5.23"
        )
    cores = os.cpu_count() or 1
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(str(rank % cores) for rank in range(ranks)))


def _mla_kv_pool(size: int, *, index_head_dim: int | None, **settings: Any) -> Any:
    """SGLang's own pool; ``index_head_dim`` belongs to sparse attention, which never gets this far without a GPU."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(size, **settings)


def _token_allocator(size: int, *, page_size: int, **settings: Any) -> Any:
    """SGLang's own allocator for pages of one token; its allocator for larger pages needs Triton in these versions."""
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    if page_size != 1:
        raise ValueError(f"--page-size {page_size}: the CPU platform has pages of 1 token only with this SGLang")
    return TokenToKVPoolAllocator(size, **settings)
