"""The installed torch, read without importing it."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from accelerators import TorchBuild, torch_build
from tests.accelerators import nvml


@pytest.mark.parametrize(
    ("written", "build"),
    [
        ({"version": "2.13.0+cu126", "cuda": "12.6"}, TorchBuild("2.13.0+cu126", (12, 6), None)),
        ({"version": "2.13.0+cpu"}, TorchBuild("2.13.0+cpu", None, None)),
        ({"version": "2.13.0+rocm7.1", "hip": "7.1.25424"}, TorchBuild("2.13.0+rocm7.1", None, "7.1.25424")),
        ({"version": "2.13.0+xpu", "xpu": "20260000"}, TorchBuild("2.13.0+xpu", None, None, "20260000")),
    ],
)
def test_the_build_of_torch_is_read_from_its_files(monkeypatch, tmp_path, written, build):
    monkeypatch.syspath_prepend(nvml.install_torch(tmp_path, **written))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert torch_build() == build


def test_installed_build_of_torch_is_read(monkeypatch):
    import torch

    build = torch_build()
    assert (build.version, build.hip, build.xpu) == (torch.__version__, torch.version.hip, torch.version.xpu)
    assert build.cuda == (torch.version.cuda and tuple(map(int, torch.version.cuda.split("."))))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert torch_build() is None
