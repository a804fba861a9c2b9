"""Orders prompts so that shared prefixes meet: a walk of their prefix tree, one prompt computing each branch first.

A prefix cache holds what was computed, not what is being computed: prompts that share a prefix and run at the same time
compute it each for themselves. So each prompt waits for the one that computes the last part of what they share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Step:
    """One prompt's turn.

    Attributes:
        index: which prompt, in the order given.
        after: the prompt whose computation this one builds on, also as an index; None if it shares too little.
        shared: tokens that it shares with prompts before it.
    """

    index: int
    after: int | None
    shared: int


def prefix_order(prompts: Sequence[NDArray[np.int64]], min_shared: int = 64) -> list[Step]:
    """Walk the prefix tree of ``prompts`` depth first.

    Args:
        prompts: int64 ``[S_i]`` token ids each.
        min_shared: a prompt does not wait for a part of its prefix shorter than this many tokens: computing it again is
            cheaper than waiting.

    Returns:
        One step a prompt; prompts that share a prefix follow each other.
    """
    # Big-endian bytes order as the ids do, and compare without a Python loop.
    keys = [prompt.astype(">u8").tobytes() for prompt in prompts]
    steps: list[Step] = []
    # The path from the root to the last prompt, cut where prompts branched: (end, owner), the owner being the first
    # that computed the tokens from the end before to this one.
    path: list[tuple[int, int]] = []
    previous: NDArray[np.int64] | None = None
    for index in sorted(range(len(prompts)), key=keys.__getitem__):
        prompt = prompts[index]
        shared = 0 if previous is None else common_prefix(previous, prompt)
        while path and _start(path, -1) >= shared:
            path.pop()
        if path:
            path[-1] = (min(path[-1][0], shared), path[-1][1])
        steps.append(Step(index, _owner(path, shared, min_shared), shared))
        if len(prompt) > shared:
            path.append((len(prompt), index))
        previous = prompt
    return steps


def _start(path: list[tuple[int, int]], number: int) -> int:
    return path[number - 1][0] if len(path) > 1 and number != 0 else 0


def _owner(path: list[tuple[int, int]], shared: int, min_shared: int) -> int | None:
    """Whom to wait for, so that fewer than ``min_shared`` of the ``shared`` tokens are computed again."""
    for number in range(len(path) - 1, -1, -1):
        if shared - _start(path, number) >= min_shared:
            return path[number][1]
    return None


def common_prefix(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """How many leading tokens two prompts have in common."""
    n = min(len(a), len(b))
    differing = np.flatnonzero(a[:n] != b[:n])
    return int(differing[0]) if differing.size else n
