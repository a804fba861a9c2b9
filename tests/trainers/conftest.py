"""Target models that have learnt something, datasets captured from them by the real engine, and the trainers."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainers import environments, target

DTYPES = ("float32", "bfloat16")
SAMPLES, SEED = 240, 7
DRAFT_VOCABULARY = 64
TIMEOUT_S = 1800
DRIVERS = Path(__file__).parent / "drivers"
# The formats that have a place for a draft model's vocabulary.
WITH_VOCABULARY = ("eagle-pt", "speculators", "specforge")
FIGURES = pytest.StashKey[list[str]]()

Drive = Callable[..., Any]
Exported = Callable[[str, str], Path]


@pytest.fixture(scope="session", autouse=True)
def _environments() -> None:
    missing = [name for name in environments.PACKAGES if not environments.is_made(name)]
    if not missing:
        return
    reason = f"no packages of {', '.join(missing)} in {environments.cache()}: `make test-trainers` makes them"
    if os.environ.get("HS_CAPTURE_TRAINERS_REQUIRED"):
        pytest.fail(reason)
    pytest.skip(reason)


def run(command: list[Any], **options: Any) -> None:
    """Run a command to its end, and fail with the end of what it wrote."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **options)
    if done.returncode:
        pytest.fail(f"{' '.join(words)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-6000:]}")


def hs_capture(*words: Any) -> None:
    """Run ``hs-capture`` of this checkout on the CPU."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "CUDA_VISIBLE_DEVICES": ""}
    run([sys.executable, "-m", "sglang_hs_capture.cli.main", *words], env=environment, cwd=environments.ROOT)


@pytest.fixture(scope="session")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Drive:
    """A function ``(environment, driver, *words) -> what the driver saved``."""

    def drive(environment: str, driver: str, *words: Any) -> Any:
        work = tmp_path_factory.mktemp(driver)
        out = work / "out.pt"
        run([sys.executable, DRIVERS / f"{driver}.py", *words, out], env=environments.variables(environment), cwd=work)
        return torch.load(out)

    return drive


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The trained target model in each dtype; its weights are kept from one session to the next."""
    recipe = hashlib.sha256(Path(target.__file__).read_bytes()).hexdigest()[:16]
    weights = environments.cache() / f"target-{recipe}.safetensors"
    if not weights.exists():
        trained = target.train_target(tmp_path_factory.mktemp("training"))
        weights.parent.mkdir(parents=True, exist_ok=True)
        save_file(trained, weights.with_suffix(".unfinished"))
        weights.with_suffix(".unfinished").rename(weights)
    trained = load_file(weights)
    models = tmp_path_factory.mktemp("targets")
    return {dtype: target.make_target(models / dtype, dtype, trained) for dtype in DTYPES}


@pytest.fixture(scope="session")
def datasets(targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function ``dtype -> dataset``, captured by the real engine from the target model in that dtype."""
    work = tmp_path_factory.mktemp("datasets")
    conversations = work / "conversations.jsonl"
    target.write_conversations(conversations, SAMPLES, SEED)

    @cache
    def captured(dtype: str) -> Path:
        sizes = ["--ring-gb", "0.0625", "--shard-gb", "0.0625", "--min-free-gb", "0.25"]
        capture = ["--model", targets[dtype], "--data", conversations, "--output", work / dtype, "--dtype", dtype]
        engine = ["--dtype", dtype, "--chunked-prefill-size", "64"]
        hs_capture("run", "--device", "cpu", *capture, *sizes, "--", *engine)
        return work / dtype

    return captured


@pytest.fixture(scope="session")
def exported(
    targets: dict[str, Path], datasets: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Exported:
    """A function ``(dtype, format) -> export`` of the dataset in that dtype."""
    work = tmp_path_factory.mktemp("exports")

    @cache
    def export(dtype: str, layout: str) -> Path:
        out = work / dtype / layout
        vocabulary = ["--verifier", targets[dtype], "--draft-vocab-size", DRAFT_VOCABULARY]
        hs_capture("export", datasets(dtype), out, "--format", layout, *(vocabulary * (layout in WITH_VOCABULARY)))
        return out

    return export


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> list[str]:
    """Lines that are shown when all tests are done, and written into the cache folder."""
    return request.config.stash.setdefault(FIGURES, [])


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> Iterator[None]:
    lines = config.stash.get(FIGURES, [])
    if lines:
        terminalreporter.section("figures of docs/trainers.md")
        for line in lines:
            terminalreporter.write_line(line)
        (environments.cache() / "figures.txt").write_text("\n".join(lines) + "\n")
    return (yield)
