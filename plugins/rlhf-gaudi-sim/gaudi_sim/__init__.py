"""A simulated Gaudi on the CPU, for rlhf's unmodified `hpu` backend, its trainers and DeepSpeed.

`install()`, or RLHF_GAUDI_SIM=1 in the environment of a run, makes a `habana_frameworks` importable whose device is
this machine's memory; `report()` tells what a Gaudi in lazy mode would have compiled, and which line made it so.
"""

from gaudi_sim.accounting import report
from gaudi_sim.activation import install, is_installed

__all__ = ["install", "is_installed", "report"]
