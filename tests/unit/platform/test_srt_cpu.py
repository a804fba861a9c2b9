"""The defaults that the platform gives to SGLang's server arguments, and what it refuses."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hs_capture.errors import EngineError
from sglang_hs_capture.platform import srt_cpu
from sglang_hs_capture.platform.pageable import PageableMemory
from sglang_hs_capture.platform.srt_cpu import CaptureCpuPlatform


def server_args(**given: Any) -> SimpleNamespace:
    """SGLang's arguments as far as the platform looks at them, with SGLang's defaults."""
    unset = {"max_total_tokens": None, "max_running_requests": None, "enable_multimodal": None, "dtype": "auto"}
    unset |= {"mm_attention_backend": None}
    ranks = {"tp_size": 1, "pp_size": 1, "enable_dp_attention": False}
    return SimpleNamespace(**{**unset, **ranks, "attention_backend": None, "sleep_on_idle": False, **given})


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU and with 3 cores."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)


def test_what_was_not_given_is_filled_in() -> None:
    args = server_args()
    CaptureCpuPlatform().apply_server_args_defaults(args)
    assert (args.dtype, args.attention_backend, args.enable_multimodal) == ("float32", "torch_native", False)
    assert args.mm_attention_backend == "sdpa"
    assert (args.max_total_tokens, args.max_running_requests, args.sleep_on_idle) == (65536, 64, True)
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ


def test_what_was_given_is_kept() -> None:
    given = {"dtype": "bfloat16", "max_total_tokens": 100, "max_running_requests": 2, "enable_multimodal": True}
    given["mm_attention_backend"] = "triton_attn"
    args = server_args(**given)
    CaptureCpuPlatform().apply_server_args_defaults(args)
    assert {name: getattr(args, name) for name in given} == given


def test_each_rank_gets_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(srt_cpu, "CHOOSES_POOLS", False)
    CaptureCpuPlatform().apply_server_args_defaults(server_args(tp_size=2, pp_size=2))
    assert os.environ.pop("SGLANG_CPU_OMP_THREADS_BIND") == "0|1|2|0"


def test_cores_that_were_named_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(srt_cpu, "CHOOSES_POOLS", False)
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "4|5")
    CaptureCpuPlatform().apply_server_args_defaults(server_args(tp_size=2))
    assert os.environ["SGLANG_CPU_OMP_THREADS_BIND"] == "4|5"


def test_several_ranks_are_refused_where_sglang_needs_nccl_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(srt_cpu, "CHOOSES_POOLS", True)
    with pytest.raises(EngineError, match="leave out --tp-size and --pp-size"):
        CaptureCpuPlatform().apply_server_args_defaults(server_args(pp_size=2))


@pytest.mark.parametrize("given", [{"enable_dp_attention": True}, {"attn_dp_size": 2}])
def test_with_dp_attention_the_ranks_interpret_tritons_kernels(monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    CaptureCpuPlatform().apply_server_args_defaults(server_args())
    assert "TRITON_INTERPRET" not in os.environ
    CaptureCpuPlatform().apply_server_args_defaults(server_args(**given))
    assert os.environ["TRITON_INTERPRET"] == "1"


def test_who_asks_for_pinned_memory_gets_ordinary_memory() -> None:
    with PageableMemory():
        tensor = torch.tensor([1, 2], pin_memory=True)
        assert torch.empty(3, dtype=torch.int64, pin_memory=True).shape == (3,)
        assert torch.cat([tensor, tensor]).tolist() == [1, 2, 1, 2]
    assert tensor.tolist() == [1, 2]
    assert tensor.device.type == "cpu"


def test_a_visible_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(EngineError, match="CUDA_VISIBLE_DEVICES"):
        CaptureCpuPlatform().apply_server_args_defaults(server_args())
