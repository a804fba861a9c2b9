"""Each guard on the configuration object of the SGLang that is installed, not on a stand-in of ours."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_hs_capture.demo.checkpoint import make_deepseek_v3

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TWO_RANKS = ["--tp-size", "2"]
# Flags, what becomes of them, and what the answer says.
CASES: dict[str, tuple[list[str], str, str]] = {
    "the documented launch": ([], "passed", ""),
    "the hierarchical cache": (["--enable-hierarchical-cache"], "refused", "remove --enable-hierarchical-cache"),
    "mixed chunks": (["--enable-mixed-chunk"], "refused", "remove --enable-mixed-chunk"),
    "two-batch overlap": (["--enable-two-batch-overlap"], "refused", "remove --enable-two-batch-overlap"),
    "context parallelism": (["--attn-cp-size", "2", *TWO_RANKS], "refused", "set --attn-cp-size and --dcp-size to 1"),
    "in decode": (["--dcp-size", "2", *TWO_RANKS], "refused", "set --attn-cp-size and --dcp-size to 1"),
    "speculative decoding": (["--speculative-algorithm", "NGRAM"], "refused", "remove --speculative-algorithm"),
    "LoRA": (["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj"], "refused", "--enable-lora"),
    "multiplexing": (["--enable-pdmux"], "refused", "remove --enable-pdmux"),
    "disaggregation": (["--disaggregation-mode", "prefill"], "refused", "set --disaggregation-mode null"),
    "DP attention": (["--enable-dp-attention", "--dp-size", "2", *TWO_RANKS], "passed", ""),
    # Only with speculative decoding, which is refused as well.
    "returned states": (["--enable-return-aux-hidden-states"], "sglang", "--speculative-algorithm"),
    "replicas": (["--dp-size", "2"], "passed", ""),
    "the prefill graph": (["PREFILL_GRAPH"], "refused", "add --disable-prefill-cuda-graph"),
    "no MLA": (["NO_MLA"], "refused", "does not recognise this model as multi-head latent attention"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the guards say to every case, asked in one process: SGLang takes long to import."""
    folder = tmp_path_factory.mktemp("models")
    model, other = make_deepseek_v3(folder / "model"), folder / "other"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["DeepseekV3Capture"]}))
    lines = []
    for flags, _, _ in CASES.values():
        path = other if "NO_MLA" in flags else model
        common = ["--model-path", str(path), "--model-impl", "sglang", "--skip-tokenizer-init"]
        lines.append([*common, "--disable-prefill-cuda-graph", *(flag for flag in flags if flag != "NO_MLA")])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "CUDA_VISIBLE_DEVICES": "",
        "SGLANG_PLATFORM": "hs_capture_cpu",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_hs_capture.models",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.compat.config_object"],
        input="".join(json.dumps(line) + "\n" for line in lines),
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_each_mode_is_judged_from_sglangs_own_settings(answers, case):
    _, expected, words = CASES[case]
    verdict, said = answers[case]
    assert verdict == expected, said
    assert words in said
