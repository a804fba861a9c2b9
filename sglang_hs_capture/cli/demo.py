"""``hs-capture demo``: the whole way on any machine, from a tiny model to states proven right."""

import importlib.resources
import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from sglang_hs_capture.cli import inspect, options
from sglang_hs_capture.cli.known_answers import check_known_answers
from sglang_hs_capture.cli.run import report
from sglang_hs_capture.driver.device import Device, use_cpu
from sglang_hs_capture.driver.progress import make_view
from sglang_hs_capture.driver.run import KNOWN_ANSWERS, RunSettings
from sglang_hs_capture.driver.source import Source, count_samples
from sglang_hs_capture.driver.start import run_on_own_server
from sglang_hs_capture.errors import CorruptionError
from sglang_hs_capture.store.index import load_index
from sglang_hs_capture.store.known_answers import load_known_answers
from sglang_hs_capture.store.schema import DatasetInfo

DEFAULT_OUTPUT = Path("demo-output")
CHUNK = 64
TOLERANCE = 1e-5
START_TIMEOUT_S = 900.0
DEMO_NOTICE = "Running on the CPU platform, in float32: exact, and slow."


def demo(
    ctx: typer.Context,
    output: Annotated[Path, typer.Option(help="Where the model and the dataset go.")] = DEFAULT_OUTPUT,
    device: options.DeviceOption = Device.CPU,
    dtype: Annotated[options.Dtype, typer.Option(help="The dtype that states are stored in.")] = options.Dtype.FLOAT32,
) -> None:
    """Capture shipped conversations from a tiny Kimi-K2.5 model and compare every state with transformers'.

    Runs on the CPU platform also where there is a GPU: the comparison is in float32, which no GPU computes exactly.
    Run it again to see a capture go on; what is there is kept.
    """
    model, dataset = output / "model", output / "dataset"
    cpu = use_cpu(device)
    data = conversations()
    _make_model(model)
    capture = options.CaptureOptions(dtype=dtype, ring_gb=1 / 16, shard_gb=1 / 16, min_free_gb=0.25)
    config = capture.config(dataset, cpu=cpu)
    sglang_args = ["--dtype", "float32", "--chunked-prefill-size", str(CHUNK), *(ctx.obj or [])]
    settings = RunSettings(output=dataset.absolute())
    with make_view(count_samples([data])) as view:
        source = Source([data], tokenizer=str(model))
        summary = run_on_own_server(
            str(model),
            source,
            config,
            settings,
            view,
            sglang_args=sglang_args,
            cpu=cpu,
            notice=DEMO_NOTICE if cpu else "",
            start_timeout_s=START_TIMEOUT_S,
        )
    report(summary)
    if summary.exit_code:
        raise typer.Exit(summary.exit_code)
    verify(dataset, model)
    typer.echo("")
    for line in inspect.lines(inspect.describe(dataset, load_index(dataset))):
        typer.echo(line)
    typer.echo("")
    for line in next_steps(dataset):
        typer.echo(line)


def conversations() -> Path:
    """The shipped conversations."""
    return Path(str(importlib.resources.files("sglang_hs_capture.demo") / "conversations.jsonl"))


def _make_model(model: Path) -> None:
    """Write the tiny checkpoint unless it is there, complete."""
    if (model / "config.json").exists():
        return
    typer.echo(f"Making a tiny Kimi-K2.5 model with random weights in {model} ...")
    from sglang_hs_capture.demo.checkpoint import make_kimi_k25

    building = model.with_name(f".{model.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    shutil.rmtree(model, ignore_errors=True)
    make_kimi_k25(building)
    building.rename(model)


def verify(dataset: Path, model: Path) -> None:
    """Compare every sample with ``transformers`` and print the outcome.

    Raises:
        CorruptionError: a state differs by more than the tolerance, or than the rounding of the dtype that it is in.
    """
    typer.echo("\nComparing every captured state with transformers, in float32 ...")
    from sglang_hs_capture.reader.dataset import HiddenStateDataset
    from sglang_hs_capture.verify.parity import compare

    captured = HiddenStateDataset(dataset)
    dtype = captured.info.dtype
    found = compare(captured, model, dtype=dtype)
    lengths = [sample.length for sample in captured.samples]
    longer = sum(length > CHUNK for length in lengths)
    typer.echo(
        f"{found.samples} prompts of {min(lengths)} to {max(lengths)} tokens, {longer} of them longer than the chunk "
        f"of {CHUNK}; {found.tokens:,} tokens in all."
    )
    typer.echo(f"{'state':<16} {'max relative error':>18}")
    for column in found.columns:
        typer.echo(f"{column.column:<16} {column.relative:>18.2e}")
    exact = dtype == options.Dtype.FLOAT32
    allowed = f"{TOLERANCE:g}" if exact else f"what rounding to {dtype} costs at most"
    if not (found.worst <= TOLERANCE if exact else found.excess <= 1):
        raise CorruptionError(
            f"a captured state differs from transformers' by {found.worst:.2e}, more than {allowed}; please report "
            "it, with what hs-capture doctor prints"
        )
    typer.echo(f"All captured states agree with transformers to {allowed}.")
    if load_known_answers(dataset):
        _check_answers(dataset, model, captured.info)


def _check_answers(dataset: Path, model: Path, info: DatasetInfo) -> None:
    """Compare the final states with what the engine itself predicted, too.

    Raises:
        CorruptionError: they do not lead to it.
    """
    answers = check_known_answers(dataset, str(model), info, KNOWN_ANSWERS, None)
    for column, sample, text in answers.problems():
        raise CorruptionError(f"{column} of sample {sample!r}: {text}; please report it")
    worst = max(column.absolute for column in answers.columns)
    typer.echo(
        f"The engine's own {answers.positions} log-probabilities follow from the final states, to {worst:.1e} (median)."
    )


def next_steps(dataset: Path) -> list[str]:
    """What a user would do next."""
    quoted = json.dumps(str(dataset))
    return [
        "Next:",
        "  Read it in a trainer:  from sglang_hs_capture import HiddenStateDataset",
        f"                         sample = HiddenStateDataset({quoted})[0]",
        '                         sample["input_ids"], sample["hidden_states"], sample["loss_mask"]',
        "  Capture from a real model, for example on eight GPUs:",
        "      hs-capture run --model moonshotai/Kimi-K2.5 --data conversations.jsonl --output states \\",
        "          --trust-remote-code -- --tp-size 8",
    ]
