"""Requests between their chunks: bounded, and what becomes of those that wait for one."""

from sglang_hs_capture.writing.inflight import InFlight


def test_a_request_keeps_its_state_from_chunk_to_chunk():
    inflight = InFlight()
    first = inflight.enter("a", 0)
    assert inflight.enter("a", 10) is first
    assert inflight.enter("b", 0).serial != first.serial
    inflight.leave(first, proven=True)
    assert inflight.enter("a", 10) is not first


def test_an_id_used_again_is_another_request():
    inflight = InFlight()
    old = inflight.enter("a", 0)
    new = inflight.enter("a", 0)
    assert inflight.all_proven({old.serial}) is False
    inflight.leave(old, proven=True)
    assert inflight.enter("a", 5) is new
    assert inflight.all_proven({old.serial}) is False


def test_the_verdict_over_several_requests():
    inflight = InFlight()
    a, b, c = (inflight.enter(name, 0) for name in "abc")
    assert inflight.all_proven(set()) is True
    assert inflight.all_proven({a.serial, b.serial}) is None
    inflight.leave(a, proven=True)
    assert inflight.all_proven({a.serial}) is True
    assert inflight.all_proven({a.serial, b.serial}) is None
    inflight.leave(c, proven=False)
    assert inflight.all_proven({b.serial, c.serial}) is False


def test_the_oldest_go_first_and_count_as_refuted():
    inflight = InFlight(most=3)
    states = [inflight.enter(str(n), 0) for n in range(5)]
    assert len(inflight) == 3
    assert [inflight.all_proven({s.serial}) for s in states] == [False, False, None, None, None]
