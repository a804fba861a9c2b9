"""Looks up in several released versions of SGLang what the plugin relies on, and writes docs/compat.md.

The wheels are downloaded without their dependencies, and read without being imported:

    python -m tests.compat --wheels build/wheels

The exit code is 1 if a version lacks something that the plugin cannot do without.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from tests.compat.relied_on import NEEDS, Need
from tests.compat.sources import Sources

VERSIONS = ("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
PAGE = Path(__file__).parents[2] / "docs" / "compat.md"
BEGIN, END = "<!-- begin: made by python -m tests.compat -->", "<!-- end -->"


def wheel(version: str, folder: Path) -> Path:
    """The wheel of a version, downloaded if it is not there."""
    found = sorted(folder.glob(f"sglang-{version}-*.whl"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*map(str, command), f"sglang=={version}"], check=True)
        found = sorted(folder.glob(f"sglang-{version}-*.whl"))
    return found[0]


def look_up(folder: Path) -> dict[str, list[bool]]:
    """Whether each version has each of the things relied on."""
    return {v: [need.there(Sources(wheel(v, folder))) for need in NEEDS] for v in VERSIONS}


def cell(need: Need, there: bool) -> str:
    return "yes" if there else ("no" if need.without else "**missing**")


def tables(found: dict[str, list[bool]]) -> str:
    """The table of names and versions, and what is done about those that a version lacks."""
    lines = [f"| name | read by | {' | '.join(VERSIONS)} |", "|---|---|" + "---|" * len(VERSIONS)]
    handled = ["| name | missing in | what the plugin does without it |", "|---|---|---|"]
    for number, need in enumerate(NEEDS):
        cells = [cell(need, found[version][number]) for version in VERSIONS]
        lines.append(f"| {need.what} | `{need.user}` | {' | '.join(cells)} |")
        missing = [version for version in VERSIONS if not found[version][number]]
        if missing and need.without:
            handled.append(f"| {need.what} | {', '.join(missing)} | {need.without} |")
    return "\n".join([*lines, "", *handled])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, required=True, help="where the wheels are, or are downloaded to")
    arguments = parser.parse_args()
    arguments.wheels.mkdir(parents=True, exist_ok=True)
    found = look_up(arguments.wheels)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(found)}\n\n{END}{after}", encoding="utf-8")
    missing = [
        f"{version}: {need.what}"
        for version, there in found.items()
        for need, is_there in zip(NEEDS, there, strict=True)
        if not is_there and not need.without
    ]
    print("\n".join(missing) or f"{len(NEEDS)} names in {len(VERSIONS)} versions: none is missing")
    sys.exit(bool(missing))


if __name__ == "__main__":
    main()
