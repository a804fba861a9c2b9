"""Where a sample's images are: records, and what is computed from them."""

import hashlib

import numpy as np
import pytest

from sglang_hs_capture.store.hashing import end_hash
from sglang_hs_capture.store.media import expand_loss_mask, modality_mask, prompt_hash, prompt_tokens
from sglang_hs_capture.store.requests import RequestRecord
from sglang_hs_capture.store.schema import Extent, Media, SampleRecord, rle_decode, rle_encode, sample_key

PAD = 7
# An image of 3 positions, one of 1, and two of 2 side by side.
STORED = np.array([1, 2, 10**15, 10**16, 10**15, 3, 10**14, 4, 5, 10**13, 10**13, 10**12, 10**11], dtype=np.int64)
RUNS = ((2, 3), (6, 1), (9, 2), (11, 2))
ASKED = [1, 2, PAD, 3, PAD, 4, 5, PAD, PAD]
MEDIA = Media(RUNS, PAD, end_hash(ASKED))


def request(**more) -> RequestRecord:
    images = ("sha256:a", "sha256:b", "sha256:c", "sha256:d")
    known = {"id": "a", "key": sample_key("a", images), "length": len(ASKED), "end_hash": end_hash(ASKED)}
    return RequestRecord(**{**known, "loss_mask": (2, 7), "source": "f:1", "images": images, **more})


def test_the_prompt_as_it_was_asked_for_follows_from_the_stored_ids():
    assert prompt_tokens(STORED, RUNS, PAD).tolist() == ASKED
    assert prompt_hash(STORED, MEDIA) == end_hash(ASKED)
    assert MEDIA.prompt_length(len(STORED)) == len(ASKED)


def test_another_text_or_another_run_gives_another_hash():
    other = STORED.copy()
    other[5] += 1
    assert prompt_hash(other, MEDIA) != MEDIA.prompt_hash
    assert prompt_hash(STORED, Media(((2, 2), *RUNS[1:]), PAD, 0)) != MEDIA.prompt_hash
    # What is in an image is not the prompt's: the chained hash of the stored ids tells it.
    image = STORED.copy()
    image[3] += 1
    assert prompt_hash(image, MEDIA) == MEDIA.prompt_hash
    assert end_hash(image) != end_hash(STORED)


def test_positions_of_images_are_marked():
    assert modality_mask(len(STORED), MEDIA).tolist() == [0, 0, 1, 1, 1, 0, 1, 0, 0, 1, 1, 1, 1]
    assert modality_mask(3, None).tolist() == [0, 0, 0]


@pytest.mark.parametrize("mask", [[0] * 9, [1] * 9, [0, 1, 1, 0, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0, 0, 0, 1]])
def test_the_loss_mask_grows_with_the_images_and_is_zero_there(mask):
    grown = rle_decode(expand_loss_mask(rle_encode(mask), MEDIA))
    images = modality_mask(len(STORED), MEDIA)
    assert len(grown) == len(STORED)
    assert not (grown & images).any()
    assert grown[images == 0].tolist() == [bit for bit, token in zip(mask, ASKED, strict=True) if token != PAD]


@pytest.mark.parametrize("runs", [(), ((2, 0),), ((2, 3), (4, 1)), ((5, 1), (2, 1)), ((-1, 1),)])
def test_runs_out_of_order_are_refused(runs):
    with pytest.raises(ValueError, match="image positions: expected"):
        Media(runs, PAD, 0)


def test_records_come_back_as_they_were_written():
    record = SampleRecord("r", len(STORED), (Extent(0, 0, len(STORED)),), end_hash(STORED), "s", MEDIA)
    assert SampleRecord.from_json(record.to_json()) == record
    assert RequestRecord.from_json(request().to_json()) == request()


def test_records_without_images_are_what_they_were():
    assert "media" not in SampleRecord("r", 1, (Extent(0, 0, 1),), 1, "s").to_json()
    assert "images" not in request(images=()).to_json()
    assert sample_key("a") == sample_key("a", ()) != sample_key("a", ("sha256:a",))


def test_the_key_is_made_as_the_page_on_the_format_says():
    name = b"caf\xc3\xa9\0sha256:a\0url-sha256:b"
    key = hashlib.blake2b(name, digest_size=12).hexdigest()
    assert sample_key("caf\xe9", ("sha256:a", "url-sha256:b")) == key


def test_an_image_behind_the_end_is_refused():
    raw = SampleRecord("r", len(STORED), (Extent(0, 0, len(STORED)),), 1, "s", MEDIA).to_json()
    with pytest.raises(ValueError, match="of a sample of 12 tokens"):
        SampleRecord.from_json({**raw, "length": 12})


@pytest.mark.parametrize(
    ("length", "hash_", "media", "met"),
    [
        (len(STORED), end_hash(STORED), MEDIA, True),
        (len(STORED) + 1, end_hash(STORED), MEDIA, False),
        (len(STORED), end_hash(STORED), Media(RUNS, PAD, 1), False),
        # The server computed the text and took no images.
        (len(ASKED), end_hash(ASKED), None, False),
    ],
)
def test_a_request_is_met_by_its_text_and_as_many_images(length, hash_, media, met):
    assert request().is_met_by(length, hash_, media) is met


def test_a_request_without_images_is_not_met_by_a_sample_with_some():
    assert not request(images=()).is_met_by(len(STORED), end_hash(STORED), MEDIA)
    assert request(images=()).is_met_by(len(ASKED), end_hash(ASKED), None)
