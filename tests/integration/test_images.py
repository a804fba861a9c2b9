"""Conversations with images through the real engine's multimodal path, against ``transformers`` with its vision tower.

Written for the image processor of ``tests/media_processor``, which stands in for the one that published checkpoints
bring along.
"""

import base64
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.errors import InputError
from sglang_hs_capture.layers import Final
from sglang_hs_capture.store.requests import load_requests
from sglang_hs_capture.verify.parity import reference_states
from tests.integration.image_model import ImageReference, make_image_model
from tests.integration.test_run import TOLERANCE, call

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CHUNK = 32
BOUNDARIES = (0, 3, 5)
SGLANG = ["--", "--chunked-prefill-size", str(CHUNK), "--enable-multimodal"]
LONG = "The picture shows a small garden behind an old house. Look at it closely before you answer. " * 3


def picture(seed: int, width: int = 70, height: int = 56) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def uri(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def asked(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}, {"role": "assistant", "content": "A garden."}]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def by_path(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": name}}


RED, BLUE, WIDE = picture(1), picture(2), picture(3, 300, 40)
# Each conversation with its images, in order; two of them differ in the image alone, two begin with the same image.
CONVERSATIONS: dict[str, tuple[dict[str, Any], list[Image.Image]]] = {
    "red": ({"messages": asked(text(LONG), by_path("red.png"), text("What is it?"))}, [RED]),
    "blue": ({"messages": asked(text(LONG), by_path("blue.png"), text("What is it?"))}, [BLUE]),
    "red-first": ({"messages": asked(by_path("red.png"), text("What is it? " + LONG))}, [RED]),
    "red-again": ({"messages": asked(by_path("red.png"), text("What is it? " + LONG + "Say it in one word."))}, [RED]),
    "two": (
        {"messages": asked({"type": "image", "image": "wide.png"}, by_path(uri(BLUE)), text("Which is wide?"))},
        [WIDE, BLUE],
    ),
    "marks": (
        {
            "conversations": [
                {"from": "human", "value": "<image>What is it?"},
                {"from": "gpt", "value": "A garden."},
                {"from": "human", "value": "And this: <image>?"},
                {"from": "gpt", "value": "A house."},
            ],
            "images": ["blue.png", "red.png"],
        },
        [BLUE, RED],
    ),
    "text": ({"messages": asked(text("No picture here."))}, []),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("models") / "kimi-k2.5")


@pytest.fixture(scope="module")
def captured(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A dataset of all conversations, by one run, and a second run that finds nothing to do."""
    base = tmp_path_factory.mktemp("images")
    for name, image in (("red", RED), ("blue", BLUE), ("wide", WIDE)):
        image.save(base / f"{name}.png")
    data, dataset = base / "data.jsonl", base / "dataset"
    rows = [{"id": id, **row} for id, (row, _) in CONVERSATIONS.items()]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["run", "--model", model, "--data", data, "--output", dataset, "--dtype", "float32", "--min-free-gb", "0"]
    words += ["--layers", ",".join(map(str, BOUNDARIES)), "--final", "both", "--trust-remote-code"]
    first = call(*words, *SGLANG)
    assert first.returncode == 0, first.stdout + first.stderr + (dataset / "server.log").read_text()[-3000:]
    return {"base": base, "words": words, "dataset": dataset, "said": first.stdout, "again": call(*words, *SGLANG)}


def test_states_equal_transformers_with_its_vision_tower(captured, model):
    dataset, reference = HiddenStateDataset(captured["dataset"]), ImageReference(model)
    assert sorted(sample.id for sample in dataset.samples) == sorted(CONVERSATIONS)
    for sample in dataset:
        images = CONVERSATIONS[sample["id"]][1]
        expected = (
            reference.states(sample["input_ids"], images, BOUNDARIES, Final.BOTH)
            if images
            else reference_states(model, sample["input_ids"], BOUNDARIES, Final.BOTH)
        )
        for got, state in zip(sample["hidden_states"], expected, strict=True):
            error = (got - state).norm(dim=1) / state.norm(dim=1)
            assert error.max() <= TOLERANCE, (sample["id"], error.max())


def test_positions_of_images_are_marked_and_carry_no_loss(captured, model):
    dataset = HiddenStateDataset(captured["dataset"])
    token = json.loads((model / "config.json").read_text())["media_placeholder_token_id"]
    for sample, entry in zip(dataset, dataset.samples, strict=True):
        images = CONVERSATIONS[sample["id"]][1]
        mask = sample["modality_mask"]
        assert mask.dtype == torch.int64
        assert mask.shape == sample["input_ids"].shape
        assert torch.equal(sample["input_ids"] == token, mask == 1)
        assert not (sample["loss_mask"] & mask).any()
        assert sample["loss_mask"].any()
        runs = entry.media.runs if entry.media else ()
        # Squares of 28 pixels: three columns of two rows for 70 x 56, eleven of two for 300 x 40.
        assert [count for _, count in runs] == [6 if image.width == 70 else 22 for image in images]


def test_an_image_is_proven_by_the_ids_at_its_positions(captured):
    dataset = HiddenStateDataset(captured["dataset"])
    entries = {entry.id: entry for entry in dataset.samples}
    ids = {id: stored_ids(dataset, entry) for id, entry in entries.items()}
    (start, count), (other, size) = entries["red"].media.runs[0], entries["blue"].media.runs[0]
    assert (start, count) == (other, size)
    assert (ids["red"][start : start + count] != ids["blue"][start : start + count]).all()
    assert np.array_equal(
        np.delete(ids["red"], range(start, start + count)), np.delete(ids["blue"], range(start, start + count))
    )
    assert entries["red"].media.prompt_hash == entries["blue"].media.prompt_hash
    assert entries["red"].end_hash != entries["blue"].end_hash
    own, again = entries["red-first"].media.runs[0], entries["red-again"].media.runs[0]
    assert np.array_equal(ids["red-first"][own[0] : sum(own)], ids["red-again"][again[0] : sum(again)])
    assert np.array_equal(ids["red-first"][own[0] : sum(own)], ids["red"][start : start + count])
    images = load_requests(captured["dataset"]).requests["two"].images
    assert len(images) == 2
    assert all(name.startswith("sha256:") for name in images)


def test_the_same_image_is_computed_and_stored_once(captured):
    entries = {entry.id: entry for entry in HiddenStateDataset(captured["dataset"]).samples}
    rows = {
        id: {(e.shard, row) for e in entry.extents for row in range(e.start, e.start + e.count)}
        for id, entry in entries.items()
    }
    shared = len(rows["red-first"] & rows["red-again"])
    assert shared > sum(entries["red-first"].media.runs[0])
    start = entries["red"].media.runs[0][0]
    # Of two prompts that differ in the image alone no more is shared than what stands before it.
    assert 0 < len(rows["red"] & rows["blue"]) <= start


def stored_ids(dataset: HiddenStateDataset, entry: Any) -> np.ndarray:
    return dataset._read_tokens(entry, entry.parts[0])


def test_a_second_run_finds_all_and_another_image_is_told(captured):
    assert captured["again"].returncode == 0
    assert "Nothing left to do" in captured["again"].stdout
    base = captured["base"]
    shutil.copy(base / "red.png", base / "red-kept.png")
    try:
        picture(9).save(base / "red.png")
        changed = call(*captured["words"], *SGLANG)
    finally:
        shutil.move(base / "red-kept.png", base / "red.png")
    assert changed.returncode == InputError.exit_code
    assert f"{base / 'data.jsonl'}:1: the id 'red' was captured with other images" in changed.stderr


def test_verify_and_inspect_know_images(captured):
    verified = call("verify", captured["dataset"])
    assert verified.returncode == 0, verified.stdout + verified.stderr
    inspected = call("inspect", captured["dataset"])
    assert "6 with images" in inspected.stdout


def test_stages_of_a_pipeline_agree_on_an_image(captured, tmp_path):
    words = [str(tmp_path / "dataset") if word == captured["dataset"] else word for word in captured["words"]]
    done = call(*words, "--limit", "4", *SGLANG, "--pp-size", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    one, other = HiddenStateDataset(captured["dataset"]), HiddenStateDataset(tmp_path / "dataset")
    same = {entry.id: place for place, entry in enumerate(one.samples)}
    assert len(other) == 4
    for entry, sample in zip(other.samples, other, strict=True):
        assert len(entry.parts) == 2
        assert entry.end_hash == one.samples[same[entry.id]].end_hash
        expected = one[same[entry.id]]
        assert torch.equal(sample["modality_mask"], expected["modality_mask"])
        for got, state in zip(sample["hidden_states"], expected["hidden_states"], strict=True):
            assert ((got - state).norm(dim=1) / state.norm(dim=1)).max() <= TOLERANCE


def test_another_process_makes_the_same_ids(captured, tmp_path):
    """The ids are made from the image's content, so that a capture that goes on another day is the same."""
    words = [str(tmp_path / "dataset") if word == captured["dataset"] else word for word in captured["words"]]
    done = call(*words, "--limit", "1", *SGLANG)
    assert done.returncode == 0, done.stdout + done.stderr
    one, other = HiddenStateDataset(captured["dataset"]), HiddenStateDataset(tmp_path / "dataset")
    assert other.samples[0].id == "red"
    assert other.samples[0].end_hash == next(entry.end_hash for entry in one.samples if entry.id == "red")


def test_a_server_that_takes_no_images_is_told(captured, tmp_path):
    words = [str(tmp_path / "dataset") if word == captured["dataset"] else word for word in captured["words"]]
    done = call(*words, "--", "--chunked-prefill-size", str(CHUNK))
    assert done.returncode == InputError.exit_code
    assert "data.jsonl:1: the prompt has images, and the server takes none" in done.stderr
