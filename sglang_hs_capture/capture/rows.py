"""Which rows of a prefill batch are captured, and what the writing thread must know about them."""

from dataclasses import dataclass

import numpy as np
import torch

from sglang_hs_capture.compat import PrefillBatch


@dataclass(frozen=True)
class KeptRequest:
    """One captured request's part in a forward.

    Attributes:
        rid: the request's id.
        index: its place in the batch.
        prefix_len: its tokens computed before this forward.
        length: its tokens in this forward.
        source: its first row in the forward.
        target: its first row among the packed rows.
    """

    rid: str
    index: int
    prefix_len: int
    length: int
    source: int
    target: int


@dataclass(frozen=True)
class RowPlan:
    """The rows of one forward to keep, request by request, in the order of the batch."""

    requests: tuple[KeptRequest, ...]
    n_rows: int

    def row_index(self) -> np.ndarray | None:
        """Int64 ``[n_rows]``, the forward's rows to keep; None when these are simply the first ``n_rows``."""
        if all(r.source == r.target for r in self.requests):
            return None
        return np.concatenate([np.arange(r.source, r.source + r.length, dtype=np.int64) for r in self.requests])


def plan_rows(batch: PrefillBatch, rid_prefix: str) -> RowPlan | None:
    """Pick the requests whose id starts with ``rid_prefix``; None when the batch has none."""
    requests: list[KeptRequest] = []
    source = target = 0
    for index, rid in enumerate(batch.rids):
        length = int(batch.seq_lens[index])
        if rid.startswith(rid_prefix) and length > 0:
            requests.append(KeptRequest(rid, index, int(batch.prefix_lens[index]), length, source, target))
            target += length
        source += length
    return RowPlan(tuple(requests), target) if requests else None


def batch_metadata(batch: PrefillBatch, plan: RowPlan, req_to_token: torch.Tensor) -> torch.Tensor:
    """Gather on the device, as one int64 vector, what the writing thread needs: see :class:`HostMetadata`.

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


class HostMetadata:
    """The host's copy of :func:`batch_metadata`, cut into its parts.

    Attributes:
        input_ids: int64 ``[N]``, the tokens of the forward.
        slots: int64 ``[N]``, the KV slot of each row.
        prompt_lens: int64 ``[B]``, each request's whole prompt length.
    """

    def __init__(self, packed: np.ndarray, plan: RowPlan, n_rows: int, n_requests: int) -> None:
        self.input_ids, self.slots, self.prompt_lens, rest = np.split(
            packed, [n_rows, 2 * n_rows, 2 * n_rows + n_requests]
        )
        self._prefix_slots: dict[int, np.ndarray] = {}
        offset = 0
        for request in plan.requests:
            self._prefix_slots[request.index] = rest[offset : offset + request.prefix_len]
            offset += request.prefix_len

    def prefix_slots(self, request: KeptRequest) -> np.ndarray:
        """Int64 ``[prefix_len]``: the KV slots of the tokens computed before."""
        return self._prefix_slots[request.index]
