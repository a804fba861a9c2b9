"""``hs-capture verify``: whether a dataset is what was captured, byte for byte, and what its states look like."""

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_hs_capture.cli import options
from sglang_hs_capture.cli.check_view import make_check_view
from sglang_hs_capture.cli.known_answers import check_known_answers
from sglang_hs_capture.cli.second_capture import SecondCapture, require_same_model
from sglang_hs_capture.cli.tell import tell
from sglang_hs_capture.driver.check import find_model
from sglang_hs_capture.driver.device import Device, use_cpu
from sglang_hs_capture.driver.summary import GB, count_of
from sglang_hs_capture.errors import ConfigError, CorruptionError, HsCaptureError, InputError, StoreError
from sglang_hs_capture.store.known_answers import KNOWN_ANSWERS_FILE
from sglang_hs_capture.store.requests import LEDGER_FILE
from sglang_hs_capture.verify.check import CheckResult, CheckSettings, check_dataset
from sglang_hs_capture.verify.findings import KINDS, Finding, Findings, Severity
from sglang_hs_capture.verify.report import is_report, write_report

if TYPE_CHECKING:
    from sglang_hs_capture.verify.known_answer import AnswerReport
    from sglang_hs_capture.verify.recapture import Comparison

SHOWN_PER_KIND = 3
TITLES = {"recapture": "Captured again", "reference": "Computed by transformers"}
DEFAULT_PROMPTS = 16
AGAINST_ONLY = ("prompts", "computed_in", "device", "start_timeout")


class Reference(StrEnum):
    """Independent implementations that states can be compared with."""

    TRANSFORMERS = "transformers"


def verify(
    ctx: typer.Context,
    directory: Annotated[Path, typer.Argument(metavar="DATASET", help="The dataset.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write histograms and findings into this HTML file, to be looked at.")
    ] = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Look at the states of so many samples only, chosen at random.")
    ] = None,
    fraction: Annotated[
        float | None, typer.Option(min=0, max=1, help="Look at the states of such a share of the samples only.")
    ] = None,
    against_model: Annotated[
        str | None, typer.Option(help="Capture some prompts again from this model, and compare every state.")
    ] = None,
    reference: Annotated[
        Reference | None,
        typer.Option(help="Compute some prompts with this library, in float32 on the CPU, and compare every state."),
    ] = None,
    known_answer: Annotated[
        bool,
        typer.Option(
            "--known-answer", help="Compute the engine's own log-probabilities anew from the final states, and compare."
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="Where --known-answer reads lm_head: a directory or a hub id.", show_default="the dataset's"),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to compare.")] = DEFAULT_PROMPTS,
    computed_in: Annotated[
        options.Dtype | None,
        typer.Option(help="What the model computes in, for what may differ.", show_default="the model's dtype"),
    ] = None,
    device: options.DeviceOption = Device.AUTO,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds the server may take to start.")] = 7200.0,
    seed: Annotated[int, typer.Option(help="Chooses samples and prompts.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that read.", show_default="processors")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as errors for the exit code.")] = False,
) -> None:
    """Check a dataset: its structure, every byte of its states, and that every sample is there.

    Exits with 0 only if nothing is wrong, else with 4. Reads each shard once, and writes nothing into the dataset.
    What follows -- goes to the SGLang that --against-model starts.
    """
    sglang_args: list[str] = ctx.obj or []
    directory = directory.expanduser()
    _refuse_useless(ctx, sample, fraction, against_model, reference, known_answer, sglang_args)
    if report is not None:
        _check_report(report)
    config = find_model(against_model) if against_model else None
    with make_check_view() as view:
        result = check_dataset(directory, CheckSettings(sample, fraction, seed, threads), view)
    comparisons: dict[str, Comparison] = {}
    answers: AnswerReport | None = None
    failed: HsCaptureError | typer.Exit | None = None
    try:
        if against_model and result.sound:
            if config is not None:
                require_same_model(directory, result.info, config, "--against-model")
            cpu = use_cpu(device)
            again = SecondCapture(against_model, config, sglang_args, cpu, start_timeout, computed_in)
            comparisons["recapture"] = again.compare(directory, prompts, seed)
        if reference and result.sound:
            source, dtype = against_model or result.info.model_path, computed_in or options.Dtype(result.info.dtype)
            comparisons["reference"] = _compare_with_transformers(directory, source, prompts, dtype)
        if known_answer and result.sound:
            answers = check_known_answers(directory, model, result.info, prompts, computed_in)
            _judge_answers(answers, result.findings)
    except (HsCaptureError, typer.Exit) as error:
        failed = error
    for kind, comparison in comparisons.items():
        _judge(kind, comparison, result.findings)
    compared = [*_comparison_lines(comparisons), *([*answers.lines(), ""] if answers else [])]
    if as_json:
        more = {kind: comparison.to_json() for kind, comparison in comparisons.items()}
        more |= {"known_answer": answers.to_json()} if answers else {}
        typer.echo(json.dumps({**result.to_json(), **more}, indent=2))
    else:
        for line in lines(result, compared):
            tell(line)
        if (against_model or reference or known_answer) and not compared and not failed:
            typer.echo("The states were not compared with the model's, since the dataset is not sound.")
    _conclude(result, compared, report, failed, strict=strict)


def _conclude(
    result: CheckResult,
    compared: Sequence[str],
    report: Path | None,
    failed: HsCaptureError | typer.Exit | None,
    *,
    strict: bool,
) -> None:
    """Write the report, and end as it has to be: after all that was found is shown, for which hours were read.

    Raises:
        CorruptionError: something is wrong with the dataset.
        HsCaptureError, typer.Exit: nothing is, and the comparison with the model has ``failed``, or the report cannot
            be written.
    """
    if report is not None:
        try:
            write_report(report, result, compared)
        except StoreError as error:
            failed = failed or error
    findings = result.findings
    if findings.errors or (strict and findings.warnings):
        more = f"; {failed}" if isinstance(failed, HsCaptureError) else ""
        raise CorruptionError(f"{result.path}: {_verdict(findings)}; {_advice(findings)}{more}")
    if failed:
        raise failed


def _check_report(path: Path) -> None:
    """Refuse a place where no report can be, or where something else is: a dataset's own file, another document.

    Raises:
        ConfigError: as said.
    """
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--report: {path.absolute().parent} is not a directory")
    if path.is_dir():
        raise ConfigError(f"--report: {path} is a directory; name a file")
    try:
        taken = path.is_file() and path.stat().st_size and not is_report(path)
    except OSError as error:
        raise ConfigError(f"--report: {path} cannot be written: {error.strerror or error}") from None
    if taken:
        raise ConfigError(f"--report: {path} is there already, and is no report; name another file, or remove it")


def _refuse_useless(
    ctx: typer.Context,
    sample: int | None,
    fraction: float | None,
    against_model: str | None,
    reference: Reference | None,
    known_answer: bool,
    sglang_args: list[str],
) -> None:
    """Refuse options that would have no effect, rather than pass over them."""
    if sample is not None and fraction is not None:
        raise ConfigError("--sample and --fraction: give one of them")
    if sglang_args and against_model is None:
        raise ConfigError("flags after '--' are for the SGLang that --against-model starts; without it there is none")
    if _given(ctx, "model") and not known_answer:
        raise ConfigError("--model is for --known-answer; without it, leave it out")
    for name in AGAINST_ONLY if against_model is None else ():
        helps_others = (reference is not None or known_answer) and name in {"prompts", "computed_in"}
        if _given(ctx, name) and not helps_others:
            raise ConfigError(f"--{name.replace('_', '-')} is for --against-model; without it, leave it out")


def _given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _compare_with_transformers(directory: Path, model: str, prompts: int, dtype: options.Dtype) -> "Comparison":
    from sglang_hs_capture.reader.dataset import HiddenStateDataset
    from sglang_hs_capture.verify.parity import ReferenceSamples
    from sglang_hs_capture.verify.recapture import bound_of, compare, spread

    captured = HiddenStateDataset(directory)
    # A dataset does not hold the images themselves.
    without_images = [index for index, sample in enumerate(captured.samples) if sample.media is None]
    if not without_images:
        raise InputError(f"{directory}: the dataset has no sample without images to compare")
    pairs = [(without_images[place],) * 2 for place in spread(len(without_images), prompts)]
    return compare(captured, ReferenceSamples(captured, model), pairs, bound_of(captured.info.dtype, dtype.value))


def _judge(kind: str, comparison: "Comparison", findings: Findings) -> None:
    for column, sample, position, text in comparison.problems():
        findings.add(Finding(kind, text, "", sample, position, column))


def _judge_answers(answers: "AnswerReport", findings: Findings) -> None:
    for column, sample, text in answers.problems():
        findings.add(Finding("known-answer", text, KNOWN_ANSWERS_FILE, sample, None, column))
    if text := answers.poor_target():
        findings.add(Finding("poor-target", text, KNOWN_ANSWERS_FILE))


def _comparison_lines(comparisons: "dict[str, Comparison]") -> list[str]:
    return [line for kind, comparison in comparisons.items() for line in (*comparison.lines(TITLES[kind]), "")]


def _verdict(findings: Findings) -> str:
    errors = f"{findings.errors:,} error{'' if findings.errors == 1 else 's'}"
    return f"{errors} and {findings.warnings:,} warning{'' if findings.warnings == 1 else 's'}"


def _advice(findings: Findings) -> str:
    if findings.samples:
        return f"samples that are not to be used: {len(findings.samples):,}; each finding above says what to do"
    return "each finding above says what to do"


def _records(result: CheckResult) -> str:
    """The files whose lines were read, in words."""
    others = {LEDGER_FILE: "ledger", KNOWN_ANSWERS_FILE: "known answers"}
    found = [word for name, word in others.items() if name in result.journals]
    return ", ".join([count_of(len(result.journals) - len(found), "journal"), *found])


def lines(result: CheckResult, compared: Sequence[str] = ()) -> list[str]:
    """The result for a person, on one page; ``compared`` are lines about comparisons with the model."""
    info, findings = result.info, result.findings
    share = result.bytes_checked / result.bytes if result.bytes else 1.0
    line_count = sum(counts.lines for counts in result.journals.values())
    shown = [
        f"Dataset      {result.path}{', which is being captured' if result.live else ''}",
        f"Model        {info.model_path} ({info.architecture}), config {info.config_hash}",
        f"Samples      {result.samples:,} ({result.tokens:,} tokens), {result.asked:,} asked for",
        f"Structure    {_records(result)} ({line_count:,} lines), {count_of(result.shards, 'shard')}",
        f"States       {result.rows_checked:,} of {result.rows:,} rows looked at ({share:.1%}), "
        f"{result.bytes_checked / GB:.3f} GB of {info.dtype} in {result.seconds:.1f} s",
        "",
        f"{'state':<16} {'norm: min':>11} {'1%':>11} {'median':>11} {'99%':>11} {'max':>11}",
    ]
    for number, name in enumerate(result.statistics.columns):
        low, median, high = result.statistics.quantiles(number, [0.01, 0.5, 0.99])
        values = (result.statistics.low[number], low, median, high, result.statistics.high[number])
        figures = " ".join(f"{value:>11.4g}" for value in values) if result.statistics.rows[number] else ""
        shown.append(f"{name:<16} {figures}".rstrip())
    shown.append("")
    shown += compared
    listed = findings.listed()
    for kind, properties in KINDS.items():
        count = findings.counts[kind]
        if not count:
            continue
        label = "ERROR" if properties.severity is Severity.ERROR else "warning"
        shown.append(f"{label}: {kind}, {count:,} time{'' if count == 1 else 's'}. To do: {properties.remedy}")
        mine = [finding for finding in listed if finding.kind == kind]
        shown += [f"  {finding}" for finding in mine[:SHOWN_PER_KIND]]
        if count > SHOWN_PER_KIND:
            shown.append(f"  and {count - SHOWN_PER_KIND:,} more{'; --json lists them' if count <= len(mine) else ''}")
    warned = "with warnings to look at" if findings.warnings else "nothing is wrong"
    verdict = f"Sound: {warned}" if result.sound else "NOT SOUND"
    partly = "" if result.rows_checked == result.rows else ", as far as it was looked at"
    shown.append(f"{verdict}{partly} ({_verdict(findings)}).")
    return shown
