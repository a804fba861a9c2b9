"""Samples with images: what is sent, what counts as captured, and how prompts with images are put in order."""

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from fake_server import INFO, FakeServer, Lines

from sglang_hs_capture.data.images import Image
from sglang_hs_capture.data.records import Sample
from sglang_hs_capture.driver import client, delivery, feed, pump
from sglang_hs_capture.driver.delivery import DeliverySettings
from sglang_hs_capture.driver.feed import Job
from sglang_hs_capture.driver.intake import OnBadInput
from sglang_hs_capture.driver.prefix_order import prefix_order
from sglang_hs_capture.driver.pump import PumpSettings
from sglang_hs_capture.driver.run import CaptureRun, RunSettings
from sglang_hs_capture.driver.summary import Summary
from sglang_hs_capture.driver.target import RunningServers
from sglang_hs_capture.store.hashing import end_hash, prefix_hashes
from sglang_hs_capture.store.index import load_index
from sglang_hs_capture.store.known_answers import load_known_answers
from sglang_hs_capture.store.requests import RequestLedger, load_requests
from sglang_hs_capture.store.schema import Media, RequestName, parse_rid, rle_decode, sample_key

PAD = 250
FAST = DeliverySettings(attempts=2, ack_timeout_s=0.5, grace_s=2.0)


def image(content: bytes, positions: int = 3) -> Image:
    name = f"sha256:{hashlib.sha256(content).hexdigest()}"
    return Image(name, data=content, nbytes=len(content), positions=positions)


def sample(name: str, ids: list[int], *images: Image, line: int = 1) -> Sample:
    mask = np.array([int(token != PAD) for token in ids], dtype=np.uint8)
    return Sample(name, f"data.jsonl:{line}", np.array(ids), mask, images, PAD if images else None)


class ImageServer(FakeServer):
    """Puts three ids made from its content in the place of each image, as SGLang does; or leaves images out."""

    takes_images = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.images: dict[str, list[str]] = {}
        self.asked: list[str] = []

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.images[body["rid"]] = body.get("image_data", [])
        self.asked += [body["rid"]] if "return_logprob" in body else []
        return await super()._generate(request)

    def capture(self, rid: str, ids: list[int]) -> None:
        images = iter(self.images[rid] if self.takes_images else [])
        tokens: list[int] = []
        runs: list[tuple[int, int]] = []
        for token in ids:
            found = next(images, None) if token == PAD else None
            if found is None:
                tokens.append(token)
                continue
            runs.append((len(tokens), 3))
            tokens += [10**6 + int(hashlib.sha256(found.encode()).hexdigest()[:8], 16)] * 3
        stored = np.array(tokens)
        rows = np.zeros(len(stored) * INFO.row_bytes, dtype=np.uint8)
        extents = self.store.append(rows, stored, np.arange(len(stored)), prefix_hashes(stored, 0, 0))
        media = Media(tuple(runs), PAD, end_hash(ids)) if runs else None
        self.store.add_sample(rid, len(stored), extents, end_hash(stored), media)
        self.store.commit()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(delivery, "RESEND_PAUSE_S", 0.01)
    monkeypatch.setattr(client, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(pump, "WATCH_INTERVAL_S", 0.01)


def run(
    directory: Path,
    samples: list[Sample],
    *,
    takes_images: bool = True,
    media_token: int | None = PAD,
    settings: PumpSettings | None = None,
) -> tuple[Summary, ImageServer]:
    """One run on a server that says that it takes images if it has a ``media_token``, and does so or not."""

    async def main() -> tuple[Summary, ImageServer]:
        server = ImageServer(directory)
        server.takes_images, server.record.media_token, server.record.prefix_cache = takes_images, media_token, True
        async with server:
            target = RunningServers([server.url], directory, expected=lambda info: [], api_key=None, grace_s=5.0)
            chosen = RunSettings(directory, OnBadInput.SKIP, delivery=FAST, pump=settings or PumpSettings())
            return await asyncio.wait_for(CaptureRun(target, samples, chosen, Lines()).run(), 30), server

    return asyncio.run(main())


RED, BLUE = image(b"red"), image(b"blue")
SAMPLES = [
    sample("red", [1, 2, PAD, 3], RED),
    sample("blue", [1, 2, PAD, 3], BLUE, line=2),
    sample("both", [PAD, 4, PAD], BLUE, RED, line=3),
    sample("none", [1, PAD, 2], line=4),
]


def test_images_are_sent_and_the_samples_count(tmp_path):
    summary, server = run(tmp_path, SAMPLES)
    assert (summary.captured, summary.tokens, summary.exit_code) == (4, 6 + 6 + 7 + 3, 0)
    assert not summary.resent
    payloads = {parse_rid(rid).key: sent for rid, sent in server.images.items()}
    assert payloads[sample_key("both", (BLUE.name, RED.name))] == [BLUE.payload(), RED.payload()]
    assert payloads[sample_key("none")] == []
    index = load_index(tmp_path)
    entries = {entry.id: entry for entry in index.samples}
    assert {id: entry.length for id, entry in entries.items()} == {"red": 6, "blue": 6, "both": 7, "none": 3}
    assert entries["red"].media == Media(((2, 3),), PAD, end_hash([1, 2, PAD, 3]))
    assert rle_decode(entries["red"].loss_mask_rle).tolist() == [1, 1, 0, 0, 0, 1]
    assert rle_decode(entries["both"].loss_mask_rle).tolist() == [0, 0, 0, 1, 0, 0, 0]
    assert entries["red"].end_hash != entries["blue"].end_hash
    assert load_requests(tmp_path).requests["both"].images == (BLUE.name, RED.name)


def test_a_second_run_sends_nothing_and_tells_another_image(tmp_path):
    run(tmp_path, SAMPLES)
    again, server = run(tmp_path, SAMPLES)
    assert again.already == 4
    assert not server.requests
    changed, server = run(tmp_path, [sample("red", [1, 2, PAD, 3], BLUE), *SAMPLES[1:]])
    assert not server.requests
    assert [str(problem) for problem in changed.skipped] == [
        "data.jsonl:1: the id 'red' was captured with other images (from data.jsonl:1); give the sample another id"
    ]


def test_a_sample_without_its_image_does_not_count(tmp_path):
    """A server that computes the text alone acknowledges the right text."""
    summary, _ = run(tmp_path, SAMPLES[:1], takes_images=False)
    assert (summary.captured, summary.resent) == (0, 1)
    assert "without its images: the server did not take them" in str(summary.dropped[0])
    index = load_index(tmp_path)
    assert not index.samples
    assert len(index.mismatched) == 2


def test_a_server_that_takes_no_images_is_told_before_anything_is_sent(tmp_path):
    summary, server = run(tmp_path, SAMPLES, media_token=None)
    assert len(server.requests) == 1
    assert [problem.source for problem in summary.skipped] == ["data.jsonl:1", "data.jsonl:2", "data.jsonl:3"]
    assert "the server takes none: start it with --enable-multimodal" in summary.skipped[0].reason


def test_a_late_acknowledgement_of_another_image_is_no_sample(tmp_path):
    """The request's key depends on its images, so that one sent with the image from before is not taken for it."""
    run(tmp_path, SAMPLES[:1], takes_images=False)
    old = SAMPLES[0]
    new = sample("red", [1, 2, PAD, 3], BLUE)
    with RequestLedger.open(tmp_path) as ledger:
        record = ledger.requests["red"]
        ledger.append(replace(record, images=(BLUE.name,), key=sample_key("red", (BLUE.name,))))

    async def late() -> None:
        async with ImageServer(tmp_path) as server:
            rid = f"hs-{sample_key('red', (RED.name,))}-0-{end_hash(old.input_ids):016x}"
            server.images[rid] = [RED.payload()]
            server.capture(rid, old.input_ids.tolist())

    asyncio.run(late())
    assert not load_index(tmp_path).samples
    assert run(tmp_path, [new])[0].captured == 1
    assert isinstance(parse_rid(load_index(tmp_path).samples[0].rid), RequestName)


def test_a_file_that_changed_is_given_up_with_its_name(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"one")
    stored = Image(image(b"one").name, place=str(path), nbytes=3)
    path.write_bytes(b"two")
    (tmp_path / "dataset").mkdir()
    summary, server = run(tmp_path / "dataset", [sample("a", [1, PAD], stored)])
    assert not server.requests
    assert f"image {path}: it has changed since the input was read" in str(summary.dropped[0])


def job(ids: list[int], *images: Image) -> Job:
    return Job(None, np.array(ids), images, PAD)  # type: ignore[arg-type]


def test_prompts_share_what_their_images_have_in_common():
    same, other = job([1, PAD, 2], image(b"a", 100)), job([1, PAD, 3], image(b"a", 100))
    different, text = job([1, PAD, 2], image(b"b", 100)), job([1, 2])
    steps = prefix_order([each.routing_ids for each in (same, other, different, text)])
    shared = {step.index: (step.after, step.shared) for step in steps}
    assert {0: (1, 101), 1: (0, 101)}.items() & shared.items()
    assert shared[2][1] <= 1
    assert text.routing_ids is text.input_ids
    assert len(same.routing_ids) == 102
    assert same.load == 102
    assert job([PAD], image(b"x" * 5120, 10)).load == 20


def test_no_more_images_are_held_than_allowed(tmp_path, monkeypatch):
    """Prompts are put in order together only as long as the input's own images do not fill memory."""
    together: list[int] = []

    def order(prompts: list[Any]) -> Any:
        together.append(len(prompts))
        return prefix_order(prompts)

    monkeypatch.setattr(feed, "BATCH_SAMPLES", 1)
    monkeypatch.setattr(pump, "prefix_order", order)
    for bound in (PumpSettings.held_bytes, len(b"red")):
        together.clear()
        (tmp_path / str(bound)).mkdir()
        summary, _ = run(tmp_path / str(bound), SAMPLES[:3], settings=PumpSettings(held_bytes=bound))
        assert summary.captured == 3
        assert max(together) == (3 if bound > 3 else 2)


def test_the_engine_is_asked_for_its_own_predictions_of_text_alone(tmp_path):
    """Its positions are not those of the prompt as it is sent."""
    summary, server = run(tmp_path, SAMPLES)
    assert summary.captured == 4
    assert [parse_rid(rid).key for rid in server.asked] == [sample_key("none")]
    assert [answer.id for answer in load_known_answers(tmp_path)] == ["none"]
