"""From conversation files to samples: limits, repeated ids, tokenizers on disk, and the conversations of the demo."""

import json
import subprocess
import sys
from importlib import resources

import pytest
from chat_templates import CHATML, KIMI_K2, LLAMA3, assistant, make_tokenizer, masked, user

from sglang_hs_capture.data.conversations import iter_records
from sglang_hs_capture.data.preparation import Preparation
from sglang_hs_capture.data.records import Conversation, Excluded, Exclusion, InputProblem, Sample
from sglang_hs_capture.data.samples import SamplePreparer, iter_samples
from sglang_hs_capture.data.template import load_tokenizer, read_stop_ids
from sglang_hs_capture.errors import InputError

TOKENISED = SamplePreparer()
DEMO = resources.files("sglang_hs_capture.demo")


@pytest.fixture
def write(tmp_path):
    def write_rows(*rows, name="f.jsonl"):
        file = tmp_path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    return write_rows


def test_tokenised_rows_need_no_tokenizer(write):
    [sample] = iter_samples(write({"id": "x", "input_ids": [1, 2], "loss_mask": [0, 1]}), TOKENISED, max_length=2)
    assert isinstance(sample, Sample)
    assert (sample.id, sample.input_ids.tolist(), sample.loss_mask.tolist()) == ("x", [1, 2], [0, 1])


def test_a_conversation_without_tokenizer_stops_the_run(write):
    with pytest.raises(
        InputError, match=r"f\.jsonl:1: is a conversation, which needs a tokenizer: give --model or --tokenizer"
    ):
        list(iter_samples(write({"messages": [user("a")]}), TOKENISED, max_length=None))


def test_a_prompt_may_be_as_long_as_the_context_and_no_longer(write):
    file = write({"id": "fits", "input_ids": [1] * 4096}, {"id": "long", "input_ids": [1] * 5000})
    fits, problem = iter_samples(file, TOKENISED, max_length=4096)
    assert fits.id == "fits"
    assert str(problem) == f"{file}:2: prompt of 5000 tokens is longer than the model's context of 4096"
    assert problem.sample_id == "long"


def test_token_ids_outside_the_vocabulary(write):
    file = write({"input_ids": [99, 0]}, {"id": "bad", "input_ids": [0, 7, 100, 100]})
    fits, problem = iter_samples(file, TOKENISED, max_length=None, vocab_size=100)
    assert isinstance(fits, Sample)
    assert problem.reason == "token id 100 at position 2 lies outside the model's vocabulary of 100"


def test_repeated_ids_are_problems_over_all_files(write):
    first = write({"id": "x", "input_ids": [1]}, {"id": 7, "input_ids": [1]}, {"id": "\ud800", "input_ids": [1]})
    second = write(
        {"id": "7", "input_ids": [2]}, {"id": "\ud800", "input_ids": [1]}, {"id": "y", "input_ids": [1]}, name="g"
    )
    *_, seven, surrogate, last = iter_samples([first, second], TOKENISED, max_length=None)
    assert str(seven) == f"{second}:1: an earlier line has the same id, '7'"
    assert surrogate.reason == r"an earlier line has the same id, '\ud800'"
    assert last.id == "y"


def test_rows_of_the_same_content_without_ids_are_no_repetition(write):
    file = write(*[{"messages": [user("a"), assistant("b")]}] * 3)
    samples = list(iter_samples(file, SamplePreparer(make_tokenizer(CHATML)), max_length=None))
    assert all(isinstance(sample, Sample) for sample in samples)
    assert len({sample.id for sample in samples}) == 3


def test_samples_with_no_token_to_train_on_are_told_apart_unless_they_are_kept(write):
    rows = [
        {"id": "some", "input_ids": [1, 2], "loss_mask": [0, 1]},
        {"id": "none", "input_ids": [1, 2], "loss_mask": [0, 0]},
        {"id": "all", "input_ids": [1, 2]},
        {"id": "wrong", "input_ids": [7, 10**6], "loss_mask": [0, 0]},
        {"id": "unanswered", "messages": [user("a")]},
    ]
    file = write(*rows)
    preparer = SamplePreparer(make_tokenizer(CHATML))
    some, none, whole, wrong, unanswered = iter_samples(file, preparer, max_length=None, vocab_size=10**5)
    assert [some.id, whole.id] == ["some", "all"]
    assert none == Excluded(f"{file}:2", Exclusion.NO_LOSS, "none")
    assert unanswered == Excluded(f"{file}:5", Exclusion.NO_LOSS, "unanswered")
    assert wrong == Excluded(f"{file}:4", Exclusion.NO_LOSS, "wrong")
    keep = SamplePreparer(make_tokenizer(CHATML), Preparation(keep_untrained=True))
    kept = iter_samples(file, keep, max_length=None, vocab_size=10**5)
    assert [type(item) for item in kept] == [Sample, Sample, Sample, InputProblem, Sample]


def test_bad_lines_pass_through_in_order(write):
    file = write({"id": "x", "input_ids": [1]}, {"id": "y"}, {"id": "z", "input_ids": [1]})
    assert [isinstance(item, InputProblem) for item in iter_samples(file, TOKENISED, max_length=None)] == [
        False,
        True,
        False,
    ]


def test_a_missing_file_is_an_error_at_the_call(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        iter_samples(tmp_path / "missing.jsonl", TOKENISED, max_length=None)


def test_a_tokenizer_from_disk_and_another_chat_template(tmp_path):
    make_tokenizer(CHATML, eos="<|im_end|>").save_pretrained(tmp_path / "model")
    record = Conversation("id", "f:1", [user("a"), assistant("b")])
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    assert masked(tokenizer, *SamplePreparer(tokenizer).prepare(record)) == ["b<|im_end|>"]
    (tmp_path / "llama.jinja").write_text(LLAMA3)
    tokenizer = load_tokenizer(str(tmp_path / "model"), chat_template=tmp_path / "llama.jinja")
    assert masked(tokenizer, *SamplePreparer(tokenizer).prepare(record)) == ["b<|eot_id|>"]


def test_a_tokenizer_or_template_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="the tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path))
    make_tokenizer(None).save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match=r"--chat-template: .*missing\.jinja cannot be read"):
        load_tokenizer(str(tmp_path / "model"), chat_template=tmp_path / "missing.jinja")


@pytest.mark.parametrize(
    ("text", "ids"),
    [('{"eos_token_id": 5}', {5}), ('{"eos_token_id": [5, 6]}', {5, 6}), ("{}", set()), ("[]", set()), ("{", set())],
)
def test_stop_ids_of_a_model(tmp_path, text, ids):
    assert read_stop_ids(str(tmp_path)) == set()
    (tmp_path / "generation_config.json").write_text(text)
    assert read_stop_ids(str(tmp_path)) == ids


def test_reading_tokenised_rows_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from sglang_hs_capture.data.samples import SamplePreparer; SamplePreparer();"
        "sys.exit(bool({'torch', 'transformers', 'sglang'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_conversation_of_the_demo_can_be_used():
    files = [str(DEMO / "conversations.jsonl"), str(DEMO / "conversations_sharegpt.jsonl")]
    tokenizer = make_tokenizer(KIMI_K2)
    samples = list(iter_samples(files, SamplePreparer(tokenizer), max_length=None, vocab_size=len(tokenizer)))
    assert all(isinstance(sample, Sample) for sample in samples), [
        str(s) for s in samples if isinstance(s, InputProblem)
    ]
    assert len(samples) >= 50
    turns = [sum(m["role"] == "assistant" for m in record.messages) for record in iter_records(files)]
    assert [len(masked(tokenizer, sample)) for sample in samples] == turns
    for sample in samples:
        assert all(text.endswith("<|im_end|>") and text.count("<|im_end|>") == 1 for text in masked(tokenizer, sample))
