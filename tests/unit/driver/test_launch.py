"""The command and environment that start a server."""

import json
import shlex
import sys

import pytest

from sglang_hs_capture.config import CaptureConfig
from sglang_hs_capture.driver.launch import flag_value, plan_server
from sglang_hs_capture.errors import ConfigError

CAPTURE = CaptureConfig(output_dir="/data/states", run_id="r1")


def plan(args=(), **options):
    return plan_server("/models/m", CAPTURE, args, inherited={}, **options)


def overrides(found):
    return json.loads(flag_value(found.command, "--json-model-override-args"))


def test_the_plain_command_has_what_capture_needs_and_no_more():
    found = plan()
    assert found.command[:5] == (sys.executable, "-m", "sglang.launch_server", "--model-path", "/models/m")
    assert set(found.command[5:8]) == {"--model-impl", "sglang", "--disable-prefill-cuda-graph"}
    assert found.command[8] == "--json-model-override-args"
    assert len(found.command) == 10
    assert found.environment == {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_hs_capture.models"}
    assert overrides(found) == {"hs_capture": CAPTURE.to_mapping()}
    assert found.url == "http://127.0.0.1:30000"


def test_a_prefill_only_server_leaves_out_what_generation_needs():
    found = plan(own=True, generates=False, port=4000)
    assert {"--skip-tokenizer-init", "--disable-decode-cuda-graph", "--skip-server-warmup"} <= set(found.command)
    assert flag_value(found.command, "--host") == "127.0.0.1"
    assert found.url == "http://127.0.0.1:4000"


def test_the_cpu_platform_hides_the_gpu():
    found = plan(cpu=True)
    assert found.environment["SGLANG_PLATFORM"] == "hs_capture_cpu"
    assert found.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert found.environment["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize("args", [["--port", "5000", "--host", "0.0.0.0"], ["--port=5000", "--host=0.0.0.0"]])
def test_the_users_flags_come_last_and_are_heeded(args):
    found = plan([*args, "--model-impl", "auto", "--api-key", "secret"], port=4000, own=True, generates=False)
    assert found.command[-len(args) - 4 :] == (*args, "--model-impl", "auto", "--api-key", "secret")
    assert found.url == "http://127.0.0.1:5000"
    assert found.api_key == "secret"


@pytest.mark.parametrize("form", ["apart", "joined"])
def test_the_users_config_overrides_are_merged(form):
    theirs = json.dumps({"num_hidden_layers": 4, "hs_capture": {"commit_interval_s": 1.5}})
    args = ["--json-model-override-args", theirs] if form == "apart" else [f"--json-model-override-args={theirs}"]
    found = plan(["--tp-size", "8", *args, "--log-level", "debug"])
    assert found.command.count("--json-model-override-args") == 1
    assert not any(word.startswith("--json-model-override-args=") for word in found.command)
    assert found.command[-4:] == ("--tp-size", "8", "--log-level", "debug")
    merged = overrides(found)
    assert merged["num_hidden_layers"] == 4
    assert merged["hs_capture"]["commit_interval_s"] == 1.5
    assert merged["hs_capture"]["output_dir"] == "/data/states"
    assert found.capture.commit_interval_s == 1.5


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--model-path", "x"], "--model-path after '--'"),
        (["--model=x"], "--model after '--'"),
        (["--json-model-override-args", "{"], "not valid JSON"),
        (["--json-model-override-args", "[]"], "expected a JSON object"),
        (["--json-model-override-args", '{"hs_capture": 1}'], "hs_capture: expected an object"),
        (["--json-model-override-args", '{"hs_capture": {"output_dir": "/other"}}'], "output_dir is set by"),
        (["--json-model-override-args", '{"hs_capture": {"layer": 3}}'], "layer"),
        (["--port", "none"], "--port"),
    ],
)
def test_what_contradicts_a_capture_is_refused(args, said):
    with pytest.raises(ConfigError, match=said):
        plan(args)


def test_another_model_package_is_refused():
    with pytest.raises(ConfigError, match="'mine', and SGLang loads one such package only"):
        plan_server("/models/m", CAPTURE, inherited={"SGLANG_EXTERNAL_MODEL_PACKAGE": "mine"})


def test_the_shell_line_can_be_pasted():
    found = plan(["--chat-template", "it's here.jinja"], cpu=True)
    words = shlex.split(found.shell_line())
    count = len(found.environment)
    assert dict(word.split("=", 1) for word in words[:count]) == dict(found.environment)
    assert tuple(words[count:]) == found.command
