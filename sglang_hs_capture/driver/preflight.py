"""Proves in a short child process that SGLang will resolve a model to a capture class.

SGLang only warns when an external model package does not import, and then serves its own class: nothing would be
captured. Run as ``python -m sglang_hs_capture.driver.preflight ARCHITECTURE...`` in the server's environment, this
module imports the package as SGLang does, asks SGLang's registry, and prints one JSON line.
"""

import asyncio
import contextlib
import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_hs_capture.driver.launch import MODEL_PACKAGE
from sglang_hs_capture.errors import EngineError, HsCaptureError
from sglang_hs_capture.model_config import CAPTURE_CLASSES

TIMEOUT_S = 600


async def check_plugin(architectures: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run the check in a child process.

    Args:
        architectures: the model's ``architectures``; empty when its config cannot be read here, which checks the import
            alone.
        environment: variables to add to this process's.

    Returns:
        The full name of the class that will capture.

    Raises:
        EngineError: with the import error's own text, or with the name of the class that SGLang would serve instead.
    """
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sglang_hs_capture.driver.preflight", *architectures),
        env={**os.environ, **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = await asyncio.wait_for(child.communicate(), TIMEOUT_S)
    except TimeoutError:
        raise EngineError(f"importing SGLang took more than {TIMEOUT_S} s; run `hs-capture doctor`") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return _read_verdict(out, err, child.returncode)


def _read_verdict(out: bytes, err: bytes, code: int | None) -> str:
    try:
        answer = json.loads(out.decode("utf-8", "replace").strip().splitlines()[-1])
    except (IndexError, ValueError):
        tail = " | ".join(err.decode("utf-8", "replace").strip().splitlines()[-3:]) or f"exit code {code}, no output"
        raise EngineError(f"SGLang cannot be imported here: {tail}; run `hs-capture doctor`") from None
    if answer["error"]:
        raise EngineError(answer["error"])
    return str(answer["class"])


def import_all(package_name: str) -> None:
    """Import every module of a package, as SGLang does but without swallowing errors.

    Raises:
        EngineError: a module does not import.
    """
    name = package_name
    try:
        package = importlib.import_module(name)
        for _, name, is_package in pkgutil.iter_modules(package.__path__, package_name + "."):
            if not is_package:
                importlib.import_module(name)
    except Exception as error:
        raise EngineError(
            f"the capture package does not load: importing {name} failed with {type(error).__name__}: {error}; SGLang "
            "would only warn and serve its own class, and nothing would be captured"
        ) from error


def resolve(architectures: Sequence[str]) -> str:
    """The full name of the capture class that SGLang's registry gives for ``architectures``.

    Raises:
        EngineError: the registry gives another class.
        GuardError: SGLang knows none of the architectures.
    """
    from sglang_hs_capture.compat import registered_class

    found = registered_class(architectures)
    full_name = f"{found.__module__}.{found.__qualname__}"
    if not found.__module__.startswith(MODEL_PACKAGE + "."):
        raise EngineError(
            f"SGLang would serve the architectures {list(architectures)} with {full_name}, which is no class of "
            f"{MODEL_PACKAGE}; supported are {', '.join(CAPTURE_CLASSES)}"
        )
    return full_name


def verdict(architectures: Sequence[str]) -> dict[str, Any]:
    """The answer as it is printed: the class that would capture, or the error."""
    found, error = "", ""
    try:
        # The registry comes first, as in a server: it imports the package, and only warns where that fails.
        found = resolve(architectures or list(CAPTURE_CLASSES)[:1])
    except Exception as failure:
        error = str(failure) if isinstance(failure, HsCaptureError) else f"{type(failure).__name__}: {failure}"
    try:
        import_all(MODEL_PACKAGE)
    except EngineError as failure:
        error = str(failure)
    return {"class": found, "error": error}


def main(architectures: Sequence[str]) -> None:
    """Print the verdict as the last line of stdout."""
    with contextlib.redirect_stdout(sys.stderr):
        answer = verdict(architectures)
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
