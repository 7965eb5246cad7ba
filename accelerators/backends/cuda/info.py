"""Facts about NVIDIA GPUs from the driver's management library (NVML), without torch and without a CUDA context.

Input: NVML through `pynvml`, CUDA_VISIBLE_DEVICES, and the version file of the installed torch. Output: the `Machine`
for the cuda backend, and its `Probe`. Safe before a fork.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerators import host
from accelerators.backends.cuda import builds
from accelerators.backends.cuda.builds import Version
from accelerators.errors import AcceleratorError, HiddenError
from accelerators.torch_build import TorchBuild, torch_build
from accelerators.types import Health, Probe

VISIBLE_ENV = "CUDA_VISIBLE_DEVICES"
REPEATABLE_ENV = "CUBLAS_WORKSPACE_CONFIG"
DEV = Path("/dev")
PCI = Path("/sys/bus/pci/devices")
VENDOR = 0x10DE
"""NVIDIA's number on the PCI bus."""

WORTH_A_BUILD = (7, 0)
"""Oldest chips for which another build of torch is worth installing; `auto` takes the CPU instead of older ones."""

# NVML's return codes (nvmlReturn_t) that users can act on.
_INVALID_ARGUMENT, _NOT_SUPPORTED, _NOT_FOUND, _UNKNOWN_FUNCTION = 2, 3, 6, 13
_SM_CLOCK, _UNCORRECTED, _SINCE_DRIVER = 1, 1, 0  # nvmlClockType_t, nvmlMemoryErrorType_t, nvmlEccCounterType_t
_REASONS = {
    9: "the NVIDIA driver is installed but not loaded; load it (modprobe nvidia), or reboot",
    12: "no NVIDIA driver is installed here: libnvidia-ml.so.1 was not found",
    18: "the NVIDIA driver was updated while the old one is still loaded; reboot",
}

# NVIDIA's data sheets: 10^12 operations per second of tensor cores in 16 bits, without sparsity, and of plain float32.
# The first pattern that matches the name counts.
_PEAKS = (
    (r"H200 NVL", 835, 60),
    (r"H200|GH200|H100 80GB HBM3", 989, 67),
    (r"H100 NVL", 835, 60),
    (r"H100 PCIe", 756, 51),
    (r"A100", 312, 19.5),
    (r"L40S", 362, 91.6),
    (r"RTX A6000", 154.8, 38.7),
    (r"RTX 4090", 165.2, 82.6),
    (r"V100-SXM[23]", 125, 15.7),
    (r"V100-PCIE", 112, 14),
)

# From the same sheets: 10^9 bytes per second of the device's memory.
_BANDWIDTHS = (
    (r"H200", 4800),
    (r"H100 80GB HBM3", 3350),
    (r"H100 NVL", 3900),
    (r"H100 PCIe", 2000),
    (r"A100-SXM4-80GB", 2039),
    (r"A100 80GB PCIe", 1935),
    (r"A100-(?:SXM4|PCIE)-40GB", 1555),
    (r"L40S", 864),
    (r"RTX A6000", 768),
    (r"RTX 4090", 1008),
    (r"V100-(?:SXM2|PCIE)", 900),
)

# Bits of NVML's reasons for a low clock that a healthy device does not have under load (nvmlClocksEventReason...).
_SLOWDOWNS = {
    0x08: "the hardware has halved its clock or more",
    0x20: "the driver lowers its clock because it is hot",
    0x40: "the hardware lowers its clock because it is hot",
    0x80: "the power supply asks for a lower clock",
}


@dataclass(frozen=True)
class GPU:
    """A GPU in NVML's view; `index` counts along the PCI bus, `memory` is in bytes (the host's if it is shared)."""

    index: int
    name: str
    uuid: str
    capability: Version
    memory: int
    bus: str = ""
    """PCI address, as in "0000:19:00.0"; empty for chips that are not on that bus."""

    def __str__(self) -> str:
        return f"{self.sm} ({self.name})"

    @property
    def sm(self) -> str:
        """The compute capability in the form of compilers."""
        return "sm_{}{}".format(*self.capability)

    @property
    def peak_flops(self) -> dict[str, float]:
        """The maker's maximum by precision (`DeviceInfo.peak_flops`); empty for a part of a board (MIG)."""
        peaks = () if self.uuid.startswith("MIG") else _PEAKS
        for pattern, half, single in peaks:
            if re.search(rf"\b(?:{pattern})\b", self.name):
                native = {"bf16": half * 1e12} if self.capability >= (8, 0) else {}
                return native | {"fp16": half * 1e12, "fp32": single * 1e12}
        return {}

    @property
    def peak_bandwidth(self) -> float:
        """The maker's maximum (`DeviceInfo.peak_bandwidth`); 0 if it is not known, or for a part of a board (MIG)."""
        rates = () if self.uuid.startswith("MIG") else _BANDWIDTHS
        return next((rate * 1e9 for pattern, rate in rates if re.search(rf"\b(?:{pattern})\b", self.name)), 0.0)


@dataclass(frozen=True)
class Machine:
    """The driver, the newest CUDA version that it supports, and the visible GPUs (at least one) in CUDA's order."""

    driver: str
    cuda: Version
    gpus: tuple[GPU, ...]

    @property
    def weakest(self) -> GPU:
        """The GPU that decides for all ranks, so that they agree."""
        return min(self.gpus, key=lambda gpu: (gpu.capability, gpu.memory))

    @property
    def model(self) -> str:
        """The name that all GPUs share, or all their names."""
        return " / ".join(dict.fromkeys(gpu.name for gpu in self.gpus))

    @property
    def torch(self) -> builds.Choice:
        """The build of torch for these GPUs and this driver."""
        return builds.choose([(gpu.name, gpu.capability) for gpu in self.gpus], self.driver)


def probe() -> Probe:
    """Report whether the cuda backend can run here; if not, with the most fundamental reason."""
    try:
        visible = machine()
    except HiddenError as error:
        return Probe(False, str(error), count=error.count)
    except AcceleratorError as error:
        # These files belong to devices even if the driver's library fails. `/proc/driver/nvidia` proves nothing:
        # containers without a GPU have it.
        files = sorted(DEV.glob("nvidia[0-9]*"))
        hint = f" (GPUs are present: {', '.join(map(str, files))})" if files else ""
        wished = os.environ.get(VISIBLE_ENV, "all").strip() not in ("", "-1")
        return Probe(False, f"{error}{hint}", count=len(files), present=bool(files) and wished)
    facts: dict[str, Any] = {"count": len(visible.gpus), "model": visible.model}
    try:
        build = _usable_torch(visible)
    except AcceleratorError as error:
        return Probe(False, str(error), present=any(gpu.capability >= WORTH_A_BUILD for gpu in visible.gpus), **facts)
    weakest = f"{visible.weakest.sm} with {visible.weakest.memory / 2**30:.0f} GiB"
    reason = f"{weakest}, driver {visible.driver} for CUDA up to {_dotted(visible.cuda)}, torch {build.version}"
    return Probe(True, reason, devices=tuple(f"pci:{gpu.bus}" for gpu in visible.gpus if gpu.bus), **facts)


def environment_report() -> dict[str, str]:
    """Return facts about GPUs and driver (`Accelerator.environment_report`)."""
    query = "--query-gpu=index,name,compute_cap,driver_version,memory.total,mig.mode.current,pci.bus_id"
    return {
        "nvidia-smi": host.read_command("nvidia-smi", query, "--format=csv"),
        "device files": host.describe_files(DEV.glob("nvidia*")),
    }


def environment(run: Mapping[str, Any]) -> dict[str, str]:
    """Let CUDA number GPUs like NVML and nvidia-smi, not the fastest first, and cuBLAS repeat sums if a run asks."""
    deterministic = run.get("engine", {}).get("deterministic", False)
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | ({REPEATABLE_ENV: ":4096:8"} if deterministic else {})


def health(uuid: str) -> Health:
    """Return the state of a GPU or MIG instance; a driver that does not answer is a problem of it."""
    try:
        with _nvml() as nvml:
            return _health(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except AcceleratorError as error:
        return Health(problems=(str(error),))


def _health(nvml: Any, handle: Any) -> Health:
    def read(function: str, *arguments: int) -> int | None:
        try:
            return int(getattr(nvml, function)(handle, *arguments))
        except nvml.NVMLError as error:
            if error.value in (_INVALID_ARGUMENT, _NOT_SUPPORTED, _UNKNOWN_FUNCTION):  # this chip, or this driver
                return None
            raise

    clock, most = read("nvmlDeviceGetClockInfo", _SM_CLOCK), read("nvmlDeviceGetMaxClockInfo", _SM_CLOCK)
    degrees, milliwatts = read("nvmlDeviceGetTemperature", 0), read("nvmlDeviceGetPowerUsage")
    readings = {
        **({} if clock is None else {"clock": f"{clock:,} of {most or clock:,} MHz"}),
        **({} if degrees is None else {"temperature": f"{degrees} C"}),
        **({} if milliwatts is None else {"power": f"{milliwatts / 1000:.0f} W"}),
    }
    reasons = read("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    errors = read("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _SINCE_DRIVER)
    counts = {} if errors is None else {"uncorrected memory errors": errors}
    return Health(readings, tuple(words for bit, words in _SLOWDOWNS.items() if reasons & bit), counts)


def machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """Return the driver and the visible GPUs, according to NVML.

    Raises:
        AcceleratorError: no GPU is visible; the message is one clause with the reason and a remedy.
    """
    with _nvml() as nvml:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        if not handles:
            raise AcceleratorError("the NVIDIA driver finds no GPU")
        gpus = tuple(_gpu(nvml, index, handle, handle) for index, handle in enumerate(handles))
        wish = environ.get(VISIBLE_ENV)
        if wish is not None:
            gpus = _instance(nvml, wish) if wish.startswith("MIG-") else visible(gpus, wish)
        if not gpus:
            raise HiddenError(
                f"{VISIBLE_ENV}={wish!r} hides all GPUs, of which there are {len(handles)}; "
                "unset it, or name some by index or UUID",
                len(handles),
            )
        version = nvml.nvmlSystemGetCudaDriverVersion()  # 12080 is 12.8
        return Machine(nvml.nvmlSystemGetDriverVersion(), (version // 1000, version % 1000 // 10), gpus)


def visible(gpus: tuple[GPU, ...], wish: str) -> tuple[GPU, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES=`wish` shows, in its order: indexes, or unique prefixes of UUIDs.

    As in the CUDA runtime, the first entry that names no GPU ends the list, and a repetition hides all GPUs.
    """
    entries = wish.split(",")
    find = _with_uuid if entries[0].startswith("GPU-") else _with_index
    chosen: list[GPU] = []
    for entry in entries:
        gpu = find(gpus, entry)
        if gpu is None:
            break
        chosen.append(gpu)
    return tuple(chosen) if len(set(chosen)) == len(chosen) else ()


def runs_on(architecture: str, capability: Version) -> bool:
    """Return whether code that torch contains (`torch.cuda.get_arch_list()`) runs on a GPU.

    Binary code (sm_80) runs on later chips of its generation, with suffix a (sm_90a) on that chip alone. The driver
    compiles intermediate code (compute_80) for every later chip.
    """
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if not match:
        return False
    kind, suffix = match.group(1, 4)
    target = (int(match[2]), int(match[3]))
    if suffix == "a":
        return capability == target
    return capability >= target and (kind == "compute" or capability[0] == target[0])


def _usable_torch(visible: Machine) -> TorchBuild:
    build = torch_build()
    weakest = visible.weakest
    choice = visible.torch
    if build is None:
        raise AcceleratorError(f"torch is not installed; {choice.remedy}")
    if build.cuda is None:
        target = f"for ROCm {build.hip}" if build.hip else "without CUDA"
        raise AcceleratorError(f"torch {build.version} is built {target}; {choice.remedy}")
    if build.cuda[0] > visible.cuda[0]:  # within one major version, newer minor versions run on older drivers
        update = "update the driver, or " if choice.build else ""
        raise AcceleratorError(
            f"driver {visible.driver} supports CUDA up to {_dotted(visible.cuda)}, but torch {build.version} is built "
            f"for CUDA {_dotted(build.cuda)}; {update}{choice.remedy}"
        )
    if build.cuda[0] >= 13 and weakest.capability < (7, 5):
        remedies = [choice.remedy] if choice.build is None or choice.build.cuda[0] < build.cuda[0] else []
        if any(gpu.capability >= (7, 5) for gpu in visible.gpus):
            remedies.append(f"hide that GPU with {VISIBLE_ENV}")
        raise AcceleratorError(
            f"torch {build.version}, built for CUDA {_dotted(build.cuda)}, has no code for {weakest}; "
            f"{', or '.join(remedies)}"
        )
    return build


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """Yield the initialized library; its errors become AcceleratorErrors."""
    try:
        import pynvml
    except ImportError:
        raise AcceleratorError("nvidia-ml-py, which asks the NVIDIA driver, is not installed; pip install it") from None
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        reason = f"the NVIDIA driver does not answer (NVML: {error}); nvidia-smi may tell more"
        raise AcceleratorError(_REASONS.get(error.value, reason)) from error


def _gpu(nvml: Any, index: int, board: Any, unit: Any) -> GPU:
    """Return the facts of a GPU; `unit` is the part with processors and memory: the board, or a MIG instance of it."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(unit).total
    except nvml.NVMLError as error:
        if error.value != _NOT_SUPPORTED:
            raise
        memory = host.total_memory()  # chips that share the host's memory, such as GB10
    capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(board))
    name, uuid = nvml.nvmlDeviceGetName(board), nvml.nvmlDeviceGetUUID(unit)
    return GPU(index, name, uuid, capability, memory, _bus(nvml, board, name))


def _bus(nvml: Any, board: Any, name: str) -> str:
    """Return the PCI address of a GPU, and check its vendor: other vendors' libraries have the same names.

    Raises:
        AcceleratorError: the vendor is not NVIDIA, according to the library or the kernel.
    """
    try:
        pci = nvml.nvmlDeviceGetPciInfo(board)
    except nvml.NVMLError as error:
        if error.value != _NOT_SUPPORTED:
            raise
        return ""
    bus = re.sub(r"^[0-9a-f]{4}(?=[0-9a-f]{4}:)", "", pci.busId.lower())  # NVML's domains have eight digits
    vendors = {pci.pciDeviceId & 0xFFFF}
    with contextlib.suppress(OSError, ValueError):
        vendors.add(int((PCI / bus / "vendor").read_text(), 16))
    if foreign := vendors - {VENDOR}:
        raise AcceleratorError(
            f"{name} at {bus} calls itself an NVIDIA GPU, but its PCI vendor is {min(foreign):#06x} and not "
            f"{VENDOR:#06x}; use the plugin of its vendor"
        )
    return bus


def _instance(nvml: Any, wish: str) -> tuple[GPU, ...]:
    """Return the MIG instance that is named first: CUDA shows at most one to a process."""
    try:
        instance = nvml.nvmlDeviceGetHandleByUUID(wish.split(",")[0])
    except nvml.NVMLError as error:
        if error.value in (_INVALID_ARGUMENT, _NOT_FOUND):
            return ()
        raise
    board = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)
    return (_gpu(nvml, nvml.nvmlDeviceGetIndex(board), board, instance),)


def _with_index(gpus: tuple[GPU, ...], entry: str) -> GPU | None:
    match = re.match(r"\s*\+?(\d+)", entry)  # like C's strtol: characters after the digits are ignored
    return gpus[int(match[1])] if match and int(match[1]) < len(gpus) else None


def _with_uuid(gpus: tuple[GPU, ...], entry: str) -> GPU | None:
    matches = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _dotted(version: Version) -> str:
    return "{}.{}".format(*version)
