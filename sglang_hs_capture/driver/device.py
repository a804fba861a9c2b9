"""Which device a server will run on, found without importing torch into this process."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from sglang_hs_capture.errors import ConfigError

CPU_NOTICE = "No GPU is visible: running on the CPU platform, which is exact but slow."
TORCH_PROBE = "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 1)"
TORCH_PROBE_TIMEOUT_S = 120


class Device(StrEnum):
    """What ``--device`` accepts."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def gpu_visible(environment: Mapping[str, str] = os.environ, device_files: Path = Path("/dev")) -> bool:
    """Whether a server started from here would see a GPU.

    An empty ``CUDA_VISIBLE_DEVICES`` hides all of them. NVIDIA's device files answer at once; where only the tools or
    another vendor's device files are found, a short child process asks torch.
    """
    if environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    if any(file.name[len("nvidia") :].isdigit() for file in device_files.glob("nvidia*")):
        return True
    hints = (device_files / "dxg", device_files / "kfd")
    if shutil.which("nvidia-smi", path=environment.get("PATH")) or any(hint.exists() for hint in hints):
        return _ask_torch(environment)
    return False


def _ask_torch(environment: Mapping[str, str]) -> bool:
    try:
        done = subprocess.run(
            [sys.executable, "-c", TORCH_PROBE],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TORCH_PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def use_cpu(device: Device, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the CPU platform is to be used.

    Raises:
        ConfigError: a GPU was asked for and none is visible.
    """
    if device is Device.CPU:
        return True
    visible = gpu_visible(environment)
    if device is Device.CUDA and not visible:
        hidden = environment.get("CUDA_VISIBLE_DEVICES")
        cause = (
            f"CUDA_VISIBLE_DEVICES is {hidden!r}" if hidden is not None else "there is no NVIDIA device file in /dev"
        )
        raise ConfigError(f"--device cuda: no GPU is visible ({cause}); use --device cpu, or make a GPU visible")
    return not visible
