"""One folder of packages for each version of a trainer, made by ``python -m tests.trainers.environments``.

A folder goes in front of the packages of the interpreter that runs the tests, so torch and what else a trainer is
content with are shared. What is in it is pinned; a folder that is complete is left alone.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What speculators needs and SGLang does not bring.
_SETTINGS = ("pydantic-settings==2.16.3", "python-dotenv==1.2.4")

PACKAGES: dict[str, tuple[str, ...]] = {
    "speculators-0.9.0": ("speculators==0.9.0", "hs-connectors==0.9.0", *_SETTINGS),
    "speculators-0.7.0": ("speculators==0.7.0", *_SETTINGS),
    # Written for transformers 4, which does not start with newer releases of the others.
    "speculators-0.4.0": (
        "speculators==0.4.0",
        "transformers==4.57.6",
        "tokenizers==0.22.2",
        "huggingface-hub==0.36.2",
        "kernels==0.9.0",
        *_SETTINGS,
    ),
    "specforge-0.2.0": ("specforge==0.2.0", "accelerate==1.15.0", "yunchang==0.6.4"),
}


def cache() -> Path:
    """Where the folders, the trained target models and the datasets lie: ``HS_CAPTURE_TRAINERS``, or ``.trainers``."""
    return Path(os.environ.get("HS_CAPTURE_TRAINERS") or ROOT / ".trainers").absolute()


def folder(name: str) -> Path:
    """The packages of one environment, there or not."""
    return cache() / "packages" / name


def is_made(name: str) -> bool:
    """Whether an environment is complete and has the packages that are pinned now."""
    stamp = folder(name) / "packages.txt"
    return stamp.is_file() and stamp.read_text().split() == list(PACKAGES[name])


def make(name: str) -> None:
    """Install an environment unless it is made.

    Raises:
        RuntimeError: pip could not; its last lines are in the message.
    """
    if is_made(name):
        return
    target = folder(name)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
    command += ["--no-deps", "--target", str(target), *PACKAGES[name]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-5:])
        raise RuntimeError(f"pip could not install {' '.join(PACKAGES[name])} into {target}:\n{tail}")
    (target / "packages.txt").write_text("\n".join(PACKAGES[name]) + "\n")


def variables(name: str) -> dict[str, str]:
    """Environment variables for a process that runs in an environment, on the CPU and without compiling.

    SpecForge has its loss as a Triton kernel only, which Triton's interpreter runs.
    """
    return {
        **os.environ,
        "PYTHONPATH": str(folder(name)),
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


if __name__ == "__main__":
    for each in PACKAGES:
        make(each)
