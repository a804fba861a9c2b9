"""Kimi-K2.5's whole language model on the GPUs of one host: capture off and on in each way of sharing it out.

61 layers of 7168, 384 routed experts of which 8 are active, latent attention, dummy weights in the checkpoint's own
W4A16 form: 594 GB, for eight cards of 141 GB. On fewer, ``--experts`` makes it smaller, and nothing else.

Each layout is served for each ``--output``: tensor parallelism over all GPUs; DP attention with the experts shared out;
two pipeline stages of tensor parallelism. What is measured is what ``benchmarks.capture_overhead`` measures, on one
server that captures where it is asked to: rounds off and on in turn, a sustained phase, the share of time for which
the ring was full, and memory; SGLang's own ``return_hidden_states`` is the baseline. A layout that this SGLang or
these GPUs cannot run is reported with its error, and the others are measured all the same.

    python -m benchmarks.full_size --output memory=/dev/shm/states --output disk=/var/tmp/states
    python -m benchmarks.full_size --gpus 2 --experts 64 --output memory=/dev/shm/states
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.capture_overhead import measure_servers
from benchmarks.load import machine
from benchmarks.report import Report, plain
from benchmarks.shapes import WHOLE, write_model

BENCHMARK = "full_size"
# Rows of one forward on each rank that computes attention.
CHUNK = 8192
# For the figures of a layout that could be measured, in the order of the summary's columns.
COLUMNS = {
    "off": "capture off",
    "on": "capture on, by answers",
    "sustained off": "sustained, capture off",
    "sustained on": "sustained, capture on, by answers",
    "acknowledged": "sustained, capture on, by acknowledgement",
    "lists": "`return_hidden_states`",
}


@dataclass(frozen=True)
class Layout:
    """A way to share the model out over GPUs.

    Attributes:
        name: in the results.
        flags: SGLang's, with which it is served.
        attention_ranks: those that compute attention for requests of their own.
        lists: whether SGLang returns hidden states; between pipeline stages it ends with an error (0.5.23).
    """

    name: str
    flags: tuple[str, ...]
    attention_ranks: int = 1
    lists: bool = True

    def all_flags(self) -> list[str]:
        """SGLang's flags with the size of a chunk, which it divides among the ranks of DP attention."""
        chunk = ("--chunked-prefill-size", str(CHUNK * self.attention_ranks))
        # By default SGLang sets memory aside for the undivided chunk, and would leave none for the weights. And it ends
        # a server whose forward takes five minutes, which the first one may, while it compiles kernels.
        return [*self.flags, *chunk, "--mem-fraction-static", "0.85", "--watchdog-timeout", "1800"]


def layouts(gpus: int) -> dict[str, Layout]:
    """The layouts for so many GPUs, by name.

    Raises:
        SystemExit: it is an odd number, or too few.
    """
    if gpus < 2 or gpus % 2:
        raise SystemExit(f"--gpus: expected an even number from 2 up, got {gpus}")
    tp, half = ("--tp-size", str(gpus)), ("--tp-size", str(gpus // 2))
    found = [
        Layout("tp", tp),
        Layout("dp-attention-ep", (*tp, "--dp-size", str(gpus), "--enable-dp-attention", "--ep-size", str(gpus)), gpus),
        Layout("pp-tp", ("--pp-size", "2", *half), lists=False),
        Layout("dp-attention", (*tp, "--dp-size", str(gpus), "--enable-dp-attention"), gpus),
    ]
    return {layout.name: layout for layout in found}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--experts", type=int, default=WHOLE.experts, help="routed experts of each layer")
    parser.add_argument("--num-layers", type=int, default=WHOLE.layers)
    parser.add_argument("--layouts", default="tp,dp-attention-ep,pp-tp", help="comma-separated, in this order")
    parser.add_argument(
        "--output", action="append", required=True, metavar="NAME=DIR", help="where states go; may be repeated"
    )
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--prompts", type=int, default=64, help="prompts in flight")
    parser.add_argument("--length", type=int, default=2048, help="tokens a prompt")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each kind")
    parser.add_argument("--sustained-rounds", type=int, default=4, help="rounds back to back")
    parser.add_argument("--return-hidden-states-prompts", type=int, default=2, help="0 leaves this baseline out")
    parser.add_argument("--ring-gib", type=float, default=4.0, help="of each rank that writes")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU platform, to try the script")
    parser.add_argument("--model", type=Path, help="a model directory in place of the shape, to try the script")
    parser.add_argument("sglang", nargs="*", help="further SGLang flags, after --")
    return parser.parse_args()


def chosen_layouts(arguments: argparse.Namespace) -> list[Layout]:
    """The layouts asked for.

    Raises:
        SystemExit: one of them does not exist.
    """
    known = layouts(arguments.gpus)
    names = arguments.layouts.split(",")
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"--layouts: expected some of {', '.join(known)}; got {', '.join(unknown)}")
    return [known[name] for name in names]


def places(given: list[str]) -> dict[str, Path]:
    """The directories to write to, by the names that results have.

    Raises:
        SystemExit: one of them is not NAME=DIR, or a name comes twice.
    """
    pairs = [text.partition("=") for text in given]
    if any(not name or not directory for name, _, directory in pairs):
        raise SystemExit(f"--output: expected NAME=DIR, got {', '.join(given)}")
    found = {name: Path(directory) for name, _, directory in pairs}
    if len(found) < len(given):
        raise SystemExit(f"--output: expected each name once, got {', '.join(given)}")
    return found


def overhead_arguments(
    arguments: argparse.Namespace, layout: Layout, place: str, output: Path, model: Path
) -> argparse.Namespace:
    """The command line of ``benchmarks.capture_overhead`` for one layout and place."""
    taken = ("results", "prompts", "length", "rounds", "sustained_rounds", "ring_gib")
    return argparse.Namespace(
        **{name: getattr(arguments, name) for name in (*taken, "cpu")},
        shape=f"kimi-k2.5, {arguments.num_layers} layers, {arguments.experts} experts, W4A16",
        label=f"{arguments.gpus}gpus-{layout.name}-{place}",
        output=output,
        model=model,
        return_hidden_states_prompts=arguments.return_hidden_states_prompts if layout.lists else 0,
        skip_upstream=True,  # a start of the whole model takes minutes; off is the same class with nothing to capture
        sglang=[*layout.all_flags(), *arguments.sglang],
    )


def measure_one(arguments: argparse.Namespace, layout: Layout, place: str, output: Path, model: Path) -> Report:
    """Measure one layout with states going to one place, and write its files."""
    own = overhead_arguments(arguments, layout, place, output, model)
    report = replace(measure_servers(own, model, own.label), benchmark=BENCHMARK)
    report.arguments = plain(own) | {"model": str(arguments.model or own.shape)}
    report.write(arguments.results)
    print(report.markdown(), flush=True)
    return report


def summary_row(report: Report) -> dict[str, float | None]:
    """One line of the summary: medians, ratios of the sustained phase, the ring and memory."""
    row: dict[str, float | None] = {
        title: statistics.median(report.series[name]) if name in report.series else None
        for title, name in COLUMNS.items()
    }
    if row["sustained off"] and row["sustained on"]:
        row["sustained on / off"] = row["sustained on"] / row["sustained off"]
    return row | report.figures


def write_summary(arguments: argparse.Namespace, rows: dict[str, dict[str, Any]]) -> Path:
    """Write all lines, those of failed layouts included, as one JSON file; done after each, so that none is lost."""
    arguments.results.mkdir(parents=True, exist_ok=True)
    found = machine()
    path = arguments.results / f"{BENCHMARK}-summary-{arguments.gpus}gpus-sglang{found['sglang']}.json"
    content = {"benchmark": BENCHMARK, "machine": found, "arguments": plain(arguments), "layouts": rows}
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def main() -> None:
    arguments = parse_arguments()
    asked, outputs = chosen_layouts(arguments), places(arguments.output)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        shape = replace(WHOLE, layers=arguments.num_layers, experts=arguments.experts)
        model = arguments.model or write_model(Path(temporary, "model"), shape)
        os.environ.setdefault("HS_BENCHMARK_LOG", str(Path(temporary, "server.log")))
        for layout in asked:
            for place, output in outputs.items():
                name, started = f"{layout.name}, {place}", time.monotonic()
                print(f"== {name}: {' '.join(layout.all_flags())}", flush=True)
                try:
                    rows[name] = summary_row(measure_one(arguments, layout, place, output, model))
                except (RuntimeError, OSError) as error:
                    rows[name] = {"error": str(error)}
                    print(f"{name}: {error}", flush=True)
                finally:
                    shutil.rmtree(output, ignore_errors=True)
                rows[name]["took, s"] = time.monotonic() - started
                path = write_summary(arguments, rows)
    failed = [name for name, row in rows.items() if "error" in row]
    print(json.dumps(rows, indent=2))
    print(f"{path}: {len(rows) - len(failed)} of {len(rows)} were measured")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
