"""Hostile names and files on the whole way: from the input through server, store and reader to what commands print."""

import ast
import asyncio
import json
import pickle
from pathlib import Path

import made_dataset
import pytest
from all_readers import read_with_all
from fake_server import FakeServer, Lines

import sglang_hs_capture
from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.cli.main import main
from sglang_hs_capture.data.conversations import iter_records
from sglang_hs_capture.data.records import InputProblem
from sglang_hs_capture.driver.run import CaptureRun, RunSettings
from sglang_hs_capture.driver.target import RunningServers

NAMES = [
    "../../../etc/passwd",
    "/absolute",
    "a\0b",
    "line\nbreak\r\n",
    "\x1b[2J\x1b]0;title\x07",
    "\ud800 lone",
    "'\"`$(touch x);&|<>",
    "{json: [1]}",
    "é" * 4096,
    " ",
    ".",
    "hs-7b86bf06a59811a29dc4187c-0-bd8ff74eee3d9ab7",
    "\u202eright to left",
]
PACKAGE = Path(sglang_hs_capture.__file__).parent


@pytest.fixture
def dataset(tmp_path):
    """Samples of these names, captured by a run whose server refuses none of them."""
    data, output = tmp_path / "data.jsonl", tmp_path / "dataset"
    output.mkdir()
    rows = [{"id": name, "input_ids": [5 + n, 6, 7]} for n, name in enumerate(NAMES)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    async def capture():
        # The first attempt at each fails with a reason as hostile as its name.
        async with FakeServer(output) as server:
            server.store.add_failure("hs-by hand \x1b[2J\ud800\n", "non_finite\x1b[31m", "\ud800\n\0")
            target = RunningServers([server.url], output, lambda info: [], None, 2.0)
            samples = list(iter_records(data))
            return await CaptureRun(target, samples, RunSettings(output), Lines()).run()

    summary = asyncio.run(capture())
    assert (summary.captured, summary.exit_code) == (len(NAMES), 0)
    return output


def test_names_come_back_as_they_were_and_become_no_files(dataset):
    found = {item["id"]: item["input_ids"].tolist() for item in HiddenStateDataset(dataset)}
    assert found == {name: [5 + n, 6, 7] for n, name in enumerate(NAMES)}
    files = {path.relative_to(dataset).as_posix() for path in dataset.rglob("*") if path.is_file()}
    expected = {
        "dataset.json",
        "requests.jsonl",
        "known_answers.jsonl",
        "journal-dp0-pp0.jsonl",
        "session-dp0-pp0.json",
    }
    expected |= {"lock-dataset", "lock-dp0-pp0", "lock-requests", "shards/dp0-pp0-000000.safetensors"}
    assert files == expected


@pytest.mark.parametrize("words", [["inspect"], ["inspect", "--json"], ["verify"], ["verify", "--json"]])
def test_commands_print_them_so_that_no_terminal_obeys(capsys, dataset, words):
    with pytest.raises(SystemExit):
        main([words[0], str(dataset), *words[1:]])
    shown = capsys.readouterr()
    for line in (shown.out + shown.err).splitlines():
        assert line.isprintable(), line
    if "--json" in words:
        json.loads(shown.out)


def test_a_name_of_a_megabyte_is_a_bad_line(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"id": "x" * 2**20, "input_ids": [1]}) + "\n")
    (problem,) = iter_records(file)
    assert isinstance(problem, InputProblem)
    assert len(str(problem)) < 300


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"input_ids": [' + b"9" * 10_000 + b"]}",
        b'{"input_ids": [1e999, 1]}',
        b'{"id": ' + b"9" * 5000 + b', "input_ids": [1]}',
        b'{"messages": "' + b"\\ud800" * 10_000 + b'"}',
        b'{"input_ids": [1], "input_ids": {"a": NaN}}',
    ],
)
def test_a_bomb_of_a_line_is_a_bad_line_and_the_next_one_is_read(tmp_path, line):
    file = tmp_path / "data.jsonl"
    file.write_bytes(line + b'\n{"id": "next", "input_ids": [1]}\n')
    problem, sample = iter_records(file)
    assert isinstance(problem, InputProblem)
    assert len(str(problem)) < 1000
    assert sample.id == "next"


class Bomb:
    """Unpickled, this makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("pattern", ["dataset.json", "*.jsonl", "final_norm.safetensors", "shards/*"])
def test_a_pickle_in_the_place_of_a_file_is_refused_and_does_nothing(tmp_path, pattern):
    directory, mark = tmp_path / "dataset", tmp_path / "mark"
    made_dataset.make(directory)
    for file in directory.glob(pattern):
        file.write_bytes(pickle.dumps(Bomb(mark)) + b"\n")
    read_with_all(directory)
    assert not mark.exists()


def test_a_journal_of_another_version_is_refused_by_all_readers(tmp_path, capsys):
    made_dataset.make(tmp_path)
    journal = tmp_path / made_dataset.JOURNAL
    first = made_dataset.decode_line(journal.read_bytes().splitlines(keepends=True)[0])
    rest = journal.read_bytes().split(b"\n", 1)[1]
    journal.write_bytes(made_dataset.encode_line({**first, "version": 2}) + rest)
    for command in ("inspect", "verify"):
        with pytest.raises(SystemExit) as ended:
            main([command, str(tmp_path)])
        assert ended.value.code == 4
        assert "has version 2, this release reads up to 1; upgrade" in capsys.readouterr().err


# What these unpickle comes from this very program: through a pipe, and from a temporary file that has no name.
PICKLING = {"data/parallel.py", "data/shuffle.py"}


def test_nothing_unpickles_what_others_may_have_written():
    """Neither by its own modules, nor by a function of another library's that does unless it is told not to."""
    importers = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            names |= {node.module} if isinstance(node, ast.ImportFrom) else set()
            if names & {"pickle", "marshal", "shelve", "dill"}:
                importers.add(path.relative_to(PACKAGE).as_posix())
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                told = {keyword.arg for keyword in node.keywords}
                assert (owner, node.func.attr) != ("torch", "load") or "weights_only" in told, path
                assert (owner, node.func.attr) != ("np", "load"), path
                # Connection.recv unpickles what it gets; recv_bytes does not.
                assert node.func.attr != "recv", path
    assert importers == PICKLING
