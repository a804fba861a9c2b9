"""Prefill throughput with capture off, on, and with SGLang's own ``return_hidden_states``, alternating on one server.

The server runs the capture classes throughout: "off" sends the same kind of prompts under ids that are not captured, so
that the two differ in nothing but the capture. Dummy weights; states go to ``--output`` (a memory-backed file system
measures the engine's side alone, a disk measures the disk).

    python -m benchmarks.capture_overhead --shape eight-layers --output /dev/shm/states --results benchmarks/results
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.load import Timing, machine, random_prompts, run_round, served
from benchmarks.shapes import SHAPES, write_model
from sglang_hs_capture.store.session import read_sessions

KINDS = ("off", "on")
WRITER = "dp0-pp0"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="eight-layers")
    parser.add_argument("--output", type=Path, required=True, help="where the states go; emptied before the run")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--prompts", type=int, default=64, help="prompts in flight in each round")
    parser.add_argument("--length", type=int, default=2048, help="tokens a prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--return-hidden-states-prompts", type=int, default=4, help="0 leaves this baseline out")
    parser.add_argument("--ring-gib", type=float, default=4.0)
    parser.add_argument("--cpu", action="store_true", help="run on the CPU platform, to try the script")
    parser.add_argument("--model", type=Path, help="a model directory in place of the shape, to try the script")
    parser.add_argument("sglang", nargs="*", help="further SGLang flags, after --")
    return parser.parse_args()


def flags(arguments: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    capture = {
        "output_dir": str(arguments.output.resolve()),
        "ring_bytes": int(arguments.ring_gib * 2**30),
        "min_free_bytes": 0,
    }
    environment = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_hs_capture.models"}
    if arguments.cpu:
        environment["SGLANG_PLATFORM"] = "hs_capture_cpu"
    return [
        *("--model-impl", "sglang", "--load-format", "dummy", "--skip-tokenizer-init", "--disable-radix-cache"),
        *("--disable-prefill-cuda-graph", "--disable-decode-cuda-graph", "--enable-return-hidden-states"),
        *("--json-model-override-args", json.dumps({"hs_capture": capture})),
        *arguments.sglang,
    ], environment


def measure(url: str, arguments: argparse.Namespace, vocab_size: int) -> dict[str, list[Timing]]:
    journal = arguments.output / f"journal-{WRITER}.jsonl"
    timings: dict[str, list[Timing]] = {kind: [] for kind in (*KINDS, "return_hidden_states")}

    def one(kind: str, number: int, count: int) -> Timing:
        prompts = random_prompts(count, arguments.length, vocab_size, seed=hash((kind, number)) % 2**31)
        prefix = "hs-" if kind == "on" else ""
        rids = [f"{prefix}{kind}-{number}-{i}" for i in range(count)]
        fields = {"return_hidden_states": True} if kind == "return_hidden_states" else {}
        return run_round(url, prompts, rids, journal=journal if kind == "on" else None, **fields)

    for kind in KINDS:
        one(kind, -1, arguments.prompts)  # the first prefill compiles kernels
    for number in range(arguments.rounds):
        for kind in KINDS if number % 2 else reversed(KINDS):
            timings[kind].append(one(kind, number, arguments.prompts))
            print(f"round {number} {kind:>4}: {timings[kind][-1].rate:10.0f} tokens/s", flush=True)
    for number in range(2 if arguments.return_hidden_states_prompts else 0):
        timings["return_hidden_states"].append(
            one("return_hidden_states", number, arguments.return_hidden_states_prompts)
        )
    return timings


def summarise(timings: dict[str, list[Timing]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for kind, rounds in timings.items():
        if rounds:
            rates = sorted(t.rate for t in rounds)
            summary[kind] = {"tokens_per_s": statistics.median(rates), "lowest": rates[0], "highest": rates[-1]}
    pairs = zip(timings["off"], timings["on"], strict=True)
    summary["on/off"] = statistics.median(on.rate / off.rate for off, on in pairs)
    summary["acknowledged after the last answer, s"] = statistics.median(
        t.acknowledged_s - t.answered_s for t in timings["on"] if t.acknowledged_s is not None
    )
    if timings["return_hidden_states"]:
        summary["on/return_hidden_states"] = (
            summary["on"]["tokens_per_s"] / summary["return_hidden_states"]["tokens_per_s"]
        )
    return summary


def main() -> None:
    arguments = parse_arguments()
    shutil.rmtree(arguments.output, ignore_errors=True)
    shape = SHAPES[arguments.shape]
    command, environment = flags(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        model = arguments.model or write_model(Path(temporary, "model"), shape)
        log = Path(os.environ.get("HS_BENCHMARK_LOG", str(Path(temporary, "server.log"))))
        with served(model, log, command, environment) as url:
            timings = measure(url, arguments, 2000 if arguments.model else shape.vocab_size)
            (session,) = read_sessions(arguments.output)
    result = {
        "benchmark": "capture_overhead",
        "machine": machine(),
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()},
        "summary": summarise(timings),
        "rounds": {kind: [vars(t) for t in rounds] for kind, rounds in timings.items()},
        "session_counters": vars(session.counters),
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    label = arguments.model.name if arguments.model else arguments.shape
    name = f"capture_overhead-{label}-sglang{result['machine']['sglang']}.json"
    (arguments.results / name).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({"model": label, **result["summary"], "counters": result["session_counters"]}, indent=2))


if __name__ == "__main__":
    main()
