"""The simulation in this process, in lazy mode: `core` is Gaudi's bridge, `device` the module beneath it."""

import importlib
import os

import gaudi_sim
from gaudi_sim.build import load

os.environ.setdefault("PT_HPU_LAZY_MODE", "1")
gaudi_sim.install()
core = importlib.import_module("habana_frameworks.torch.core")
device = load()

__all__ = ["core", "device"]
