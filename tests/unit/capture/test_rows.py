"""Which rows of a batch are kept, and what travels to the writing process."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from sglang_hs_capture.capture.rows import batch_metadata, plan_rows
from sglang_hs_capture.compat import PrefillBatch
from sglang_hs_capture.writing.plan import BatchHeader, HostMetadata, ImageSpan


def make_batch(rids, prefix_lens, seq_lens, padding=0) -> PrefillBatch:
    n = sum(seq_lens)
    tokens = torch.arange(1000, 1000 + n + padding)
    return PrefillBatch(
        rids=rids,
        prefix_lens=prefix_lens,
        seq_lens=seq_lens,
        input_ids=tokens,
        slots=tokens + 5000,
        prompt_lens=torch.tensor([p + s for p, s in zip(prefix_lens, seq_lens, strict=True)], dtype=torch.int32),
        req_pool_indices=torch.arange(len(rids)) + 1,
    )


def test_a_batch_of_captured_requests_needs_no_row_index():
    plan = plan_rows(make_batch(["hs-a", "hs-b"], [0, 0], [3, 2], padding=4), "hs-")
    assert plan.n_rows == 5
    assert plan.row_index() is None
    assert [(r.rid, r.source, r.target, r.length) for r in plan.requests] == [("hs-a", 0, 0, 3), ("hs-b", 3, 3, 2)]


def test_other_requests_are_skipped_and_rows_close_up():
    plan = plan_rows(make_batch(["x", "hs-a", "HEALTH_1", "hs-b"], [0, 0, 0, 0], [2, 3, 1, 2]), "hs-")
    assert plan.n_rows == 5
    assert plan.row_index().tolist() == [2, 3, 4, 6, 7]


def test_a_batch_without_captured_requests_is_none():
    assert plan_rows(make_batch(["x", "ahs-1"], [0, 0], [2, 3]), "hs-") is None


def test_metadata_survives_the_trip_with_prefix_slots():
    batch = make_batch(["hs-a", "x", "hs-b"], [2, 1, 3], [3, 1, 2], padding=3)
    table = torch.arange(50, dtype=torch.int32).view(5, 10)
    plan = plan_rows(batch, "hs-")
    packed = batch_metadata(batch, plan, table)
    assert packed.dtype == torch.int64
    # A later in-place change of the model's input must not reach the copy.
    batch.input_ids.zero_()
    header = BatchHeader(1, plan, 6, 3)
    assert packed.shape == (header.metadata_words,)
    meta = HostMetadata(packed.numpy(), header)
    assert meta.input_ids.tolist() == list(range(1000, 1006))
    assert meta.slots.tolist() == list(range(6000, 6006))
    assert meta.prompt_lens.tolist() == [5, 2, 5]
    assert meta.prefix_slots(plan.requests[0]).tolist() == [10, 11]
    assert meta.prefix_slots(plan.requests[1]).tolist() == [30, 31, 32]


def test_requests_without_a_prefix_have_no_prefix_slots():
    batch = make_batch(["hs-a"], [0], [3])
    plan = plan_rows(batch, "hs-")
    packed = batch_metadata(batch, plan, torch.zeros(2, 4, dtype=torch.int32))
    meta = HostMetadata(packed.numpy(), BatchHeader(1, plan, 3, 1))
    assert meta.prefix_slots(plan.requests[0]).size == 0
    assert isinstance(meta.slots, np.ndarray)


def test_images_travel_in_the_prompts_order_in_the_form_of_either_sglang():
    old = SimpleNamespace(pad_value=10**6 + 5, offsets=[(8, 8)])
    new = SimpleNamespace(padding_values=lambda: (2**62, 3), offsets=[(9, 20), (2, 4)])
    mm_inputs = [None, SimpleNamespace(mm_items=[old, new]), None]
    batch = replace(make_batch(["x", "hs-a", "hs-b"], [0, 4, 0], [2, 3, 1]), mm_inputs=mm_inputs)
    plan = plan_rows(batch, "hs-")
    assert plan.requests[0].images == (
        ImageSpan(2, 3, (2**62, 3)),
        ImageSpan(8, 1, (10**6 + 5,)),
        ImageSpan(9, 12, (2**62, 3)),
    )
    assert plan.requests[1].images == ()
