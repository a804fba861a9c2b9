"""Every mode in which states would be wrong is refused, with the flag to change."""

from dataclasses import replace

import pytest

from sglang_hs_capture.capture.guards import check_engine
from sglang_hs_capture.compat import EngineSettings
from sglang_hs_capture.errors import GuardError

GOOD = EngineSettings(
    served_name="m",
    model_path="m",
    context_length=4096,
    chunked_prefill_size=512,
    max_prefill_tokens=1024,
    is_mla=True,
    radix_cache=True,
    hierarchical_cache=False,
    prefill_cuda_graph=False,
    mixed_chunk=False,
    two_batch_overlap=False,
    context_parallel=False,
    speculative=False,
    lora=False,
    pd_multiplexing=False,
    disaggregation=False,
    multimodal=True,
    aux_hidden_states=False,
    nameless_replicas=False,
)


def test_the_documented_launch_passes():
    check_engine(GOOD)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"is_mla": False}, "hs-capture prepare"),
        ({"hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"prefill_cuda_graph": True}, "--disable-prefill-cuda-graph"),
        ({"mixed_chunk": True}, "--enable-mixed-chunk"),
        ({"two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"context_parallel": True}, "--attn-cp-size"),
        ({"speculative": True}, "--speculative-algorithm"),
        ({"lora": True}, "--enable-lora"),
        ({"pd_multiplexing": True}, "--enable-pdmux"),
        ({"disaggregation": True}, "--disaggregation-mode"),
        ({"aux_hidden_states": True}, "--enable-return-aux-hidden-states"),
        ({"nameless_replicas": True}, "--dp-size"),
    ],
)
def test_each_wrong_mode_names_its_flag(change, named):
    with pytest.raises(GuardError, match=named):
        check_engine(replace(GOOD, **change))


def test_all_problems_are_told_at_once():
    with pytest.raises(GuardError, match=r"enable-hierarchical-cache.*enable-lora"):
        check_engine(replace(GOOD, hierarchical_cache=True, lora=True))
