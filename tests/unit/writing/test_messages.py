"""Messages arrive as they were sent, and what is none is named."""

import os
from multiprocessing import Pipe

import pytest

from sglang_hs_capture.staging.ring import Span
from sglang_hs_capture.writing.messages import (
    Channel,
    Failure,
    NormNotice,
    Opened,
    PieceNotice,
    Setup,
    Stop,
    decode,
    encode,
)
from sglang_hs_capture.writing.plan import BatchHeader, ImageSpan, KeptRequest, RowPlan

IMAGES = (ImageSpan(2, 5, (2**62 + 1, 1_000_000)), ImageSpan(9, 1, (3_000_000,)))
REQUESTS = (KeptRequest("hs-\ud800\n\0", 0, 5, 7, 9, 11), KeptRequest("hs-é", 3, 0, 1, 20, 18, IMAGES))
MESSAGES = [
    Setup({"a": 1}, {"b": [2]}, {"c": None}, ["boundary:1"], [0], "m", None),
    Setup({}, {}, {}, [], [0], "m", 163605),
    BatchHeader(3, RowPlan(REQUESTS, 8), 21, 4),
    BatchHeader(4, RowPlan((), 0), 0, 0),
    PieceNotice("rows", 2**40, Span(0, 4096, 2**50)),
    NormNotice("BF16", 32, 1e-6),
    Failure(None, "x"),
    Opened(),
    Stop(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message):
    assert decode(encode(message)) == message
    encode(message)[:-1].decode("ascii")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe nonsense",
        b"7",
        b"[1,2,3]",
        b'["Nope",{}]',
        b'["Stop",[]]',
        b'["Stop",{"x":1}]',
        b'["BatchHeader",{}]',
        b'["PieceNotice",{"content":"rows","number":1,"span":{"offset":1}}]',
        os.urandom(300),
    ],
)
def test_what_is_no_message_is_named(data):
    with pytest.raises(ValueError, match="expected a message of this release, got b") as caught:
        decode(data)
    assert len(str(caught.value)) < 450


def test_a_channel_waits_no_longer_than_it_is_told_and_ends_with_the_other_side():
    ours, theirs = (Channel(end) for end in Pipe())
    assert theirs.receive(0.0) is None
    ours.send(Stop())
    ours.close()
    assert theirs.receive(None) == Stop()
    with pytest.raises(EOFError):
        theirs.receive(None)
