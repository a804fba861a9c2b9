"""``hs-capture verify``: its page, its JSON, its report, its exit codes, and what it passes on."""

import dataclasses
import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import made_dataset as made
import numpy as np
import pytest
import torch
from made_answers import answer_of, write_model

from sglang_hs_capture.cli import known_answers, second_capture
from sglang_hs_capture.cli import verify as verify_module
from sglang_hs_capture.cli.check_view import BarView, LineView
from sglang_hs_capture.cli.main import main
from sglang_hs_capture.driver.summary import Summary
from sglang_hs_capture.store.jsonfile import write_object
from sglang_hs_capture.verify import parity


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("HS_CAPTURE_DEBUG", raising=False)


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "dataset"
    made.make(directory, "float32")
    return directory


@pytest.fixture
def dataset(template, tmp_path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "dataset"))


@pytest.fixture
def model(tmp_path) -> Path:
    """A model of the dataset's config: only its hash and its dtype are looked at."""
    directory = tmp_path / "model"
    directory.mkdir()
    text = {"num_hidden_layers": 6, "hidden_size": made.HIDDEN, "vocab_size": 2000, "max_position_embeddings": 64}
    config = {"architectures": ["DeepseekV3ForCausalLM"], "dtype": "bfloat16", **text}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def call(capsys, *words):
    """Run the command; its exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        main(["verify", *(str(word) for word in words)])
    out, err = capsys.readouterr()
    return ended.value.code or 0, out, err


def damage(dataset: Path) -> None:
    place = made.where(dataset, "s3", 4, "float32")
    made.flip(place.file, place.offset)


def test_a_sound_dataset_is_one_page_and_exit_code_0(capsys, dataset):
    code, out, err = call(capsys, dataset)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "Sound: nothing is wrong (0 errors and 0 warnings)."
    assert "52 of 52 rows looked at (100.0%)" in out
    assert len(out.splitlines()) < 40
    assert all(name in out for name in made.COLUMNS)


def test_damage_is_told_with_what_to_do_and_exit_code_4(capsys, dataset):
    damage(dataset)
    code, out, err = call(capsys, dataset)
    assert code == 4
    assert "ERROR: checksum, 1 time. To do: restore it from a copy" in out
    assert "'s3'" in out
    assert out.splitlines()[-1] == "NOT SOUND (1 error and 0 warnings)."
    assert err == (
        f"error: {dataset}: 1 error and 0 warnings; samples that are not to be used: 1; each finding above says what "
        "to do\n"
    )


def test_warnings_count_where_they_are_asked_to(capsys, dataset):
    (dataset / "final_norm.safetensors").unlink()
    assert call(capsys, dataset)[0] == 0
    code, _, err = call(capsys, dataset, "--strict")
    assert code == 4
    assert "0 errors and 1 warning;" in err


def test_json_has_every_finding(capsys, dataset):
    damage(dataset)
    code, out, _ = call(capsys, dataset, "--json")
    account = json.loads(out)
    assert code == 4
    assert account["sound"] is False
    assert account["counts"] == {"checksum": 1}
    (finding,) = account["findings"]
    assert finding["kind"] == "checksum"
    assert finding["severity"] == "error"
    assert finding["file"].startswith("shards/dp0-pp0-")
    assert finding["what_to_do"]
    assert "s3" in account["affected_samples"]["ids"]
    assert account["affected_samples"]["count"] == len(account["affected_samples"]["ids"])
    assert account["dataset"]["hidden_size"] == made.HIDDEN
    assert [column["column"] for column in account["columns"]] == list(made.COLUMNS)
    assert account["columns"][0]["norm_min"] <= account["columns"][0]["norm_median"]


def test_a_quick_look_says_that_it_is_one(capsys, dataset):
    out = call(capsys, dataset, "--sample", 1)[1]
    assert out.splitlines()[-1].startswith("Sound: nothing is wrong, as far as it was looked at")
    assert call(capsys, dataset, "--fraction", 0.2)[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sample", "1", "--fraction", "0.5"], "--sample and --fraction: give one of them"),
        (["--", "--tp-size", "8"], "flags after '--' are for the SGLang that --against-model starts"),
        (["--prompts", "3"], "--prompts is for --against-model"),
        (["--model", "x"], "--model is for --known-answer"),
        (["--known-answer", "--device", "cpu"], "--device is for --against-model"),
        (["--device", "cpu"], "--device is for --against-model"),
        (["--reference", "transformers", "--device", "cpu"], "--device is for --against-model"),
        (["--report", "{tmp}/none/report.html"], "none is not a directory"),
        (["--against-model", "{tmp}/none"], "is not a directory"),
    ],
)
def test_options_without_effect_are_refused(capsys, tmp_path, dataset, words, said):
    code, out, err = call(capsys, dataset, *(word.format(tmp=tmp_path) for word in words))
    assert (code, out) == (2, "")
    assert said in err


def test_no_dataset(capsys, tmp_path):
    code, out, err = call(capsys, tmp_path)
    assert (code, out) == (4, "")
    assert "expected a dataset" in err


class Tags(HTMLParser):
    """Sees that every tag is closed, and keeps attributes and texts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_the_report_holds_everything_itself(capsys, dataset, tmp_path):
    made.rewrite(dataset / "requests.jsonl", lambda r: {**r, "source": "<script>&"} if r["id"] == "s1" else r)
    made.rewrite(dataset / made.JOURNAL, lambda r: [] if r.get("rid") == made.rid_of("s1") else r)
    damage(dataset)
    report = tmp_path / "report.html"
    assert call(capsys, dataset, "--report", report)[0] == 4
    text = report.read_text()
    page = Tags()
    page.feed(text)
    assert page.open == []
    tags = [tag for tag, _ in page.seen]
    assert tags.count("svg") == 3 * len(made.COLUMNS)
    assert not {"script", "link", "img", "iframe"} & set(tags)
    assert not any(name in attributes for _, attributes in page.seen for name in ("href", "src"))
    assert "url(" not in text
    words = " ".join(page.texts)
    assert all(said in words for said in ("checksum", "missing", "<script>&", "/models/made", "restore it from a copy"))
    for tag, attributes in page.seen:
        for name in ("x", "y", "cx", "cy", "x1", "x2", "y1", "y2"):
            if tag in {"rect", "circle", "line", "text"} and name in attributes:
                assert 0 <= float(attributes[name] or "nan") <= 420
        for pair in (attributes.get("points") or "").split():
            assert all(0 <= float(number) <= 420 for number in pair.split(","))


def test_a_report_is_written_over_a_report_and_over_nothing_else(capsys, dataset, tmp_path):
    report, notes = tmp_path / "report.html", tmp_path / "notes.html"
    report.touch()
    notes.write_text("<!DOCTYPE html>\n<html>mine</html>")
    for _ in range(2):
        assert call(capsys, dataset, "--report", report)[0] == 0
    for other in (notes, dataset / "dataset.json", dataset / made.JOURNAL):
        before = other.read_bytes()
        code, out, err = call(capsys, dataset, "--report", other)
        assert (code, out) == (2, "")
        assert f"{other} is there already, and is no report" in err
        assert other.read_bytes() == before
    code, _, err = call(capsys, dataset, "--report", tmp_path)
    assert code == 2
    assert "is a directory; name a file" in err


@pytest.mark.parametrize("damaged", [False, True])
def test_what_was_found_is_told_though_the_report_cannot_be_written(capsys, dataset, damaged):
    if damaged:
        damage(dataset)
    code, out, err = call(capsys, dataset, "--json", "--report", "/dev/full")
    assert code == 4
    assert json.loads(out)["sound"] is not damaged
    assert "/dev/full: the report could not be written: No space left on device" in err
    assert ("samples that are not to be used" in err) is damaged


def test_a_description_cannot_speak_to_the_terminal(capsys, dataset):
    info = json.loads((dataset / "dataset.json").read_text())
    info.pop("crc")
    write_object(dataset / "dataset.json", {**info, "model_path": "\x1b[2J\ud800"})
    out = call(capsys, dataset)[1]
    assert "\\x1b[2J\\ud800" in out
    assert "\x1b" not in out


def test_a_model_of_another_config_is_refused(capsys, dataset, model):
    code, out, err = call(capsys, dataset, "--against-model", model)
    assert code == 4
    assert "Sound: nothing is wrong" in out, "what was read is told all the same"
    assert "was captured from a model with the config c0ffee, and that of --against-model is" in err


def captured_by(dtype: str, change):
    """What takes the place of a run: the dataset's prompts with the states that ``change`` makes of the right ones."""

    def run(model, source, capture, settings, view, *, sglang_args, cpu, start_timeout_s):
        (path,) = source.paths
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
        seen.append((model, capture, sglang_args, cpu, rows))
        made.make_from(settings.output, dtype, {row["id"]: row["input_ids"] for row in rows}, change)
        return Summary(str(settings.output), captured=len(rows))

    seen: list = []
    return run, seen


@pytest.fixture
def same_model(dataset, model, monkeypatch):
    from sglang_hs_capture.model_config import load_model_config

    monkeypatch.setattr(verify_module, "require_same_model", lambda *_: None)
    return load_model_config(model)


def test_prompts_are_captured_again_as_they_were(capsys, dataset, model, same_model, monkeypatch):
    run, seen = captured_by("float32", lambda _id, _states: None)
    monkeypatch.setattr(second_capture, "run_on_own_server", run)
    words = ["--against-model", model, "--prompts", 4, "--device", "cpu"]
    report = dataset.parent / "report.html"
    code, out, _ = call(capsys, dataset, *words, "--report", report, "--", "--tp-size", "2")
    assert "Captured again: 4 samples" in report.read_text()
    assert code == 0, out
    assert "Captured again: 4 samples" in out
    ((path, capture, sglang_args, cpu, rows),) = seen
    assert (path, sglang_args, cpu, len(rows)) == (str(model), ["--tp-size", "2"], True, 4)
    assert (capture.layers, capture.final.value, capture.dtype) == ((1, 3), "pre_norm", "float32")
    chosen = [int(row["id"]) for row in rows]
    assert [row["input_ids"] for row in rows] == [made.tokens_of(n, made.LENGTHS[n]).tolist() for n in chosen]
    assert not Path(capture.output_dir).exists()
    account = json.loads(call(capsys, dataset, *words, "--json")[1])
    assert account["recapture"]["samples"] == 4
    assert account["recapture"]["columns"][0]["row"] == 0


def test_a_state_that_comes_out_otherwise_is_named(capsys, dataset, model, same_model, monkeypatch):
    def change(id, states):
        if id == "3":
            states[11, 2] *= 1.5

    run, _ = captured_by("float32", change)
    monkeypatch.setattr(second_capture, "run_on_own_server", run)
    code, out, _ = call(capsys, dataset, "--against-model", model, "--prompts", 6, "--json")
    assert code == 4
    (finding,) = json.loads(out)["findings"]
    place = {name: finding[name] for name in ("kind", "sample", "position", "column")}
    assert place == {"kind": "recapture", "sample": "s3", "position": 11, "column": "final:pre_norm"}
    assert "the row differs by 0.5 when" in finding["what"]


def test_a_second_capture_that_fails_ends_with_its_own_code(capsys, dataset, model, same_model, monkeypatch):
    def run(*_args, **_more):
        return Summary("x", ended="the server was killed by SIGKILL", exit_code=6)

    monkeypatch.setattr(second_capture, "run_on_own_server", run)
    code, out, err = call(capsys, dataset, "--against-model", model, "--json")
    assert code == 6
    assert json.loads(out)["sound"]
    assert "could not be captured again: the server was killed by SIGKILL" in err


def test_a_damaged_dataset_is_not_captured_again(capsys, dataset, model, same_model, monkeypatch):
    monkeypatch.setattr(second_capture, "run_on_own_server", None)
    damage(dataset)
    code, out, _ = call(capsys, dataset, "--against-model", model)
    assert code == 4
    assert "The states were not compared with the model's" in out


@pytest.mark.parametrize(
    ("flags", "cpu", "given", "computed"),
    [
        ([], True, None, "float32"),
        ([], False, None, "bfloat16"),
        (["--dtype", "float16"], True, None, "float16"),
        (["--dtype=auto"], False, None, "bfloat16"),
        ([], False, "float32", "float32"),
    ],
)
def test_the_dtype_of_the_arithmetic(model, same_model, flags, cpu, given, computed):
    dtype = verify_module.options.Dtype(given) if given else None
    again = second_capture.SecondCapture(str(model), same_model, flags, cpu, 1.0, dtype)
    assert again._computed_in() == computed


def test_states_are_compared_with_transformers(capsys, dataset, monkeypatch):
    class Reference:
        def states(self, input_ids, boundaries, final):
            assert (boundaries, final.value) == ([1, 3], "pre_norm")
            states = torch.from_numpy(made.states_of(input_ids.numpy()))
            if len(input_ids) == made.LENGTHS[1]:
                states[:, 1] *= 1.001
            return list(states.unbind(1))

    asked = []
    monkeypatch.setattr(parity, "load_reference", lambda path: asked.append(path) or Reference())
    code, out, _ = call(capsys, dataset, "--reference", "transformers", "--json")
    assert code == 4
    assert asked == ["/models/made"]
    account = json.loads(out)
    assert account["reference"]["samples"] == 6
    assert {(f["kind"], f["sample"], f["column"]) for f in account["findings"]} == {("reference", "s1", "boundary:3")}
    code, out, _ = call(capsys, dataset, "--reference", "transformers", "--computed-in", "bfloat16")
    assert code == 0
    assert "Computed by transformers: 6 samples" in out


@pytest.fixture
def answered(dataset, tmp_path, monkeypatch) -> Path:
    """The dataset with what the engine said of two samples, and the model's head where --model names it."""
    made.write_answers(dataset, [answer_of("s3", 5).to_json(), answer_of("s1").to_json()])
    write_model(tmp_path / "weights")
    load = known_answers.resolve_model_config
    monkeypatch.setattr(
        known_answers, "resolve_model_config", lambda path: dataclasses.replace(load(path), config_hash="c0ffee")
    )
    return dataset


def test_the_engines_own_answers_are_computed_anew(capsys, answered, tmp_path):
    words = [answered, "--known-answer", "--model", tmp_path / "weights"]
    code, out, _ = call(capsys, *words)
    assert code == 0
    assert "Known answers: 2 prompts, 25 of the engine's own predictions" in out
    assert "warning: poor-target" in out
    assert call(capsys, *words, "--strict")[0] == 4
    code, out, _ = call(capsys, *words, "--json", "--prompts", 1, "--computed-in", "bfloat16")
    account = json.loads(out)["known_answer"]
    assert (code, account["prompts"], account["computed_in"]) == (0, 1, "bfloat16")


def test_answers_that_final_states_do_not_lead_to_are_an_error(capsys, answered, tmp_path):
    report = tmp_path / "report.html"
    made.write_norm(answered, weight=np.linspace(1.5, 0.5, made.HIDDEN))
    words = [answered, "--known-answer", "--model", tmp_path / "weights", "--report", report, "--json"]
    code, out, _ = call(capsys, *words)
    assert code == 4
    found = [finding for finding in json.loads(out)["findings"] if finding["kind"] == "known-answer"]
    assert [(f["file"], f["column"]) for f in found] == [("known_answers.jsonl", "final:pre_norm")]
    assert "Known answers: 2 prompts" in report.read_text()


def test_known_answers_that_cannot_be_had(capsys, answered, tmp_path):
    code, out, err = call(capsys, answered, "--known-answer")
    assert "Sound: nothing is wrong" in out
    assert (code, "name a directory with the model's weights by --model" in err) == (2, True)
    (answered / "known_answers.jsonl").unlink()
    code, _, err = call(capsys, answered, "--known-answer", "--model", tmp_path / "weights")
    assert (code, "expected log-probabilities of the engine" in err) == (5, True)


def test_another_models_head_is_refused(capsys, dataset, tmp_path):
    made.write_answers(dataset, [answer_of("s1").to_json()])
    code, _, err = call(capsys, dataset, "--known-answer", "--model", write_model(tmp_path / "weights"))
    assert code == 4
    assert "c0ffee, and that of --model is" in err


def test_progress_is_shown_in_bytes(capsys):
    with LineView(interval_s=0) as view:
        view.begin("tokens", 20, "samples")
        view.advance(5)
        view.begin("states", 4_000_000_000, "bytes")
        view.advance(1_000_000_000)
    assert capsys.readouterr().err.splitlines() == ["tokens: 5 of 20 samples", "states: 1.00 of 4.00 GB"]


def test_progress_on_a_terminal():
    from io import StringIO

    from rich.console import Console

    stream = StringIO()
    with BarView(Console(file=stream, force_terminal=True, width=100)) as view:
        view.begin("tokens", 20, "samples")
        view.advance(20)
        view.begin("states", 4_000_000_000, "bytes")
        view.advance(1_000_000_000)
    text = stream.getvalue()
    assert "20/20" in text
    assert "4.0 GB" in text
