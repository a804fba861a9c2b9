"""``hs-capture run``: conversations in, a dataset of hidden states out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from sglang_hs_capture.cli import options
from sglang_hs_capture.cli.tell import tell
from sglang_hs_capture.driver.delivery import DeliverySettings
from sglang_hs_capture.driver.device import CPU_NOTICE, Device, use_cpu
from sglang_hs_capture.driver.intake import OnBadInput
from sglang_hs_capture.driver.progress import make_view
from sglang_hs_capture.driver.pump import PumpSettings
from sglang_hs_capture.driver.regenerate import AnswerSettings
from sglang_hs_capture.driver.run import KNOWN_ANSWERS, RunSettings
from sglang_hs_capture.driver.source import count_samples
from sglang_hs_capture.driver.start import (
    Wanted,
    run_on_own_server,
    run_on_ray,
    run_on_running_servers,
    served_model,
    served_path,
)
from sglang_hs_capture.driver.summary import Summary
from sglang_hs_capture.errors import ConfigError, StoreError

OF_ANSWERS = ("max_new_tokens", "temperature", "top_p")
NOT_OF_ANSWERS = ("split_turns", "overflow", "keep_untrained")
# What only a server that this command starts can be told.
RAY_ONLY = ("ray_address", "ray_engines", "ray_nodes", "ray_resources")
EXAMPLE_URL = "http://127.0.0.1:30000"
OWN_SERVER_ONLY = ("rid_prefix", "ring_gb", "shard_gb", "min_free_gb", "replica", "device", "start_timeout")


@options.with_options(capture=options.CaptureOptions, given=options.InputOptions)
def run(
    ctx: typer.Context,
    *,
    data: options.DataOption,
    output: options.OutputOption,
    model: Annotated[
        str | None, typer.Option(help="The model: a directory, or a hub id. With --server, the server's by default.")
    ] = None,
    capture: options.CaptureOptions,
    on_bad_input: options.OnBadInputOption = OnBadInput.STOP,
    limit: options.LimitOption = None,
    server: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of a running server that captures into --output, or a file with one on each line; may be given "
            "several times. None is started."
        ),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="The key that the server of --server wants.")] = None,
    known_answers: Annotated[
        int,
        typer.Option(
            min=0,
            help="Prompts for which the engine's own log-probabilities are kept, for `verify --known-answer`; of each "
            "server.",
        ),
    ] = KNOWN_ANSWERS,
    given: options.InputOptions,
    regenerate: Annotated[
        bool,
        typer.Option(
            "--regenerate", help="Let the model answer every prompt first, and capture prompt and answer together."
        ),
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = (
        AnswerSettings.max_new_tokens
    ),
    temperature: Annotated[float, typer.Option(min=0, max=1000, help="Of answers.")] = AnswerSettings.temperature,
    top_p: Annotated[float, typer.Option(min=0.001, max=1, help="Of answers.")] = AnswerSettings.top_p,
    max_in_flight: Annotated[
        int, typer.Option(min=1, help="Most prompts in flight, for each server.")
    ] = PumpSettings.max_prompts,
    ack_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds after the server's reply in which a sample must be on disk.")
    ] = DeliverySettings.ack_timeout_s,
    attempts: Annotated[
        int, typer.Option(min=1, help="Times a sample is sent before it is given up.")
    ] = DeliverySettings.attempts,
    device: options.DeviceOption = Device.AUTO,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds the server may take to start.")] = 7200.0,
    ray: Annotated[
        bool, typer.Option("--ray", help="Start engines on a Ray cluster; --output lies where all its nodes see it.")
    ] = False,
    ray_address: Annotated[
        str, typer.Option(help="The cluster's address; auto for the one that this machine belongs to.")
    ] = "auto",
    ray_engines: Annotated[
        str, typer.Option(metavar="N|auto", help="How many engines; auto for as many as there is room for.")
    ] = "auto",
    ray_nodes: Annotated[int, typer.Option(min=1, help="Nodes of one engine.")] = 1,
    ray_resources: Annotated[
        str | None,
        typer.Option(
            help='What Ray sets aside on each node of an engine, as a JSON object such as {"GPU": 8}.',
            show_default="a GPU for each rank that SGLang's flags ask for; on the CPU platform a CPU",
        ),
    ] = None,
    json_summary: Annotated[Path | None, typer.Option(help="Write the summary to this file as well.")] = None,
) -> None:
    """Capture hidden states of conversations.

    Starts SGLang with the capture classes, sends every conversation once, and waits until its states are safely on
    disk. Run the same command again to go on after any interruption. Everything after -- goes to SGLang.
    """
    settings = RunSettings(
        output=output.expanduser().resolve(),
        on_bad_input=on_bad_input,
        limit=limit,
        known_answers=known_answers,
        delivery=DeliverySettings(attempts=attempts, ack_timeout_s=ack_timeout),
        pump=PumpSettings(max_prompts=max_in_flight),
    )
    if json_summary is not None and not json_summary.absolute().parent.is_dir():
        raise ConfigError(f"--json-summary: {json_summary.absolute().parent} is not a directory")
    if json_summary is not None and json_summary.is_dir():
        raise ConfigError(f"--json-summary: {json_summary} is a directory; name a file")
    _refuse_idle(ctx, max_length=given.max_length, regenerate=regenerate, ray=ray, server=bool(server))
    sglang_args: list[str] = ctx.obj or []
    trust_remote_code = given.trust_remote_code or options.TRUST_FLAG in sglang_args
    given = replace(given, trust_remote_code=trust_remote_code)
    answers = AnswerSettings(max_new_tokens, temperature, top_p) if regenerate else None
    source = given.source(data, model, share=4)
    if server:
        wanted = Wanted(capture.layers, capture.final, capture.dtype.value if capture.dtype else None)
        if not source.tokenizer and (served := served_model(settings.output)):
            source = replace(source, tokenizer=str(served.path))
        with make_view(options.total_of(count_samples(data), limit)) as view:
            if not source.tokenizer and (path := served_path(settings.output)):
                view.say(
                    f"The server's model, {path}, is neither a directory here nor in the hub's cache: conversations "
                    "need --model or --tokenizer."
                )
            summary = run_on_running_servers(
                _urls(server, api_key),
                source,
                settings,
                view,
                model=model,
                wanted=wanted,
                api_key=api_key,
                answers=answers,
            )
    else:
        if model is None:
            raise ConfigError("--model: expected a directory or a hub id; only --server does without")
        cpu = use_cpu(device)
        config = capture.config(output, cpu=cpu)
        if trust_remote_code and options.TRUST_FLAG not in sglang_args:
            sglang_args = [options.TRUST_FLAG, *sglang_args]
        with make_view(options.total_of(count_samples(data), limit)) as view:
            if ray:
                summary = run_on_ray(
                    model,
                    source,
                    config,
                    settings,
                    view,
                    sglang_args=sglang_args,
                    cpu=cpu,
                    address=ray_address,
                    engines=_engines(ray_engines),
                    nodes=ray_nodes,
                    resources=_resources(ray_resources),
                    start_timeout_s=start_timeout,
                    answers=answers,
                )
            else:
                summary = run_on_own_server(
                    model,
                    source,
                    config,
                    settings,
                    view,
                    sglang_args=sglang_args,
                    cpu=cpu,
                    notice=CPU_NOTICE if cpu and device is Device.AUTO else "",
                    start_timeout_s=start_timeout,
                    answers=answers,
                )
    report(summary, json_summary)
    raise typer.Exit(summary.exit_code)


def _refuse_idle(ctx: typer.Context, *, max_length: int | None, regenerate: bool, ray: bool, server: bool) -> None:
    """Refuse options that would have no effect beside the others.

    Raises:
        ConfigError: there is one.
    """
    if max_length is None:
        options.refuse_given(ctx, ("overflow",), options.OVERFLOW_ALONE)
    if regenerate:
        options.refuse_given(ctx, NOT_OF_ANSWERS, "has no meaning for what the model answers; leave it out")
    else:
        options.refuse_given(ctx, OF_ANSWERS, "is a setting of --regenerate; give that as well")
    if not ray:
        options.refuse_given(ctx, RAY_ONLY, "is for --ray")
    if server and ray:
        raise ConfigError("--server and --ray: servers are running already, or are started on Ray; leave one out")
    if not server:
        options.refuse_given(ctx, ("api_key",), "is for --server; give SGLang's own --api-key after '--'")
        return
    if ctx.obj:
        raise ConfigError("flags after '--' are for a server that this command starts; with --server there is none")
    options.refuse_given(
        ctx, OWN_SERVER_ONLY, "is a setting of the server, which runs already; with --server leave it out"
    )


def _urls(given: list[str], api_key: str | None) -> list[str]:
    """The URLs given, and those in the files given.

    Raises:
        ConfigError: something is neither.
    """
    urls: list[str] = []
    for word in given:
        if "://" in word:
            _check_url(word, "--server", api_key)
            urls.append(word)
        elif Path(word).is_file():
            urls += _urls_of_file(Path(word), api_key)
        else:
            raise ConfigError(f"--server {word}: expected a URL such as {EXAMPLE_URL}, or a file of URLs")
    return urls


def _urls_of_file(path: Path, api_key: str | None) -> list[str]:
    """The URLs in a file, one on each line; empty lines, and lines that begin with #, are passed over.

    Raises:
        ConfigError: there is none, or something else.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--server {path}: expected a file with a URL on each line; {error}") from None
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
    lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
    if not lines:
        raise ConfigError(f"--server {path}: expected a URL such as {EXAMPLE_URL} on each line, and there is none")
    for number, line in lines:
        _check_url(line, f"{path}, line {number}", api_key)
    return [line for _, line in lines]


def _check_url(url: str, where: str, api_key: str | None) -> None:
    """See that a server can be asked at this URL.

    Raises:
        ConfigError: as said; a password in it is not repeated.
    """
    try:
        parts = urlsplit(url)
        place, port = parts.hostname, parts.port
    except ValueError:
        place, port = None, None
    plain = url.isprintable() and " " not in url and port != 0
    if not plain or not place or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
        scheme, _, rest = url.partition("://")
        raise ConfigError(f"{where}: expected a URL such as {EXAMPLE_URL}, got {scheme}://{rest.rpartition('@')[2]}")
    if parts.username is not None and api_key:
        raise ConfigError(f"{where}: a user in the URL of {place} and --api-key: only one can be sent; leave one out")


def _engines(text: str) -> int | None:
    """The number of engines asked for; None for ``auto``.

    Raises:
        ConfigError: it is neither.
    """
    if text == "auto":
        return None
    if not text.isdigit() or not int(text):
        raise ConfigError(f"--ray-engines: expected a number of engines or auto; got {text!r}")
    return int(text)


def _resources(text: str | None) -> dict[str, float] | None:
    """The resources given.

    Raises:
        ConfigError: they are no object of amounts.
    """
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if (
        not isinstance(found, dict)
        or not found
        or not all(isinstance(v, int | float) and v > 0 for v in found.values())
    ):
        raise ConfigError(f'--ray-resources: expected a JSON object of amounts such as {{"GPU": 8}}; got {text}')
    return dict(found)


def report(summary: Summary, file: Path | None = None) -> None:
    """Print the account of a run, and write it to ``file`` where one is named.

    Raises:
        StoreError: the run went well, and the file cannot be written.
    """
    for line in summary.lines():
        tell(line)
    if summary.ended:
        tell(f"error: {summary.ended}", err=True)
    if file is None:
        return
    try:
        file.write_text(json.dumps(summary.to_json(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        problem = f"--json-summary {file}: could not be written: {error.strerror or error}; the summary is shown above"
        if not summary.exit_code:
            raise StoreError(problem) from None
        tell(f"error: {problem}", err=True)
