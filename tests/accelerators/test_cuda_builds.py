"""Which build of torch is installed for which GPUs and driver: answers of nvidia-smi, and PyTorch's table of builds."""

from __future__ import annotations

import pytest

from ci import versions

V100, A100, H100 = "Tesla V100-SXM2-32GB, 7.0", "NVIDIA A100-SXM4-80GB, 8.0", "NVIDIA H100 80GB HBM3, 9.0"
B200 = "NVIDIA B200, 10.0"
A100_IN_MIG_MODE = A100  # nvidia-smi lists GPUs, not their instances


@pytest.mark.parametrize(
    ("gpus", "driver", "tag", "reason"),
    [
        ([V100], "535.183.01", "cu126", "needs driver 580 or later; this machine has 535.183.01"),
        ([V100], "580.65.06", "cu126", "the one for CUDA 13.0 has no code for Tesla V100-SXM2-32GB (sm_70)"),
        ([A100], "550.54.15", "cu126", "needs driver 580 or later; this machine has 550.54.15"),
        ([A100_IN_MIG_MODE], "550.54.15", "cu126", "needs driver 580 or later; this machine has 550.54.15"),
        ([H100], "570.86.15", "cu126", "needs driver 580 or later; this machine has 570.86.15"),
        ([H100], "580.159.04", "", "the build for CUDA 13.0"),
        ([B200], "580.65.06", "", "the build for CUDA 13.0"),
        ([V100, H100], "580.65.06", "cu126", "has no code for Tesla V100-SXM2-32GB (sm_70)"),
        ([V100, B200], "580.65.06", "", "the build for CUDA 13.0, which serves only NVIDIA B200"),
        ([B200], "570.86.15", None, "update the driver to 580 or later"),
        ([A100], "470.82.01", None, "update the driver to 525 or later"),
        (["Tesla K80, 3.7"], "580.65.06", None, "no build of torch has code for this GPU"),
    ],
)
def test_build_suits_every_gpu_and_the_driver(gpus, driver, tag, reason):
    found, why = versions.nvidia("".join(f"{gpu}, {driver}\n" for gpu in gpus))
    assert found == tag and reason in why
