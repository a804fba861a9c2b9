"""Prefill throughput with capture off, on, and with SGLang's own ``return_hidden_states``; and the memory it takes.

First SGLang's own class is served, without the plugin, then the capture class. On the latter the three kinds of round
take turns: "off" sends the same kind of prompts under ids that are not captured, so that it differs from "on" in
nothing but the capture. A round with capture has two rates: until the last answer, and until the last sample was
acknowledged. A ring that takes in a whole round makes the first one look good whatever the disk can do, so a last,
longer phase, off and on, keeps the same number of prompts in flight without a break ("sustained").

SGLang's ``return_hidden_states`` returns the last layer's state, one for each token. With ``--own-boundaries`` its own
class is served so that it returns the states at these boundaries in its place, as a drafter's training needs them
(``--enable-return-aux-hidden-states``), and these rounds are the baseline as well.

A server of several GPUs (``-- --tp-size 2``, or ``--pp-size``, or DP attention) is measured in the same way: a prompt
is acknowledged when every stage of a pipeline has it on disk, and the ring's figure is that of the writer that waited
most.

Both servers get a KV cache of the same size, so that the device memory in use differs by what the capture takes. It is
read after the warm-up, when both have run a full load, and once more at the end.

Dummy weights; states go to ``--output`` (a memory-backed file system measures the engine's side alone, a disk measures
the disk), which needs room for the states of the largest phase. Finished shards are removed between the rounds.

    python -m benchmarks.capture_overhead --shape eight-layers --output /dev/shm/states --results benchmarks/results \\
        -- --chunked-prefill-size 8192
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.load import (
    Timing,
    device_memory,
    host_memory,
    machine,
    random_prompts,
    returned_elements,
    run_round,
    served,
    server_flags,
    server_memory,
    stable_seed,
    text_config,
)
from benchmarks.report import Report, plain
from benchmarks.shapes import SHAPES, write_model
from sglang_hs_capture.store.session import read_sessions

OFF, ON, LISTS = "off", "on", "return_hidden_states"
# Three boundaries and the final state, two bytes an element: the capture's defaults.
STATES_BYTES = 4 * 2
RESERVE_BYTES = 2**30


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="eight-layers")
    parser.add_argument("--output", type=Path, required=True, help="where the states go; emptied before the run")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--prompts", type=int, default=64, help="prompts in flight")
    parser.add_argument("--length", type=int, default=2048, help="tokens a prompt")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each kind")
    parser.add_argument("--return-hidden-states-prompts", type=int, default=2, help="0 leaves this baseline out")
    parser.add_argument(
        "--own-boundaries", type=int, nargs="+", default=[], help="SGLang's own class returns the states at these"
    )
    parser.add_argument("--sustained-rounds", type=int, default=4, help="rounds back to back; 0 leaves this phase out")
    parser.add_argument(
        "--skip-upstream", action="store_true", help="do not serve SGLang's own class: no memory figure"
    )
    parser.add_argument("--ring-gib", type=float, default=4.0)
    parser.add_argument("--cpu", action="store_true", help="run on the CPU platform, to try the script")
    parser.add_argument("--model", type=Path, help="a model directory in place of the shape, to try the script")
    parser.add_argument("--label", help="name of what is measured in the results' names; default: the model's")
    parser.add_argument("sglang", nargs="*", help="further SGLang flags, after --")
    arguments = parser.parse_args()
    if arguments.own_boundaries and (arguments.skip_upstream or not arguments.return_hidden_states_prompts):
        parser.error(
            "--own-boundaries: expected SGLang's own class to be served and asked for lists: leave out --skip-upstream "
            "and give --return-hidden-states-prompts above 0"
        )
    return arguments


@dataclass
class Measured:
    """What one server showed.

    Attributes:
        timings: of each round, by kind.
        sustained: the same for the sustained phase.
        warm_bytes: of device memory on all GPUs, after the warm-up; ``end_bytes`` at the end.
        blocked_share: of the time of the rounds with capture, the part in which a forward waited for room in the ring;
            None without any.
        host_bytes: of host memory of the server that captures, at the end; with the ring, without the files.
        server: what it says of its own memory.
        start_s: seconds until the server was healthy, in which kernels may be compiled.
        list_elements: numbers that ``return_hidden_states`` gave for each token; None where it was not measured.
    """

    timings: dict[str, list[Timing]] = field(default_factory=dict)
    sustained: dict[str, Timing] = field(default_factory=dict)
    warm_bytes: int | None = None
    end_bytes: int | None = None
    blocked_share: float | None = None
    host_bytes: int | None = None
    server: dict[str, Any] = field(default_factory=dict)
    start_s: float | None = None
    list_elements: int | None = None


class Load:
    """Rounds of prompts for one server."""

    def __init__(self, url: str, arguments: argparse.Namespace, vocab_size: int) -> None:
        self._url, self._arguments, self._vocab_size = url, arguments, vocab_size

    def round(self, kind: str, number: int, times: int = 1) -> Timing:
        """Send one round, or several back to back; ``off`` and ``on`` of the same ``number`` have the same prompts."""
        a = self._arguments
        in_flight = a.return_hidden_states_prompts if kind == LISTS else a.prompts
        count = in_flight * times
        prompts = random_prompts(count, a.length, self._vocab_size, stable_seed(number, times))
        prefix = "hs-" if kind == ON else ""
        timing = run_round(
            self._url,
            prompts,
            [f"{prefix}{kind}-{number}-{times}-{i}" for i in range(count)],
            in_flight=in_flight,
            dataset=a.output if kind == ON else None,
            **(self._lists_fields() if kind == LISTS else {}),
        )
        remove_finished(a.output)
        acknowledged = f", {timing.acknowledged_rate:10.0f} to the last acknowledgement" if kind == ON else ""
        print(f"{kind:>20} {number:3}: {timing.rate:10.0f} tokens/s{acknowledged}", flush=True)
        return timing

    @cached_property
    def list_elements(self) -> int:
        """How many numbers ``return_hidden_states`` gives for each token; the server is asked once."""
        return returned_elements(self._url, self._vocab_size)

    def _lists_fields(self) -> dict[str, Any]:
        # One token is generated, since without any SGLang returns no states. A number has a digit and a comma at least.
        least = 2 * self.list_elements * self._arguments.length
        return {"return_hidden_states": True, "max_new_tokens": 1, "least_bytes": least}

    def host_memory(self) -> int | None:
        """Bytes of host memory of the server that captures; None without one."""
        records = read_sessions(self._arguments.output)
        return host_memory(records[0].pid) if records else None

    def blocked(self) -> dict[str, float]:
        """Seconds for which each writer's forwards waited for room in the ring so far."""
        return {record.writer: record.counters.blocked_s for record in read_sessions(self._arguments.output)}


def remove_finished(output: Path) -> None:
    """Remove finished shards; the benchmark reads none."""
    for shard in output.glob("shards/*.safetensors"):
        shard.unlink()


def measure(load: Load, url: str, kinds: Sequence[str], arguments: argparse.Namespace) -> Measured:
    """Warm up and run the rounds of all kinds in turn, then the sustained phase."""
    found = Measured({kind: [] for kind in kinds})
    for kind in kinds:
        if kind != LISTS:
            load.round(kind, -1)  # the first prefill compiles kernels
        else:
            found.list_elements = load.list_elements
    found.warm_bytes, blocked = device_memory(), load.blocked()
    for number in range(arguments.rounds):
        shift = number % len(kinds)
        for kind in (*kinds[shift:], *kinds[:shift]):
            found.timings[kind].append(load.round(kind, number))
    if arguments.sustained_rounds:
        for kind in kinds:
            if kind != LISTS:
                found.sustained[kind] = load.round(kind, 0, arguments.sustained_rounds)
    found.end_bytes, found.host_bytes, found.server = device_memory(), load.host_memory(), server_memory(url)
    if captured := [*found.timings.get(ON, []), *filter(None, [found.sustained.get(ON)])]:
        waited = max(now - blocked.get(writer, 0.0) for writer, now in load.blocked().items())
        found.blocked_share = waited / sum(t.acknowledged_s or t.answered_s for t in captured)
    return found


def build_report(arguments: argparse.Namespace, label: str, plugin: Measured, upstream: Measured | None) -> Report:
    """Series, ratios and figures of the measurements."""
    off, on = plugin.timings[OFF], plugin.timings[ON]
    series = {} if upstream is None else {"SGLang's own class": [t.rate for t in upstream.timings[OFF]]}
    series |= {
        "capture off": [t.rate for t in off],
        "capture on, by answers": [t.rate for t in on],
        "capture on, by acknowledgement": [t.acknowledged_rate for t in on],
    }
    ratios = {
        "on / off, by answers": [b.rate / a.rate for a, b in zip(off, on, strict=True)],
        "on / off, by acknowledgement": [b.acknowledged_rate / a.rate for a, b in zip(off, on, strict=True)],
    }
    lists = {"`return_hidden_states`": plugin.timings.get(LISTS, [])}
    if upstream is not None:
        if arguments.own_boundaries:
            boundaries = ", ".join(map(str, arguments.own_boundaries))
            lists[f"`return_hidden_states`, boundaries {boundaries}"] = upstream.timings[LISTS]
        own = statistics.median(series["SGLang's own class"])
        ratios["off / SGLang's own class"] = [t.rate / own for t in off]
    for name, timings in lists.items():
        if timings:
            series[name] = [t.rate for t in timings]
            ratios[f"on, by acknowledgement / {name}"] = [
                a.acknowledged_rate / b.rate for a, b in zip(on, timings, strict=True)
            ]
    if plugin.sustained:
        without, captured = plugin.sustained[OFF], plugin.sustained[ON]
        series |= {
            "sustained, capture off": [without.rate],
            "sustained, capture on, by answers": [captured.rate],
            "sustained, capture on, by acknowledgement": [captured.acknowledged_rate],
        }
        ratios["sustained, on / off, by acknowledgement"] = [captured.acknowledged_rate / without.rate]
    lags = [t.acknowledged_s - t.answered_s for t in on if t.acknowledged_s is not None]
    figures: dict[str, float | None] = {
        "acknowledged after the last answer, median, s": statistics.median(lags),
        "share of the time with capture for which the ring was full": plugin.blocked_share,
        "device memory on all GPUs with capture, GB": _gigabytes(plugin.end_bytes),
        "host memory with capture, GB": _gigabytes(plugin.host_bytes),
        "start of the server, s": plugin.start_s,
    }
    if upstream is not None:
        figures |= {
            "extra device memory with capture, GB": _difference(plugin.warm_bytes, upstream.warm_bytes),
            "the same after all rounds, GB": _difference(plugin.end_bytes, upstream.end_bytes),
        }
    details = {"plugin": _details(plugin)} | ({} if upstream is None else {"upstream": _details(upstream)})
    return Report(
        "capture_overhead",
        label,
        "tokens/s",
        machine(),
        plain(arguments),
        series=series,
        ratios=ratios,
        figures=figures,
        details=details,
    )


def _gigabytes(value: int | None) -> float | None:
    return None if value is None else value / 1e9


def _difference(more: int | None, less: int | None) -> float | None:
    return None if more is None or less is None else (more - less) / 1e9


def _details(measured: Measured) -> dict[str, Any]:
    rounds = {kind: [vars(t) for t in timings] for kind, timings in measured.timings.items()}
    sustained = {kind: vars(timing) for kind, timing in measured.sustained.items()}
    return {**vars(measured), "timings": rounds, "sustained": sustained}


def check_room(arguments: argparse.Namespace, hidden_size: int) -> None:
    """End now if the states of the largest phase do not fit."""
    tokens = arguments.prompts * arguments.length * max(1, arguments.sustained_rounds)
    needed, free = tokens * hidden_size * STATES_BYTES + RESERVE_BYTES, shutil.disk_usage(arguments.output).free
    if free < needed:
        raise SystemExit(
            f"{arguments.output}: {tokens:,} tokens in one phase need {needed / 1e9:.1f} GB and there are "
            f"{free / 1e9:.1f} GB: give another --output, or lower --sustained-rounds or --prompts"
        )


def own_boundaries_flags(boundaries: Sequence[int]) -> list[str]:
    """Flags with which SGLang 0.5.23 returns the states at some boundaries in place of the last layer's.

    The speculative algorithm names how layers are counted, and nothing else: no draft model is loaded.
    """
    ids = [str(boundary) for boundary in boundaries]
    convention = ["--speculative-algorithm", "EAGLE3", "--return-aux-hidden-state-layer-ids", *ids]
    return ["--enable-return-aux-hidden-states", *convention]


def measure_servers(arguments: argparse.Namespace, model: Path, label: str) -> Report:
    """Serve the model as the arguments say, and measure.

    Raises:
        RuntimeError: a server did not start, or a request or a capture failed.
    """
    shutil.rmtree(arguments.output, ignore_errors=True)
    arguments.output.mkdir(parents=True)
    capture = {
        "output_dir": str(arguments.output.resolve()),
        "ring_bytes": int(arguments.ring_gib * 2**30),
        "min_free_bytes": 0,
    }
    config = text_config(model)
    check_room(arguments, config["hidden_size"])
    kinds = (OFF, ON, LISTS) if arguments.return_hidden_states_prompts else (OFF, ON)
    found: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as temporary:
        log = Path(os.environ.get("HS_BENCHMARK_LOG", str(Path(temporary, "server.log"))))
        for name in ("plugin",) if arguments.skip_upstream else ("upstream", "plugin"):
            flags, environment = server_flags(capture if name == "plugin" else None, cpu=arguments.cpu)
            flags += ["--load-format", "dummy", "--disable-decode-cuda-graph", "--enable-return-hidden-states"]
            # A KV cache of the same size on both, and no larger than what is in flight.
            flags += ["--max-total-tokens", str(arguments.prompts * (arguments.length + 64)), *arguments.sglang]
            if name == "upstream" and arguments.own_boundaries:
                flags += own_boundaries_flags(arguments.own_boundaries)
            began = time.monotonic()
            with served(model, log, flags, environment) as url:
                start_s = time.monotonic() - began
                served_kinds = kinds if name == "plugin" else tuple(kind for kind in kinds if kind != ON)
                found[name] = measure(Load(url, arguments, config["vocab_size"]), url, served_kinds, arguments)
            found[name].start_s = start_s
    report = build_report(arguments, label, found["plugin"], found.get("upstream"))
    sessions = read_sessions(arguments.output)
    report.details["session_counters"] = {record.writer: vars(record.counters) for record in sessions}
    return report


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as temporary:
        model = arguments.model or write_model(Path(temporary, "model"), SHAPES[arguments.shape])
        report = measure_servers(arguments, model, arguments.label or model_label(arguments))
    report.write(arguments.results)
    print(report.markdown())


def model_label(arguments: argparse.Namespace) -> str:
    """The name of what is measured, in the results and their files' names."""
    return str(arguments.model.name if arguments.model else arguments.shape)


if __name__ == "__main__":
    main()
