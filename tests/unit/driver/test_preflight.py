"""The check that SGLang will load the capture classes; with SGLang itself it is tested in the integration tests."""

import json
import sys

import pytest

from sglang_hs_capture.driver import preflight
from sglang_hs_capture.driver.preflight import import_all
from sglang_hs_capture.errors import EngineError, GuardError


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of models, of which one does not import."""
    directory = tmp_path / "toy_models"
    directory.mkdir()
    (directory / "__init__.py").touch()
    (directory / "good.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield directory
    for name in [name for name in sys.modules if name.startswith("toy_models")]:
        del sys.modules[name]


def test_a_package_that_imports_passes(package):
    import_all("toy_models")
    assert "toy_models.good" in sys.modules


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import gone_module", "No module named 'gone_module'"),
        ("def f(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_module_that_does_not_import_is_named_with_its_error(package, source, said):
    (package / "bad.py").write_text(source + "\n")
    with pytest.raises(EngineError, match=said) as caught:
        import_all("toy_models")
    assert "importing toy_models.bad failed" in str(caught.value)


def test_the_import_error_is_told_rather_than_what_follows_from_it(monkeypatch, capsys):
    def import_all(name):
        raise EngineError("the capture package does not load: why")

    def resolve(architectures):
        raise GuardError("SGLang does not know the architectures")

    monkeypatch.setattr(preflight, "import_all", import_all)
    monkeypatch.setattr(preflight, "resolve", resolve)
    preflight.main(["DeepseekV3ForCausalLM"])
    assert json.loads(capsys.readouterr().out) == {"class": "", "error": "the capture package does not load: why"}


def test_without_an_architecture_one_of_the_known_is_looked_up(monkeypatch):
    asked = []
    monkeypatch.setattr(preflight, "import_all", lambda name: None)
    monkeypatch.setattr(preflight, "resolve", lambda architectures: asked.append(list(architectures)) or "a.B")
    assert preflight.verdict([]) == {"class": "a.B", "error": ""}
    assert asked == [["DeepseekV2ForCausalLM"]]


def test_a_child_that_dies_is_told_with_its_last_words():
    assert preflight._read_verdict(b'noise\n{"class": "a.B", "error": ""}\n', b"", 0) == "a.B"
    with pytest.raises(EngineError, match="ImportError: libcuda"):
        preflight._read_verdict(b"", b"Traceback\nImportError: libcuda.so.1\n", 1)
    with pytest.raises(EngineError, match="exit code -9, no output"):
        preflight._read_verdict(b"", b"", -9)
