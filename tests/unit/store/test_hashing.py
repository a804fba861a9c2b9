"""The chained hash against a plain loop, and continued in chunks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hs_capture.store.hashing import end_hash, prefix_hashes, splitmix64

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
TOKENS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40)


def reference_mix(z: int) -> int:
    z = (z + GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def reference(tokens: list[int], start: int = 0, base: int = 0) -> list[int]:
    hashes = []
    for position, token in enumerate(tokens, start):
        base = (base + reference_mix(reference_mix(token & MASK) ^ ((position + 1) * GOLDEN & MASK))) & MASK
        hashes.append(base)
    return hashes


def test_splitmix64_gives_the_published_sequence() -> None:
    # The first outputs of the generator for seed 1234567, as its author's C code prints them.
    states = np.array([1234567, (1234567 + GOLDEN) & MASK], np.uint64)
    assert splitmix64(states).tolist() == [6457827717110365317, 3203168211198807973]


def test_known_hash() -> None:
    assert [f"{h:016x}" for h in prefix_hashes([1, 2, 3], 0, 0).tolist()] == [f"{h:016x}" for h in reference([1, 2, 3])]
    assert f"{end_hash([1, 2, 3]):016x}" == "bd8ff74eee3d9ab7"


@given(TOKENS, st.integers(0, 2**40), st.integers(0, MASK))
def test_equals_the_plain_loop(tokens: list[int], start: int, base: int) -> None:
    hashes = prefix_hashes(np.array(tokens), start, base)
    assert hashes.dtype == np.uint64
    assert hashes.tolist() == reference(tokens, start, base)


@given(TOKENS, st.data())
def test_chunks_continue_each_other(tokens: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(tokens)))
    first = prefix_hashes(tokens[:cut], 0, 0)
    second = prefix_hashes(tokens[cut:], cut, int(first[-1]))
    assert [*first.tolist(), *second.tolist()] == reference(tokens)
    assert end_hash(tokens) == reference(tokens)[-1]


@pytest.mark.parametrize("other", [[1, 3, 2], [1, 2], [1, 2, 4], [2, 2, 3], [1, 2, 3, 0]])
def test_other_tokens_have_another_hash(other: list[int]) -> None:
    assert end_hash(other) != end_hash([1, 2, 3])


def test_no_tokens_have_no_hashes() -> None:
    assert prefix_hashes(np.empty(0, np.int64), 7, 1).tolist() == []
