"""What SGLang's plain attention backend lacks for DP attention, whose batches are padded; on the CPU platform only."""

from typing import Any

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.runtime_context import get_parallel

from sglang_hs_capture.platform.pageable import PageableMemory


class PaddedAttentionBackend(TorchNativeAttnBackend):
    """SGLang's own backend, in batches that are padded to the longest one of all data-parallel ranks."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        if get_parallel().attn_dp_size > 1:
            # For the life of the process, in the thread that runs the model.
            PageableMemory().__enter__()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of a request that fills up a batch: one token, which is computed and let go."""
        return 1
