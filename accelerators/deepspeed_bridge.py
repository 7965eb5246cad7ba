"""DeepSpeed told of the device, and asked what it can do there. Imports DeepSpeed in its functions alone."""

from __future__ import annotations

import os
from typing import Any

from accelerators.types import AcceleratorError, DeepSpeedView, Support


def prepare(name: str, device: str, own: Any = None) -> DeepSpeedView:
    """What `Accelerator.prepare_deepspeed` does for the backend `name`, whose device DeepSpeed calls `device`.

    Args:
        own: the backend's `DeepSpeedAccelerator`, where DeepSpeed does not know the device.
    """
    wanted = os.environ.setdefault("DS_ACCELERATOR", device) if own is None else device
    if wanted != device:
        raise AcceleratorError(
            f"{name}: the environment asks DeepSpeed for another device (DS_ACCELERATOR={wanted}); "
            f"unset it, or set it to {device}"
        )
    import deepspeed
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.ops import __compatible_ops__

    # Where tensors are a CPU's, a collective through shared memory would be compiled before the first step, for a
    # minute and even for one rank; only DeepSpeed's inference uses it.
    __compatible_ops__["deepspeed_shm_comm"] = False
    if own is not None:
        set_accelerator(own)
    found = get_accelerator()
    if found.device_name() != device:
        raise AcceleratorError(
            f"{name}: DeepSpeed was set to {found.device_name()!r} earlier in this process; "
            f"import it only after prepare_deepspeed(), or start with DS_ACCELERATOR={device}"
        )
    return DeepSpeedView(
        implementation=f"{type(found).__module__}.{type(found).__qualname__}",
        device=found.device_name(),
        communication=found.communication_backend_name(),
        dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in found.supported_dtypes()),
        version=deepspeed.__version__,
    )


def operator(builder: str) -> Support:
    """What `Accelerator.deepspeed_operator` answers; a compiler that it tries may complain aloud."""
    from deepspeed.accelerator import get_accelerator

    found = get_accelerator().create_op_builder(builder)
    # Of what a device lacks, deepspeed 0.19 gives None, or a builder of nothing that calls itself compatible.
    if found is None or getattr(found, "NAME", "") in ("", "deepspeed_not_implemented"):
        return Support(False, f"DeepSpeed has no {builder} for {get_accelerator().device_name()}")
    if not found.is_compatible(verbose=False):
        return Support(False, f"DeepSpeed's {builder} cannot be built here")
    return Support(True, "it can be built", found.NAME)
