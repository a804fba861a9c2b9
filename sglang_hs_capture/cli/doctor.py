"""``hs-capture doctor``: what of this machine and of this SGLang fits, in plain words."""

import asyncio
import os
import platform
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_hs_capture.cli.tell import tell
from sglang_hs_capture.config import GIB
from sglang_hs_capture.driver import probe
from sglang_hs_capture.driver.device import gpu_visible
from sglang_hs_capture.driver.launch import MODEL_PACKAGE, PACKAGE_VARIABLE
from sglang_hs_capture.driver.preflight import check_plugin
from sglang_hs_capture.errors import HsCaptureError
from sglang_hs_capture.store import fs

WRITE_BYTES = 256 * 2**20
WRITE_BLOCK = 16 * 2**20
# Memory locked for the ring; the default ring has 4 GiB.
LOCKED_WANTED = 4 * GIB


class Level(StrEnum):
    """How a finding weighs."""

    OK = "ok"
    NOTE = "note"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Level
    text: str


def doctor(
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Where a dataset would go: space and speed are tested.")
    ] = None,
) -> None:
    """Say what of this machine and this SGLang fits, and what would stop a capture."""
    typer.echo("Importing torch and SGLang in a process of their own takes some seconds ...")
    found = probe.look()
    findings = [_python(), *_software(found), _plugin(), _locked_memory()]
    if directory is not None:
        findings.append(_disk(directory))
    for finding in findings:
        tell(f"{finding.level.value:>5}  {finding.text}")
    failures = sum(finding.level is Level.FAIL for finding in findings)
    typer.echo("Nothing here would stop a capture." if not failures else f"{failures} of these would stop a capture.")
    raise typer.Exit(1 if failures else 0)


def _python() -> Finding:
    return Finding(Level.OK, f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")


def _software(found: dict[str, Any]) -> list[Finding]:
    if "error" in found:
        return [Finding(Level.FAIL, f"torch and SGLang cannot be looked at: {found['error']}")]
    checks: tuple[tuple[str, Callable[[Any], list[Finding]]], ...] = (
        ("torch", _torch),
        ("triton", _triton),
        ("sglang", _sglang),
        ("platform", _platform),
    )
    findings = []
    for name, judge in checks:
        answer = found[name]
        if isinstance(answer, dict) and "error" in answer:
            findings.append(Finding(Level.FAIL, f"{name}: {answer['error']}"))
        else:
            findings += judge(answer)
    return findings


def _torch(answer: dict[str, Any]) -> list[Finding]:
    cuda = f"built for CUDA {answer['cuda']}" if answer["cuda"] else "built without CUDA"
    findings = [Finding(Level.OK, f"torch {answer['version']}, {cuda}")]
    gpus = answer["gpus"]
    if gpus:
        sizes = ", ".join(f"{gpu['name']} ({gpu['bytes'] / GIB:.0f} GiB)" for gpu in gpus)
        findings.append(Finding(Level.OK, f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: {sizes}"))
    elif gpu_visible():
        findings.append(
            Finding(Level.FAIL, "a GPU is there, but torch cannot use it: check the driver and torch's build")
        )
    else:
        findings.append(
            Finding(Level.NOTE, "no GPU is visible: the CPU platform would be used, which is exact but slow")
        )
    return findings


def _triton(version: str) -> list[Finding]:
    return [Finding(Level.OK, f"Triton {version}")]


def _sglang(answer: dict[str, Any]) -> list[Finding]:
    version = answer["version"]
    level, word = (Level.OK, "tested") if answer["tested"] else (Level.NOTE, "not tested; tested are 0.5.17 to 0.5.23")
    findings = [Finding(level, f"SGLang {version}, {word}")]
    if answer["missing"]:
        names = "; ".join(answer["missing"])
        findings.append(Finding(Level.FAIL, f"SGLang {version} lacks what the plugin relies on: {names}"))
    else:
        findings.append(Finding(Level.OK, "SGLang has everything the plugin relies on"))
    return findings


def _platform(registered: bool) -> list[Finding]:
    if registered:
        return [Finding(Level.OK, "the CPU platform is registered with SGLang")]
    text = "the CPU platform is not registered: install this package with pip, so that SGLang finds its entry point"
    return [Finding(Level.NOTE if gpu_visible() else Level.FAIL, text)]


def _plugin() -> Finding:
    other = os.environ.get(PACKAGE_VARIABLE, "")
    if other not in ("", MODEL_PACKAGE):
        return Finding(
            Level.FAIL, f"{PACKAGE_VARIABLE} names another package, {other!r}: SGLang loads one only; unset it"
        )
    try:
        found = asyncio.run(check_plugin((), {PACKAGE_VARIABLE: MODEL_PACKAGE}))
    except HsCaptureError as error:
        return Finding(Level.FAIL, str(error))
    return Finding(Level.OK, f"SGLang loads the capture classes, such as {found}")


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding(Level.OK, "locked memory is not limited")
    # CUDA's own pinned allocations are not counted against the limit on most systems, so this is no failure.
    level = Level.OK if soft >= LOCKED_WANTED else Level.NOTE
    return Finding(
        level, f"locked memory is limited to {soft / GIB:.2f} GiB (ulimit -l); the ring pins 4 GiB by default"
    )


def _disk(directory: Path) -> Finding:
    """Write, sync and remove a file where a dataset would go."""
    place = directory.expanduser().absolute()
    try:
        existing = next(parent for parent in (place, *place.parents) if parent.is_dir())
        free = fs.free_bytes(existing)
        if free < 2 * WRITE_BYTES:
            return Finding(Level.FAIL, f"{existing}: only {free / GIB:.2f} GiB are free")
        speed = _write_speed(existing / f".hs-capture-doctor-{os.getpid()}")
    except OSError as error:
        return Finding(Level.FAIL, f"{place}: cannot be written: {error.strerror or error}")
    return Finding(Level.OK, f"{existing}: {free / GIB:,.0f} GiB free, {speed / 1e9:.2f} GB/s written and synced")


def _write_speed(path: Path) -> float:
    block = os.urandom(WRITE_BLOCK)
    try:
        begin = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for _ in range(WRITE_BYTES // WRITE_BLOCK):
                fs.pwrite_all(file.fileno(), block, file.tell())
                file.seek(0, os.SEEK_END)
            os.fsync(file.fileno())
        return WRITE_BYTES / (time.perf_counter() - begin)
    finally:
        path.unlink(missing_ok=True)
