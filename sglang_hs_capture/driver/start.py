"""Puts a run together: on a server of its own, or on one that is running already."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from sglang_hs_capture.config import CaptureConfig
from sglang_hs_capture.data.records import Prepared
from sglang_hs_capture.driver.answers import ANSWERS_FILE
from sglang_hs_capture.driver.check import check_output, find_model, make_output
from sglang_hs_capture.driver.launch import flag_value, plan_server
from sglang_hs_capture.driver.progress import ProgressView
from sglang_hs_capture.driver.ray_cluster import RayEngines, RayPlan, connect, default_resources, replicas_of
from sglang_hs_capture.driver.ray_host import EngineRequest
from sglang_hs_capture.driver.regenerate import AnswerSettings, Regeneration
from sglang_hs_capture.driver.run import RunSettings, Samples, run_capture
from sglang_hs_capture.driver.server import free_port
from sglang_hs_capture.driver.source import Source
from sglang_hs_capture.driver.summary import Summary
from sglang_hs_capture.driver.target import OwnServer, RunningServers
from sglang_hs_capture.errors import ConfigError
from sglang_hs_capture.layers import Final, make_columns, parse_layers, resolve_boundaries
from sglang_hs_capture.model_config import ModelConfig, resolve_model_config
from sglang_hs_capture.store.identity import DATASET_FILE
from sglang_hs_capture.store.schema import DatasetInfo
from sglang_hs_capture.store.session import read_sessions

CONNECT_GRACE_S = 30.0


@dataclass(frozen=True)
class Wanted:
    """What the user asked a running server for; None where any will do."""

    layers: str | None = None
    final: Final | None = None
    dtype: str | None = None

    def differences(self, there: DatasetInfo, model: ModelConfig | None) -> list[str]:
        """Name what ``there`` has otherwise.

        Raises:
            ConfigError: the layers are not the model's.
        """
        boundaries = there.boundaries
        if self.layers is not None:
            boundaries = resolve_boundaries(parse_layers(self.layers), there.num_layers)
        finals = tuple(name for name in there.columns if name.startswith("final:"))
        if self.final is not None:
            finals = tuple(column.name for column in make_columns((), self.final))
        now = replace(
            there,
            boundaries=boundaries,
            columns=(*(column.name for column in make_columns(boundaries, Final.PRE_NORM)[:-1]), *finals),
            dtype=self.dtype or there.dtype,
            config_hash=model.config_hash if model else there.config_hash,
        )
        return there.differences(now)


def run_on_own_server(
    model: str,
    source: Source,
    capture: CaptureConfig,
    settings: RunSettings,
    view: ProgressView,
    *,
    sglang_args: Sequence[str] = (),
    cpu: bool = False,
    notice: str = "",
    start_timeout_s: float,
    answers: AnswerSettings | None = None,
) -> Summary:
    """Start a server, capture, and stop the server.

    Everything that can be refused without it is refused before it is started.

    Args:
        notice: said before the server is started, if it is.
        answers: how the model is to answer the prompts anew, before they are captured with its answers.

    Raises:
        HsCaptureError: nothing was begun; errors that come later are told by the summary.
    """
    config = find_model(model)
    samples, again = _input(
        source, settings, answers, view, max_length=_context_length(config, sglang_args), known=config
    )
    plan = plan_server(
        model,
        capture.model_copy(update={"run_id": uuid.uuid4().hex}),
        sglang_args,
        port=free_port(),
        cpu=cpu,
        own=True,
        generates=answers is not None,
    )
    make_output(settings.output)
    check_output(settings.output, config, plan.capture)
    target = OwnServer(plan, settings.output, config, start_timeout_s, notice)
    return run_capture(target, samples, settings, view, again)


def run_on_ray(
    model: str,
    source: Source,
    capture: CaptureConfig,
    settings: RunSettings,
    view: ProgressView,
    *,
    sglang_args: Sequence[str] = (),
    cpu: bool = False,
    address: str,
    engines: int | None,
    nodes: int = 1,
    resources: Mapping[str, float] | None = None,
    start_timeout_s: float,
    answers: AnswerSettings | None = None,
) -> Summary:
    """Start engines on a Ray cluster, capture, and stop them.

    Args:
        address: the cluster's.
        engines: how many engines; None for as many as there is room for.
        nodes: nodes of one engine.
        resources: what Ray sets aside on each node of an engine; None for what follows from SGLang's flags.
        answers: see ``run_on_own_server``.

    Raises:
        HsCaptureError: nothing was begun; errors that come later are told by the summary.
    """
    config = find_model(model)
    samples, again = _input(
        source, settings, answers, view, max_length=_context_length(config, sglang_args), known=config
    )
    checked = plan_server(model, capture, sglang_args, cpu=cpu).capture
    plan = RayPlan(
        address,
        engines,
        resources or default_resources(sglang_args, cpu=cpu, nodes=nodes),
        replicas_of(sglang_args),
    )
    make_output(settings.output)
    check_output(settings.output, config, checked)
    marker = f"run-{uuid.uuid4().hex}"
    request = EngineRequest(
        model, capture, tuple(sglang_args), cpu, nodes, start_timeout_s, marker, answers is not None
    )
    connect(plan.address)
    # While no engine is up, nothing moves, and nothing is wrong.
    patient = replace(
        settings,
        delivery=replace(settings.delivery, grace_s=start_timeout_s),
        pump=replace(settings.pump, stall_timeout_s=settings.pump.stall_timeout_s + start_timeout_s),
    )
    return run_capture(RayEngines(plan, request), samples, patient, view, again)


def run_on_running_servers(
    urls: Sequence[str],
    source: Source,
    settings: RunSettings,
    view: ProgressView,
    *,
    model: str | None,
    wanted: Wanted,
    api_key: str | None = None,
    answers: AnswerSettings | None = None,
) -> Summary:
    """Capture on servers that somebody else started.

    Args:
        urls: the servers', all of which capture into the output.
        model: the model they should serve; None to take their word.
        answers: see ``run_on_own_server``.

    Raises:
        HsCaptureError: nothing was begun.
    """
    config = find_model(model) if model else None
    known = config or served_model(settings.output)
    samples, again = _input(source, settings, answers, view, max_length=None, known=known)
    if not settings.output.is_dir():
        raise ConfigError(
            f"--output {settings.output}: there is no such directory; name the one the server captures into"
        )

    def expected(there: DatasetInfo) -> list[str]:
        return wanted.differences(there, config)

    target = RunningServers(urls, settings.output, expected, api_key, CONNECT_GRACE_S)
    # The servers are not asked where nothing is left to be captured.
    if (settings.output / DATASET_FILE).exists():
        target.check_settings()
    return run_capture(target, samples, settings, view, again)


def _input(
    source: Source,
    settings: RunSettings,
    answers: AnswerSettings | None,
    view: ProgressView,
    *,
    max_length: int | None,
    known: ModelConfig | None,
) -> tuple[Samples, Regeneration | None]:
    """What is to be captured: the samples of the input, or what the model answers to its prompts.

    Args:
        max_length: the longest prompt the model takes, as far as it is known.
        known: the model, if its files are here.

    Raises:
        InputError: a file is missing, or was tokenised with another vocabulary.
    """
    for notice in source.check_sets():
        view.say(notice)
    vocab_size = known.vocab_size if known else None
    if answers is None:
        media_token = known.media_token if known else None
        return source.samples(max_length=max_length, vocab_size=vocab_size, media_token=media_token), None
    prompts = islice(source.prompts(vocab_size=vocab_size), settings.limit)
    again = Regeneration(
        prompts=prompts,
        directory=settings.output,
        settings=answers,
        max_length=source.preparation.max_length,
        max_prompts=settings.pump.max_prompts,
        delivery=settings.delivery,
    )
    return _answered(settings.output), again


def _answered(directory: Path) -> Iterator[Prepared]:
    """The samples in the file of answers, which need not be there yet."""
    yield from Source(paths=[directory / ANSWERS_FILE], tokenizer="").samples(max_length=None, vocab_size=None)


def served_path(output: Path) -> str | None:
    """Where the model of a running server is, by the server's own word, which may be relative to another directory."""
    sessions = read_sessions(output) if output.is_dir() else []
    return next((str(record.model["model_path"]) for record in sessions if record.model), None)


def served_model(output: Path) -> ModelConfig | None:
    """The model that a running server captures from, by its session record, if its files are here too."""
    path = served_path(output)
    try:
        return resolve_model_config(path) if path else None
    except ConfigError:
        return None


def _context_length(config: ModelConfig | None, sglang_args: Sequence[str]) -> int | None:
    """The longest prompt that can be told before the server is up."""
    given = flag_value(sglang_args, "--context-length")
    if given is not None and given.isdigit():
        return int(given)
    return config.context_length if config else None
