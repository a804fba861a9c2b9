"""``hs-capture export``: its page, its exit codes, and what it says while it writes."""

import json
from pathlib import Path

import exported_dataset as made
import pytest

from sglang_hs_capture.cli import export as export_module
from sglang_hs_capture.cli.check_view import LineView
from sglang_hs_capture.cli.main import main
from sglang_hs_capture.export.options import Format
from sglang_hs_capture.store.schema import DatasetInfo


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make(tmp_path_factory.mktemp("made") / "dataset")


def call(capsys, *words) -> tuple[int, str, str]:
    """Run the command; its exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        main(["export", *(str(word) for word in words)])
    out, err = capsys.readouterr()
    return ended.value.code or 0, out, err


def test_every_format_has_its_page(capsys, dataset, tmp_path):
    for name in Format:
        code, out, err = call(capsys, dataset, tmp_path / name, "--format", name.value)
        assert (code, err) == (0, "")
        lines = out.splitlines()
        assert lines[0] == f"Export       {tmp_path / name}, format {name.value}"
        assert lines[1].startswith("Samples      8 (45 tokens), 8 written now: 0.000 GB in ")
        boundary = name in (Format.SPECULATORS, Format.SAFETENSORS)
        ids, convention = ("[1, 2, 4], final 6", "boundary") if boundary else ("[0, 1, 3], final 5", "output_of_layer")
        assert lines[2] == f"Layer ids    {ids} (convention {convention})"
        assert lines[3] == f"Final state  {'post_norm' if name is Format.SPECFORGE else 'pre_norm'}"
        assert len(lines) == 4


def test_a_second_call_writes_nothing(capsys, dataset, tmp_path):
    call(capsys, dataset, tmp_path / "out", "--format", "eagle-pt", "--workers", 3)
    code, out, _ = call(capsys, dataset, tmp_path / "out", "--format", "eagle-pt")
    assert code == 0
    assert "8 (45 tokens), 0 written now" in out


def test_options_come_through(capsys, dataset, tmp_path):
    words = ["--format", "safetensors", "--dtype", "float32", "--min-loss-tokens", 2]
    code, out, _ = call(capsys, dataset, tmp_path / "out", *words)
    assert code == 0
    assert "Left out     4 samples with too few tokens that the loss is on" in out
    manifest = json.loads((tmp_path / "out" / "export.json").read_text())
    assert (manifest["dtype"], manifest["min_loss_tokens"], manifest["finished"]["samples"]) == ("float32", 2, 4)


def test_errors_are_one_line_with_an_exit_code(capsys, dataset, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    code, _, err = call(capsys, dataset, tmp_path / "full", "--format", "eagle-pt")
    assert code == 4
    assert err.startswith(f"error: {tmp_path / 'full'}: expected an empty directory or an export; it holds 'mine'")
    assert err.count("\n") == 1
    code, _, err = call(capsys, dataset, tmp_path / "out", "--format", "eagle-pt", "--draft-vocab-size", 5)
    assert code == 2
    assert "name the model's directory with --verifier" in err
    code, _, err = call(capsys, tmp_path / "nothing", tmp_path / "out", "--format", "eagle-pt")
    assert code == 4
    assert "expected a dataset" in err
    code, _, err = call(capsys, dataset, tmp_path / "out", "--format", "pickle")
    assert code == 2


def test_plain_lines_show_how_far_it_is(capsys, dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "make_check_view", lambda: LineView(0.0))
    code, _, err = call(capsys, dataset, tmp_path / "out", "--format", "speculators", "--workers", 1)
    assert code == 0
    assert "Export: 0.00 of 0.00 GB" in err
    assert err.splitlines()[-1] == "Tokens: 8 of 8 samples"


def test_the_formats_are_those_that_there_are():
    from sglang_hs_capture.export.formats import FORMATS

    assert set(FORMATS) == set(Format)
    info: DatasetInfo = made.info_of()
    assert all(FORMATS[name](info, None).name is name for name in Format)
