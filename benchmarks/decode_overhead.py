"""Decode throughput of a server with the plugin against SGLang's own class, with CUDA graphs for decode on both.

Both servers are up at once, on the same GPU, and only one of them has work at a time. In each round three kinds take
turns, in an order that is turned from round to round: SGLang's own class; the capture class with prompts that are not
captured; the capture class with prompts that are captured and then decode. All prompts of a kind are sent at once and
generate the same number of tokens; its rate is of generated tokens, from the first request sent to the last answer, so
the prefill of the short prompts is in it on both servers alike. A ratio is that of two kinds in the same round.

    python -m benchmarks.decode_overhead --shape eight-layers --output /dev/shm/states --results benchmarks/results
"""

import argparse
import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from benchmarks.load import (
    SILENCE_TIMEOUT_S,
    Timing,
    machine,
    random_prompts,
    run_round,
    served,
    server_flags,
    stable_seed,
    text_config,
)
from benchmarks.report import Report, plain
from benchmarks.shapes import SHAPES, write_model
from sglang_hs_capture.store.session import Counters, read_sessions

WARM_UP_ROUNDS = 2
UPSTREAM, IDLE, CAPTURED = "SGLang's own class", "plugin, prompts not captured", "plugin, prompts captured"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="eight-layers")
    parser.add_argument("--output", type=Path, required=True, help="where captured states go; emptied before the run")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--requests", type=int, default=64, help="requests in flight")
    parser.add_argument("--length", type=int, default=32, help="tokens a prompt")
    parser.add_argument("--generate", type=int, default=256, help="tokens to generate for each prompt")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each kind on each server")
    parser.add_argument("--ring-gib", type=float, default=4.0)
    parser.add_argument("--cpu", action="store_true", help="run on the CPU platform, to try the script")
    parser.add_argument("--model", type=Path, help="a model directory in place of the shape, to try the script")
    parser.add_argument("sglang", nargs="*", help="further SGLang flags, after --")
    return parser.parse_args()


def one_round(url: str, kind: str, number: int, arguments: argparse.Namespace, vocab_size: int) -> Timing:
    """Send one round; the prompts of round ``number`` are the same for every kind and server."""
    prompts = random_prompts(arguments.requests, arguments.length, vocab_size, stable_seed("decode", number))
    prefix = "hs-" if kind == CAPTURED else "other-"
    rids = [f"{prefix}{number}-{i}" for i in range(arguments.requests)]
    # The acknowledgements are not waited for: generating does not wait for the disk either.
    timing = run_round(url, prompts, rids, max_new_tokens=arguments.generate)
    print(f"{kind:>30} {number:3}: {timing.generated_rate:10.0f} tokens/s", flush=True)
    return timing


def measure(urls: dict[str, str], arguments: argparse.Namespace, vocab_size: int) -> dict[str, list[Timing]]:
    """Warm up, then run the rounds of all kinds in turn; ``urls`` gives each kind's server."""
    kinds = list(urls)
    timings: dict[str, list[Timing]] = {kind: [] for kind in kinds}
    for number in range(-WARM_UP_ROUNDS, arguments.rounds):
        shift = number % len(kinds)
        for kind in (*kinds[shift:], *kinds[:shift]):
            timing = one_round(urls[kind], kind, number, arguments, vocab_size)
            if number >= 0:
                timings[kind].append(timing)
    return timings


def captured_samples(output: Path, expected: int) -> Counters:
    """Wait until the capture has acknowledged what was sent to it; a plugin that does nothing would cost nothing.

    Raises:
        RuntimeError: it acknowledges fewer samples.
    """
    deadline = time.monotonic() + SILENCE_TIMEOUT_S
    while True:
        (session,) = read_sessions(output)
        if session.counters.samples == expected:
            return session.counters
        if time.monotonic() > deadline:
            raise RuntimeError(f"expected {expected} captured samples, there are {session.counters.samples}: {session}")
        time.sleep(0.2)


def build_report(arguments: argparse.Namespace, label: str, timings: dict[str, list[Timing]]) -> Report:
    """Series of the three kinds, and the ratios of each round."""
    series = {kind: [t.generated_rate for t in found] for kind, found in timings.items()}
    ratios = {
        f"{kind} / {UPSTREAM}": [a / b for a, b in zip(series[kind], series[UPSTREAM], strict=True)]
        for kind in (IDLE, CAPTURED)
    }
    return Report(
        "decode_overhead",
        label,
        "generated tokens/s",
        machine(),
        plain(arguments),
        series=series,
        ratios=ratios,
        details={"rounds": {kind: [vars(t) for t in found] for kind, found in timings.items()}},
    )


def main() -> None:
    arguments = parse_arguments()
    shutil.rmtree(arguments.output, ignore_errors=True)
    capture = {
        "output_dir": str(arguments.output.resolve()),
        "ring_bytes": int(arguments.ring_gib * 2**30),
        "min_free_bytes": 0,
    }
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as servers:
        model = arguments.model or write_model(Path(temporary, "model"), SHAPES[arguments.shape])
        vocab_size = text_config(model)["vocab_size"]
        log = Path(os.environ.get("HS_BENCHMARK_LOG", str(Path(temporary, "server.log"))))
        tokens = arguments.requests * (arguments.length + arguments.generate + 64)
        common = ["--load-format", "dummy", "--max-running-requests", str(arguments.requests)]
        # Two servers share the GPU: the KV cache is as large as what is in flight, and no larger. The fraction is of
        # what is free at a server's start, of which the second one's weights are the larger part.
        common += ["--max-total-tokens", str(tokens), "--mem-fraction-static", "0.85"]
        if arguments.cpu:
            common.append("--disable-decode-cuda-graph")  # there are none without a GPU
        urls = {}
        for kinds, settings in (((UPSTREAM,), None), ((IDLE, CAPTURED), capture)):
            flags, environment = server_flags(settings, cpu=arguments.cpu)
            name = log.with_stem(f"{log.stem}-{'plugin' if settings else 'upstream'}")
            server = served(model, name, [*flags, *common, *arguments.sglang], environment)
            urls |= dict.fromkeys(kinds, servers.enter_context(server))
        found = measure(urls, arguments, vocab_size)
        rounds = arguments.rounds + WARM_UP_ROUNDS
        counters = captured_samples(arguments.output, arguments.requests * rounds)
    label = arguments.model.name if arguments.model else arguments.shape
    report = build_report(arguments, label, found)
    report.details["session_counters"] = vars(counters)
    report.write(arguments.results)
    print(report.markdown())


if __name__ == "__main__":
    main()
