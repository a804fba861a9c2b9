"""Choosing the device without torch."""

import stat

import pytest

from sglang_hs_capture.driver import device
from sglang_hs_capture.driver.device import Device, gpu_visible, use_cpu
from sglang_hs_capture.errors import ConfigError

NOWHERE = {"PATH": "/nowhere"}


def test_a_device_file_is_enough(tmp_path):
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "nvidia-uvm").touch()
    assert not gpu_visible(NOWHERE, tmp_path)
    (tmp_path / "nvidia3").touch()
    assert gpu_visible(NOWHERE, tmp_path)


@pytest.mark.parametrize("hidden", ["", " ", "-1"])
def test_an_empty_list_of_devices_hides_all(tmp_path, hidden):
    (tmp_path / "nvidia0").touch()
    assert not gpu_visible({"CUDA_VISIBLE_DEVICES": hidden}, tmp_path)
    assert gpu_visible({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path)


@pytest.mark.parametrize("answer", [True, False])
def test_where_only_the_tools_are_there_torch_is_asked(tmp_path, monkeypatch, answer):
    tool = tmp_path / "nvidia-smi"
    tool.touch()
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(device, "_ask_torch", lambda environment: answer)
    assert gpu_visible({"PATH": str(tmp_path)}, tmp_path) is answer


def test_the_users_choice_counts(monkeypatch):
    monkeypatch.setattr(device, "gpu_visible", lambda environment: False)
    assert use_cpu(Device.AUTO, {})
    assert use_cpu(Device.CPU, {})
    with pytest.raises(ConfigError, match="no GPU is visible"):
        use_cpu(Device.CUDA, {})
    monkeypatch.setattr(device, "gpu_visible", lambda environment: True)
    assert not use_cpu(Device.AUTO, {})
    assert use_cpu(Device.CPU, {})
    assert not use_cpu(Device.CUDA, {})
