"""Images of conversations: the forms they come in, where they stand, and what becomes of those that cannot be used."""

import base64
import hashlib
import io
import json
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow

from sglang_hs_capture.data import images as images_module
from sglang_hs_capture.data.conversations import iter_records
from sglang_hs_capture.data.images import load_images
from sglang_hs_capture.data.parallel import PooledPreparer
from sglang_hs_capture.data.preparation import Preparation, SplitTurns
from sglang_hs_capture.data.prompts import iter_prompts
from sglang_hs_capture.data.records import BadRow, InputProblem, Sample
from sglang_hs_capture.data.samples import SamplePreparer, iter_samples
from sglang_hs_capture.data.template import ChatTemplate
from sglang_hs_capture.demo.tokenizer import MEDIA_PLACEHOLDER, demo_texts, train_tokenizer
from sglang_hs_capture.driver.source import Source

ANSWER = {"role": "assistant", "content": "b"}


def png(color: str = "red", size: tuple[int, int] = (60, 30)) -> bytes:
    file = io.BytesIO()
    Pillow.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


RED, BLUE = png("red"), png("blue")
RED_URI = f"data:image/png;base64,{base64.b64encode(RED).decode()}"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(demo_texts())


@pytest.fixture(scope="module")
def media_token(tokenizer) -> int:
    return tokenizer.convert_tokens_to_ids(MEDIA_PLACEHOLDER)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(BLUE)
    return tmp_path


@pytest.fixture
def prepare(folder, tokenizer, media_token):
    """Writes rows to a file beside the images, and prepares them."""

    def run(*rows, token=media_token, preparation=None):
        file = folder / "f.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        preparer = SamplePreparer(tokenizer, preparation, media_token=token)
        return list(iter_samples(file, preparer, max_length=None))

    return run


def name_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def user(*parts) -> dict:
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


FORMS = [
    user({"type": "image_url", "image_url": {"url": "pictures/red.png"}}, {"type": "text", "text": "What?"}),
    user({"type": "image_url", "image_url": "pictures/red.png"}, "What?"),
    user({"type": "image", "image": "pictures/red.png"}, {"type": "text", "text": "What?"}),
    user({"type": "image", "path": "pictures/red.png"}, {"type": "text", "text": "What?"}),
    user({"type": "image", "url": RED_URI}, {"type": "text", "text": "What?"}),
    user({"type": "image", "url": RED_URI[:60] + "\r\n" + RED_URI[60:]}, {"type": "text", "text": "What?"}),
    user({"type": "image_url", "image_url": {"url": RED_URI}}, {"type": "text", "text": "What?"}),
    user({"type": "input_image", "image_url": RED_URI}, {"type": "text", "text": "What?"}),
    {**user({"type": "image"}, {"type": "text", "text": "What?"}), "images": ["pictures/red.png"]},
    {**user({"type": "image"}, "What?"), "images": [{"path": "pictures/red.png", "bytes": None}]},
    {**user({"type": "image"}, "What?"), "images": [{"bytes": base64.b64encode(RED).decode(), "path": "x"}]},
    {**user("<image>What?"), "images": ["pictures/red.png"]},
    {"messages": [{"role": "user", "content": "<image>What?"}, ANSWER], "image": "pictures/red.png"},
    {"prompt": "<image>What?", "response": "b", "image": "pictures/red.png"},
    {
        "conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "b"}],
        "images": ["pictures/red.png"],
    },
]


@pytest.mark.parametrize("row", FORMS)
def test_every_form_gives_the_same_prompt_and_the_same_image(prepare, tokenizer, media_token, row):
    [sample] = prepare(row)
    assert isinstance(sample, Sample), sample
    assert tokenizer.decode(sample.input_ids) == (
        "<|im_user|>user<|im_middle|><|media_begin|>image<|media_content|><|media_pad|><|media_end|>What?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>b<|im_end|>"
    )
    [image] = sample.images
    assert image.name == name_of(RED)
    assert image.positions == 3 * 2
    assert base64.b64decode(image.payload().removeprefix("data:;base64,")) == RED
    assert sample.media_token == media_token
    assert sample.loss_mask[sample.input_ids == media_token].tolist() == [0]
    assert sample.loss_mask[-1] == 1


def test_several_images_keep_their_order_over_turns(prepare):
    row = {
        "messages": [
            {"role": "user", "content": "First <image>, then <image>."},
            ANSWER,
            {"role": "user", "content": [{"type": "image", "image": RED_URI}, "<image>"]},
            {"role": "assistant", "content": [{"type": "text", "text": "like this: <image>"}]},
        ],
        "images": ["blue.png", "pictures/red.png", "blue.png", "blue.png"],
    }
    [sample] = prepare(row)
    assert [image.name for image in sample.images] == [name_of(data) for data in (BLUE, RED, RED, BLUE, BLUE)]
    places = sample.input_ids == sample.media_token
    # One that the assistant gives is no token that it learns, either.
    assert not sample.loss_mask[places].any()


def test_marks_beside_parts_of_the_type_are_text(prepare, tokenizer):
    [sample] = prepare({**user({"type": "image"}, "What does <image> mean?"), "images": ["blue.png"]})
    assert [image.name for image in sample.images] == [name_of(BLUE)]
    assert "What does <image> mean?" in tokenizer.decode(sample.input_ids)


def test_rows_tokenised_before_may_have_images(prepare, media_token):
    [sample] = prepare({"input_ids": [5, media_token, 6], "images": ["blue.png"]})
    assert [image.name for image in sample.images] == [name_of(BLUE)]
    assert sample.loss_mask.tolist() == [1, 0, 1]


def test_marks_without_images_are_text(prepare, tokenizer):
    [sample] = prepare({"messages": [{"role": "user", "content": "HTML has <image>."}, ANSWER]})
    assert not sample.images
    assert "HTML has <image>." in tokenizer.decode(sample.input_ids)


def test_a_url_is_left_to_the_server(prepare):
    url = "https://example.com/a.png"
    [sample] = prepare(user({"type": "image_url", "image_url": {"url": url}}))
    [image] = sample.images
    assert image.payload() == url
    assert image.name == f"url-sha256:{hashlib.sha256(url.encode()).hexdigest()}"
    assert image.held == image.nbytes == 0


def test_rows_without_an_id_are_told_apart_by_their_images(folder):
    file = folder / "f.jsonl"
    rows = [{**user({"type": "image"}), "images": [name]} for name in ("blue.png", "pictures/red.png")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, other = iter_records(file)
    assert one.id != other.id


PROBLEMS = {
    "image 'FOLDER/none.png': no such file": user({"type": "image", "image": "none.png"}),
    "image 'FOLDER/pictures': not a file": user({"type": "image", "image": "pictures"}),
    "image 'FOLDER/cut.png': no image that can be decoded": user({"type": "image", "image": "cut.png"}),
    "image 'FOLDER/f.jsonl': no image that can be decoded": user({"type": "image", "image": "f.jsonl"}),
    "image in a data: URI: no image that can be decoded": user({"type": "image", "image": "data:;base64,AAAA"}),
    "image in a data: URI, 'data:;base64,?': ": user({"type": "image", "image": "data:;base64,?"}),
    "image in a data: URI, 'data:nothing': there is no comma": user({"type": "image", "image": "data:nothing"}),
    "image 'FOLDER/a\\x00b': no such file": user({"type": "image", "image": "a\0b"}),
    "image 'file://[a': no such file can be": user({"type": "image", "image": "file://[a"}),
    "messages[0]: content[0]: image: expected a path, a data: URI or an http(s) URL; got 7": user(
        {"type": "image", "image": 7}
    ),
    "messages[0]: an image that names no file, and the row's own images, 0 of them, are used up": user(
        {"type": "image"}
    ),
    "images: 1 images, and the messages have places for 0 of them": {**user("x"), "images": ["blue.png"]},
    "images: expected a list; got str": {**user("<image>"), "images": "blue.png"},
    "images[0]: bytes: expected an image's bytes, in base64; got '?'": {**user("<image>"), "images": [{"bytes": "?"}]},
    "it has 1 images, and its prompt 0 placeholders": {"input_ids": [1, 2], "images": ["blue.png"]},
    "it has 1 images, and its prompt 2 placeholders": user({"type": "image", "image": "blue.png"}, "<|media_pad|>"),
}


@pytest.mark.parametrize(("reason", "row"), PROBLEMS.items())
def test_what_cannot_be_used_is_told_with_file_and_line(prepare, folder, reason, row):
    (folder / "cut.png").write_bytes(RED[:-30])
    [problem] = prepare(row)
    assert isinstance(problem, InputProblem)
    assert problem.source == f"{folder / 'f.jsonl'}:1"
    assert problem.reason.startswith(reason.replace("FOLDER", str(folder)))


def test_a_model_that_takes_no_images_is_told(prepare):
    [problem] = prepare(FORMS[0], token=None)
    assert "names no media_placeholder_token_id" in problem.reason


def test_a_template_that_leaves_images_out_is_told(prepare, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}")
    [problem] = prepare(user({"type": "image", "image": "blue.png"}))
    assert "its prompt 0 placeholders" in problem.reason


def test_sizes_are_bounded(folder, monkeypatch):
    monkeypatch.setattr(images_module, "MAX_BYTES", min(len(BLUE), len(RED)) - 1)
    with pytest.raises(BadRow, match="larger than the limit"):
        load_images(["blue.png"], folder)
    with pytest.raises(BadRow, match="image in a data: URI: larger than the limit"):
        load_images([RED_URI], folder)
    monkeypatch.setattr(images_module, "MAX_BYTES", 2**20)
    monkeypatch.setattr(images_module, "MAX_PIXELS", 60 * 30 - 1)
    with pytest.raises(BadRow, match=r"60 x 30 pixels; the limit is 1799 together"):
        load_images(["blue.png"], folder)
    monkeypatch.setattr(images_module, "MAX_IMAGES", 1)
    with pytest.raises(BadRow, match="2 images in one row; the limit is 1"):
        load_images(["blue.png", "blue.png"], folder)


def test_a_file_that_changes_before_it_is_sent_is_told(folder):
    [image] = load_images(["blue.png"], folder)
    (folder / "blue.png").write_bytes(RED)
    with pytest.raises(BadRow, match=r"blue\.png: it has changed since the input was read"):
        image.payload()


def test_bytes_of_a_table_are_taken_as_they_are(folder):
    from sglang_hs_capture.data.media import row_images

    [image] = load_images(row_images({"images": [{"bytes": BLUE, "path": None}]}), folder)
    assert image.name == name_of(BLUE)
    assert np.array_equal(np.frombuffer(image.data, np.uint8), np.frombuffer(BLUE, np.uint8))


def thinking(text: str, thought: str) -> dict:
    return {"role": "assistant", "content": text, "reasoning_content": thought}


@pytest.mark.parametrize("split", [SplitTurns.AUTO, SplitTurns.ALWAYS])
def test_each_split_turn_has_the_images_up_to_it(prepare, tokenizer, split):
    """The template leaves the reasoning of earlier turns out, so that each turn is a sample of its own."""
    row = {
        "id": "x",
        "messages": [
            {"role": "user", "content": "<image>One?"},
            thinking("red", "Hm."),
            {"role": "user", "content": "Two?"},
            thinking("two", "So."),
            {"role": "user", "content": [{"type": "text", "text": "Or <image>"}, {"type": "text", "text": "<image>"}]},
            thinking("blue", "Ah."),
        ],
        "images": ["pictures/red.png", "blue.png", "pictures/red.png"],
    }
    samples = prepare(row, preparation=Preparation(split_turns=split))
    assert [sample.id for sample in samples] == ["x#turn-1", "x#turn-2", "x#turn-3"]
    names = [[image.name for image in sample.images] for sample in samples]
    assert names == [[name_of(RED)], [name_of(RED)], [name_of(RED), name_of(BLUE), name_of(RED)]]
    for sample, thought in zip(samples, ("Hm.", "So.", "Ah."), strict=True):
        trained = tokenizer.decode(sample.input_ids[sample.loss_mask == 1])
        assert thought in trained
        assert (sample.input_ids == sample.media_token).sum() == len(sample.images)


def test_turns_beside_images_are_found_whoever_shows_them(prepare):
    """Also where the assistant's own turn has an image, and where one ends what comes before it."""
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": "blue.png"}]},
            {"role": "assistant", "content": [{"type": "image", "image": "blue.png"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "More?"},
            thinking("c", "Hm."),
        ]
    }
    first, second = prepare(row, preparation=Preparation(split_turns=SplitTurns.ALWAYS))
    assert len(first.images) == len(second.images) == 2
    assert first.loss_mask.any()
    assert second.loss_mask.any()


def test_processes_that_tokenise_read_images_too(folder, tokenizer, media_token):
    tokenizer.save_pretrained(folder / "tokenizer")
    source = Source([folder / "f.jsonl"], str(folder / "tokenizer"), workers=2)
    rows = [{"id": str(number), **user({"type": "image", "image": "blue.png"}, f"{number}?")} for number in range(40)]
    (folder / "f.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    load = partial(source._load, media_token)
    preparer = PooledPreparer(load, 2, start_after_s=0.0, media_token=media_token)
    alone = list(source.samples(max_length=None, vocab_size=None, media_token=media_token))
    together = list(source.samples(max_length=None, vocab_size=None, preparer=preparer))
    assert [plain(sample) for sample in together] == [plain(sample) for sample in alone]
    assert [len(sample.images) for sample in alone] == [1] * 40


def plain(sample: Sample) -> tuple:
    return sample.id, sample.input_ids.tolist(), sample.loss_mask.tolist(), sample.images, sample.media_token


def test_a_table_gives_the_same_as_lines(prepare, folder, tokenizer, media_token):
    rows = [
        {**user({"type": "image"}, "What?"), "images": [{"path": "blue.png"}]},
        {**user({"type": "image"}, "What?"), "images": [{"bytes": RED}]},
    ]
    columns = {"messages": [json.dumps(row["messages"]) for row in rows]}
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table(
        {
            "messages": pa.array(columns["messages"], pa.string()).cast(pa.json_()),
            "images": pa.array([row["images"] for row in rows], pa.list_(image)),
        }
    )
    pq.write_table(table, folder / "f.parquet")
    preparer = SamplePreparer(tokenizer, media_token=media_token)
    from_table = list(iter_samples(folder / "f.parquet", preparer, max_length=None))
    rows[1]["images"] = [{"bytes": base64.b64encode(RED).decode()}]
    assert [plain(sample) for sample in from_table] == [plain(sample) for sample in prepare(*rows)]
    assert [image.name for sample in from_table for image in sample.images] == [name_of(BLUE), name_of(RED)]


def test_prompts_with_images_are_not_answered_anew(folder, tokenizer, media_token):
    rows = [
        {"id": "a", **FORMS[0]},
        {"id": "b", "input_ids": [5, media_token, 6], "images": ["blue.png"]},
        {"id": "c", "messages": [{"role": "user", "content": "x"}, ANSWER]},
    ]
    (folder / "f.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = ChatTemplate(tokenizer, {})
    records = iter_records(folder / "f.jsonl")
    *problems, prompt = iter_prompts(records, lambda source: template, last_only=False, vocab_size=None)
    for problem, name in zip(problems, "ab", strict=True):
        assert isinstance(problem, InputProblem)
        assert problem.sample_id == name
        assert "it has images, and prompts are answered anew only from text" in problem.reason
    assert prompt.id == "c"
