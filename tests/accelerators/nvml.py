"""A `pynvml` module without a driver, built from a table of chips.

In a test: `monkeypatch.setitem(sys.modules, "pynvml", nvml.fake("V100", "V100"))`. For another process, `install`
writes a module of that name into a folder for its PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple


class Chip(NamedTuple):
    name: str
    capability: tuple[int, int]
    mebibytes: int | None  # None: memory shared with the host, which NVML does not report


CHIPS = {
    "P100": Chip("Tesla P100-PCIE-16GB", (6, 0), 16384),
    "V100": Chip("Tesla V100-SXM2-32GB", (7, 0), 32768),
    "T4": Chip("Tesla T4", (7, 5), 15360),
    "A100": Chip("NVIDIA A100-SXM4-80GB", (8, 0), 81920),
    "RTX 3090": Chip("NVIDIA GeForce RTX 3090", (8, 6), 24576),
    "L4": Chip("NVIDIA L4", (8, 9), 23034),
    "H100": Chip("NVIDIA H100 80GB HBM3", (9, 0), 81559),
    "H200": Chip("NVIDIA H200", (9, 0), 143771),
    "GB10": Chip("NVIDIA GB10", (12, 1), None),
}

NOT_SUPPORTED, NOT_FOUND, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, GPU_IS_LOST, VERSION_MISMATCH = 3, 6, 9, 12, 15, 18


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__({GPU_IS_LOST: "GPU is lost"}.get(value, f"code {value}"))
        self.value = value


def fake(
    *chips: str,
    driver: str = "570.86.15",
    cuda: int = 12080,
    init_error: int | None = None,
    name_error: int | None = None,
    vendor: int = 0x10DE,
    slowdowns: int = 0,
    errors: int | None = 0,
) -> ModuleType:
    """The module on a machine with these chips (names in CHIPS), along the PCI bus.

    GPU number 1 has the UUID GPU-1111..., and the MIG instance MIG-1 with a quarter of its memory. `opened` counts
    initializations without shutdown; any question needs one. `slowdowns` are the bits of NVML's reasons for a low
    clock, and `errors` the uncorrected ones of memory (None: the chip does not count them).
    """
    module = ModuleType("pynvml")

    def opened() -> None:
        assert module.opened > 0, "asked before nvmlInit, or after nvmlShutdown"

    def init() -> None:
        if init_error is not None:
            raise NVMLError(init_error)
        module.opened += 1

    def shutdown() -> None:
        module.opened -= 1

    def text(value: str) -> str:
        opened()
        return value

    def name(index: int) -> str:
        if name_error is not None:
            raise NVMLError(name_error)
        return text(CHIPS[chips[index]].name)

    def uuid(handle: int | str) -> str:
        return text(handle if isinstance(handle, str) else f"GPU-{str(handle) * 8}-{str(handle) * 4}")

    def memory(handle: int | str) -> SimpleNamespace:
        opened()
        instance = isinstance(handle, str)
        mebibytes = CHIPS[chips[parent(handle) if instance else handle]].mebibytes
        if mebibytes is None:
            raise NVMLError(NOT_SUPPORTED)
        return SimpleNamespace(total=(mebibytes << 20) // (4 if instance else 1))

    def pci(index: int) -> SimpleNamespace:
        if CHIPS[chips[index]].mebibytes is None:
            raise NVMLError(NOT_SUPPORTED)
        return SimpleNamespace(busId=text(f"00000000:{index + 16:02X}:00.0"), pciDeviceId=0x2330 << 16 | vendor)

    def parent(instance: str) -> int:
        return int(instance.removeprefix("MIG-"))

    def by_uuid(wanted: str) -> int | str:
        if wanted in (boards := [uuid(index) for index in range(len(chips))]):
            return boards.index(wanted)
        if wanted not in [f"MIG-{index}" for index in range(len(chips))]:
            raise NVMLError(NOT_FOUND)
        return wanted

    def answer(value: int | None) -> int:
        opened()
        if value is None:
            raise NVMLError(NOT_SUPPORTED)
        return value

    module.opened = 0
    module.nvmlDeviceGetClockInfo = lambda handle, clock: answer(1410)
    module.nvmlDeviceGetMaxClockInfo = lambda handle, clock: answer(1980)
    module.nvmlDeviceGetTemperature = lambda handle, sensor: answer(61)
    module.nvmlDeviceGetPowerUsage = lambda handle: answer(412_300)
    module.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: answer(slowdowns)
    module.nvmlDeviceGetTotalEccErrors = lambda handle, kind, since: answer(errors)
    module.NVMLError = NVMLError
    module.nvmlInit = init
    module.nvmlShutdown = shutdown
    module.nvmlSystemGetDriverVersion = lambda: text(driver)
    module.nvmlSystemGetCudaDriverVersion = lambda: cuda
    module.nvmlDeviceGetCount = lambda: len(chips)
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetHandleByUUID = by_uuid
    module.nvmlDeviceGetDeviceHandleFromMigDeviceHandle = parent
    module.nvmlDeviceGetIndex = lambda handle: handle
    module.nvmlDeviceGetName = name
    module.nvmlDeviceGetPciInfo = pci
    module.nvmlDeviceGetUUID = uuid
    module.nvmlDeviceGetMemoryInfo = memory
    module.nvmlDeviceGetCudaComputeCapability = lambda index: CHIPS[chips[index]].capability
    return module


def install(folder: Path, *chips: str) -> Path:
    """Write a module `pynvml` for a machine with these chips into a folder, and return the folder."""
    source = Path(__file__).read_text()
    (folder / "pynvml.py").write_text(f"{source}\n\nglobals().update(vars(fake(*{chips!r})))\n")
    return folder


def install_torch(
    folder: Path, version: str, cuda: str | None = None, hip: str | None = None, xpu: str | None = None
) -> Path:
    """Write a package `torch` that has a version and cannot be imported into a folder, and return the folder."""
    package = folder / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('torch was imported')\n")
    lines = [
        "from typing import Optional",
        f"__version__ = {version!r}",
        f"cuda: Optional[str] = {cuda!r}",
        f"hip: Optional[str] = {hip!r}",
        f"xpu: Optional[str] = {xpu!r}",
    ]
    (package / "version.py").write_text("\n".join(lines))
    return folder
