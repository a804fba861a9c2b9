"""``hs-capture prepare-data``: the set it writes is what reading the input directly gives, and what it tells."""

import io
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from chat_templates import KIMI_K2, make_tokenizer
from PIL import Image as Pillow
from rich.console import Console
from tokenizers import normalizers

from sglang_hs_capture.cli.main import main
from sglang_hs_capture.cli.mask_view import highlighted, print_samples
from sglang_hs_capture.data import prepared as prepared_module
from sglang_hs_capture.data.preparation import Preparation
from sglang_hs_capture.data.prepared import PreparedSet, describe_tokenizer
from sglang_hs_capture.data.records import InputProblem, Sample
from sglang_hs_capture.data.samples import SamplePreparer, iter_samples
from sglang_hs_capture.demo.checkpoint import make_kimi_k25
from sglang_hs_capture.driver import start
from sglang_hs_capture.driver.make_set import Account
from sglang_hs_capture.driver.run import RunSettings
from sglang_hs_capture.driver.source import TOKENIZED_BY, Source
from sglang_hs_capture.errors import DiskFullError, InputError, StoreError
from sglang_hs_capture.store.jsonfile import write_object


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(KIMI_K2, eos="<|im_end|>").save_pretrained(folder)
    return folder


def turns(number):
    return [{"role": "user", "content": f"Question {number}"}, {"role": "assistant", "content": f"答え {number} 😀"}]


@pytest.fixture
def data(tmp_path):
    rows = [
        {"messages": turns(0)},
        {"id": "two", "messages": turns(1) + turns(2)},
        {"id": 3, "prompt": "Why?", "response": "So."},
        {"id": "all", "input_ids": [1, 2, 3]},
        {"id": "runs", "input_ids": [1, 2, 3], "loss_mask_rle": [1, 1, 1]},
        {"id": "none", "messages": turns(3)[:1]},
        {"id": "zero", "input_ids": [4], "loss_mask": [0]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def call(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["prepare-data", *map(str, words)])
    out, err = capsys.readouterr()
    return ended.value.code or 0, out, err


def plain(items):
    assert all(isinstance(item, Sample) for item in items), items
    return [(item.id, item.input_ids.tolist(), item.loss_mask.tolist()) for item in items]


def test_a_prepared_set_is_what_reading_its_input_gives(capsys, tmp_path, data, model):
    source = Source([data], str(model))
    direct = [item for item in source.samples(max_length=None, vocab_size=None) if isinstance(item, Sample)]
    code, out, err = call(capsys, tmp_path / "set", "--data", data, "--tokenizer", model)
    assert code == 0, err
    again = list(iter_samples(tmp_path / "set", SamplePreparer(), max_length=None))
    assert plain(again) == plain(direct)
    assert len(again) == 5
    assert "5 samples: " in out
    assert "Excluded 2 samples: 2 without a token to train on (--keep-untrained keeps such)." in out
    account = json.loads((tmp_path / "set" / "_prepared.json").read_text())
    tokens, trained = sum(len(item.input_ids) for item in direct), sum(int(item.loss_mask.sum()) for item in direct)
    assert (account["samples"], account["tokens"], account["trained_tokens"]) == (5, tokens, trained)
    assert account["excluded"] == {"no-loss": 2}
    assert account["length_percentiles"]["0"] == 3
    assert re.fullmatch("sha256-[0-9a-f]{32}", account["tokenizer_hash"])
    assert re.fullmatch("sha256-[0-9a-f]{32}", account["vocabulary_hash"])
    table = pq.read_table(tmp_path / "set")
    assert table.column("source").to_pylist() == [f"{data}:{n}" for n in range(1, 6)]
    assert sorted(os.listdir(tmp_path / "set")) == ["_prepared.json", "data-00000.parquet"]
    assert sorted(os.listdir(tmp_path)) == ["rows.jsonl", "set"]


@pytest.fixture
def made(capsys, tmp_path, data, model):
    """A set of conversations, in ``tmp_path / "set"``."""
    assert call(capsys, tmp_path / "set", "--data", data, "--tokenizer", model)[0] == 0
    return tmp_path / "set"


@pytest.fixture
def other_model(tmp_path):
    """A tokenizer that is another one in a way: its vocabulary, or something else of it."""

    def make(word):
        tokenizer = make_tokenizer(KIMI_K2, eos="<|im_end|>")
        if word:
            tokenizer.add_tokens([word])
        else:
            tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
        tokenizer.save_pretrained(tmp_path / "other-model")
        return tmp_path / "other-model"

    return make


def begin_run(paths, model):
    """What ``run`` does with its input before anything else, and what it says."""
    said = []
    view = SimpleNamespace(say=said.append)
    start._input(Source(paths, str(model)), RunSettings(Path("out")), None, view, max_length=None, known=None)
    return said


def test_a_set_of_the_models_own_tokenizer_says_nothing(made, data, model):
    assert begin_run([made, data], model) == []


def test_a_set_of_another_vocabulary_is_refused(capsys, tmp_path, made, model, other_model):
    other = other_model("another0word")
    for paths in ([made], [made / "data-00000.parquet"], [Path(f"{made}/*.parquet")]):
        with pytest.raises(InputError, match=f"set: was tokenised by {model} .* the vocabulary of {other} is another"):
            begin_run(paths, other)
    code, _, err = call(capsys, tmp_path / "again", "--data", made, "--tokenizer", other)
    assert (code, "so its token ids stand for other text" in err) == (5, True)
    assert not (tmp_path / "again").exists()


def test_a_set_that_cannot_be_held_against_the_model_is_told(tmp_path, made, other_model):
    [said] = begin_run([made], other_model(""))
    assert "the vocabularies are the same, and the rest of the tokenizers" in said
    [said] = begin_run([made], tmp_path)
    assert "set: nobody can say whether its tokens are the model's: " in said
    assert "the tokenizer cannot be loaded" in said
    [said] = begin_run([made], "")
    assert said.endswith("no --model is given")


def test_a_set_made_of_a_set_remembers_what_tokenised_it(capsys, tmp_path, made, model, other_model):
    assert call(capsys, tmp_path / "again", "--data", made, "--shuffle-seed", 1)[0] == 0
    first, again = (json.loads((folder / "_prepared.json").read_text()) for folder in (made, tmp_path / "again"))
    assert [again[key] for key in TOKENIZED_BY] == [first[key] for key in TOKENIZED_BY]
    with pytest.raises(InputError, match="is another one"):
        begin_run([tmp_path / "again"], other_model("another0word"))


def test_sets_of_different_tokenizers_are_not_mixed(capsys, tmp_path, made, data, other_model):
    assert call(capsys, tmp_path / "b", "--data", data, "--tokenizer", other_model("another0word"))[0] == 0
    code, _, err = call(capsys, tmp_path / "both", "--data", made, "--data", tmp_path / "b")
    assert (code, "b: were tokenised with different vocabularies" in err) == (5, True)


@pytest.mark.parametrize("damage", ["file-gone", "file-more", "account-cut", "account-edited", "newer"])
def test_a_set_that_is_not_whole_is_refused(tmp_path, monkeypatch, capsys, damage):
    monkeypatch.setattr(prepared_module, "SHARD_TOKENS", 4)
    monkeypatch.setattr(prepared_module, "GROUP_TOKENS", 2)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"id": {n}, "input_ids": [1, 2, 3]}}\n' for n in range(6)))
    made, account = tmp_path / "set", tmp_path / "set" / "_prepared.json"
    assert call(capsys, made, "--data", rows)[0] == 0
    assert len(list(iter_samples(made, SamplePreparer(), max_length=None))) == 6
    text = account.read_text()
    said = {
        "file-gone": "set: expected 6 samples, as _prepared.json says; got 4 in 2 Parquet files; copy the whole folder",
        "file-more": "set: expected 6 samples, as _prepared.json says; got 8 in 4 Parquet files",
        "account-cut": "_prepared.json: not JSON",
        "account-edited": "_prepared.json: the checksum is wrong",
        "newer": "_prepared.json: expected version 1, got 2: written by another release",
    }[damage]
    if damage == "file-gone":
        (made / "data-00001.parquet").unlink()
    elif damage == "file-more":
        (made / "data-00003.parquet").write_bytes((made / "data-00000.parquet").read_bytes())
    elif damage == "newer":
        content = json.loads(text)
        content.pop("crc")
        write_object(account, content | {"version": 2})
    else:
        account.write_text(text[:50] if damage == "account-cut" else text.replace('"samples": 6', '"samples": 5'))
    with pytest.raises(InputError, match=re.escape(said)):
        iter_samples(made, SamplePreparer(), max_length=None)


def test_a_record_of_another_kind_says_nothing_of_a_folder(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": "x", "input_ids": [1]}\n')
    (tmp_path / "_prepared.json").write_text('{"samples": 7}')
    assert len(list(iter_samples(tmp_path, SamplePreparer(), max_length=None))) == 1


def test_samples_are_shown_with_what_is_trained_on(capsys, tmp_path, data, model):
    _, out, _ = call(capsys, tmp_path / "set", "--data", data, "--tokenizer", model, "--show", 2)
    assert f"'two' ({data}:2)" in out
    assert (
        "<|im_user|>user<|im_middle|>Question 1<|im_end|><|im_assistant|>assistant<|im_middle|>⟦答え 1 😀<|im_end|>⟧"
        in out
    )
    assert "Why?" not in out
    _, out, _ = call(capsys, tmp_path / "other", "--data", data, "--tokenizer", model, "--show", 0)
    assert "⟦" not in out


def test_rows_tokenised_before_need_no_tokenizer_and_show_their_ids(capsys, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "x", "input_ids": [7, 8, 9], "loss_mask": [0, 1, 1]}\n')
    code, out, _ = call(capsys, tmp_path / "set", "--data", path)
    assert (code, "7 ⟦8 9 ⟧" in out) == (0, True)
    assert json.loads((tmp_path / "set" / "_prepared.json").read_text())["tokenizer_hash"] is None


def test_tokens_that_a_tokenizer_does_not_have_are_shown_by_their_ids(capsys, tmp_path, model):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "x", "input_ids": [7, 1099511627776], "loss_mask": [0, 1]}\n')
    code, out, _ = call(capsys, tmp_path / "set", "--data", path, "--tokenizer", model)
    assert (code, "⟦1099511627776 ⟧" in out) == (0, True)
    code, out, err = call(capsys, tmp_path / "other", "--data", path, "--tokenizer", tmp_path)
    assert (code, "7 ⟦1099511627776 ⟧" in out) == (0, True)
    assert "Samples are shown by their token ids: " in err


@pytest.mark.parametrize("there", [True, False])
def test_a_link_leads_to_the_folder_to_make(tmp_path, there):
    if there:
        (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with PreparedSet(tmp_path / "link") as prepared:
        make(prepared, ["a"])
    assert (tmp_path / "link").is_symlink()
    assert pq.read_table(tmp_path / "real" / "data-00000.parquet").num_rows == 1


def test_where_a_file_system_is_mounted_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("os.path.ismount", lambda path: True)
    with pytest.raises(StoreError, match="name a folder in it"):
        PreparedSet(tmp_path / "set")
    assert os.listdir(tmp_path) == []


def test_a_set_that_is_done_takes_nothing_of_the_next_one_along(tmp_path):
    with PreparedSet(tmp_path / "set") as prepared:
        make(prepared, ["a"])
        (tmp_path / ".set.preparing").mkdir()
    assert sorted(os.listdir(tmp_path)) == [".set.preparing", "set"]


def test_untrained_samples_are_kept_if_asked_for(capsys, tmp_path, data, model):
    code, out, _ = call(capsys, tmp_path / "set", "--data", data, "--tokenizer", model, "--keep-untrained")
    assert (code, "7 samples" in out, "Excluded" in out) == (0, True, False)
    keep = SamplePreparer(preparation=Preparation(keep_untrained=True))
    again = iter_samples(tmp_path / "set", keep, max_length=None)
    assert [item.loss_mask.any() for item in again] == [True] * 5 + [False] * 2


def test_a_limit_of_a_random_order(capsys, tmp_path, data, model):
    words = ["--data", data, "--tokenizer", model, "--keep-untrained", "--limit", 3]
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        assert call(capsys, tmp_path / name, *words, "--shuffle-seed", seed)[0] == 0
    ids = {name: pq.read_table(tmp_path / name).column("id").to_pylist() for name in "abc"}
    assert len(ids["a"]) == 3
    assert ids["a"] == ids["b"] != ids["c"]


def test_a_bad_line_stops_it_wherever_it_is_and_nothing_is_left(capsys, tmp_path, data, model):
    with data.open("a") as file:
        file.write("oops\n")
    code, out, err = call(capsys, tmp_path / "set", "--data", data, "--tokenizer", model)
    assert (code, out) == (5, "")
    assert f"error: {data}:8: not JSON" in err
    assert "(--on-bad-input skip leaves such samples out)" in err
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_bad_lines_are_left_out_and_told_by_their_reasons(capsys, tmp_path, data, model):
    with data.open("a") as file:
        file.write('oops\n{"id": "all", "input_ids": [1]}\n{"id": "\\ud800", "input_ids": [1]}\n')
        file.write('{"input_ids": [1, 2, 3, 4, 5, 6]}\n{"input_ids": [1, 2, 3, 4, 5, 6, 7]}\n')
    words = ["--data", data, "--tokenizer", model, "--on-bad-input", "skip", "--max-length", 5]
    words += ["--overflow", "bad-input"]
    code, out, _ = call(capsys, tmp_path / "set", *words)
    assert code == 0
    assert "  5: prompt of ... tokens is longer than --max-length, ..." in out
    assert "  1: an earlier line has the same id, ..." in out
    assert (
        f"Left out: {data}:10: id: holds half of a surrogate pair, '\\ud800', which a Parquet file cannot hold" in out
    )
    account = json.loads((tmp_path / "set" / "_prepared.json").read_text())
    assert account["left_out"] == sum(account["left_out_reasons"].values()) == 8
    assert pq.read_table(tmp_path / "set").column("id").to_pylist() == ["all", "runs"]


def test_an_input_without_samples_makes_an_empty_set(capsys, tmp_path):
    (tmp_path / "rows.jsonl").write_text("")
    code, out, _ = call(capsys, tmp_path / "set", "--data", tmp_path / "rows.jsonl")
    assert (code, "0 samples: 0 tokens, 0 trained on." in out) == (0, True)
    assert list(iter_samples(tmp_path / "set", SamplePreparer(), max_length=None)) == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--data", "{tmp}/none.jsonl"], 5, "none.jsonl: no such file or folder"),
        (
            ["--data", "{tmp}/rows.jsonl"],
            5,
            "rows.jsonl:1: is a conversation, which needs a tokenizer: give --model or --tokenizer",
        ),
        (["--data", "{tmp}/rows.jsonl", "--model", "{tmp}/none"], 2, "is not a directory"),
        (["--data", "{tmp}/rows.jsonl", "--tokenizer", "{tmp}"], 5, "the tokenizer cannot be loaded"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(capsys, tmp_path, data, words, code, said):
    found, _, err = call(capsys, tmp_path / "set", *(word.format(tmp=tmp_path) for word in words))
    assert (found, said in err, err.count("error: ")) == (code, True, 1), err
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_what_is_there_is_not_touched(capsys, tmp_path, data):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "file").touch()
    code, _, err = call(capsys, tmp_path / "set", "--data", data)
    assert (code, "set: exists already and is not empty" in err) == (4, True)


def sample(name, length=3):
    return Sample(name, "f:1", np.arange(length), np.ones(length, np.uint8))


def make(prepared, names):
    for name in names:
        prepared.add(sample(name))
    prepared.finish({})


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    (tmp_path / ".set.preparing").mkdir()
    (tmp_path / ".set.preparing" / "data-00007.parquet").write_bytes(b"PAR1")
    with PreparedSet(tmp_path / "set") as prepared:
        make(prepared, ["a"])
    assert os.listdir(tmp_path) == ["set"]
    assert sorted(os.listdir(tmp_path / "set")) == ["_prepared.json", "data-00000.parquet"]


def test_two_processes_do_not_make_one_set(tmp_path):
    with PreparedSet(tmp_path / "set") as prepared:
        with pytest.raises(StoreError, match="another process is making this set"):
            PreparedSet(tmp_path / "set")
        make(prepared, ["a"])
    assert os.listdir(tmp_path) == ["set"]


def test_a_large_set_has_several_files_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared_module, "GROUP_TOKENS", 10)
    monkeypatch.setattr(prepared_module, "SHARD_TOKENS", 30)
    with PreparedSet(tmp_path / "set") as prepared:
        make(prepared, map(str, range(50)))
    files = sorted(path for path in (tmp_path / "set").glob("*.parquet"))
    assert [pq.read_metadata(file).num_rows for file in files] == [12, 12, 12, 12, 2]
    assert pq.read_metadata(files[0]).num_row_groups == 3
    again = iter_samples(tmp_path / "set", SamplePreparer(), max_length=None)
    assert [item.id for item in again] == [str(number) for number in range(50)]


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepared_module.pyarrow.parquet.ParquetWriter, "write_table", full)
    prepared = PreparedSet(tmp_path / "set")
    with prepared, pytest.raises(DiskFullError, match="No space left on device; free some space"):
        make(prepared, ["a"])
    assert os.listdir(tmp_path) == []


def test_percentiles_are_lengths_that_there_are():
    account = Account()
    assert account.percentiles() == {}
    for length in range(1, 201):
        account.add(sample("x", length))
    assert account.percentiles() == {0: 1, 10: 20, 50: 100, 90: 180, 99: 198, 100: 200}


def test_the_account_does_not_grow_with_what_is_left_out():
    account = Account()
    for number in range(5000):
        account.leave_out(InputProblem(f"f:{number}", f"reason {chr(0x4E00 + number)}"))
    assert (account.left_out, len(account.first)) == (5000, 20)
    assert len(account.reasons) == 101
    assert account.reasons["other reasons"] == 4900
    assert "Left out: and 4,980 more" in account.lines()


def test_tokenizers_are_told_apart_by_their_hashes():
    kimi, other = make_tokenizer(KIMI_K2), make_tokenizer(KIMI_K2)
    assert describe_tokenizer(kimi) == describe_tokenizer(other)
    other.chat_template += " "
    assert describe_tokenizer(kimi)["tokenizer_hash"] == describe_tokenizer(other)["tokenizer_hash"]
    assert describe_tokenizer(kimi)["chat_template_hash"] != describe_tokenizer(other)["chat_template_hash"]
    other.add_tokens(["<new>"])
    assert describe_tokenizer(kimi)["tokenizer_hash"] != describe_tokenizer(other)["tokenizer_hash"]


def characters(tokens):
    return "".join(map(chr, tokens))


def shown(text, mask):
    ids = np.array([ord(character) for character in text])
    return Sample("x", "f:1", ids, np.array(mask, np.uint8))


def test_on_a_terminal_the_trained_tokens_have_a_colour():
    item = shown("user:yes", [0] * 5 + [1] * 3)
    text = highlighted(item, characters, coloured=True)
    assert text.plain == "user:yes"
    assert [(span.start, span.end) for span in text.spans] == [(5, 8)]
    output = io.StringIO()
    print_samples(Console(file=output, force_terminal=True, color_system="standard", width=80), [item], characters)
    assert "user:\x1b[1;30;42myes\x1b[0m" in output.getvalue()
    assert "⟦" not in output.getvalue()


@pytest.mark.parametrize(
    ("text", "mask", "expected"),
    [
        ("abc", [1, 1, 1], "⟦abc⟧"),
        ("abc", [0, 0, 0], "abc"),
        ("abcd", [1, 0, 0, 1], "⟦a⟧bc⟦d⟧"),
        ("a\x1b[2J\r\n\tb\u202e", [0] * 6 + [1] * 4, "a\\x1b[2J\\r⟦\n\\tb\\u202e⟧"),
        ("x[red]y[/red]", [0] * 13, "x[red]y[/red]"),
        ("a" * 250, [1] * 250, f"⟦{'a' * 100} [... 50 tokens ...] {'a' * 100}⟧"),
    ],
)
def test_without_colours_they_stand_between_brackets_and_nothing_moves_the_cursor(text, mask, expected):
    item = shown(text, mask)
    assert highlighted(item, characters, coloured=False).plain == expected
    output = io.StringIO()
    print_samples(Console(file=output, width=80), [item], characters)
    assert f"{expected}\n" in output.getvalue()


def test_samples_with_images_are_left_out(capsys, tmp_path):
    """A model that takes images; the set is of texts."""
    model = make_kimi_k25(tmp_path / "model")
    token = json.loads((model / "config.json").read_text())["media_placeholder_token_id"]
    Pillow.new("RGB", (4, 4)).save(tmp_path / "a.png")
    rows = [{"id": "image", "input_ids": [5, token], "images": ["a.png"]}, {"id": "text", "input_ids": [5]}]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--data", data, "--model", model]
    code, _, err = call(capsys, tmp_path / "out", *words)
    assert code
    assert "rows.jsonl:1: it has images, which a tokenised set cannot hold" in " ".join(err.split())
    code, out, _ = call(capsys, tmp_path / "out", *words, "--on-bad-input", "skip")
    assert (code, pq.read_table(tmp_path / "out")["id"].to_pylist()) == (0, ["text"])
    assert "Left out 1 line or sample" in out
