"""The bridge between PyTorch and the simulated Gaudi; importing it makes `torch.device("hpu")` work in this process."""

import os
import sys

import torch

from accelerators import AcceleratorError
from accelerators.backends.cpu import info as cpu_info
from gaudi_sim import accounting, node
from gaudi_sim.activation import NAME
from gaudi_sim.behaviours import is_simulated
from gaudi_sim.build import load

node.check_logs()
accounting.open_accounts(load())
if torch.accelerator.current_accelerator() is None:
    raise AcceleratorError(
        f"{NAME}: PyTorch has looked for devices in this process already, in a backward for example, and does not look "
        "again; call gaudi_sim.install() and import habana_frameworks.torch before"
    )

# Backward runs in the thread that calls it, as the CPU's does. In the device's own thread it would have a second team
# of OpenMP threads, and two teams that wait for each other's cores make a step a third slower.
torch.autograd.set_multithreading_enabled(False)
_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
if _ranks > 1 and not os.environ.get("OMP_NUM_THREADS"):  # the cards of one machine share its cores
    torch.set_num_threads(max(1, cpu_info.cores() // _ranks))

from . import core, hpu, overwrites  # noqa: E402 (they need the device)

torch._register_device_module("hpu", hpu)
if is_simulated("set_data"):
    load().refuse_set_data()
overwrites.install()
if not accounting.is_lazy():
    from . import compiler  # noqa: F401 (registers itself with torch.compile)

from gaudi_sim import faults  # noqa: E402 (it replaces parts of the device)

faults.plant_from_environment()
if os.environ.get("RANK", "0") == "0":
    print(f"{NAME}: this is a simulation of a Gaudi on the CPU, not a Gaudi", file=sys.stderr, flush=True)

__all__ = ["core", "hpu"]
