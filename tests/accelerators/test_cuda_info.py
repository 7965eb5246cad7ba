"""Finding NVIDIA GPUs without torch: what the probe says of each chip, and of each thing that can be amiss."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelerators import AcceleratorError, Health, Probe, TorchBuild
from accelerators.backends.cuda import info as cuda_info
from tests.accelerators import nvml

ROOT = Path(__file__).parents[2]
CUDA_12 = TorchBuild("2.13.0+cu126", (12, 6), None)
CUDA_13 = TorchBuild("2.13.0+cu130", (13, 0), None)
CUDA_13_2 = TorchBuild("2.15.0+cu132", (13, 2), None)


@pytest.fixture
def present(monkeypatch, tmp_path):
    """Pretend that the machine has these chips, and torch this build: present("V100", torch=CUDA_13)."""
    monkeypatch.delenv(cuda_info.VISIBLE_ENV, raising=False)
    monkeypatch.setattr(cuda_info, "DEV", tmp_path / "dev")
    monkeypatch.setattr(cuda_info, "PCI", tmp_path / "pci")

    def pretend(*chips: str, torch: TorchBuild | None = CUDA_12, **driver) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", nvml.fake(*chips, **driver))
        monkeypatch.setattr(cuda_info, "torch_build", lambda: torch)

    return pretend


# what is found

DRIVER = "driver 570.86.15 for CUDA up to 12.8, torch 2.13.0+cu126"


@pytest.mark.parametrize(
    ("chip", "model", "facts"),
    [
        ("V100", "Tesla V100-SXM2-32GB", "sm_70 with 32 GiB"),
        ("A100", "NVIDIA A100-SXM4-80GB", "sm_80 with 80 GiB"),
        ("H100", "NVIDIA H100 80GB HBM3", "sm_90 with 80 GiB"),
    ],
)
def test_the_chip_the_driver_and_torch_are_named(present, chip, model, facts):
    present(chip, chip)
    devices = ("pci:0000:10:00.0", "pci:0000:11:00.0")
    assert cuda_info.probe() == Probe(True, f"{facts}, {DRIVER}", count=2, model=model, devices=devices)


def test_several_models_are_counted_and_the_weakest_decides(present):
    present("A100", "V100", "A100")
    probe = cuda_info.probe()
    assert probe.model == "NVIDIA A100-SXM4-80GB / Tesla V100-SXM2-32GB"
    assert probe.count == 3
    assert probe.reason.startswith("sm_70 with 32 GiB")


def test_chip_without_separate_memory_has_the_hosts(present, monkeypatch):
    present("GB10")
    monkeypatch.setattr(cuda_info.host, "total_memory", lambda: 12345)
    assert cuda_info.machine().weakest.memory == 12345


def test_driver_may_be_older_than_torch_within_a_major_version(present):
    present("A100", cuda=12000)
    assert cuda_info.probe().ok
    assert cuda_info.environment({}) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize("asked", [False, True])
def test_run_that_asks_for_equal_results_gets_a_workspace_of_cublas(asked):
    variables = cuda_info.environment({"engine": {"deterministic": asked}})
    assert ("CUBLAS_WORKSPACE_CONFIG" in variables) == asked


# health

READINGS = {"clock": "1,410 of 1,980 MHz", "temperature": "61 C", "power": "412 W"}


def test_health_is_what_nvml_reports(present):
    present("A100", "H100", errors=3)
    (first, second) = cuda_info.machine().gpus
    assert cuda_info.health(second.uuid) == Health(READINGS, (), {"uncorrected memory errors": 3})
    present("A100", "H100", slowdowns=0x40 | 0x80 | 0x04, errors=None)  # the last is the usual limit of power
    assert cuda_info.health(first.uuid) == Health(
        READINGS, ("the hardware lowers its clock because it is hot", "the power supply asks for a lower clock"), {}
    )
    assert sys.modules["pynvml"].opened == 0


def test_driver_that_does_not_answer_is_a_problem_of_the_device(present):
    present("A100")
    assert cuda_info.health("GPU-gone").problems == (
        "the NVIDIA driver does not answer (NVML: code 6); nvidia-smi may tell more",
    )


@pytest.mark.parametrize(("chip", "rate"), [("H200", 4.8e12), ("A100", 2.039e12), ("V100", 0.9e12), ("T4", 0.0)])
def test_bandwidth_is_the_makers(present, chip, rate):
    present(chip)
    assert cuda_info.machine().weakest.peak_bandwidth == rate


@pytest.mark.parametrize("trouble", [{}, {"name_error": nvml.GPU_IS_LOST}])
def test_the_library_is_closed_after_each_question(present, trouble):
    present("A100", **trouble)
    cuda_info.probe()
    assert sys.modules["pynvml"].opened == 0


# what can be amiss


@pytest.mark.parametrize(
    ("chips", "environment", "reason"),
    [
        (
            [],
            {"init_error": nvml.LIBRARY_NOT_FOUND},
            "no NVIDIA driver is installed here: libnvidia-ml.so.1 was not found",
        ),
        (
            [],
            {"init_error": nvml.DRIVER_NOT_LOADED},
            "the NVIDIA driver is installed but not loaded; load it (modprobe nvidia), or reboot",
        ),
        (
            ["A100"],
            {"init_error": nvml.VERSION_MISMATCH},
            "the NVIDIA driver was updated while the old one is still loaded; reboot",
        ),
        (
            ["A100"],
            {"name_error": nvml.GPU_IS_LOST},
            "the NVIDIA driver does not answer (NVML: GPU is lost); nvidia-smi may tell more",
        ),
        ([], {}, "the NVIDIA driver finds no GPU"),
        (["A100"], {"torch": None}, "torch is not installed; install torch's build for CUDA 12.6 (2.14 or earlier)"),
        (
            ["A100"],
            {"torch": TorchBuild("2.13.0+cpu", None, None)},
            "torch 2.13.0+cpu is built without CUDA; install torch's build for CUDA 12.6 (2.14 or earlier)",
        ),
        (
            ["A100"],
            {"torch": TorchBuild("2.13.0+rocm7.1", None, "7.1.25424"), "driver": "580.65.06", "cuda": 13000},
            "torch 2.13.0+rocm7.1 is built for ROCm 7.1.25424; install torch's build for CUDA 13.0",
        ),
        (
            ["A100"],
            {"torch": CUDA_13, "driver": "550.54.15", "cuda": 12040},
            "driver 550.54.15 supports CUDA up to 12.4, but torch 2.13.0+cu130 is built for CUDA 13.0; "
            "update the driver, or install torch's build for CUDA 12.6 (2.14 or earlier)",
        ),
        (
            ["GB10"],
            {"torch": CUDA_13, "driver": "550.54.15", "cuda": 12040},
            "driver 550.54.15 supports CUDA up to 12.4, but torch 2.13.0+cu130 is built for CUDA 13.0; "
            "update the driver to 580 or later",
        ),
        (
            ["GB10", "V100"],  # no build has code for both
            {"torch": CUDA_13, "driver": "580.65.06", "cuda": 13000},
            "torch 2.13.0+cu130, built for CUDA 13.0, has no code for sm_70 (Tesla V100-SXM2-32GB); "
            "hide that GPU with CUDA_VISIBLE_DEVICES",
        ),
        (
            ["V100"],
            {"torch": CUDA_13, "cuda": 13000},
            "torch 2.13.0+cu130, built for CUDA 13.0, has no code for sm_70 (Tesla V100-SXM2-32GB); "
            "install torch's build for CUDA 12.6 (2.14 or earlier)",
        ),
        (
            ["GB10", "V100"],  # a newer minor version of CUDA is no other build
            {"torch": CUDA_13_2, "driver": "580.65.06", "cuda": 13000},
            "torch 2.15.0+cu132, built for CUDA 13.2, has no code for sm_70 (Tesla V100-SXM2-32GB); "
            "hide that GPU with CUDA_VISIBLE_DEVICES",
        ),
        (
            ["A100", "V100"],
            {"torch": CUDA_13, "cuda": 13000},
            "torch 2.13.0+cu130, built for CUDA 13.0, has no code for sm_70 (Tesla V100-SXM2-32GB); "
            "install torch's build for CUDA 12.6 (2.14 or earlier), or hide that GPU with CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_every_obstacle_has_a_reason_that_helps(present, chips, environment, reason):
    present(*chips, **environment)
    probe = cuda_info.probe()
    assert (probe.ok, probe.reason, probe.devices) == (False, reason, ())
    assert (probe.count, probe.present) == ((len(chips), True) if "torch" in reason else (0, False))


# GPUs that are there all the same


@pytest.mark.parametrize(
    "trouble",
    [
        {"init_error": nvml.LIBRARY_NOT_FOUND},
        {"name_error": nvml.GPU_IS_LOST},
    ],
)
def test_where_the_library_does_not_tell_the_files_do(present, tmp_path, trouble):
    present("A100", **trouble)
    assert not cuda_info.probe().present
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    probe = cuda_info.probe()
    assert (probe.ok, probe.present, probe.count) == (False, True, 2)
    assert probe.reason.endswith(f" (GPUs are present: {tmp_path}/dev/nvidia0, {tmp_path}/dev/nvidia1)")


@pytest.mark.parametrize("wish", ["", "-1", "9"])
def test_hidden_gpus_are_counted_but_not_asked_for(present, monkeypatch, tmp_path, wish):
    present("A100", "A100", torch=TorchBuild("2.13.0+cpu", None, None))
    monkeypatch.setenv(cuda_info.VISIBLE_ENV, wish)
    assert (cuda_info.probe().count, cuda_info.probe().present) == (2, False)
    present("A100", init_error=nvml.VERSION_MISMATCH)
    monkeypatch.setenv(cuda_info.VISIBLE_ENV, wish)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert cuda_info.probe().present == (wish == "9")  # whether that is one of them, nobody can tell


@pytest.mark.parametrize(("chips", "expected"), [(["P100"], False), (["V100"], True), (["P100", "V100"], True)])
def test_chips_that_are_too_old_are_left_to_the_cpu(present, chips, expected):
    present(*chips, torch=CUDA_13, cuda=13000)
    probe = cuda_info.probe()
    assert (probe.ok, probe.present, probe.count) == (False, expected, len(chips))


# impostors


def test_another_vendors_device_is_refused_by_its_librarys_word(present):
    present("A100", vendor=0x1E3E)
    assert cuda_info.probe().reason == (
        "NVIDIA A100-SXM4-80GB at 0000:10:00.0 calls itself an NVIDIA GPU, but its PCI vendor is 0x1e3e and not "
        "0x10de; use the plugin of its vendor"
    )


def test_a_library_that_lies_is_refused_by_the_kernels_word(present, tmp_path):
    present("A100")
    (tmp_path / "pci" / "0000:10:00.0").mkdir(parents=True)
    vendor = tmp_path / "pci" / "0000:10:00.0" / "vendor"
    vendor.write_text("0x10de\n")
    assert cuda_info.probe().ok
    vendor.write_text("0x9999\n")
    assert not cuda_info.probe().ok
    assert "its PCI vendor is 0x9999" in cuda_info.probe().reason


def test_chip_that_is_not_on_the_bus_names_no_device(present):
    present("GB10")
    assert cuda_info.probe().ok
    assert cuda_info.probe().devices == ()


def test_without_nvidia_ml_py_the_remedy_is_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert cuda_info.probe().reason == "nvidia-ml-py, which asks the NVIDIA driver, is not installed; pip install it"


def test_most_fundamental_obstacle_is_the_reason(present, monkeypatch):
    wrong = TorchBuild("2.13.0+cpu", None, None)
    monkeypatch.setenv(cuda_info.VISIBLE_ENV, "")
    present("V100", torch=wrong, init_error=nvml.DRIVER_NOT_LOADED)
    assert "not loaded" in cuda_info.probe().reason
    present("V100", torch=wrong)
    monkeypatch.setenv(cuda_info.VISIBLE_ENV, "")
    assert "CUDA_VISIBLE_DEVICES='' hides all GPUs" in cuda_info.probe().reason
    monkeypatch.delenv(cuda_info.VISIBLE_ENV)
    assert "built without CUDA" in cuda_info.probe().reason


# CUDA_VISIBLE_DEVICES


@pytest.mark.parametrize(
    ("wish", "indexes"),
    [
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 2", [1, 2]),
        ("1gpu,+2", [1, 2]),
        ("", []),
        ("-1", []),
        ("0,2,-1,1", [0, 2]),
        ("0,3,1", [0]),
        ("none", []),
        ("0,,1", [0]),
        ("1,1", []),
        ("GPU-1", [1]),
        ("GPU-22222222-2222,GPU-0", [2, 0]),
        ("GPU-", []),
        ("GPU-1,GPU-9,GPU-0", [1]),
        ("GPU-1,0", [1]),
        ("0,GPU-1", [0]),
        ("GPU-1,GPU-11", []),
    ],
)
def test_visible_devices_are_those_of_the_cuda_runtime(present, wish, indexes):
    present("A100", "V100", "T4")
    if indexes:
        assert [gpu.index for gpu in cuda_info.machine({cuda_info.VISIBLE_ENV: wish}).gpus] == indexes
    else:
        with pytest.raises(AcceleratorError, match=f"CUDA_VISIBLE_DEVICES='{wish}' hides all GPUs, .* there are 3"):
            cuda_info.machine({cuda_info.VISIBLE_ENV: wish})


def test_one_mig_instance_is_shown_with_its_own_memory(present):
    present("A100", "H100")
    (gpu,) = cuda_info.machine({cuda_info.VISIBLE_ENV: "MIG-1,MIG-0"}).gpus
    assert (gpu.index, gpu.uuid, gpu.capability) == (1, "MIG-1", (9, 0))
    assert gpu.memory == (81559 << 20) // 4
    with pytest.raises(AcceleratorError, match="CUDA_VISIBLE_DEVICES='MIG-9' hides all"):
        cuda_info.machine({cuda_info.VISIBLE_ENV: "MIG-9"})


def test_probing_and_selecting_import_no_torch(tmp_path):
    nvml.install(tmp_path, "A100", "A100")
    nvml.install_torch(tmp_path, "2.13.0+cu126", cuda="12.6")  # it fails where it is imported
    code = (
        "import sys, accelerators\n"
        "found = accelerators.select('cuda')\n"
        "print(found.name, found.spec.probe().count, 'torch' in sys.modules)"
    )
    clean = {key: value for key, value in os.environ.items() if key not in ("RLHF_ACCELERATOR", cuda_info.VISIBLE_ENV)}
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": path, "RLHF_PLUGINS": "none"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["cuda", "2", "False"], done.stderr


@pytest.mark.parametrize(
    ("architecture", "capability", "runs"),
    [
        ("sm_80", (8, 0), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_75", (7, 0), False),
        ("compute_80", (9, 0), True),
        ("compute_90", (8, 0), False),
        ("sm_90a", (9, 0), True),
        ("compute_90a", (10, 0), False),
        ("sm_100f", (10, 3), True),
        ("gfx942", (9, 0), False),
    ],
)
def test_code_runs_on_the_chips_of_its_generation(architecture, capability, runs):
    assert cuda_info.runs_on(architecture, capability) is runs
