"""DeepSpeed's side of a backend: tells DeepSpeed which device to use, and what it can build for it.

Only the functions import DeepSpeed.
"""

from __future__ import annotations

import os
from typing import Any

from accelerators.errors import AcceleratorError
from accelerators.types import DeepSpeedView, Support


def prepare(name: str, device: str, accelerator: Any = None) -> DeepSpeedView:
    """Make DeepSpeed use a backend's device; see `Accelerator.prepare_deepspeed`.

    Args:
        name: the backend.
        device: DeepSpeed's name for the device.
        accelerator: the backend's `DeepSpeedAccelerator` if DeepSpeed does not know the device.
    """
    wanted = os.environ.setdefault("DS_ACCELERATOR", device) if accelerator is None else device
    if wanted != device:
        raise AcceleratorError(
            f"{name}: the environment asks DeepSpeed for another device (DS_ACCELERATOR={wanted}); "
            f"unset it, or set it to {device}"
        )
    import deepspeed
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.ops import __compatible_ops__

    # For tensors of a CPU, DeepSpeed would compile a collective through shared memory before the first step. That takes
    # a minute, even for one rank, and only DeepSpeed's inference uses it.
    __compatible_ops__["deepspeed_shm_comm"] = False
    if accelerator is not None:
        set_accelerator(accelerator)
    current = get_accelerator()
    if current.device_name() != device:
        raise AcceleratorError(
            f"{name}: DeepSpeed was set to {current.device_name()!r} earlier in this process; "
            f"import it only after prepare_deepspeed(), or start with DS_ACCELERATOR={device}"
        )
    return DeepSpeedView(
        implementation=f"{type(current).__module__}.{type(current).__qualname__}",
        device=current.device_name(),
        communication=current.communication_backend_name(),
        dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in current.supported_dtypes()),
        version=deepspeed.__version__,
    )


def operator(builder: str) -> Support:
    """Return whether DeepSpeed can build an operator here; a compiler that it tries may print errors."""
    from deepspeed.accelerator import get_accelerator

    operator_builder = get_accelerator().create_op_builder(builder)
    # For operators that a device lacks, deepspeed 0.19 returns None, or an empty builder that claims to be compatible.
    if operator_builder is None or getattr(operator_builder, "NAME", "") in ("", "deepspeed_not_implemented"):
        return Support(False, f"DeepSpeed has no {builder} for {get_accelerator().device_name()}")
    if not operator_builder.is_compatible(verbose=False):
        return Support(False, f"DeepSpeed's {builder} cannot be built here")
    return Support(True, "it can be built", operator_builder.NAME)
