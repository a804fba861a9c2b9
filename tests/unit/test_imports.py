"""The order of imports: which part of the package may import which, and where SGLang, torch and Triton come in."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_hs_capture

PACKAGE = "sglang_hs_capture"
ROOT = Path(sglang_hs_capture.__file__).parent

# A part may import from itself and from those of earlier lines, at any depth of nesting.
ORDER = (
    {"errors", "text"},
    {"layers", "float8"},
    {"config"},
    {"model_config"},
    {"compat", "kernels", "store", "demo"},
    {"data"},
    {"staging", "reader", "platform"},
    {"writing", "verify", "export"},
    {"capture"},
    {"models", "driver"},
    {"cli"},
)
RANK = {part: rank for rank, parts in enumerate(ORDER) for part in parts}
# The two sides of a capture meet on disk and over HTTP only.
NEVER = {
    "driver": {"capture", "kernels", "models", "platform", "reader", "staging", "verify", "writing"},
    "cli": {"capture", "kernels", "models", "platform", "staging", "writing"},
    "reader": {"compat", "data", "demo", "kernels"},
    "export": {"compat", "data", "demo", "kernels", "platform", "staging"},
    "verify": {"compat", "data", "kernels", "reader"},
}
MODULES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}


def part_of(file: str) -> str:
    """The part that a file of the package belongs to: ``store`` for ``store/fs.py``, ``config`` for ``config.py``."""
    return file.split("/", maxsplit=1)[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Every name that a file imports, wherever in it: ``a.b.c`` for ``from a.b import c``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the order"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers(top_level: str) -> set[str]:
    """The files that import a package of somebody else's."""
    return {file for file, path in MODULES.items() if any(n.split(".")[0] == top_level for n in imported(path))}


def test_every_part_has_a_place_in_the_order():
    assert {part_of(file) for file in MODULES} - {"__init__"} == set(RANK)


@pytest.mark.parametrize("file", [file for file in MODULES if file != "__init__.py"])
def test_imports_point_one_way(file):
    part = part_of(file)
    for name in imported(MODULES[file]):
        top_level, _, rest = name.partition(".")
        other = rest.split(".")[0]
        if top_level == PACKAGE and other not in ("", "__version__", part):
            assert RANK[other] < RANK[part], f"{file} imports {name}"
            assert other not in NEVER.get(part, ()), f"{file} imports {name}"


def test_the_package_itself_imports_only_the_reader():
    parts = {name.split(".")[1] for name in imported(MODULES["__init__.py"]) if name.startswith(PACKAGE)}
    assert parts == {"reader"}


def test_sglang_is_imported_where_its_versions_are_dealt_with():
    assert {part_of(file) for file in importers("sglang")} == {"compat", "models", "platform"}


def test_triton_is_imported_in_the_kernel_only():
    assert importers("triton") == {"kernels/pack.py"}


def test_parts_that_must_be_light_import_no_torch():
    light = {"errors", "layers", "float8", "config", "model_config", "store", "writing", "cli"}
    assert not light & {part_of(file) for file in importers("torch") | importers("transformers")}


def test_the_reference_shares_nothing_with_the_code_that_captured():
    """``verify`` reads datasets by the store's own definitions; the independent computation must not."""
    parts = {name.split(".")[1] for name in imported(MODULES["verify/parity.py"]) if name.startswith(PACKAGE)}
    assert parts == {"errors", "layers", "model_config"}


def test_structure_is_checked_without_torch():
    torch = importers("torch") | importers("transformers")
    comparisons = {f"verify/{name}.py" for name in ("known_answer", "lm_head", "parity", "recapture")}
    assert {file for file in torch if part_of(file) == "verify"} <= comparisons


@pytest.mark.parametrize("parts", [("cli", "config", "driver", "layers", "store"), ("writing",)])
def test_the_commands_and_the_writing_process_load_without_torch(parts):
    """Also through others, so that ``hs-capture`` answers at once and the writing process is small."""
    files = [f"{PACKAGE}/{file}" for file in MODULES if part_of(file) in parts and "__main__" not in file]
    modules = [file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in files]
    heavy = ("sglang", "torch", "transformers", "triton")
    program = f"import {', '.join(modules)}, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
