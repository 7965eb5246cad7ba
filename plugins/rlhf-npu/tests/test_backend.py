"""The backend with a stand-in for torch_npu: no Ascend NPU is used. Tensors of the kit's checks are on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.modeling_utils  # noqa: F401 (before a stand-in: transformers looks for torch_npu once)
from rlhf_npu import backend as backend_module
from rlhf_npu import plugin
from rlhf_npu.backend import NPU

from accelerators import Accelerator, AcceleratorError
from accelerators.testing import CHECKS
from accelerators.testing.stand_in import Streams, subject

BF16 = {"Ascend910B3": True, "Ascend910A": False, "Ascend310P3": False}
"""Chips, and whether `IsBF16Supported` of torch_npu's NpuVariables.cpp is true for them."""

DEEPSPEED_NEEDS = """
import torch
from types import SimpleNamespace
torch.npu = SimpleNamespace(Event=torch.Event, Stream=torch.Stream, is_available=lambda: True)
"""


class Torch(ModuleType):
    """The module torch, in which the type of device that torch_npu registers for good is `meta`."""

    def device(self, kind: str, index: int) -> torch.device:
        assert kind == "npu"
        return torch.device("meta", index)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def runtime(monkeypatch):
    """Install a torch_npu that answers as with this chip, and return it; `chosen` lists the devices of `set_device`."""
    monkeypatch.setattr(plugin, "chips", list)

    def install(chip: str = "Ascend910B3", count: int = 8) -> ModuleType:
        monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
        module, npu = ModuleType("torch_npu"), ModuleType("torch_npu.npu")
        module.__spec__ = ModuleSpec("torch_npu", None)
        module.__version__, module.npu, module.chosen = "2.13.0", npu, []
        functions = {
            "device_count": lambda: count,
            "set_device": module.chosen.append,
            "get_device_name": lambda: chip,
            "is_bf16_supported": lambda: BF16[chip],
            "utils": SimpleNamespace(get_cann_version=lambda: "8.5.0"),
        }
        for name, function in (functions | Streams().functions("NPUGraph")).items():
            setattr(npu, name, function)
        monkeypatch.setitem(sys.modules, "torch_npu", module)
        monkeypatch.setattr(backend_module, "torch", Torch("torch"))
        backends = [*torch.distributed.Backend.backend_list, "hccl"]
        monkeypatch.setattr(torch.distributed.Backend, "backend_list", backends)
        return module

    return install


class OnCPU(NPU):
    """The backend whose tensors are on the CPU, which locks no pages."""

    def bind(self, local_rank: int) -> torch.device:
        super().bind(local_rank)
        return torch.device("cpu")

    def pins_memory(self) -> bool:
        return False

    mark = Accelerator.mark  # the CPU has no events


# placement


def test_rank_gets_the_npu_of_its_number(runtime):
    module, backend = runtime(), NPU()
    assert backend.bind(3).index == backend.device().index == 3
    assert module.chosen == [3]
    assert (backend.dist_backend(), backend.deepspeed_name) == ("hccl", "npu")


def test_more_ranks_than_npus_are_an_error_that_names_the_variable(runtime, monkeypatch):
    runtime(count=2)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5")
    with pytest.raises(AcceleratorError, match=r"rank 2, this machine shows 2 \(ASCEND_RT_VISIBLE_DEVICES=4,5\)"):
        NPU().bind(2)


def test_extension_without_its_libraries_is_an_error_with_cause_and_remedy(monkeypatch, tmp_path):
    cause = "libhccl.so: cannot open shared object file: No such file or directory"
    (tmp_path / "torch_npu.py").write_text(f"raise ImportError({cause!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    with pytest.raises(AcceleratorError, match=r"cannot be imported \(.*libhccl.so.*\); source CANN's set_env.sh"):
        NPU().bind(0)


def test_device_info_is_the_runtimes(runtime):
    runtime()
    info = NPU().info()
    assert (info.model, info.count) == ("Ascend910B3", 8)
    assert info.software == f"torch {torch.__version__}, torch_npu 2.13.0, CANN 8.5.0"


# precision and kernels of chips


@pytest.mark.parametrize(
    ("chip", "precision", "adamw", "graphs"),
    [
        ("Ascend910B3", "bf16", "torch-fused", "npu-graphs"),
        ("Ascend910A", "fp16", "torch-foreach", ""),
        ("Ascend310P3", "fp16", "torch-foreach", ""),
    ],
)
def test_the_chip_decides_precision_and_kernels(runtime, chip, precision, adamw, graphs):
    runtime(chip)
    backend = OnCPU()
    backend.bind(0)
    made = {operation: support.implementation for operation, support in backend.kernels.capabilities().items()}
    assert (made["adamw"], made["attention"], made["graph_capture"]) == (adamw, "sdpa", graphs)
    assert (backend.precision().name, backend.precision().loss_scaling) == (precision, precision == "fp16")


def test_refusals_name_the_chip(runtime):
    runtime("Ascend910A")
    backend = NPU()
    with pytest.raises(AcceleratorError, match="bf16 on npu: native from Ascend 910B on; this is Ascend910A; use auto"):
        backend.precision("bf16")
    assert backend.kernels.capabilities()["graph_capture"].reason.endswith("; this is Ascend910A")


def test_recordings_are_counted(runtime):
    runtime()
    backend = OnCPU()
    backend.bind(0)
    total = torch.zeros(1)
    step = backend.capture(lambda x: total.add_(x), key="step")
    assert [step(torch.ones(1)).item() for _ in range(4)] == [1, 2, 3, 4]
    assert backend.compilations() == 1 and backend.recordings_keep_memory()


def test_masks_of_attention_are_boolean_as_the_fused_kernel_needs(runtime):
    from transformers.masking_utils import AttentionMaskInterface

    runtime()
    backend = OnCPU()
    backend.bind(0)
    name = backend.kernels.get("attention", required=True)
    make = AttentionMaskInterface()[name]
    mask = make(batch_size=1, q_length=4, kv_length=4, attention_mask=torch.tensor([[False, True, True, True]]))
    assert mask.dtype == torch.bool and mask.any(-1).all()


# lack of memory


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (RuntimeError("NPU out of memory. Tried to allocate 386.00 MiB (NPU 0; 61.27 GiB total)"), True),
        (RuntimeError("EL0004: [PID: 1] Failed to allocate memory requested by %s module."), True),
        (RuntimeError("Resource_Error_Insufficient_Device_Memory(EI0011): Failed to allocate"), True),
        (RuntimeError("aclrtMalloc failed, ret = 207001, size=10485760"), True),
        (RuntimeError("EZ9999: Inner Error! 507015"), False),
        (ValueError("NPU out of memory"), False),
    ],
)
def test_lack_of_memory_is_told_from_other_errors(error, found):
    assert NPU().is_out_of_memory(error) == found


# the conformance kit, as far as a stand-in can pass it


@pytest.mark.parametrize("check", [check for check in CHECKS if check.module != "processes"], ids=str)
def test_conformance_on_a_stand_in(runtime, check):
    runtime()
    check.run(subject(OnCPU))


@pytest.mark.slow  # a process that imports torch and DeepSpeed
def test_deepspeed_uses_its_own_npu_accelerator(tmp_path: Path):
    (tmp_path / "torch_npu.py").write_text(DEEPSPEED_NEEDS)
    code = "from rlhf_npu.backend import NPU; v = NPU().prepare_deepspeed()\nprint(v.implementation, v.communication)"
    user = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}  # of another test, perhaps
    environment = user | {
        "ASCEND_HOME_PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.split()[-2:] == ["deepspeed.accelerator.npu_accelerator.NPU_Accelerator", "hccl"], done.stderr
