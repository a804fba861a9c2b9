"""Which rows of a prefill batch are captured, and what the writing process must know about them."""

import torch

from sglang_hs_capture.compat import PrefillBatch
from sglang_hs_capture.writing.plan import ImageSpan, KeptRequest, RowPlan


def plan_rows(batch: PrefillBatch, rid_prefix: str) -> RowPlan | None:
    """Pick the requests whose id starts with ``rid_prefix``; None when the batch has none."""
    requests: list[KeptRequest] = []
    source = target = 0
    for index, rid in enumerate(batch.rids):
        length = int(batch.seq_lens[index])
        if rid.startswith(rid_prefix) and length > 0:
            images = tuple(ImageSpan(*span) for span in batch.images(index))
            requests.append(KeptRequest(rid, index, int(batch.prefix_lens[index]), length, source, target, images))
            target += length
        source += length
    return RowPlan(tuple(requests), target) if requests else None


def batch_metadata(batch: PrefillBatch, plan: RowPlan, req_to_token: torch.Tensor) -> torch.Tensor:
    """Gather on the device, as one int64 vector, what :class:`~sglang_hs_capture.writing.plan.HostMetadata` reads.

    It is a new tensor, made on the forward's own stream: the model may change ``input_ids`` in place afterwards.
    """
    n_rows = int(sum(batch.seq_lens))
    parts = [batch.input_ids[:n_rows], batch.slots[:n_rows], batch.prompt_lens]
    for request in plan.requests:
        if request.prefix_len:
            # Indexing by a device scalar would wait for the device; a one-row gather does not.
            line = batch.req_pool_indices[request.index : request.index + 1]
            parts.append(req_to_token[:, : request.prefix_len].index_select(0, line.long()).view(-1))
    return torch.cat([part.to(torch.int64) for part in parts])
