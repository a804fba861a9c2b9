"""The command line: arguments, errors as one line, and what the commands print."""

import errno
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import typer
from fake_server import INFO, make_sample

from sglang_hs_capture.cli import main as main_module
from sglang_hs_capture.cli import run as run_module
from sglang_hs_capture.cli.main import main, split
from sglang_hs_capture.cli.options import CaptureOptions
from sglang_hs_capture.driver.regenerate import AnswerSettings
from sglang_hs_capture.driver.summary import Summary
from sglang_hs_capture.errors import ConfigError, StoreError
from sglang_hs_capture.model_config import load_model_config
from sglang_hs_capture.store.hashing import end_hash, prefix_hashes
from sglang_hs_capture.store.identity import model_identity
from sglang_hs_capture.store.requests import DroppedRecord, RequestLedger, RequestRecord
from sglang_hs_capture.store.schema import make_rid, rle_encode, sample_key
from sglang_hs_capture.store.session import Counters, SessionRecord, write_session
from sglang_hs_capture.store.writer import StoreWriter

TEXT = {"num_hidden_layers": 61, "hidden_size": 8, "vocab_size": 32, "max_position_embeddings": 64}
RELIED_ON = (
    "--model --data --output --layers --final --dtype --on-bad-input --limit --server --max-length --tokenizer "
    "--chat-template --max-in-flight --rid-prefix --ring-gb --shard-gb --min-free-gb --device --json-summary"
)
KIMI = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": TEXT}


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("SGLANG_EXTERNAL_MODEL_PACKAGE", raising=False)
    monkeypatch.delenv("HS_CAPTURE_DEBUG", raising=False)


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    (directory / "sub").mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(KIMI))
    (directory / "model-00001.safetensors").write_bytes(b"weights")
    return directory


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"id": "a", "input_ids": [1, 2, 3]}\n')
    return path


def call(capsys, *words):
    """Run one command; its exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    return ended.value.code or 0, out, err


def test_what_follows_two_dashes_is_sglangs():
    assert split(["run", "--model", "m", "--", "--tp-size", "8", "--", "x"]) == (
        ["run", "--model", "m"],
        ["--tp-size", "8", "--", "x"],
    )
    assert split(["run"]) == (["run"], [])


def test_version_and_help(capsys):
    assert call(capsys, "--version")[1].startswith("sglang-hs-capture ")
    code, out, _ = call(capsys, "run", "--help")
    assert code == 0
    for flag in RELIED_ON.split(" "):
        assert flag in out


def test_sglang_flags_go_to_commands_that_start_it(capsys, tmp_path):
    with pytest.raises(SystemExit, match="only run, serve, demo, verify start"):
        main(["inspect", str(tmp_path), "--", "--tp-size", "8"])
    code, _, err = call(capsys, "run", "stray.jsonl", "--data", "x", "--output", "y", "--model", "z")
    assert code == 2
    assert "unexpected extra argument" in err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--model", "{tmp}/none"], 2, "is not a directory"),
        (["--layers", "three"], 2, "--layers: expected one of eagle3, sglang"),
        (["--layers", "3,31,61"], 2, "lies outside the model"),
        (["--device", "cuda"], 2, "no GPU is visible"),
        (["--data", "{tmp}/none.jsonl"], 5, "none.jsonl: no such file"),
        (["--min-free-gb", "1e9"], 4, "less than the floor"),
        (["--chat-template-kwargs", "["], 2, "--chat-template-kwargs"),
        (["--", "--model-path", "x"], 2, "--model-path after '--'"),
        (["--server", "http://127.0.0.1:9", "--", "--tp-size", "8"], 2, "with --server there is none"),
        (["--server", "http://127.0.0.1:9"], 2, "there is no such directory"),
    ],
)
def test_errors_are_one_line_with_a_code_of_their_own(capsys, tmp_path, model, data, words, code, said):
    words = [word.format(tmp=tmp_path) for word in words]
    ours = ["run", "--model", model, "--data", data, "--output", tmp_path / "out"]
    found, out, err = call(capsys, *ours, *words)
    assert found == code
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err


def put_captured(output: Path) -> None:
    """A dataset that a server, whose record is there too, has captured ``data`` into."""
    store = StoreWriter.open(output, "dp0-pp0", INFO, session_id="5e55", shard_bytes=2**20, min_free_bytes=0)
    tokens = np.array([1, 2, 3])
    rows = np.zeros(3 * INFO.row_bytes, np.uint8)
    extents = store.append(rows, tokens, np.arange(3), prefix_hashes(tokens, 0, 0))
    store.add_sample(make_rid("hs-", sample_key("a"), 0, end_hash(tokens)), 3, extents, end_hash(tokens))
    store.close()
    record = SessionRecord(writer="dp0-pp0", session_id="5e55" * 8, pid=1, host="here", model=model_identity(INFO))
    write_session(output, record)
    with RequestLedger.open(output) as ledger:
        ledger.append(RequestRecord("a", sample_key("a"), 3, end_hash(tokens), rle_encode(np.ones(3, np.uint8)), "x"))


def test_other_settings_than_the_datasets_are_refused_where_nothing_is_left(capsys, tmp_path, data):
    put_captured(tmp_path / "out")
    ours = ["run", "--server", "http://127.0.0.1:9", "--data", data, "--output", tmp_path / "out"]
    code, out, err = call(capsys, *ours)
    assert (code, "Nothing left to do" in out) == (0, True), err
    code, out, err = call(capsys, *ours, "--dtype", "bfloat16")
    assert (code, out) == (4, "")
    assert "captures differently: dtype" in err


def test_a_server_whose_model_is_not_here_is_named(capsys, tmp_path):
    put_captured(tmp_path / "out")
    talk = tmp_path / "talk.jsonl"
    talk.write_text(json.dumps({"id": "b", "messages": [{"role": "user", "content": "x"}]}) + "\n")
    code, _, err = call(capsys, "run", "--server", "http://127.0.0.1:9", "--data", talk, "--output", tmp_path / "out")
    assert code == 5
    assert f"The server's model, {INFO.model_path}, is neither a directory here nor in the hub's cache" in err
    assert "needs a tokenizer: give --model or --tokenizer" in err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--ray-engines", "0"], "--ray-engines: expected a number of engines or auto; got '0'"),
        (["--ray-resources", '{"GPU": -1}'], "--ray-resources: expected a JSON object of amounts"),
        (["--ray-resources", "8"], "--ray-resources: expected a JSON object of amounts"),
        (["--ray-nodes", "2"], "--ray-nodes 2: an engine of 1 ranks does not spread evenly"),
    ],
)
def test_a_plan_for_a_cluster_that_makes_no_sense_is_refused(capsys, tmp_path, data, model, words, named):
    code, _, err = call(capsys, "run", "--ray", "--model", model, "--data", data, "--output", tmp_path / "out", *words)
    assert (code, named in err) == (2, True), err
    assert not (tmp_path / "out").exists()


def test_a_cluster_needs_ray(capsys, tmp_path, data, model, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = call(capsys, "run", "--ray", "--model", model, "--data", data, "--output", tmp_path / "out")
    assert code == 2
    assert "Ray is not installed" in err


def test_merge_joins_datasets_and_says_what_it_did(capsys, tmp_path, dataset):
    code, out, err = call(capsys, "merge", tmp_path / "out", dataset)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith(f"{tmp_path / 'out'}: ")
    before, after = (json.loads(call(capsys, "inspect", path, "--json")[1]) for path in (dataset, tmp_path / "out"))
    assert after["samples"] == before["samples"] > 0
    assert call(capsys, "merge", tmp_path / "out", dataset)[0] == 2


def test_a_name_that_is_no_text_is_shown_as_far_as_it_is(capsys, tmp_path, dataset):
    out = tmp_path / os.fsdecode(b"r\xffd \x1b[31m")
    code, shown, _ = call(capsys, "merge", out, dataset)
    assert (code, shown.splitlines()[-1].startswith(f"{tmp_path}/r\\udcffd \\x1b[31m: ")) == (0, True)


def test_a_model_is_needed_without_a_server(capsys, tmp_path, data):
    code, _, err = call(capsys, "run", "--data", data, "--output", tmp_path / "out")
    assert (code, "--model: expected a directory or a hub id" in err) == (2, True)


def test_commands_that_set_up_a_capture_have_the_same_options_for_it():
    commands = typer.main.get_command(main_module.app).commands
    offered = {
        name: {
            parameter.name: (parameter.opts, parameter.help, parameter.default)
            for parameter in commands[name].params
            if parameter.name in {field.name for field in fields(CaptureOptions)}
        }
        for name in ("run", "serve", "prepare")
    }
    assert len(offered["run"]) == len(fields(CaptureOptions))
    assert offered["run"] == offered["serve"] == offered["prepare"]
    assert not any(parameter.name == "capture" for command in commands.values() for parameter in command.params)


def test_debug_keeps_the_traceback(monkeypatch, tmp_path):
    monkeypatch.setenv("HS_CAPTURE_DEBUG", "1")
    with pytest.raises(main_module.HsCaptureError):
        main(["inspect", str(tmp_path)])


@pytest.mark.parametrize("command", ["verify", "run --data DATA --output OUT --server"])
@pytest.mark.parametrize(("code", "advice"), [(errno.EACCES, "let this user"), (errno.ENAMETOOLONG, "a shorter path")])
def test_a_path_that_cannot_be_looked_at_is_told(capsys, tmp_path, data, monkeypatch, command, code, advice):
    path, stat = tmp_path / "closed", os.stat

    def refuse(asked, **more):
        if str(asked).startswith(str(path)):
            raise OSError(code, os.strerror(code), str(asked))
        return stat(asked, **more)

    monkeypatch.setattr(os, "stat", refuse)
    words = [{"OUT": tmp_path / "out", "DATA": data}.get(word, word) for word in command.split()]
    exit_code, _, err = call(capsys, *words, path)
    assert exit_code == 2
    assert err.startswith(f"error: {path}")
    assert os.strerror(code) in err
    assert advice in err
    monkeypatch.setenv("HS_CAPTURE_DEBUG", "1")
    with pytest.raises(OSError, match=re.escape(os.strerror(code))):
        main([str(word) for word in [*words, path]])


def test_run_passes_its_options_on(capsys, tmp_path, model, data, monkeypatch):
    seen = {}

    def run_on_own_server(name, source, capture, settings, view, **more):
        seen.update(name=name, source=source, capture=capture, settings=settings, **more)
        return Summary(str(settings.output), asked=2, captured=1, ended="told why", exit_code=6)

    monkeypatch.setattr(run_module, "run_on_own_server", run_on_own_server)
    words = f"--layers 2,4 --final both --dtype float16 --on-bad-input skip --limit 7 --max-in-flight 3 \
        --max-length 9 --overflow drop --split-turns never --loss-on last --rid-prefix x- --shuffle-seed 5 \
        --keep-untrained --workers 3 --ring-gb 2 --shard-gb 1 --min-free-gb 0.5 \
        --json-summary {tmp_path}/s.json --trust-remote-code"
    ours = ["run", "--model", model, "--data", data, "--output", tmp_path / "out", *words.split()]
    code, out, err = call(capsys, *ours, "--", "--tp-size", "8")
    assert code == 6
    assert out.startswith("Captured 1 sample ")
    assert err.splitlines()[-1] == "error: told why"
    assert json.loads((tmp_path / "s.json").read_text())["ended"] == "told why"
    assert seen["sglang_args"] == ["--trust-remote-code", "--tp-size", "8"]
    assert seen["cpu"] is True
    capture, settings = seen["capture"], seen["settings"]
    assert (capture.layers, capture.final, capture.dtype, capture.rid_prefix) == ((2, 4), "both", "float16", "x-")
    assert (capture.ring_bytes, capture.shard_bytes, capture.min_free_bytes) == (2 * 2**30, 2**30, 2**29)
    assert (settings.on_bad_input, settings.limit) == ("skip", 7)
    source = seen["source"]
    prepared = source.preparation
    assert (prepared.max_length, prepared.overflow) == (9, "drop")
    assert (prepared.split_turns, prepared.loss_on) == ("never", "last")
    assert settings.pump.max_prompts == 3
    assert (source.shuffle_seed, prepared.keep_untrained, source.workers) == (5, True, 3)
    assert capture.output_dir == str(tmp_path / "out")


def test_defaults(capsys, tmp_path, model, data, monkeypatch):
    seen = {}

    def run_on_own_server(name, source, capture, settings, view, **more):
        seen.update(capture=capture, settings=settings, **more)
        return Summary("")

    monkeypatch.setattr(run_module, "run_on_own_server", run_on_own_server)
    assert call(capsys, "run", "--model", model, "--data", data, "--output", tmp_path / "out")[0] == 0
    assert "running on the CPU platform" in seen["notice"]
    capture = seen["capture"]
    assert (capture.layers, capture.final, capture.dtype) == ("eagle3", "pre_norm", "bfloat16")
    assert (capture.ring_bytes, capture.rid_prefix) == (2**28, "hs-")
    assert seen["settings"].on_bad_input == "stop"
    assert seen["answers"] is None
    words = ["--regenerate", "--max-new-tokens", 64, "--temperature", 0.5, "--top-p", 0.75]
    assert call(capsys, "run", "--model", model, "--data", data, "--output", tmp_path / "out", *words)[0] == 0
    assert seen["answers"] == AnswerSettings(max_new_tokens=64, temperature=0.5, top_p=0.75)


def test_serve_prints_the_plain_command(capsys, tmp_path, model):
    words = ["serve", "--model", model, "--output", tmp_path / "out", "--layers", "sglang", "--dry-run"]
    code, out, _ = call(capsys, *words, "--", "--tp-size", "8")
    assert code == 0
    line = shlex.split(out)
    assert "SGLANG_EXTERNAL_MODEL_PACKAGE=sglang_hs_capture.models" in line
    assert line[-2:] == ["--tp-size", "8"]
    overrides = json.loads(line[line.index("--json-model-override-args") + 1])
    assert overrides["hs_capture"]["layers"] == "sglang"
    assert not (tmp_path / "out").exists()


def test_prepare_links_the_files_and_edits_the_config(capsys, tmp_path, model):
    out = tmp_path / "prepared"
    code, printed, _ = call(capsys, "prepare", model, out, "--output", tmp_path / "states", "--layers", "3,31,59")
    assert code == 0
    assert f"--model-path {out}" in printed
    assert {path.name for path in out.iterdir()} == {path.name for path in model.iterdir()}
    assert (out / "model-00001.safetensors").read_bytes() == b"weights"
    assert (out / "model-00001.safetensors").is_symlink()
    assert not (out / "config.json").is_symlink()
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["KimiK25Capture", "KimiK25ForConditionalGeneration"]
    assert config["hs_capture"]["layers"] == [3, 31, 59]
    assert config["hs_capture"]["output_dir"] == str(tmp_path / "states")
    assert load_model_config(out).config_hash == load_model_config(model).config_hash
    assert json.loads((model / "config.json").read_text()) == KIMI, "the model itself is left alone"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_prepare_refuses_what_it_cannot_do(capsys, tmp_path, model):
    states = ["--output", tmp_path / "states"]
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious").touch()
    code, _, err = call(capsys, "prepare", model, full, *states)
    assert (code, "not empty" in err) == (4, True)
    code, _, err = call(capsys, "prepare", model, tmp_path / "p", *states, "--layers", "61")
    assert (code, "lies outside the model" in err) == (2, True)
    (model / "config.json").write_text(json.dumps({**KIMI, "architectures": ["LlamaForCausalLM"]}))
    code, _, err = call(capsys, "prepare", model, tmp_path / "p", *states)
    assert (code, "LlamaForCausalLM is not supported; supported are Deepseek" in err) == (2, True)
    assert not (tmp_path / "p").exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    (model / "config.json").write_text(json.dumps(KIMI))
    assert call(capsys, "prepare", model, empty, *states)[0] == 0


@pytest.fixture
def dataset(tmp_path):
    """Two samples, one of which shares its first rows with the other; one pending, one dropped, one failed."""
    directory = tmp_path / "states"
    store = StoreWriter.open(directory, "dp0-pp0", INFO, session_id="5e" * 16, shard_bytes=2**20, min_free_bytes=0)
    with RequestLedger.open(directory) as ledger:
        for name in ("a", "b", "pending", "dropped"):
            sample = make_sample(name)
            ids = sample.input_ids
            mask = tuple(rle_encode(sample.loss_mask))
            ledger.append(RequestRecord(name, sample_key(name), len(ids), end_hash(ids), mask, sample.source))
            if name in "ab":
                rows = bytes(len(ids) * INFO.row_bytes)
                extents = store.append(rows, ids, range(len(ids)), prefix_hashes(ids, 0, 0))
                store.add_sample(make_rid("hs-", sample_key(name), 0, end_hash(ids)), len(ids), extents, end_hash(ids))
        ledger.append(DroppedRecord("dropped", "data.jsonl:1", "no luck"))
    ids = make_sample("lost").input_ids
    store.append(bytes(5 * INFO.row_bytes), ids, range(5), prefix_hashes(ids, 0, 0))
    store.add_failure(make_rid("hs-", sample_key("pending"), 0, 7), "non_finite", "state 0")
    store.commit()
    store.close()
    counters = Counters(rows=15, bytes=240, samples=2, failed=1, blocked_s=0.5)
    record = SessionRecord("dp0-pp0", "5e" * 16, 1, "host", state="closed", counters=counters)
    write_session(directory, record)
    return directory


def test_inspect_json_is_what_scripts_rely_on(capsys, dataset):
    code, out, _ = call(capsys, "inspect", dataset, "--json")
    assert code == 0
    found = json.loads(out)
    session = found["sessions"][0]
    assert session.pop("updated_at")
    assert found == {
        "path": str(dataset),
        "model": {
            "path": "/models/tiny",
            "architecture": "DeepseekV3ForCausalLM",
            "config_hash": "0" * 64,
            "num_layers": 4,
            "hidden_size": 2,
            "final_norm_eps": 1e-6,
        },
        "boundaries": [1],
        "columns": ["boundary:1", "final:pre_norm"],
        "dtype": "float32",
        "created_at": "2025-01-01T00:00:00.000Z",
        "sglang_version": "0.5.23",
        "samples": 2,
        "tokens": 10,
        "images": {"samples": 0, "tokens": 0},
        "rows": 15,
        "rows_without_sample": 5,
        "reused": {"disk": 0.0, "compute": 0.0},
        "bytes": 240,
        "shards": {"finished": 1, "unfinished": 0},
        "scale_bytes": 0,
        "requests": {
            "asked": 4,
            "pending": 1,
            "dropped": 1,
            "failed": 1,
            "mismatched": 0,
            "unclaimed": 0,
        },
        "pending_ids": ["pending"],
        "zero_loss_masks": {"count": 0, "ids": []},
        "reasons": {"no luck": 1, "non_finite": 1},
        "draft_ids": {"boundary": [1], "output_of_layer": [0], "final": {"boundary": 4, "output_of_layer": 3}},
        "sessions": [
            {
                "writer": "dp0-pp0",
                "state": "closed",
                "running": None,
                "error": None,
                "counters": {
                    "rows": 15,
                    "bytes": 240,
                    "samples": 2,
                    "failed": 1,
                    "incomplete": 0,
                    "blocked_s": 0.5,
                    "disk_wait_s": 0.0,
                    "ring_bytes": 0,
                    "slot_table_bytes": 0,
                },
            }
        ],
    }


def test_inspect_speaks_plainly(capsys, dataset):
    code, out, _ = call(capsys, "inspect", dataset)
    assert code == 0
    for part in (
        "Samples      2 (10 tokens)",
        "33.3% of them in no sample",
        "4 asked for, 1 still missing, 1 dropped, 1 failed, 0 of other tokens",
        "  still missing: 'pending'; run again to capture them",
        "1 x no luck",
        "cannot serve a draft model whose first boundary is 1",
        "SpecForge, ModelOpt, speculators 0.4 [0], final 3",
        "vLLM, speculators 0.9                [1], final 4",
    ):
        assert part in out


def test_inspect_names_samples_that_nothing_is_learned_from_and_some_that_are_missing(capsys, dataset):
    with RequestLedger.open(dataset) as ledger:
        for name in ("a", *(f"more\n{number}" for number in range(7))):
            ids = make_sample(name).input_ids
            ledger.append(RequestRecord(name, sample_key(name), len(ids), end_hash(ids), (len(ids),), "data.jsonl:9"))
    out = call(capsys, "inspect", dataset)[1]
    assert "1 captured samples have a loss mask of zeros only, so that nothing is learned from them: 'a'" in out
    assert "8 still missing" in out
    assert "'pending', 'more\\n0', 'more\\n1', 'more\\n2', 'more\\n3' and 3 more; run again" in out


def test_inspect_of_no_dataset_is_one_line(capsys, tmp_path):
    code, _, err = call(capsys, "inspect", tmp_path)
    assert code == 4
    assert "there is no dataset.json" in err


def test_the_cli_imports_neither_torch_nor_sglang():
    probe = (
        "import sys, sglang_hs_capture.cli.main; print(sorted({'torch', 'sglang', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_inspect_tells_a_session_whose_process_has_ended(capsys, dataset):
    import socket

    gone = subprocess.Popen(["true"])
    gone.wait()
    write_session(dataset, SessionRecord("dp0-pp0", "5e" * 16, gone.pid, socket.gethostname(), state="ready"))
    assert "dp0-pp0 ready, but its process has ended" in call(capsys, "inspect", dataset)[1]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--server", "http://127.0.0.1:1", "--ring-gb", "2"], "--ring-gb is a setting of the server"),
        (["--server", "http://127.0.0.1:1", "--device", "cpu"], "--device is a setting of the server"),
        (["--model", "m", "--overflow", "drop"], "--overflow says what becomes of samples longer than --max-length"),
        (["--model", "m", "--api-key", "k"], "--api-key is for --server"),
        (["--model", "m", "--temperature", "1"], "--temperature is a setting of --regenerate"),
        (["--model", "m", "--regenerate", "--split-turns", "never"], "--split-turns has no meaning for what the model"),
        (["--model", "m", "--ray-nodes", "2"], "--ray-nodes is for --ray"),
        (["--model", "m", "--ray-engines", "2"], "--ray-engines is for --ray"),
        (["--ray", "--server", "http://127.0.0.1:1"], "--server and --ray: servers are running already"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(capsys, tmp_path, words, named):
    data = tmp_path / "data.jsonl"
    data.write_text('{"id": "a", "input_ids": [1, 2]}\n')
    code, _, err = call(capsys, "run", "--data", data, "--output", tmp_path / "out", *words)
    assert code == 2
    assert named in err


@pytest.mark.parametrize(
    "text",
    [
        b"http://a:1/\nhttps://[::1]:2\n",
        b"\xef\xbb\xbf# the first rack\r\nhttp://a:1/\r\n\r\n  https://[::1]:2\r\n",
    ],
)
def test_servers_are_named_in_a_file(tmp_path, text):
    file = tmp_path / "servers.txt"
    file.write_bytes(text)
    assert run_module._urls([str(file)], None) == ["http://a:1/", "https://[::1]:2"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "on each line, and there is none"),
        (b"# none yet\n", "on each line, and there is none"),
        (b"\xff\xfeh", "expected a file with a URL on each line"),
        (b"http://a:1\na:2\n", "servers.txt, line 2: expected a URL such as"),
        (b"http://a:1 # the first\n", "servers.txt, line 1: expected a URL such as"),
    ],
)
def test_a_file_of_servers_that_has_something_else_is_refused(tmp_path, text, said):
    file = tmp_path / "servers.txt"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=said):
        run_module._urls([str(file)], None)


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "://a",
        "ftp://a",
        "http://[::1",
        "http://a:99999",
        "http://a:0",
        "http://a:b",
        "http://a/?x=1",
        "http://a b",
    ],
)
def test_a_url_at_which_no_server_can_be_asked_is_refused_at_once(url):
    with pytest.raises(ConfigError, match="--server: expected a URL such as"):
        run_module._urls([url], None)


def test_a_password_in_a_url_is_not_repeated_and_not_sent_beside_a_key():
    assert run_module._urls(["http://me:secret@a:1"], None)
    for url, key in (("http://me:secret@a:x", None), ("http://me:secret@a:1", "key")):
        with pytest.raises(ConfigError) as refused:
            run_module._urls([url], key)
        assert "secret" not in str(refused.value)


def test_a_summary_that_cannot_be_written_is_told_and_a_worse_end_counts(capsys):
    with pytest.raises(StoreError, match="--json-summary /dev/full: could not be written: No space left on device"):
        run_module.report(Summary("out"), Path("/dev/full"))
    run_module.report(Summary("out", ended="lost the server", exit_code=6), Path("/dev/full"))
    assert "error: --json-summary /dev/full: could not be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["inspect", "x", "--watch", "--interval", "inf"], ["run", "--data", "x", "--output", "x", "--temperature", "inf"]],
)
def test_a_number_without_end_is_refused(capsys, words):
    code, _, err = call(capsys, *words)
    assert code == 2
    assert f"Invalid value for '{words[-2]}'" in err
