"""The platform takes part only when it is asked for by name."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from sglang_hs_capture.platform.cpu import PLATFORM_NAME, activate


def test_the_entry_point_is_installed_under_the_platforms_name() -> None:
    [point] = entry_points(group="sglang.srt.platforms", name=PLATFORM_NAME)
    assert point.load() is activate


@pytest.mark.parametrize("selected", [None, "", "cuda", "hs_capture"])
def test_it_stays_out_of_the_way_unless_chosen(monkeypatch: pytest.MonkeyPatch, selected: str | None) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    if selected is not None:
        monkeypatch.setenv("SGLANG_PLATFORM", selected)
    assert activate() is None


def test_it_names_its_class_when_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", PLATFORM_NAME)
    assert activate() == "sglang_hs_capture.platform.srt_cpu:CaptureCpuPlatform"


def test_asking_it_imports_neither_torch_nor_sglang() -> None:
    code = (
        "import sys; from sglang_hs_capture.platform.cpu import activate; activate(); "
        "sys.exit(' '.join({'torch', 'sglang'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
