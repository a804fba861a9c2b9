"""Looks at torch, SGLang and the plugin in a child process, so that the asking process imports none of them.

Run as ``python -m sglang_hs_capture.driver.probe``; prints one JSON line.
"""

import contextlib
import importlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from sglang_hs_capture.driver.launch import CPU_PLATFORM

PLATFORM_GROUP = "sglang.srt.platforms"
TIMEOUT_S = 300


def look(*, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Run the probe in a child process; a failure of the child is told under ``"error"``."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sglang_hs_capture.driver.probe"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"importing torch and SGLang took more than {timeout_s:.0f} s"}
    except (IndexError, ValueError):
        return {"error": " | ".join(done.stderr.strip().splitlines()[-3:]) or f"exit code {done.returncode}"}
    return answer if isinstance(answer, dict) else {"error": f"unexpected answer {answer!r}"}


def gather() -> dict[str, Any]:
    """Everything that can be found out; what cannot be found out is an error text in its place."""
    return {
        "torch": _attempt(_torch),
        "triton": _attempt(lambda: str(importlib.import_module("triton").__version__)),
        "sglang": _attempt(_sglang),
        "platform": _attempt(_platform),
    }


def _attempt(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _torch() -> dict[str, Any]:
    import torch

    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append({"name": properties.name, "bytes": properties.total_memory})
    return {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}


def _sglang() -> dict[str, Any]:
    from sglang_hs_capture import compat

    version = compat.sglang_version()
    return {"version": version, "tested": compat.is_tested(version), "missing": compat.missing_names()}


def _platform() -> bool:
    return any(point.name == CPU_PLATFORM for point in importlib.metadata.entry_points(group=PLATFORM_GROUP))


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = gather()
    print(json.dumps(found))
