"""The command and the environment that start SGLang with the capture classes; ``serve`` prints exactly this."""

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_hs_capture.config import CONFIG_KEY, CaptureConfig
from sglang_hs_capture.errors import ConfigError

MODEL_PACKAGE = "sglang_hs_capture.models"
PACKAGE_VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
PLATFORM_VARIABLE = "SGLANG_PLATFORM"
CPU_PLATFORM = "hs_capture_cpu"
LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 30000

# Without these, states would be missing: a replayed prefill graph runs no Python.
CAPTURE_FLAGS = ("--model-impl", "sglang", "--disable-prefill-cuda-graph")
# A server that a run has for itself gets token ids, so it needs no tokenizer and no generated warm-up text, ...
OWN_FLAGS = ("--skip-tokenizer-init", "--skip-server-warmup")
# ... and none of the graphs for decode unless it is to answer prompts.
PREFILL_ONLY_FLAGS = ("--disable-decode-cuda-graph",)
# One line of log a request says nothing that the journal does not, and makes the log as long as the input.
QUIET_FLAGS = ("--log-level-http", "warning")
OVERRIDE_FLAG = "--json-model-override-args"


@dataclass(frozen=True)
class LaunchPlan:
    """How to start one server.

    Attributes:
        command: the whole command line.
        environment: variables to add to the environment.
        host: the address to reach the server at.
        port: its port.
        api_key: the key that requests must carry, if the user set one.
        capture: the settings that the model will find in its config.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    host: str
    port: int
    api_key: str | None
    capture: CaptureConfig

    @property
    def url(self) -> str:
        """Where the server answers."""
        return f"http://{self.host}:{self.port}"

    def shell_line(self) -> str:
        """The same as one line for a shell, variables first."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.command)])


def plan_server(
    model: str,
    capture: CaptureConfig,
    sglang_args: Sequence[str] = (),
    *,
    port: int | None = None,
    cpu: bool = False,
    own: bool = False,
    generates: bool = True,
    inherited: Mapping[str, str] = os.environ,
) -> LaunchPlan:
    """Assemble the command; the user's flags come last, and SGLang takes the last of a repeated flag.

    Args:
        model: a directory or a hub id.
        capture: the capture settings.
        sglang_args: the user's own flags for SGLang.
        port: the port to serve at when the user names none; None leaves it to SGLang.
        cpu: run on the CPU platform.
        own: leave out what only other users of the server need.
        generates: whether it is to generate; else what only generation needs is left out.
        inherited: the environment that the server will be started in.

    Raises:
        ConfigError: a flag of the user's contradicts what a capture needs, or another model package is set.
    """
    _refuse_conflicts(sglang_args, inherited)
    capture, overrides, rest = _merge_overrides(capture, sglang_args)
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, *CAPTURE_FLAGS]
    if own:
        command += [*OWN_FLAGS, *QUIET_FLAGS]
    if not generates:
        command += PREFILL_ONLY_FLAGS
    if port is not None:
        command += ["--host", LOOPBACK, "--port", str(port)]
    command += [OVERRIDE_FLAG, json.dumps(overrides, separators=(",", ":")), *rest]
    environment = {PACKAGE_VARIABLE: MODEL_PACKAGE}
    if cpu:
        # The device is hidden as well: SGLang takes its CUDA paths wherever torch sees one.
        environment |= {PLATFORM_VARIABLE: CPU_PLATFORM, "CUDA_VISIBLE_DEVICES": ""}
        # Threads that spin while they wait take the cores from those that compute: several times slower when shared.
        environment.setdefault("OMP_WAIT_POLICY", inherited.get("OMP_WAIT_POLICY", "PASSIVE"))
    return LaunchPlan(
        command=tuple(command),
        environment=environment,
        host=_reachable(flag_value(rest, "--host")),
        port=_port(flag_value(rest, "--port"), port),
        api_key=flag_value(rest, "--api-key"),
        capture=capture,
    )


def flag_value(args: Sequence[str], *names: str) -> str | None:
    """The value SGLang would take for a flag, ``--flag value`` or ``--flag=value``: that of its last occurrence."""
    found = None
    for index, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name not in names:
            continue
        if equals:
            found = value
        elif index + 1 < len(args):
            found = args[index + 1]
    return found


def _without_flag(args: Sequence[str], name: str) -> list[str]:
    kept: list[str] = []
    skip = False
    for arg in args:
        if skip:
            skip = False
        elif arg == name:
            skip = True
        elif not arg.startswith(f"{name}="):
            kept.append(arg)
    return kept


def _refuse_conflicts(args: Sequence[str], inherited: Mapping[str, str]) -> None:
    for name in ("--model-path", "--model"):
        if flag_value(args, name) is not None:
            raise ConfigError(
                f"{name} after '--': the model is named by hs-capture's own --model; remove one of the two"
            )
    package = inherited.get(PACKAGE_VARIABLE, "")
    if package not in ("", MODEL_PACKAGE):
        raise ConfigError(
            f"{PACKAGE_VARIABLE} is set to {package!r}, and SGLang loads one such package only: unset it, or set it to "
            f"{MODEL_PACKAGE}"
        )


def _merge_overrides(
    capture: CaptureConfig, args: Sequence[str]
) -> tuple[CaptureConfig, dict[str, Any], Sequence[str]]:
    """Put the capture settings into the user's own config overrides.

    Returns:
        The settings as the model will see them, the merged overrides, and the user's flags without theirs.
    """
    text = flag_value(args, OVERRIDE_FLAG)
    if text is None:
        return capture, {CONFIG_KEY: capture.to_mapping()}, args
    try:
        theirs = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{OVERRIDE_FLAG}: not valid JSON: {error}") from None
    if not isinstance(theirs, dict):
        raise ConfigError(f"{OVERRIDE_FLAG}: expected a JSON object; got {text}")
    ours = capture.to_mapping()
    settings = theirs.get(CONFIG_KEY, {})
    if not isinstance(settings, dict):
        raise ConfigError(f"{OVERRIDE_FLAG}: {CONFIG_KEY}: expected an object; got {settings!r}")
    for name in ("output_dir", "run_id"):
        if settings.get(name, ours[name]) != ours[name]:
            raise ConfigError(f"{OVERRIDE_FLAG}: {CONFIG_KEY}.{name} is set by hs-capture itself; remove it")
    merged = CaptureConfig.from_mapping(ours | settings)
    return merged, theirs | {CONFIG_KEY: merged.to_mapping()}, _without_flag(args, OVERRIDE_FLAG)


def _reachable(host: str | None) -> str:
    """An address to reach a server at that listens on ``host``."""
    return LOOPBACK if not host or host in ("0.0.0.0", "::") else host


def _port(text: str | None, default: int | None) -> int:
    if text is None:
        return DEFAULT_PORT if default is None else default
    if not text.isdigit():
        raise ConfigError(f"--port after '--': expected a number; got {text!r}")
    return int(text)
