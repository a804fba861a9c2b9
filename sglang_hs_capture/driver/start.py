"""Puts a run together: on a server of its own, or on one that is running already."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_hs_capture.config import CaptureConfig
from sglang_hs_capture.driver.check import check_output, find_model, make_output
from sglang_hs_capture.driver.launch import flag_value, plan_server
from sglang_hs_capture.driver.progress import ProgressView
from sglang_hs_capture.driver.run import RunSettings, run_capture
from sglang_hs_capture.driver.server import free_port
from sglang_hs_capture.driver.source import Source
from sglang_hs_capture.driver.summary import Summary
from sglang_hs_capture.driver.target import OwnServer, RunningServers
from sglang_hs_capture.errors import ConfigError
from sglang_hs_capture.layers import Final, make_columns, parse_layers, resolve_boundaries
from sglang_hs_capture.model_config import ModelConfig, resolve_model_config
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
) -> Summary:
    """Start a server, capture, and stop the server.

    Everything that can be refused without it is refused before it is started.

    Args:
        notice: said before the server is started, if it is.

    Raises:
        HsCaptureError: nothing was begun; errors that come later are told by the summary.
    """
    config = find_model(model)
    samples = source.samples(
        max_length=_context_length(config, sglang_args),
        vocab_size=config.vocab_size if config else None,
        media_token=config.media_token if config else None,
    )
    plan = plan_server(
        model,
        capture.model_copy(update={"run_id": uuid.uuid4().hex}),
        sglang_args,
        port=free_port(),
        cpu=cpu,
        prefill_only=True,
    )
    make_output(settings.output)
    check_output(settings.output, config, plan.capture)
    target = OwnServer(plan, settings.output, config, start_timeout_s, notice)
    return run_capture(target, samples, settings, view)


def run_on_running_servers(
    urls: Sequence[str],
    source: Source,
    settings: RunSettings,
    view: ProgressView,
    *,
    model: str | None,
    wanted: Wanted,
    api_key: str | None = None,
) -> Summary:
    """Capture on servers that somebody else started.

    Args:
        urls: the servers', all of which capture into the output.
        model: the model they should serve; None to take their word.

    Raises:
        HsCaptureError: nothing was begun.
    """
    config = find_model(model) if model else None
    known = config or served_model(settings.output)
    samples = source.samples(
        max_length=None,
        vocab_size=known.vocab_size if known else None,
        media_token=known.media_token if known else None,
    )
    if not settings.output.is_dir():
        raise ConfigError(
            f"--output {settings.output}: there is no such directory; name the one the server captures into"
        )

    def expected(there: DatasetInfo) -> list[str]:
        return wanted.differences(there, config)

    target = RunningServers(urls, settings.output, expected, api_key, CONNECT_GRACE_S)
    return run_capture(target, samples, settings, view)


def served_model(output: Path) -> ModelConfig | None:
    """The model that a running server captures from, by its session record, if its files are here too."""
    sessions = read_sessions(output) if output.is_dir() else []
    path = next((str(record.model["model_path"]) for record in sessions if record.model), None)
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
