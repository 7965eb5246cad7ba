"""The devices that a plan assumes: described by number and memory or by name, or detected from an accelerator."""

from __future__ import annotations

import difflib
import re
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from accelerators import KnownDevice, known_device, known_device_names
from rlhf.config.schema import Config
from rlhf.errors import ConfigError
from rlhf.utils.process_info import current_process

if TYPE_CHECKING:
    from accelerators import Accelerator

PROCESS = 760 * 2**20
"""Bytes of a process that has imported torch, transformers and DeepSpeed; a run measures its own."""

# For a device with a separate allocator: the part that is lost to fragmentation, and the bytes that its runtime uses.
_FRAGMENTATION, _RUNTIME = 0.04, 2**29

DEVICE_CHUNK = 1 << 24
"""`Accelerator.chunk_elements` of the built-in backends for such devices."""


@dataclass(frozen=True)
class Environment:
    """Ranks, precision and attention of a run.

    Attributes:
        unified_memory: the devices' memory is the host's.
        process: bytes that a process uses before it loads a model.
        fused_attention: attention does not materialize its matrix of weights.
        chunk_elements: logits that are processed at a time (`Accelerator.chunk_elements`).
        keeps_recordings: recorded steps of rollouts keep the memory of their intermediate results.
        converts_weights: rollouts read weights in a layout that the device prefers (operation `inference_weights`).
        fragmentation: part of the memory in use that a device's allocator loses between blocks.
        device_memory: bytes that a device has; None if not known.
        device_limit: bytes of a device that a plan may fill.
        reserved: further bytes of a device, which its runtime takes.
        host_limit: bytes of the host that a plan may fill for each rank; None if not known.
        available: bytes of a device that are free now, or in use by this process already; None if not known.
        zero_stages: the ZeRO stages that the device does not refuse.
    """

    ranks: int = 1
    precision: str = "bf16"
    fused_attention: bool = True
    chunk_elements: int = 1 << 22
    keeps_recordings: bool = False
    converts_weights: bool = False
    unified_memory: bool = False
    process: int = 0
    fragmentation: float = 0.0
    device_memory: int | None = None
    device_limit: int = sys.maxsize
    reserved: int = 0
    host_limit: int | None = None
    available: int | None = None
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)

    @property
    def width(self) -> int:
        """Bytes of a number in the compute precision."""
        return 4 if self.precision == "fp32" else 2

    @property
    def reduce_width(self) -> int:
        """Bytes of a number in which gradients are summed over ranks."""
        return 4 if self.precision != "fp16" and self.ranks > 1 else self.width


def describe_environment(config: Config, devices: int, memory: int, host: int | None) -> Environment:
    """Return an environment of `devices` with `memory` bytes and an allocator each, in a host with `host` bytes."""
    precision = "bf16" if config.precision == "auto" else config.precision
    return Environment(
        devices,
        precision,
        chunk_elements=DEVICE_CHUNK,
        keeps_recordings=config.engine.kernels.get("graph_capture") != "none",
        process=PROCESS,
        fragmentation=_FRAGMENTATION,
        device_memory=memory,
        device_limit=memory - _RUNTIME,
        reserved=_RUNTIME,
        host_limit=host and host // devices,
    )


def parse_machine(text: str) -> tuple[int, KnownDevice]:
    """Return the number of devices and the device that `8xa100-80` names.

    Raises:
        ConfigError: no device has this name.
    """
    names = known_device_names()
    count, name = re.fullmatch(r"(?:(\d+)\s*x\s*)?(.*)", text.strip().lower(), re.DOTALL).groups()  # type: ignore[union-attr]
    written = re.sub(r"[\s_-]+", "-", name)
    matching = [known for known in names if known.replace("-", "") == written.replace("-", "")]
    if not matching or count == "0":
        close = [known for known in names if known.startswith(written)]
        close = close or difflib.get_close_matches(written, names, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}? " if close and not matching else ""
        raise ConfigError(
            f"--on: must be a number and a known device, such as 8x{names[0]}, got {text}; {hint}known are "
            f"{', '.join(names)}; for others give --devices, --memory, --tflops and --price"
        )
    return int(count or 1), known_device(matching[0])


def describe_machine(config: Config, devices: int, device: KnownDevice, host: int | None) -> Environment:
    """Return an environment of `devices` of a known kind, in a host with `host` bytes.

    Raises:
        ConfigError: the device does not compute in the precision of the run.
    """
    best = device.precisions[0]
    if config.precision not in ("auto", *device.precisions):
        raise ConfigError(f"precision: {device.name} does not have {config.precision}; set it to auto, which is {best}")
    precision = best if config.precision == "auto" else config.precision
    return replace(describe_environment(config, devices, device.memory, host), precision=precision)


def list_zero_stages(accelerator: Accelerator) -> tuple[int, ...]:
    """Return the ZeRO stages that the device does not refuse."""
    return tuple(stage for stage in range(4) if not accelerator.refuse_zero_stage(stage))


def detect_environment(
    accelerator: Accelerator, config: Config, ranks: int, *, local: int | None = None
) -> Environment:
    """Return the environment of the accelerator that this process is bound to.

    Args:
        ranks: ranks of the run, a device each.
        local: ranks on this machine; None: as many as the launcher states.
    """
    memory = accelerator.memory()
    local = local or current_process().count_local_ranks(ranks)
    unified = accelerator.device() == accelerator.host_device()
    return Environment(
        ranks,
        accelerator.precision(config.precision).name,
        chunk_elements=accelerator.chunk_elements,
        keeps_recordings=accelerator.kernels.capabilities()["graph_capture"].ok
        and accelerator.recordings_keep_memory(),
        converts_weights=accelerator.kernels.get("inference_weights") is not None,
        unified_memory=unified,
        process=memory.allocated if unified else PROCESS,
        fragmentation=0 if unified else _FRAGMENTATION,
        device_memory=memory.total,
        reserved=0 if unified else _RUNTIME,
        # Ranks on one machine share the host's memory, but each has a device.
        device_limit=memory.total // local if unified else memory.total - _RUNTIME,
        available=None
        if memory.available is None
        else memory.allocated + memory.available // (local if unified else 1),
        zero_stages=list_zero_stages(accelerator),
    )
