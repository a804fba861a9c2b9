"""The pages hold to the code: links, options, error messages, exit codes, and snippets that compile."""

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from sglang_hs_capture import errors
from sglang_hs_capture.cli.main import app
from sglang_hs_capture.config import CONFIG_KEY, CaptureConfig
from sglang_hs_capture.layers import resolve_boundaries
from sglang_hs_capture.verify.findings import KINDS
from sglang_hs_capture.verify.recapture import BOUNDS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sglang_hs_capture"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OPTIONS = {
    name: {"--help", *(flag for parameter in command.params for flag in parameter.opts)}
    for name, command in COMMANDS.items()
}

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?\n(.*?)```|`([^`]+)`", re.DOTALL)
CALL = re.compile(r"^\s*hs-capture ([\w-]+)([^|#\n]*)", re.MULTILINE)
# Commands of the trainers, whose options are theirs.
TRAINERS = re.compile(r"^(?:speculators|specforge) [^\n]*", re.MULTILINE)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
PARAMETRIZED = pytest.mark.parametrize("name", TEXTS)


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def code(text: str) -> list[str]:
    """Every code span and code block, with continued lines joined."""
    found = (block or span.replace("\n", " ") for block, span in CODE.findall(text))
    return [re.sub(r"\\\n\s*", " ", piece) for piece in found]


def anchors(text: str) -> set[str]:
    """The names by which a page's headings can be linked to."""
    headings = re.findall(r"^#+ (.*)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXTS[name], re.DOTALL)


@PARAMETRIZED
def test_links_lead_somewhere(name):
    for target in LINK.findall(without_code(TEXTS[name])):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        page = (ROOT / name).parent / file if file else ROOT / name
        assert page.exists(), f"{name} links to {target}"
        if anchor:
            assert anchor in anchors(page.read_text(encoding="utf-8")), f"{name} links to {target}"


# Their tables hold whole records, names and messages.
WIDE = {"docs/format.md", "docs/compat.md", "docs/reliability.md"}


@pytest.mark.parametrize("name", sorted(TEXTS.keys() - WIDE))
def test_lines_are_short(name):
    assert [line for line in TEXTS[name].splitlines() if len(line) > 120] == []


@PARAMETRIZED
def test_commands_and_their_options_exist(name):
    for command, rest in (call for piece in code(TEXTS[name]) for call in CALL.findall(piece)):
        assert command in OPTIONS, f"{name}: hs-capture {command}"
        unknown = set(FLAG.findall(rest.partition(" -- ")[0])) - OPTIONS[command]
        assert not unknown, f"{name}: hs-capture {command} has no {unknown}"


def sglang_options() -> str:
    """The source in which SGLang declares its server's arguments; read, since importing it takes long."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "srt"
    files = [folder / "server_args.py", *sorted((folder / "arg_groups").rglob("*.py"))]
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file.exists())


def test_every_option_named_is_one_of_ours_or_of_sglang():
    declared = sglang_options()
    ours = set().union(*OPTIONS.values())
    for name, text in TEXTS.items():
        pieces = code(text)
        theirs = {flag for piece in pieces for call in TRAINERS.findall(piece) for flag in FLAG.findall(call)}
        for flag in {flag for piece in pieces for flag in FLAG.findall(piece)} - ours - theirs:
            field = flag.removeprefix("--").replace("-", "_")
            assert re.search(rf"\b{field}\b", declared), f"{name}: neither hs-capture nor SGLang has {flag}"


@pytest.mark.parametrize("name", [name for name in TEXTS if blocks(name, "python")])
def test_python_compiles(name):
    for program in blocks(name, "python"):
        compile(program, name, "exec")


def test_the_input_forms_of_the_readme_are_json():
    rows = [json.loads(line) for block in blocks("README.md", "json") for line in block.splitlines()]
    assert [sorted(row)[-1] for row in rows] == ["loss_mask", "messages", "id", "response"]


def test_the_settings_of_the_readme_are_those_of_the_code():
    listed = set(re.findall(r"^\| `(\w+)` \|", TEXTS["README.md"], re.MULTILINE))
    assert listed == set(CaptureConfig.model_fields) - {"run_id"}
    by_hand, after_dashes = re.findall(r"--json-model-override-args '(.*)'", TEXTS["README.md"])
    CaptureConfig.from_mapping(json.loads(by_hand)[CONFIG_KEY])
    CaptureConfig.from_mapping({"output_dir": "/data", **json.loads(after_dashes)[CONFIG_KEY]})


def test_the_presets_are_those_of_the_code():
    for preset in ("eagle3", "sglang"):
        (row,) = re.findall(rf"^\| `{preset}`.*$", TEXTS["docs/layers.md"], re.MULTILINE)
        assert f"| {', '.join(map(str, resolve_boundaries(preset, 61)))} |" in row


def test_exit_codes_are_those_of_the_code():
    table = re.findall(r"^\| (\d) \| `(\w+)` \|", TEXTS["docs/troubleshooting.md"], re.MULTILINE)
    own = [error for error in vars(errors).values() if isinstance(error, type) and "exit_code" in vars(error)]
    assert {(int(number), name) for number, name in table} == {(error.exit_code, error.__name__) for error in own}


def test_every_finding_of_verify_is_explained_with_its_weight():
    table = re.findall(r"^\| `([\w-]+)` \| (error|warning) \|", TEXTS["docs/verify.md"], re.MULTILINE)
    assert dict(table) == {kind: properties.severity.value for kind, properties in KINDS.items()}


def test_what_may_differ_from_a_second_capture_is_what_the_code_allows():
    table = re.findall(r"^\| (\w+) \| ([\de.-]+) \| ([\de.-]+) \|", TEXTS["docs/verify.md"], re.MULTILINE)
    allowed = {dtype: (float(row), float(typical)) for dtype, row, typical in table}
    assert allowed == {dtype: (bound.row, bound.typical) for dtype, bound in BOUNDS.items()}


def strings_of_the_code() -> list[str]:
    """Every string of the package, with a NUL in place of each value put into it."""
    found = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def messages_of_the_page() -> list[str]:
    """The messages that the troubleshooting page explains: the code spans before the colon of an item's text."""
    sections = TEXTS["docs/troubleshooting.md"].split("\n## ")
    items = [
        " ".join(item.split())
        for section in sections
        if "(exit code" in section.split("\n", 1)[0]
        for item in re.findall(r"^- (`.*?)(?=\n- |\n\n|\Z)", section, re.MULTILINE | re.DOTALL)
    ]
    heads = [re.match(r"(?:`[^`]+`(?:, and )?)+", item) for item in items]
    assert all(heads)
    return [message for head in heads if head for message in re.findall(r"`([^`]+)`", head[0])]


def test_the_messages_explained_are_those_of_the_code():
    known = strings_of_the_code()
    messages = messages_of_the_page()
    assert len(messages) > 70
    for message in messages:
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("...")), re.DOTALL)
        assert any(pattern.search(text) for text in known), f"no message of the code reads {message!r}"
