"""Capture of prompts that share a prefix, with SGLang's radix cache on and off, by ``hs-capture run`` end to end.

Both runs take the same tokenised prompts in the same random order, each on its own server of the same model, and are
timed from the first request sent to the last sample acknowledged; another set before has compiled the kernels. The disk
share compares the rows stored with the prompts' unique prefixes.

    python -m benchmarks.prefix_reuse --shape eight-layers --output /dev/shm/reuse --results benchmarks/results
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.load import served
from benchmarks.report import write_json
from benchmarks.shapes import SHAPES, write_model


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="eight-layers")
    parser.add_argument("--model", type=Path, help="a model directory in place of the shape, to try the script")
    parser.add_argument("--output", type=Path, required=True, help="where the datasets go; emptied before the run")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--shared", type=int, default=1536)
    parser.add_argument("--sets", type=int, default=2, help="measured sets of prompts, each with a prefix of its own")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU platform, to try the script")
    parser.add_argument("sglang", nargs="*", help="further SGLang flags, after --")
    return parser.parse_args()


def write_prompts(file: Path, arguments: argparse.Namespace, vocab_size: int, seed: int, sets: int) -> int:
    """Write sets of prompts in random order; returns the number of unique prefixes, which is the rows needed."""
    generator = random.Random(seed)
    lines, unique = [], 0
    for number in range(sets):
        shared = [generator.randrange(10, vocab_size) for _ in range(arguments.shared)]
        unique += arguments.shared
        for index in range(arguments.prompts):
            own = [generator.randrange(10, vocab_size) for _ in range(arguments.length - arguments.shared)]
            unique += len(own)
            lines.append(json.dumps({"id": f"{seed}-{number}-{index}", "input_ids": shared + own}))
    generator.shuffle(lines)
    file.write_text("\n".join(lines) + "\n")
    return unique


def hs_capture(*arguments: str | Path) -> bytes:
    """Run the command line and return what it printed."""
    command = [sys.executable, "-m", "sglang_hs_capture.cli.main", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def inspect_rows(output: Path) -> int:
    return int(json.loads(hs_capture("inspect", output, "--json"))["rows"])


def measure(model: Path, files: list[Path], output: Path, arguments: argparse.Namespace, *more: str) -> dict[str, Any]:
    """Capture the first file to warm up and the second to measure; returns the second's summary and rows."""
    override = {"hs_capture": {"output_dir": str(output), "min_free_bytes": 0}}
    flags = ["--model-impl", "sglang", "--disable-prefill-cuda-graph", "--disable-decode-cuda-graph"]
    flags += ["--skip-tokenizer-init", "--json-model-override-args", json.dumps(override), *arguments.sglang, *more]
    environment = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_hs_capture.models"}
    if arguments.cpu:
        environment["SGLANG_PLATFORM"] = "hs_capture_cpu"
    summary = output.with_suffix(".json")
    rows = 0
    with served(model, output.with_suffix(".log"), flags, environment) as url:
        for file in files:
            rows = inspect_rows(output) if summary.exists() else 0
            hs_capture("run", "--server", url, "--data", file, "--output", output, "--json-summary", summary)
    result = {**json.loads(summary.read_text()), "rows": inspect_rows(output) - rows}
    shutil.rmtree(output)
    return result


def main() -> None:
    arguments = parse_arguments()
    shutil.rmtree(arguments.output, ignore_errors=True)
    arguments.output.mkdir(parents=True)
    shape = SHAPES[arguments.shape]
    dummy = [] if arguments.model else ["--load-format", "dummy"]
    with tempfile.TemporaryDirectory() as temporary:
        model = arguments.model or write_model(Path(temporary, "model"), shape)
        files = [Path(temporary, "warm.jsonl"), Path(temporary, "measured.jsonl")]
        vocab_size = 2000 if arguments.model else shape.vocab_size
        write_prompts(files[0], arguments, vocab_size, seed=1, sets=1)
        unique = write_prompts(files[1], arguments, vocab_size, seed=2, sets=arguments.sets)
        runs = {
            "on": measure(model, files, arguments.output / "on", arguments, *dummy),
            "off": measure(model, files, arguments.output / "off", arguments, *dummy, "--disable-radix-cache"),
        }
    tokens = arguments.sets * arguments.prompts * arguments.length
    rates = {kind: tokens / run["seconds"] for kind, run in runs.items()}
    found = {
        "tokens": tokens,
        "unique": unique,
        "tokens_per_s": rates,
        "on/off": rates["on"] / rates["off"],
        "rows/unique": runs["on"]["rows"] / unique,
    }
    label = arguments.model.name if arguments.model else arguments.shape
    name = f"prefix_reuse-{label}-sglang{version('sglang')}"
    write_json(arguments.results, name, "prefix_reuse", arguments, **found, runs=runs)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
