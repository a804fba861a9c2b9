"""The input of a run."""

import gzip
import json
import os

import pytest

from sglang_hs_capture.driver import source as source_module
from sglang_hs_capture.driver.source import Source, count_samples, default_workers, parse_template_kwargs
from sglang_hs_capture.errors import ConfigError, InputError


def test_rows_tokenised_before_need_no_tokenizer(tmp_path, monkeypatch):
    def load_tokenizer(*args, **kwargs):
        raise InputError("the tokenizer was loaded")

    monkeypatch.setattr(source_module, "load_tokenizer", load_tokenizer)
    data = tmp_path / "data.jsonl"
    row, conversation = {"id": "a", "input_ids": [1, 2]}, {"id": "b", "messages": [{"role": "user", "content": "x"}]}
    data.write_text(f"{json.dumps(row)}\n{json.dumps(conversation)}\n")
    samples = Source([data], "/no/tokenizer").samples(max_length=None, vocab_size=None)
    assert next(samples).id == "a"
    with pytest.raises(InputError, match="the tokenizer was loaded"):
        next(samples)


def test_a_missing_file_is_told_at_once(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        Source([tmp_path / "none.jsonl"], "").samples(max_length=None, vocab_size=None)


@pytest.mark.parametrize(("text", "count"), [("", 0), ("a\n", 1), ("a\nb", 2), ("a\n\nb\n", 3)])
def test_lines_are_counted(tmp_path, text, count):
    (tmp_path / "data").write_text(text)
    assert count_samples([tmp_path / "data", tmp_path / "data"]) == 2 * count


def test_lines_are_not_counted_where_that_would_take_long(tmp_path, monkeypatch):
    assert count_samples([tmp_path / "none"]) is None
    (tmp_path / "packed").write_bytes(gzip.compress(b"a\n"))
    assert count_samples([tmp_path / "packed"]) is None
    (tmp_path / "data").write_text("a\n" * 10)
    monkeypatch.setattr(source_module, "COUNT_BYTES_LIMIT", 19)
    assert count_samples([tmp_path / "data"]) is None


def test_the_number_of_workers_depends_on_the_machine(monkeypatch):
    for processors, share, expected in ((1, 1, 1), (2, 4, 1), (16, 4, 4), (64, 1, 16), (192, 4, 16)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=processors: range(n))
        assert default_workers(share) == expected


def test_template_settings_are_an_object():
    assert parse_template_kwargs(None) == {}
    assert parse_template_kwargs('{"thinking": false}') == {"thinking": False}
    for text in ("[]", "{", "3"):
        with pytest.raises(ConfigError, match="--chat-template-kwargs"):
            parse_template_kwargs(text)
