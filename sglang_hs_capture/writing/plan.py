"""Which rows of a prefill forward are captured, and what came with them."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class ImageSpan(NamedTuple):
    """One image of a prompt: its first position, how many it takes, and the ids that stand there, in turn."""

    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls on a span
    ids: tuple[int, ...]


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
        images: those of its whole prompt, in order.
    """

    rid: str
    index: int
    prefix_len: int
    length: int
    source: int
    target: int
    images: tuple[ImageSpan, ...] = ()


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


@dataclass(frozen=True)
class BatchHeader:
    """Announces one forward; its metadata, its absmax and its rows follow in pieces, in this order.

    Attributes:
        number: counts the model's prefill forwards, those without captured requests included.
        plan: which requests and rows.
        n_forward_rows: rows N of the whole forward, captured or not.
        n_requests: requests B of the whole forward.
    """

    number: int
    plan: RowPlan
    n_forward_rows: int
    n_requests: int

    @property
    def metadata_words(self) -> int:
        """Length of the metadata: see :class:`HostMetadata`."""
        return 2 * self.n_forward_rows + self.n_requests + sum(r.prefix_len for r in self.plan.requests)


class HostMetadata:
    """The metadata of a forward, int64 ``[2 N + B + ...]``, cut into its parts.

    Attributes:
        input_ids: int64 ``[N]``, the tokens of the forward.
        slots: int64 ``[N]``, the KV slot of each row.
        prompt_lens: int64 ``[B]``, each request's whole prompt length.
    """

    def __init__(self, packed: np.ndarray, header: BatchHeader) -> None:
        n_rows = header.n_forward_rows
        self.input_ids, self.slots, self.prompt_lens, rest = np.split(
            packed, [n_rows, 2 * n_rows, 2 * n_rows + header.n_requests]
        )
        self._prefix_slots: dict[int, np.ndarray] = {}
        offset = 0
        for request in header.plan.requests:
            self._prefix_slots[request.index] = rest[offset : offset + request.prefix_len]
            offset += request.prefix_len

    def prefix_slots(self, request: KeptRequest) -> np.ndarray:
        """Int64 ``[prefix_len]``: the KV slots of the tokens computed before."""
        return self._prefix_slots[request.index]
