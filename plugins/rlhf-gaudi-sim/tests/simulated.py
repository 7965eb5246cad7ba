"""The simulated device in this process, without the bridge around it."""

from contextlib import nullcontext
from types import ModuleType

import torch
from gaudi_sim.build import load

device = load()

# What PyTorch itself asks of a device's Python module.
hpu = ModuleType("torch.hpu")
vars(hpu).update(
    is_available=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: 0,
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    get_rng_state=lambda index=0: device.default_generator().get_state(),
    set_rng_state=lambda state, index=0: device.default_generator().set_state(state),
    device=nullcontext,
    _initialized=True,
    _is_in_bad_fork=lambda: False,
)
torch._register_device_module("hpu", hpu)
