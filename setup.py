"""Packaging of sglang-hs-capture."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
INIT = ROOT / "sglang_hs_capture" / "__init__.py"


def read_version() -> str:
    """The version in ``sglang_hs_capture/__init__.py``, read without importing the package."""
    match = re.search(r'^__version__ = "([^"]+)"$', INIT.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise RuntimeError(f'{INIT}: expected a line such as __version__ = "0.1.0"')
    return match.group(1)


TEST = ["pytest", "hypothesis", "psutil"]

setup(
    name="sglang-hs-capture",
    version=read_version(),
    description="Captures hidden states from SGLang at full prefill speed, for training EAGLE-3 draft models",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["sglang_hs_capture", "sglang_hs_capture.*"]),
    package_data={"sglang_hs_capture.demo": ["*.jinja", "*.jsonl"]},
    install_requires=[
        "sglang>=0.5.17",
        "torch",
        "transformers",
        "tokenizers",
        "huggingface-hub",
        "triton",
        "safetensors",
        "datasets",
        "numpy",
        "pillow",
        "pyarrow>=19",
        "prometheus-client",
        "pydantic>=2",
        "xxhash",
        "aiohttp",
        "typer",
        "rich",
    ],
    extras_require={"ray": ["ray"], "test": TEST, "dev": [*TEST, "ruff", "mypy", "matplotlib"]},
    entry_points={
        "console_scripts": ["hs-capture = sglang_hs_capture.cli.main:main"],
        "sglang.srt.platforms": ["hs_capture_cpu = sglang_hs_capture.platform.cpu:activate"],
    },
)
