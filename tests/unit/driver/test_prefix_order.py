"""The order of prompts: whoever is waited for has computed what is shared, and little is computed twice."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hs_capture.driver.prefix_order import common_prefix, prefix_order


def prompts_of(*texts: str) -> list[np.ndarray]:
    return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]


def test_a_leader_computes_a_shared_prefix_for_all():
    system = "s" * 100
    prompts = prompts_of("x" * 80, system + "a" * 5, "y", system + "b" * 9, system + "c")
    steps = {step.index: step for step in prefix_order(prompts, min_shared=64)}
    order = [step.index for step in prefix_order(prompts, min_shared=64)]
    group = [index for index in order if index in {1, 3, 4}]
    leader = group[0]
    assert order.index(group[-1]) - order.index(leader) == 2
    assert steps[leader].after is None
    assert all(steps[index].after == leader and steps[index].shared == 100 for index in group[1:])
    assert steps[0].after is None
    assert steps[2].after is None


def test_a_turn_waits_for_the_turn_before_it():
    prompts = prompts_of("u" * 300, "u" * 100, "u" * 200)
    steps = prefix_order(prompts, min_shared=64)
    assert [(step.index, step.after, step.shared) for step in steps] == [(1, None, 0), (2, 1, 100), (0, 2, 200)]


def test_a_short_overlap_is_not_waited_for():
    prompts = prompts_of("a" * 63 + "x", "a" * 63 + "y")
    assert [step.after for step in prefix_order(prompts, min_shared=64)] == [None, None]


def test_many_short_branches_add_up_to_a_wait():
    texts = ["a" * (30 * n) + "b" for n in range(1, 12)] + ["a" * 330 + "c"]
    prompts = prompts_of(*texts)
    for step in prefix_order(prompts, min_shared=64):
        lost = (
            step.shared if step.after is None else step.shared - common_prefix(prompts[step.index], prompts[step.after])
        )
        assert lost < 64


def test_equal_prompts_wait_for_the_first():
    steps = prefix_order(prompts_of("z" * 70, "z" * 70, "z" * 70), min_shared=64)
    assert [(step.index, step.after) for step in steps] == [(0, None), (1, 0), (2, 0)]


def test_negative_and_large_ids_are_ids_like_others():
    prompts = [np.array([-1, 2**40, 7]), np.array([-1, 2**40, 8])]
    assert [step.shared for step in prefix_order(prompts, min_shared=1)] == [0, 2]


@settings(max_examples=200)
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=12).map(lambda ids: np.array(ids, dtype=np.int64)), max_size=25),
    st.integers(1, 4),
)
def test_waiting_is_acyclic_and_leaves_less_than_the_minimum(prompts, min_shared):
    steps = prefix_order(prompts, min_shared)
    assert sorted(step.index for step in steps) == list(range(len(prompts)))
    place = {step.index: number for number, step in enumerate(steps)}
    for number, step in enumerate(steps):
        best = max((common_prefix(prompts[step.index], prompts[other.index]) for other in steps[:number]), default=0)
        assert step.shared == best
        if step.after is not None:
            assert place[step.after] < number
        waited = 0 if step.after is None else common_prefix(prompts[step.index], prompts[step.after])
        assert best - waited < min_shared
